"""Shares of bytes that are sharded over mesh axes, of a tree of arrays or a program's arguments."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from xlashard._jax.tree_definitions import leaf_paths
from xlashard.analysis.explain.descriptions import describe_value
from xlashard.analysis.explain.model import ValueReport
from xlashard.analysis.explain.program_report import values_text
from xlashard.analysis.programs.program import ProgramValue
from xlashard.analysis.programs.program_reader import compile_program, find_stage, read
from xlashard.core.sharding import NamedSharding, XLACompatibleSharding, as_tiles, from_jax
from xlashard.errors import ArgumentError, ExpectationError, counted
from xlashard.pods.testing.expectations import check_call
from xlashard.support.formatting import closest, in_bytes
from xlashard.support.tracebacks import short_tracebacks


@dataclass(frozen=True, repr=False)
class ShardingSummary:
    """Shardings of some values, and the shares of their bytes that mesh axes shard.

    `print(summary)` shows the shares and the values that take the most memory of a device.

    Attributes:
        values: The values.
        axes: For each value the mesh axes that shard it.
        mesh: Names and sizes of the axes of their meshes.
    """

    values: tuple[ValueReport, ...]
    axes: tuple[frozenset[str], ...]
    mesh: tuple[tuple[str, int], ...]

    def share(self, axis: str | Sequence[str] | None = None) -> float:
        """Return the share of the bytes that are sharded over an axis, from 0 to 1.

        Values of one element, such as counters of steps, do not count.

        Args:
            axis: The axis; several count a value that one of them shards, None one that is sharded
                at all.
        """
        total = sum(value.nbytes for value in self.values if _has_dimensions(value))
        left = sum(value.nbytes for value in self.find_unsharded(axis))
        return 1 - left / total if total else 1.0

    def find_unsharded(self, axis: str | Sequence[str] | None = None) -> tuple[ValueReport, ...]:
        """Return the values that an axis does not shard, the largest first.

        Args:
            axis: As for `share`.
        """
        names = _list_names(axis)
        left = [
            value
            for value, axes in zip(self.values, self.axes, strict=True)
            if _has_dimensions(value)
            and not (_is_sharded(value) if names is None else axes.intersection(names))
        ]
        return tuple(sorted(left, key=lambda value: -value.nbytes))

    def __str__(self) -> str:
        axes = [name for name, size in self.mesh if size > 1]
        parts = [f"{_format_percent(self.share(name))} over {name}" for name in axes]
        shares = ", ".join([f"sharded: {_format_percent(self.share())} of the bytes", *parts])
        return "\n".join(filter(None, (shares, values_text("Values", self.values))))

    def __repr__(self) -> str:
        held = in_bytes(sum(value.device_bytes for value in self.values))
        count = counted(len(self.values), "value")
        return f"<ShardingSummary of {count}, {held} on each device; print it>"


def _list_names(axis: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return (axis,) if isinstance(axis, str) else None if axis is None else tuple(axis)


def _is_sharded(value: ValueReport) -> bool:
    return 0 < value.device_bytes < value.nbytes


def _has_dimensions(value: ValueReport) -> bool:
    """Return True for a value of which an axis could shard a dimension."""
    return math.prod(value.shape) > 1


def sharding_summary(tree: Any) -> ShardingSummary:
    """Summarize the shardings of the arrays of a tree, as a table for logs.

    Args:
        tree: Arrays, or each a `jax.ShapeDtypeStruct`, in any pytree: a state of flax, a model of
            equinox. A NumPy array counts as held whole. Leaves of other types are left out.

    Returns:
        The summary.

    Raises:
        ArgumentError: The tree has no arrays.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put
        >>> rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
        >>> summary = sharding_summary({"w": device_put(np.ones((16, 4)), rows), "b": np.ones(32)})
        >>> summary.share("data"), [value.path for value in summary.find_unsharded("data")]
        (0.5, ["['b']"])
    """
    with short_tracebacks:
        return _summarize_tree("sharding_summary", tree)


def assert_sharded(
    tree: Any,
    args: Sequence[Any] | None = None,
    /,
    *,
    axis: str | Sequence[str] | None = None,
    at_least: float = 1.0,
) -> None:
    """Fail unless enough bytes of some arrays, or of a program's arguments, are sharded.

    A value counts with all its bytes if the axis shards one of its dimensions. An axis of one
    device shards nothing.

    Args:
        tree: Arrays as `sharding_summary` takes them; or, with `args`, a function; or a stage. Then
            the arguments count in the shardings of the compiled program, and nothing runs.
        args: Arguments of the function; a `jax.ShapeDtypeStruct` can replace an array.
        axis: The mesh axis that must shard them; several count a value that one of them shards,
            None one that is sharded at all.
        at_least: Least share of the bytes, from 0 to 1.

    Raises:
        ExpectationError: A smaller share is sharded; with the paths of the values that are not. It
            is an `AssertionError`.
        ArgumentError: There is no array, or none of the meshes has such an axis.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put
        >>> rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
        >>> params = {"w": device_put(np.ones((16, 4)), rows), "b": np.ones(1)}
        >>> assert_sharded(params, axis="data", at_least=0.98)
        >>> assert_sharded(jax.jit(lambda p: p["w"] * 2), (params,), axis="data", at_least=0.98)
    """
    with short_tracebacks:
        _check_share(at_least)
        name, summary = _summarize(tree, args)
        _check_axes(summary, axis)
        share = summary.share(axis)
        if share >= at_least:
            return
        names = _list_names(axis)
        over = "" if names is None else f" over {' or '.join(names)}"
        table = values_text(f"Not sharded{over}", summary.find_unsharded(axis))
        raise ExpectationError(
            f"{_format_percent(share)} of the bytes of {name} are sharded{over}, at least "
            f"{_format_percent(at_least)} were expected\n\n{table}"
        )


def _format_percent(share: float) -> str:
    """Format a share, rounded down: 100 % stands for all of them alone."""
    return f"{math.floor(share * 10_000) / 100:g} %"


def _check_share(share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ArgumentError(
            f"at_least is {share!r}: it must be a share from 0 to 1, such as at_least=0.98"
        )


def _check_axes(summary: ShardingSummary, axis: str | Sequence[str] | None) -> None:
    known = [name for name, _ in summary.mesh]
    for name in _list_names(axis) or ():
        if known and name not in known:
            close = closest(name, known)
            advice = f"did you mean {close!r}?" if close else f"the axes are {', '.join(known)}"
            raise ArgumentError(f"axis is {name!r}, which no mesh of the values has; {advice}")


def _summarize(tree: Any, args: Sequence[Any] | None) -> tuple[str, ShardingSummary]:
    if args is None and find_stage(tree) is None:
        return "the tree", _summarize_tree("assert_sharded", tree)
    args = () if args is None else args
    check_call("assert_sharded", tree, args)
    program = compile_program(read(tree, tuple(args), {}, "assert_sharded"))
    used = [value for value in program.arguments if value.sharding is not None]
    return f"the arguments of {program.name}", _summarize_values(used)


def _summarize_tree(caller: str, tree: Any) -> ShardingSummary:
    leaves = jax.tree.leaves(tree)
    paths = leaf_paths(tree, "")
    pairs = zip(paths, leaves, strict=True)
    arrays = [_read_leaf(path, leaf) for path, leaf in pairs if hasattr(leaf, "dtype")]
    if not arrays:
        example = "sharding_summary(params)"
        if caller == "assert_sharded":
            example = 'assert_sharded(params, axis="data"), or assert_sharded(f, (x,)) for a call'
        raise ArgumentError(f"tree of {caller} has no arrays: write {example}")
    return _summarize_values(arrays)


def _read_leaf(path: str, leaf: Any) -> ProgramValue:
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    sharding = getattr(leaf, "sharding", None)
    placed = None if sharding is None else as_tiles(from_jax(sharding), leaf.shape)
    return ProgramValue(path, aval, sharding=placed)


def _summarize_values(values: Iterable[ProgramValue]) -> ShardingSummary:
    values = tuple(values)
    mesh: dict[str, int] = {}
    for value in values:
        if isinstance(value.sharding, NamedSharding):
            mesh.update(value.sharding.mesh.shape)
    return ShardingSummary(
        values=tuple(map(_describe, values)),
        axes=tuple(_find_axes(value.sharding) for value in values),
        mesh=tuple(mesh.items()),
    )


def _describe(value: ProgramValue) -> ValueReport:
    report = describe_value(value, "unknown")
    return report if report.used else replace(report, spec="host", used=True)


def _find_axes(sharding: XLACompatibleSharding | None) -> frozenset[str]:
    """Return the axes of more than one device over which a sharding divides dimensions."""
    if not isinstance(sharding, NamedSharding):
        return frozenset()
    sizes = sharding.mesh.shape
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec)
    return frozenset(
        name for entry in entries for name in entry if isinstance(name, str) and sizes[name] > 1
    )
