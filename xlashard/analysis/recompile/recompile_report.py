"""Report of `explain_recompile`: cache misses, their reasons, and hints that avoid them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from xlashard.analysis.recompile.call_differences import FUNCTIONS, CallDifference, differences
from xlashard.analysis.report.cells import Span, join_cell
from xlashard.analysis.report.parts import Column, Head, Section
from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.core.pjit.cache_miss import CacheMiss, DerivedProgram
from xlashard.errors import counted
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import CELL, in_seconds, name_file, near_line
from xlashard.support.lazily import dataclass

type Kind = Literal["compilation", "lowering", "tracing"]
type Reason = Literal["first", "differs", "recreated", "cleared", "concurrent", "unknown"]

COMPILED = ("the compiler", "the persistent cache")


@dataclass(frozen=True)
class Explanation:
    """Stages that one call had to run, and the reason.

    Attributes:
        number: Number of the cache miss.
        kind: The last stage that ran: a `compilation`; a `lowering` whose module equals that of a
            live executable; a `tracing` alone, for shapes or a transformation.
        file: The file of the call.
        line: Its line.
        trace_seconds: Duration of tracing; None if nothing was traced.
        lower_seconds: Duration of lowering, likewise.
        compile_seconds: Duration of compiling, or of reading the persistent cache, likewise.
        executable: Origin of the executable: `the compiler`, `the persistent cache` or the live
            program of an equal module; None if the call needed none.
        reason: `first` of its kind; it `differs` from all earlier calls; the jitted function is
            `recreated` from source that another one was made of, for an equal call; the caches were
            `cleared` before; a `concurrent` call in another thread ran the same stages; or
            `unknown`: no recorded property of the call differs.
        nearest: Number of the earlier call with the fewest differences, if any.
        differences: The differences from that call.
    """

    number: int
    kind: Kind
    file: str
    line: int
    trace_seconds: float | None
    lower_seconds: float | None
    compile_seconds: float | None
    executable: str | None
    reason: Reason
    nearest: int | None
    differences: tuple[CallDifference, ...]

    @property
    def seconds(self) -> float:
        """Return the total duration."""
        parts = (self.trace_seconds, self.lower_seconds, self.compile_seconds)
        return sum(part for part in parts if part is not None)

    @property
    def place(self) -> str:
        """Return the file name and line of the call: `train.py:41`."""
        file = name_file(self.file)
        return near_line(file if file.startswith(CELL) else Path(file).name, self.line)

    def text(self, function: str) -> str:
        """Format the explanation as one line."""
        head = f"{self.kind} {self.number} of {function} at {self.place} ({self.costs})"
        return f"{head}: {self.because}"

    @property
    def costs(self) -> str:
        """Return the duration, and the origin of an executable that was not compiled."""
        cost = in_seconds(self.seconds)
        if self.executable is None or self.executable == COMPILED[0]:
            return cost
        return f"{cost}, executable from {self.executable}"

    @property
    def because(self) -> str:
        """Return the reason as a phrase."""
        if self.reason == "first":
            return f"the first {self.kind}"
        if self.reason == "differs":
            parts = "; ".join(map(str, self.differences))
            return f"differs from number {self.nearest} in {parts}"
        if self.reason == "recreated":
            return (
                "a new function object, of the same source as one that was called like this before"
            )
        return (
            f"like number {self.nearest}, "
            + {
                "cleared": "after jax.clear_caches()",
                "concurrent": "run by two threads concurrently",
                "unknown": "except for a property that is not recorded",
            }[self.reason]
        )


def explain_record(
    record: CacheMiss, earlier: Sequence[CacheMiss], of_others: Collection[int] = ()
) -> Explanation:
    """Explain a record by comparing it with earlier ones.

    Args:
        record: The record.
        earlier: The earlier records, in order.
        of_others: Digests of calls for which other functions of the same source missed the cache.
    """
    reason, nearest, changes = _reason(record, _candidates(record, earlier))
    if reason == "first" and record.key.digest() in of_others:
        reason = "recreated"
    return Explanation(
        number=record.number,
        kind=_kind(record),
        file=record.location[0],
        line=record.location[1],
        trace_seconds=record.seconds.get("trace"),
        lower_seconds=record.seconds.get("lower"),
        compile_seconds=record.seconds.get("compile"),
        executable=record.executable_source,
        reason=reason,
        nearest=nearest.number if nearest else None,
        differences=changes,
    )


def _kind(record: CacheMiss) -> Kind:
    """Return the last stage of a record."""
    if record.executable_source in COMPILED:
        return "compilation"
    return "lowering" if "lower" in record.seconds else "tracing"


def _candidates(record: CacheMiss, earlier: Sequence[CacheMiss]) -> Sequence[CacheMiss]:
    """List the earlier records whose result the call could have reused."""
    if record.executable_source is not None:
        candidates = [r for r in earlier if r.executable_source is not None]
    elif "lower" in record.seconds:
        candidates = [r for r in earlier if "lower" in r.seconds or r.executable_source is not None]
    else:
        return earlier
    # Without an equally advanced record, compare with traced calls.
    return earlier if not candidates and "trace" in record.seconds else candidates


def _reason(
    record: CacheMiss, candidates: Sequence[CacheMiss]
) -> tuple[Reason, CacheMiss | None, tuple[CallDifference, ...]]:
    compared = [(differences(other.key, record.key), other) for other in candidates]
    if not compared:
        return "first", None, ()
    changes, nearest = min(reversed(compared), key=lambda pair: len(pair[0]))
    if changes:
        return "differs", nearest, changes
    if nearest.clear_count != record.clear_count:
        return "cleared", nearest, ()
    return ("concurrent" if record.began < nearest.ended else "unknown"), nearest, ()


_NUMBERS = ("int", "float", "bool", "complex")
_SHOWN = 6


def hints(
    explained: Sequence[Explanation], records: Sequence[CacheMiss], num_functions: int = 1
) -> tuple[str, ...]:
    """Return distinct hints for some cache misses.

    Args:
        explained: The explanations of the cache misses.
        records: All records of the function, to count the distinct values of what changed.
        num_functions: Number of jitted functions of the same source with a cache miss.
    """
    texts: list[str] = []
    if any(explanation.reason == "recreated" for explanation in explained):
        texts.append(
            f"{num_functions} jitted functions were made of this source, and JAX compiles each: "
            "make it once, outside of the loop or function that runs repeatedly, and pass varying "
            "values as arguments"
        )
    for explanation in explained:
        for difference in explanation.differences:
            texts += _find_hints(difference, records)
    return tuple(dict.fromkeys(texts))


def _find_hints(difference: CallDifference, records: Sequence[CacheMiss]) -> Iterator[str]:
    path = difference.path
    if difference.part == "shape":
        yield from _about_shapes(path, records)
    elif difference.part in ("dtype", "weak type"):
        yield from _about_types(path, records)
    elif difference.part == "static argument":
        yield from _about_statics(path, records)
    elif difference.part == "mesh in force" and "none" in (difference.before, difference.after):
        yield (
            "some calls have a mesh in force and others do not: enter the mesh around all calls, "
            "or write NamedSharding(mesh, P(...)) in place of P(...) and enter no mesh"
        )
    elif difference.part == "mesh in force" and "by `with mesh:`" in (
        difference.before + difference.after
    ):
        yield (
            "calls and lower() enter the mesh in different ways: write `with jax.set_mesh(mesh):` "
            "around all of them, and no `with mesh:`"
        )
    elif difference.part == "static field" and difference.after.startswith("another "):
        yield f"{path} is a new function object in some calls: make it once, and pass the same one"
    elif difference.part in ("commitment", "sharding", "layout"):
        yield (
            f"the placement of {path} changes between calls: before the first call, write "
            "device_put(x, sharding) with the sharding that later calls have"
        )
    elif difference.part == "setting":
        yield f"{path} changes between calls: set it once, before the first"
    elif difference.part == "structure" and "absent" in (difference.before, difference.after):
        yield f"{path} is absent in some calls: pass the same tree at every call"
    elif difference.part == "structure" and difference.before.startswith("passed by"):
        yield f"{path} is passed by position in some calls and by name in others: use one of them"


def _about_shapes(path: str, records: Sequence[CacheMiss]) -> Iterator[str]:
    shapes = list(dict.fromkeys(tuple(a.aval.shape) for a in _arguments(path, records)))
    if len({len(shape) for shape in shapes}) != 1:
        return
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        different = list(dict.fromkeys(sizes))
        if len(different) > 1:
            yield (
                f"dimension {dim} of {path} had {counted(len(different), 'size')} "
                f"({_listed(different)}): pad it to one size, or to a few, so that calls share "
                "their programs"
            )


def _about_types(path: str, records: Sequence[CacheMiss]) -> Iterator[str]:
    arguments = list(_arguments(path, records))
    weak = [a for a in arguments if a.aval.weak_type]
    dtypes = list(dict.fromkeys(str(a.aval.dtype) for a in reversed(arguments)))
    if any(a.sharding is None for a in weak):
        yield (
            f"{path} is a Python number in some calls: always pass the same type, such as "
            f"np.{dtypes[0]}({path})"
        )
    elif weak:
        yield (
            f"{path} is a weakly typed array in some calls, as JAX makes of Python numbers: write "
            f"jnp.asarray(value, jnp.{dtypes[0]}) where it is made"
        )
    elif len(dtypes) > 1 and all(map(str.isidentifier, dtypes)):
        module = "np" if any(a.sharding is None for a in arguments) else "jnp"
        yield (
            f"{path} is of {counted(len(dtypes), 'dtype')} ({_listed(dtypes)}): convert it to one "
            f"of them before the call, such as {path}.astype({module}.{dtypes[0]})"
        )


def _arguments(path: str, records: Sequence[CacheMiss]) -> Iterable:
    return (a for record in records for a in record.key.arguments if a.path == path)


def _about_statics(name: str, records: Sequence[CacheMiss]) -> Iterator[str]:
    values = [s for record in records for s in record.key.statics if s.name == name]
    different = list(dict.fromkeys(replace(value, by_name=False) for value in values))
    texts = list(dict.fromkeys(value.text for value in different))
    kinds = list(dict.fromkeys(value.kind for value in different))
    if len(texts) < len(different) and kinds[0] in FUNCTIONS:
        yield (
            f"the static argument {name} is a new function object in each call: define it once, "
            "outside of the loop"
        )
    elif len(texts) < len(different):
        yield (
            f"values of the static argument {name} have the same repr but are not equal: define "
            f"__eq__ and __hash__ of {kinds[0]} by value, such as with @dataclass(frozen=True)"
        )
    elif any(" at 0x" in text for text in texts):
        yield (
            f"the static argument {name} is a new object in each call: make it once, or define "
            f"__eq__ and __hash__ of {kinds[0]} by value"
        )
    elif all(kind in _NUMBERS for kind in kinds) and len(different) > 1:
        yield (
            f"the static argument {name} had {counted(len(different), 'value')} "
            f"({_listed(texts)}), each with its own program: if it is only computed with, remove "
            "it from static_argnums and static_argnames"
        )


def _listed(values: Sequence[object]) -> str:
    shown = [str(value) for value in values[:_SHOWN]]
    return ", ".join([*shown, "..."] if len(values) > _SHOWN else shown)


@dataclass(frozen=True, repr=False)
class RecompileReport(SerializableReport):
    """Cache misses of one function since it was made or its cache cleared.

    `str(report)` has a line for each; `report.print()` shows a table.

    Attributes:
        function: The function's name.
        explanations: The stages and reason of each cache miss, in order.
        derived_programs: The programs that transformations derived from its calls.
        dropped: Number of earlier cache misses that are no longer recorded.
        hints: Changes that avoid further compilations.
        watched: False if cache misses were not recorded: those of a function of `jax.jit` are
            recorded after `watch`.

    Example:
        >>> from xlashard import explain_recompile, pjit
        >>> double = pjit(lambda x: x * 2)
        >>> _ = double(1), double(2.0)
        >>> len(explain_recompile(double).explanations)
        2
    """

    _kind = "recompile"
    _format = ReportFormat("recompile report", 1, "explain_recompile(f).to_json()")

    function: str
    explanations: tuple[Explanation, ...]
    derived_programs: tuple[DerivedProgram, ...]
    dropped: int
    hints: tuple[str, ...]
    watched: bool = True

    @property
    def compilations(self) -> tuple[Explanation, ...]:
        """Return the explanations of calls that compiled, or read the persistent cache."""
        return tuple(e for e in self.explanations if e.kind == "compilation")

    @property
    def seconds(self) -> float:
        """Return the total duration."""
        return sum(each.seconds for each in (*self.explanations, *self.derived_programs))

    @property
    def headline(self) -> str:
        """Return the counts and the total duration in one line."""
        if not self.watched:
            return f"{self.function} was not watched: its compilations are unknown"
        if not self.explanations:
            return f"{self.function} has not been traced or compiled yet"
        done = len(self.compilations)
        rest = len(self.explanations) - done
        others = f" and {counted(rest, 'call')} only traced or lowered" if rest else ""
        if self.derived_programs:
            others += f", {counted(len(self.derived_programs), 'derived program')}"
        cost = in_seconds(self.seconds)
        return f"{self.function}: {counted(done, 'compilation')}{others}, {cost} in all"

    def __str__(self) -> str:
        lines = [self.headline]
        if self.dropped:
            dropped = counted(self.dropped, "earlier cache miss", "earlier cache misses")
            lines.append(f"  ({dropped} no longer recorded)")
        lines += [f"  {explanation.text(self.function)}" for explanation in self.explanations]
        lines += [f"  {derived}" for derived in self.derived_programs]
        lines += [f"  hint: {hint}" for hint in self.hints]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<RecompileReport of {self.headline}; print it>"

    def page_name(self) -> str:
        """Return the name of the function."""
        return self.function

    def parts(self) -> Iterator[Part]:
        """Yield the counts, the cache misses, and hints."""
        notes = [("derived", join_cell(str(each))) for each in self.derived_programs]
        notes += [("hint", join_cell(Span(hint, "good"))) for hint in self.hints]
        yield Head(self.headline, notes=notes)
        yield _MISSES.with_rows(self.explanations)


_MISSES = Section[Explanation](
    "cache-misses",
    "Cache misses",
    columns=(
        Column("", "number", str, "number"),
        Column("stage", "kind", ""),
        Column("called at", "place", "code"),
        Column(">tracing", "trace_seconds", "seconds"),
        Column(">lowering", "lower_seconds", "seconds"),
        Column(">compiling", "compile_seconds", "seconds"),
        Column("reason", "because"),
    ),
    row_name=lambda e: str(e.number),
    most=10**6,
)
