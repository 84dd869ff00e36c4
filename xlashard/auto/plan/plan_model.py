"""Data model of automatic layouts: frozen values of plain types."""

import ast
import keyword
import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xlashard.analysis.explain.model import CollectiveReport, ValueReport
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.analysis.report.excerpts import Excerpt
from xlashard.analysis.report.texts import split_steps
from xlashard.hlo.collectives import CollectiveTotal
from xlashard.predict.targets.chip import Links
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from jax import sharding as jax_sharding
else:
    # For specs of a plan that is applied; saved plans are read without JAX.
    jax_sharding = deferred("jax.sharding")

type Outcome = Literal["fits", "out of memory", "refused", "not compiled"]
"""Verdict on a layout by its compiled program; `not compiled` if others were more promising."""


@dataclass(frozen=True)
class PlannedArgument:
    """An argument of the call, with all its arrays.

    Attributes:
        path: Path in Python: `state`, `others[0]`; empty if the arrays have paths of their own, as
            those of modules have.
        keyword: Whether it is passed by keyword.
        donated: Whether its arrays are donated.
    """

    path: str
    keyword: bool = False
    donated: bool = False


@dataclass(frozen=True)
class PlannedConstraint:
    """Sharding constraint inside the function.

    Attributes:
        operation: Name of the primitive: `dot_general`.
        kind: `result` or `operand` of the operation, or `parameter` of the function inside it.
        index: Position among them.
        type: Type of the constrained value: `float32[8,16]`.
        spec: Spec, as text.
        source: Line of the operation; None if unknown.
        site: Path of the operation in the jaxpr, as in `ConstraintSite`.
        line: File's name and line of the innermost frame of the operation: `model.py:12`.
        number: Number of the operation among those of its name and line.
        body: Number of the inner jaxpr of a parameter.
    """

    operation: str
    kind: Literal["operand", "result", "parameter"]
    index: int
    type: str
    spec: str
    source: SourceLine | None
    site: tuple[int, ...]
    line: str = ""
    number: int = 0
    body: int = 0


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that was considered.

    Attributes:
        name: Its name: `auto`, or `data`, `fsdp`, `tensor`, `fsdp+tensor`.
        outcome: Verdict.
        predicted_seconds: Time of a step by the search, before any compilation.
        predicted_bytes: Memory of a device by the search.
        seconds: Time of a step of the compiled program; None if it wasn't compiled.
        total_bytes: Memory of a device of the compiled program; None likewise.
        measured_seconds: Median time of a step on the devices; None if not measured.
        reason: The compiler's error, or empty.
        title: What each mesh axis does: `FSDP over data, tensor over model`; empty if the
            arguments don't show it.
    """

    name: str
    outcome: Outcome
    predicted_seconds: float
    predicted_bytes: int
    seconds: float | None = None
    total_bytes: int | None = None
    measured_seconds: float | None = None
    reason: str = ""
    title: str = ""

    @property
    def label(self) -> str:
        """The title, or the name without one."""
        return self.title or self.name

    @property
    def best_seconds(self) -> float:
        """The measured time, else that of the compiled program, else the predicted one."""
        known = self.seconds if self.measured_seconds is None else self.measured_seconds
        return self.predicted_seconds if known is None else known

    @property
    def best_bytes(self) -> int:
        """The memory of the compiled program, else the predicted one."""
        return self.total_bytes or self.predicted_bytes


class PathRule(NamedTuple):
    """Spec of all values whose path a regular expression matches.

    Attributes:
        pattern: Regular expression, for `re.search`; of several rules the first that matches holds.
        spec: The spec.
    """

    pattern: str
    spec: "jax_sharding.PartitionSpec"


@dataclass(frozen=True)
class LogicalAxisRule:
    """Mesh axes of a logical axis, as flax's `logical_axis_rules` takes them.

    Attributes:
        name: The logical axis: `embed`.
        axes: The mesh axes; empty for a dimension that stays whole.
    """

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class HeldMemory:
    """Part of the memory of a program that fits in no layout.

    Attributes:
        name: Path of an argument, or the operation of a temporary.
        type: Type of one shard or temporary.
        device_bytes: Bytes on one device.
        source: Line of a temporary; None for arguments.
    """

    name: str
    type: str
    device_bytes: int
    source: SourceLine | None = None


@dataclass(frozen=True)
class PlanFields:
    """Facts of an automatic layout; see `AutoPlan`."""

    name: str
    devices: str
    mesh: tuple[tuple[str, int], ...]
    outcome: Outcome
    memory_bytes: int
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    constraints: tuple[PlannedConstraint, ...]
    layouts: tuple[PlannedLayout, ...]
    collectives: tuple[CollectiveTotal, ...]
    shares: tuple[tuple[str, float], ...]
    fingerprint: str
    arguments: tuple[PlannedArgument, ...] = ()
    axis_rules: tuple[LogicalAxisRule, ...] = ()
    unforeseen: tuple[CollectiveReport, ...] = ()
    gap: float | None = None
    least_seconds: float | None = None
    unknown_primitives: tuple[str, ...] = ()
    held: tuple[HeldMemory, ...] = ()
    smallest_slice: str = ""
    links: Links = "ici"
    excerpts: tuple[Excerpt, ...] = ()
    explicit_axes: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    ignores_constraints: bool = False
    wrapper: Literal["", "nnx", "equinox"] = ""
    beyond_rules: int = 0
    untied_seconds: float | None = None

    def check(self) -> None:
        """Check the facts that code is written from: a plan may come from a stranger's file.

        Raises:
            ValueError: A mesh, spec, path or site is invalid; the text has its path and value.
        """
        axes = {name for name, size in self.mesh if size > 0}
        if not axes or len(axes) < len(self.mesh):
            raise ValueError(f"mesh is {self.mesh}, not distinct axes with sizes above 0")
        if not self.layouts:
            raise ValueError("layouts is empty: the first is the plan's own")
        for number, argument in enumerate(self.arguments):
            if argument.path and not is_parameter_path(argument.path):
                raise ValueError(
                    f"arguments[{number}].path is {argument.path!r}, not the path of an argument, "
                    "such as state or others[0]"
                )
        for side in ("inputs", "outputs", "constraints"):
            for number, value in enumerate(getattr(self, side)):
                _check_spec(f"{side}[{number}].spec", value.spec, axes)
        for number, spec in enumerate(self.types):
            _check_spec(f"types[{number}]", spec, axes)

    @property
    def fits(self) -> bool:
        """True if the layout fits in the memory."""
        return self.outcome == "fits"

    @property
    def chosen(self) -> PlannedLayout:
        """The plan's own layout."""
        return self.layouts[0]

    @property
    def runner_up(self) -> PlannedLayout | None:
        """The fastest other layout that fits; None without one."""
        return next((layout for layout in self.layouts[1:] if layout.outcome == "fits"), None)


