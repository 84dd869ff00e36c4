"""Pick the lines of the user's program that a report shows."""

from collections.abc import Sequence
from dataclasses import dataclass

from xlashard._jax.trace.origins import is_users_file
from xlashard.analysis.explain.model import SourceLine
from xlashard.hlo.module import Frame


@dataclass(frozen=True)
class SourceLocator:
    """Picks the line of a stack that a report shows.

    Attributes:
        function: The name of the function that became the program.
        file: Its file.
    """

    function: str
    file: str

    @classmethod
    def of(cls, described: str | None) -> "SourceLocator":
        """Make a locator for a function that JAX describes as `step at model.py:12`."""
        name, _, place = (described or "").partition(" at ")
        return cls(name, place.rpartition(":")[0])

    def line(self, frames: Sequence[Frame]) -> SourceLine | None:
        """Return the innermost line of the user's files inside the function, else the innermost.

        Args:
            frames: A stack, innermost first. Its outer end is the code that traced the function.
        """
        own = [i for i, frame in enumerate(frames) if self._is_of_function(frame)]
        inside = frames[: own[-1] + 1] if own else frames
        if not inside:
            return None
        frame = next((f for f in inside if is_users_file(f.file)), inside[0])
        return SourceLine(frame.file, frame.line, frame.function, is_users_file(frame.file))

    def own_line(self, frames: Sequence[Frame]) -> SourceLine | None:
        """Return `line(frames)`, or None if a known function is not on the stack."""
        if self.file and not any(map(self._is_of_function, frames)):
            return None
        return self.line(frames)

    def _is_of_function(self, frame: Frame) -> bool:
        return frame.file == self.file and frame.function.rpartition(".")[2] == self.function
