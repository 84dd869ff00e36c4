"""Console output of a run: a progress bar on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from xlashard.support.formatting import printable

_PLAIN_WIDTH = 100


@dataclass
class Pace:
    """Speed of the latest steps.

    Attributes:
        tokens: Tokens per step.
        steps: Steps of the whole run.
        clock: Returns the time in seconds.
    """

    tokens: int
    steps: int
    clock: Callable[[], float] = time.perf_counter
    _marks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=50))

    def mark(self, done: int) -> None:
        """Record the time at which `done` steps are complete."""
        self._marks.append((done, self.clock()))

    @property
    def seconds(self) -> float | None:
        """Return the seconds per step; ``None`` before the second mark."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first)

    @property
    def rate(self) -> float | None:
        """Return the tokens per second."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def left(self) -> float | None:
        """Return the seconds to the end of the run."""
        if self.seconds is None:
            return None
        return (self.steps - self._marks[-1][0]) * self.seconds

    def __str__(self) -> str:
        if self.rate is None or self.left is None:
            return "measuring speed"
        minutes, seconds = divmod(round(self.left), 60)
        return f"{self.rate:,.0f} tokens/s · {minutes}:{seconds:02d} left"


class Screen:
    """Output of a run: a progress bar at the bottom of a terminal, elsewhere lines.

    The lines have no control codes, for log files, pipes and CI.

    Args:
        console: Console to print on.
        every: Steps between two lines, without a terminal.
    """

    def __init__(self, console: Console, every: int) -> None:
        self._console = console
        self._every = every
        self._steps = 0
        self._bar: Progress | None = None

    def show(self, shown: Any) -> None:
        """Print a line or a renderable, above the bar if there is one."""
        if isinstance(shown, str):
            # Brackets in paths are not rich markup; lines of a log are not wrapped.
            self._console.print(Text(printable(shown)), soft_wrap=not self._console.is_terminal)
        else:
            self._console.print(shown)
        self._console.file.flush()

    def begin(self, steps: int, done: int = 0) -> None:
        """Store the number of steps, and open the bar."""
        self._steps = steps
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
        )
        self._bar.add_task("training", total=steps, completed=done, status="")
        self._bar.start()

    def step(self, done: int, loss: float, pace: Pace) -> None:
        """Advance the bar, or print a line for the first, the last, and every n-th step."""
        if self._bar:
            status = f"loss [bold]{loss:.4f}[/] · {pace}"
            self._bar.update(self._bar.task_ids[0], completed=done, status=status)
        elif self._console.is_terminal:
            return  # The bar is closed.
        elif done in (1, self._steps) or done % self._every == 0:
            width = len(str(self._steps))
            self.show(f"step {done:>{width}}/{self._steps} · loss {loss:.4f} · {pace}")

    def end(self) -> None:
        """Close the bar, if it is open, and leave it on the screen."""
        if self._bar:
            self._bar.stop()
            self._bar = None


def log_console(file: IO[str]) -> Console:
    """Return a console that writes to a file, without control codes."""
    return Console(file=file, force_terminal=False, highlight=False, width=_PLAIN_WIDTH)


def make_console() -> Console:
    """Return a console on standard output; without a terminal wide enough for the tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)
