"""The folder of a sweep: a line of JSON for each result, and the whole reports beside them."""

import contextlib
import json
import os
from pathlib import Path

from xlashard.errors import ArgumentError
from xlashard.pjit.report.records import Record
from xlashard.tpu.preflight.report import PreflightReport
from xlashard.tpu.preflight.sweep.fields import FORMAT, SweepResult

_RECORD = Record("result of a sweep", FORMAT, "the same sweep")
_LINES = "results.jsonl"
_REPORTS = "reports"


class Store:
    """Results that outlive the process that found them.

    Args:
        folder: Where they are; made if it isn't there.

    Raises:
        ArgumentError: If it can't be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            (folder / _REPORTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"the folder of the sweep, {folder}, can't be made: {error.strerror}; name another "
                "one"
            ) from None

    def known(self) -> dict[str, SweepResult]:
        """The results that are there by their keys, the last one of each.

        A line that is cut off, as when a machine stops, and a result whose report is gone are
        passed over: they are found again.
        """
        try:
            text = (self.folder / _LINES).read_bytes().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ArgumentError(  # no-catalogue: needs a folder of its own
                f"the folder of the sweep, {self.folder}, can't be read ({_LINES}: "
                f"{error.strerror}); name another one"
            ) from None
        found = {}
        for line in text.splitlines():
            with contextlib.suppress(ArgumentError):
                result = _RECORD.read(SweepResult, line)
                found[result.key] = result
        return {k: r for k, r in found.items() if self._is_whole(r)}

    def _is_whole(self, result: SweepResult) -> bool:
        return not result.report or (self.folder / result.report).exists()

    def keep_report(self, name: str, report: PreflightReport) -> str:
        """Writes a whole report, and gives its place in the folder."""
        place = f"{_REPORTS}/{name}.json"
        file = self.folder / place
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(report.to_json(), encoding="utf-8")
        unfinished.replace(file)
        return place

    def keep(self, result: SweepResult) -> None:
        """Writes a result."""
        line = json.dumps(_RECORD.to_dict(result), separators=(",", ":"))
        file = self.folder / _LINES
        with file.open("ab+") as lines:
            # After a line that was cut off a new one begins.
            lines.seek(0, os.SEEK_END)
            if lines.tell():
                lines.seek(-1, os.SEEK_END)
                line = line if lines.read(1) == b"\n" else f"\n{line}"
            lines.write(f"{line}\n".encode())
