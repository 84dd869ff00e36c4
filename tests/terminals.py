"""Terminals that tests open: what a program writes to one is read at the other end."""

import os
import pty
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

import pytest

from xlashard.support import consoles


class Terminal:
    """Terminal.

    Attributes:
        stream: The stream of a program.
        end: Its file descriptor.
    """

    def __init__(self) -> None:
        self._screen, self.end = pty.openpty()
        self.stream: TextIOWrapper = os.fdopen(os.dup(self.end), "w", encoding="utf-8")
        self._text = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # Linux reports an error once nothing has the other end open.
        with suppress(OSError):
            while chunk := os.read(self._screen, 1 << 16):
                self._text += chunk

    def read(self) -> str:
        """Return what was written so far."""
        with suppress(ValueError):
            self.stream.flush()
        return self._text.decode(errors="replace")

    def close(self) -> None:
        """Close both ends."""
        self.stream.close()
        os.close(self.end)
        self._reader.join(10)
        os.close(self._screen)


@contextmanager
def terminal_for_errors(columns: int = 80) -> Iterator[Terminal]:
    """Yield a terminal that shows standard error inside the block.

    A fixture can't: pytest captures the streams again before it calls the test.
    """
    opened = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", opened.stream)
        patch.setattr(consoles, "_SPINNER_INTERVAL", 0.01)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(columns))
        try:
            yield opened
        finally:
            opened.close()