_UNCONSTRAINED = "P.UNCONSTRAINED"
_AXIS = r"""(?:'(?:[^'\\\n\r]|\\.)*+'|"(?:[^"\\\n\r]|\\.)*+")"""
_ENTRY = rf"(?:None|P\.UNCONSTRAINED|{_AXIS}|\({_AXIS}(?:, {_AXIS})*+,?\))"
_SPEC = re.compile(rf"P\((?:{_ENTRY}(?:, {_ENTRY})*+)?\)")
_PARAMETER = re.compile(r"([^\W\d]\w*)(?:\[\d+\])?")


def is_parameter_path(path: str) -> bool:
    """Return True for the path of an argument: a name, or a name with an index.

    Args:
        path: The path.
    """
    match = _PARAMETER.fullmatch(path)
    return match is not None and not keyword.iskeyword(match[1])


def read_spec_entries(text: str) -> tuple[Any, ...]:
    """Return the entries of the text of a spec; `...` stands for `P.UNCONSTRAINED`.

    Args:
        text: Text of `text_of_spec`. No other expression is accepted, since code has it.

    Raises:
        ValueError: The text is another one.
    """
    if _SPEC.fullmatch(text) is None:
        raise ValueError("not a spec such as P('data', None)")
    entries = re.findall(_ENTRY, text[2:-1])
    try:
        return tuple([... if e == _UNCONSTRAINED else ast.literal_eval(e) for e in entries])
    except SyntaxError:
        raise ValueError("not a spec: an axis name has an invalid escape") from None


