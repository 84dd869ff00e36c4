"""What a person sees of a run: a live bar on a terminal, plain lines everywhere else."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from xlashard.wording import printable

_PLAIN_WIDTH = 100


class Screen(Protocol):
    """Where a run shows itself."""

    def show(self, thing: Any) -> None:
        """Shows a line of text, or anything that rich can print."""
        ...

    def begin(self, steps: int, done: int = 0) -> None:
        """Training begins, or goes on where some steps are done."""
        ...

    def step(self, done: int, loss: float, pace: "Pace") -> None:
        """A step was measured."""
        ...

    def end(self) -> None:
        """Training is over, by whatever way."""
        ...


@dataclass
class Pace:
    """How fast steps go, from the last of them.

    Attributes:
        tokens: Bytes of one step.
        steps: Steps of the whole run.
        clock: Seconds since some fixed moment.
    """

    tokens: int
    steps: int
    clock: Callable[[], float] = time.perf_counter
    _marks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=50))

    def mark(self, done: int) -> None:
        """Notes that `done` steps are over now."""
        self._marks.append((done, self.clock()))

    @property
    def seconds(self) -> float | None:
        """Seconds per step; ``None`` before the second mark."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first)

    @property
    def rate(self) -> float | None:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def left(self) -> float | None:
        """Seconds to the end of the run."""
        if self.seconds is None:
            return None
        return (self.steps - self._marks[-1][0]) * self.seconds

    def __str__(self) -> str:
        if self.rate is None or self.left is None:
            return "measuring speed"
        minutes, seconds = divmod(round(self.left), 60)
        return f"{self.rate:,.0f} tokens/s · {minutes}:{seconds:02d} left"


class PlainScreen:
    """Lines without control codes: a log file, a pipe, CI."""

    def __init__(self, console: Console, every: int):
        self._console = console
        self._every = every
        self._steps = 0

    def show(self, thing: Any) -> None:
        """Prints it."""
        _print(self._console, thing)

    def begin(self, steps: int, done: int = 0) -> None:
        """Remembers the number of steps."""
        self._steps = steps

    def step(self, done: int, loss: float, pace: Pace) -> None:
        """Prints a line at the first, the last, and every so many steps."""
        if done == 1 or done == self._steps or done % self._every == 0:
            width = len(str(self._steps))
            self.show(f"step {done:>{width}}/{self._steps} · loss {loss:.4f} · {pace}")

    def end(self) -> None:
        """Nothing is open."""


class LiveScreen:
    """A progress bar that stays at the bottom of a terminal."""

    def __init__(self, console: Console):
        self._console = console
        self._bar: Progress | None = None

    def show(self, thing: Any) -> None:
        """Prints it, above the bar."""
        _print(self._bar.console if self._bar else self._console, thing)

    def begin(self, steps: int, done: int = 0) -> None:
        """Opens the bar."""
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            console=self._console,
        )
        self._bar.add_task("training", total=steps, completed=done, said="")
        self._bar.start()

    def step(self, done: int, loss: float, pace: Pace) -> None:
        """Moves the bar."""
        if self._bar:
            said = f"loss [bold]{loss:.4f}[/] · {pace}"
            self._bar.update(self._bar.task_ids[0], completed=done, said=said)

    def end(self) -> None:
        """Closes the bar, and leaves it as it is."""
        if self._bar:
            self._bar.stop()
            self._bar = None


def make_screen(console: Console, every: int) -> Screen:
    """The screen that fits where the output goes."""
    return LiveScreen(console) if console.is_terminal else PlainScreen(console, every)


def log_screen(file: IO[str], every: int) -> Screen:
    """A screen that is a file."""
    return PlainScreen(Console(file=file, highlight=False, width=_PLAIN_WIDTH), every)


def make_console() -> Console:
    """A console on standard output; wide enough for the tables where there is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def _print(console: Console, thing: Any) -> None:
    if isinstance(thing, str):
        # Paths may hold brackets, which rich would read as its markup; a log's lines stay whole.
        console.print(Text(printable(thing)), soft_wrap=not console.is_terminal)
    else:
        console.print(thing)
    console.file.flush()
