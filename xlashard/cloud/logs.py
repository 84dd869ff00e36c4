"""What workers write: a file for each, and their lines on the terminal, each after its name."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from xlashard.testing.launch.launcher import OutputChunk
from xlashard.testing.launch.output_text import last_lines
from xlashard.testing.launch.prefix_printer import PrefixPrinter


class LogBook:
    """Keeps and shows the output of several workers; for several threads at once.

    Args:
        folder: Where the files `worker-LABEL.log` go, in place of what is there.
        labels: Of the workers.
        out: Where their lines are shown.
    """

    def __init__(self, folder: Path, labels: Sequence[str], out: TextIO | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._files = {label: self.path(label).open("wb") for label in labels}
        shown = out or sys.stdout
        self._printer = PrefixPrinter(shown, shown, len(labels), names=labels)
        self._lock = threading.Lock()

    def path(self, label: str) -> Path:
        """The file of a worker."""
        return self.folder / f"worker-{label}.log"

    def write(self, label: str, text: bytes) -> None:
        """Takes what a worker wrote."""
        with self._lock:
            self._files[label].write(text)
            self._files[label].flush()
            self._printer.show(OutputChunk(self._numbers[label], "stdout", text))

    def last_lines(self, label: str, most: int) -> str:
        """The end of what a worker wrote."""
        with self._lock:
            text = self.path(label).read_bytes().decode("utf-8", errors="replace")
        return last_lines(text, most)

    def close(self) -> None:
        """Shows lines that have no end, and closes the files."""
        with self._lock:
            self._printer.finish()
            for file in self._files.values():
                file.close()