def _check_spec(path: str, text: str, axes: Set[str]) -> None:
    try:
        entries = read_spec_entries(text)
    except ValueError as error:
        raise ValueError(f"{path} is {text[:60]!r}, {error}") from None
    names = [n for e in entries if e for n in ([] if e is ... else [e] if type(e) is str else e)]
    if len(set(names)) < len(names) or not axes >= set(names):
        known = ", ".join(sorted(axes))
        raise ValueError(f"{path} is {text[:60]!r}, not a spec over the axes {known}")


def spec_of_text(text: str) -> "jax_sharding.PartitionSpec":
    """Return the spec of its text.

    Args:
        text: Text such as `P('data', None)`.

    Raises:
        ValueError: The text is not a spec.

    Example:
        >>> spec_of_text("P(('data', 'model'), None)")
        P(('data', 'model'), None)
    """
    unconstrained = jax_sharding.PartitionSpec.UNCONSTRAINED
    entries = [unconstrained if e is ... else e for e in read_spec_entries(text)]
    return jax_sharding.PartitionSpec(*entries)


def text_of_spec(spec: "jax_sharding.PartitionSpec") -> str:
    """Return the text of a spec, without dimensions at its end that stay whole."""
    dims = list(spec)
    while dims and dims[-1] is None:
        dims.pop()
    free = jax_sharding.PartitionSpec.UNCONSTRAINED
    return f"P({', '.join([_UNCONSTRAINED if dim is free else repr(dim) for dim in dims])})"


def path_rules(specs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    r"""Return patterns with specs: the first that `re.search` finds in a path has its spec.

    They are as few as a greedy choice gives: each rule is the pattern that covers most of the
    remaining paths and is right for all that it matches.

    Args:
        specs: Spec of each path, as text.

    Example:
        >>> path_rules({"w[0]['up']": "P('x')", "w[1]['up']": "P('x')", "w[0]['b']": "P()"})
        (("\\['up'\\]$", "P('x')"), ('', 'P()'))
    """
    rules: list[tuple[str, str]] = []
    remaining = dict(specs)
    patterns = {path: _patterns(path) for path in specs}
    while len(set(remaining.values())) > 1:
        # The last rule takes what is left: the replicated values, if there are any.
        usual, _ = Counter(remaining.values()).most_common(1)[0]
        last = "P()" if "P()" in remaining.values() else usual
        counts = Counter(p for path, s in remaining.items() if s != last for p in patterns[path])
        for pattern in sorted(counts, key=lambda p: (-counts[p], len(p), p)):
            matching = {path for path in remaining if re.search(pattern, path)}
            specs_there = {remaining[path] for path in matching}
            if len(specs_there) == 1:
                rules.append((pattern, specs_there.pop()))
                remaining = {p: s for p, s in remaining.items() if p not in matching}
                break
    return (*rules, *(("", spec) for spec in set(remaining.values())))


def _patterns(path: str) -> set[str]:
    """Return patterns that match a path: its ends and its beginnings, with any layer's number."""
    keys = split_steps(path)
    if "".join(keys) != path:
        return {f"^{re.escape(path)}$"}
    escaped = [r"\[\d+\]" if re.fullmatch(r"\[\d+\]", key) else re.escape(key) for key in keys]
    ends = ["".join(escaped[n:]) + "$" for n in range(1, len(keys))]
    starts = ["^" + "".join(escaped[:n]) for n in range(1, len(keys))]
    both = [f"^{a}.*{''.join(escaped[n:])}$" for n in range(2, len(keys)) for a in escaped[:1]]
    return {*ends, *starts, *both, f"^{''.join(escaped)}$", f"^{re.escape(path)}$"}
