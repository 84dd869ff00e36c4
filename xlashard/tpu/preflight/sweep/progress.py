"""How far a sweep is: a bar, or a line for each mesh where nobody looks at a terminal."""

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from xlashard.tpu.preflight.sweep.fields import SweepResult
from xlashard.wording import in_seconds


class Progress:
    """Tells of results as they come.

    Args:
        shown: Whether anything is shown.
        console: Where; the standard error if None.
    """

    def __init__(self, *, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._is_shown = shown
        self._total = self._done = 0
        self._best: SweepResult | None = None
        self._bar = _bar(self._console) if shown and self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, total: int, known: Sequence[SweepResult]) -> None:
        """Begins.

        Args:
            total: How many results there will be.
            known: Those that are there.
        """
        self._total, self._done = total, len(known)
        for result in known:
            self._compare(result)
        self._show()

    def tell(self, result: SweepResult) -> None:
        """One more is there."""
        self._done += 1
        self._compare(result)
        self._show()
        if self._is_shown and not self._bar:
            self._console.print(
                f"{self._done}/{self._total} {result.where} {result.axes}: {_said(result)}",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )

    def _compare(self, result: SweepResult) -> None:
        if result.outcome == "fits" and (self._best is None or result.rank < self._best.rank):
            self._best = result

    def _show(self) -> None:
        if not self._bar:
            return
        best = self._best
        said = "" if best is None else f"best {_said(best)}: {best.axes} on {best.where}"
        (task,) = self._bar.task_ids
        self._bar.update(task, total=self._total, completed=self._done, description=said)


def _bar(console: Console) -> Bar:
    bar = Bar(
        TextColumn("meshes"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
    )
    bar.add_task("", total=None)
    return bar


def _said(result: SweepResult) -> str:
    if result.outcome == "fits" and result.facts is not None:
        return in_seconds(result.facts.seconds)
    reason = " ".join(result.reason.split())
    return f"{result.outcome}: {reason}" if reason else result.outcome
