"""Describe a program's collectives with the user's names of axes, values and lines."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from xlashard._jax.trace.origins import is_users_file
from xlashard.geometry import MeshGrid, ReplicaGroups, SourceTargetPairs
from xlashard.hlo.collectives import Collective, along_text
from xlashard.hlo.module import Frame
from xlashard.pjit.report.model import CollectiveReport, SourceLine


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


def describe_collectives(
    collectives: Sequence[Collective],
    grid: MeshGrid | None,
    arguments: Collection[str],
    sources: SourceLocator,
) -> tuple[CollectiveReport, ...]:
    """Group equal collectives with the same cause, most sent bytes first.

    Args:
        collectives: The collectives of the program.
        grid: The mesh that names axes, or None.
        arguments: The paths of the program's arguments.
        sources: Picks the lines to show.
    """
    alike: dict[CollectiveReport, list[Collective]] = {}
    for collective in collectives:
        described = describe_collective(collective, grid, arguments, sources)
        alike.setdefault(described, []).append(collective)
    reports = [with_totals(described, equal) for described, equal in alike.items()]
    return tuple(sorted(reports, key=lambda r: -r.sent_bytes))


def describe_collective(
    c: Collective, grid: MeshGrid | None, arguments: Collection[str], sources: SourceLocator
) -> CollectiveReport:
    """Describe a collective without its counts and bytes, which equal ones may differ in.

    Args:
        c: The collective.
        grid: The mesh that names axes, or None.
        arguments: The paths of the program's arguments.
        sources: Picks the lines to show.
    """
    parts = None if grid is None else c.axes(grid)
    # The cause of a gather is the consumer of the whole value; of others it is their own operation.
    has_consumer = c.kind == "all-gather" or not c.frames
    return CollectiveReport(
        kind=c.kind,
        along=along_text(c, grid),
        axes=None if parts is None else tuple(dict.fromkeys(part.name for part in parts)),
        count=0,
        times=0,
        times_known=c.times_known,
        conditional=c.conditional,
        asynchronous=c.asynchronous,
        operands=tuple(map(str, c.operands)),
        results=tuple(map(str, c.results)),
        operand_bytes=0,
        result_bytes=0,
        payload_bytes=0,
        sent_bytes=0,
        op_name=c.op_name,
        # XLA names an argument by its path, and a gather of it likewise.
        argument=c.op_name if c.op_name in arguments else "",
        source=sources.line(c.frames),
        needed_by=c.needed_by if has_consumer else "",
        needed_by_source=sources.line(c.needed_by_frames) if has_consumer else None,
        groups=None if parts is not None else _positions(c.groups),
    )


def _positions(groups: ReplicaGroups | SourceTargetPairs) -> tuple[tuple[int, ...], ...]:
    return groups.pairs if isinstance(groups, SourceTargetPairs) else groups.devices()


def with_totals(described: CollectiveReport, collectives: Sequence[Collective]) -> CollectiveReport:
    """Return the report of equal collectives, with their totals.

    Args:
        described: The result of `describe_collective` for each.
        collectives: The collectives.
    """
    return replace(
        described,
        count=len(collectives),
        times=sum(c.times for c in collectives),
        operand_bytes=sum(c.times * c.operand_bytes for c in collectives),
        result_bytes=sum(c.times * c.result_bytes for c in collectives),
        payload_bytes=sum(c.times * c.payload_bytes for c in collectives),
        sent_bytes=sum(c.times * c.sent_bytes for c in collectives),
    )
