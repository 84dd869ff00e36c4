"""Errors about explicit mesh axes, with the operands, the axes and the expression to write."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePath
from typing import Any

from xlashard._jax import installed_version
from xlashard._jax.lowering import aval_text
from xlashard._jax.trace.primitive_names import ALIKE_OPERANDS, LINEAR_ALGEBRA
from xlashard._jax.trace.tracing import entry_axes, typed_axes
from xlashard._jax.trace.type_errors import (
    InvalidSpec,
    Operand,
    TypeDifference,
    TypeFailure,
    read_type_failure,
)
from xlashard.core.sharding import PartitionSpec, grid_of, spec_of
from xlashard.core.sharding.named import spec_entries
from xlashard.errors import (
    DivisibilityError,
    GeometryError,
    ShardingTypeError,
    XlashardError,
    counted,
)
from xlashard.geometry import validate_spec

type Axes = tuple[str, ...]
"""The mesh axes of one dimension, major to minor."""


def explained(error: Exception) -> Exception:
    """Return an error of JAX about explicit mesh axes with names and a fix; others unchanged.

    The traceback stays.
    """
    if isinstance(error, XlashardError):
        return error
    try:
        failure = read_type_failure(error)
    except (AttributeError, KeyError) as missing:
        # Of variables of JAX's own functions, which a release can rename: the error itself counts.
        error.add_note(
            f"xlashard can't name the operands with jax {installed_version()}, in which "
            f"{missing.args[0]!r} has another name"
        )
        return error
    if failure is None:
        return error
    return _error(failure, type(error)).with_traceback(error.__traceback__)


def _error(failure: TypeFailure, also: type[Exception]) -> ShardingTypeError:
    problem = failure.problem
    if isinstance(problem, InvalidSpec):
        text = _invalid_spec(problem, failure)
    elif isinstance(problem, TypeDifference):
        text = _difference(problem, failure)
    else:
        text = f"{_subject(failure)}: {_operation(failure)}"
    paths = dict.fromkeys(path for operand in failure.operands for path in operand.origins)
    return ShardingTypeError(
        text,
        operation=failure.operation,
        paths=tuple(paths),
        source=f"{failure.file}:{failure.line}",
        also=also,
    )


def _place(failure: TypeFailure) -> str:
    if not failure.file:
        return failure.function
    return f"{PurePath(failure.file).name}:{failure.line} in {failure.function}"


def _invalid_spec(problem: InvalidSpec, failure: TypeFailure) -> str:
    spec, shape = problem.spec, problem.shape
    subject = f"the sharding {spec} at {_place(failure)}"
    axes = [entry_axes(entry) for entry in spec.partitions]
    if shape is not None and len(axes) > len(shape):
        return (
            f"{subject} has {len(axes)} entries for an array of shape {shape}: give at most "
            f"{counted(len(shape), 'entry', 'entries')}, such as {_spec(axes[: len(shape)])}"
        )
    try:
        validate_spec(spec_of(spec), grid_of(problem.mesh), shape)
    except DivisibilityError as error:
        axes[error.dim] = ()
        return f"{subject}: {error}. Pad it, or leave it whole: {_spec(axes)}"
    except GeometryError as error:
        return f"{subject}: {error}"
    return f"{subject}: {failure.text}"


def _difference(problem: TypeDifference, failure: TypeFailure) -> str:
    before, after = aval_text(problem.before), aval_text(problem.after)
    fix = f"jax.sharding.reshard(value, {_spec(typed_axes(problem.before))})"
    if problem.branches:
        first, other = problem.branches
        return (
            f"the result{problem.path} of {problem.kind} at {_place(failure)} is {before} from "
            f"{first} and {after} from {other}, sharded over other mesh axes: return {fix} from "
            f"{other}"
        )
    return (
        f"{problem.path} of {problem.kind} at {_place(failure)} is {before}, but the function "
        f"returns {after} for the next round, sharded over other mesh axes: return {fix} for it"
    )


def _subject(failure: TypeFailure) -> str:
    operands = [o for o in failure.operands if o.aval.ndim or len(failure.operands) == 1]
    listed = " and ".join(map(_described, operands))
    return f"{failure.operation} at {_place(failure)}" + (f" takes {listed}" if listed else "")


def _described(operand: Operand) -> str:
    kind, path = aval_text(operand.aval), " and ".join(operand.origins)
    if operand.is_argument:
        same = operand.name in ("", path)
        return f"{path} ({kind})" if same else f"{operand.name} ({kind}, which is {path})"
    origin = "closed over" if operand.is_closed_over else f"computed from {path or 'constants'}"
    article = "an" if kind[0] in "aeio" else "a"
    return f"{operand.name} ({kind}, {origin})" if operand.name else f"{article} {kind} {origin}"


def _operation(failure: TypeFailure) -> str:
    """Return what is wrong with the operands of an operation, and the fix."""
    operands, params, name = failure.operands, failure.params, failure.operation
    axes = [_dims(operand) for operand in operands]
    meshes = {_mesh_axes(operand) for operand in operands} - {()}
    if len(meshes) > 1 or "context mesh" in failure.text:
        return _other_mesh(failure)
    if failure.is_batched and (axis := _repeated_axis(failure)):
        return (
            f"{axis!r} would shard two dimensions of the result, counting that of jax.vmap: write "
            f"jax.sharding.reshard(x, P(...)) without {axis!r} for an operand, before jax.vmap if "
            "that maps its dimension"
        )
    if name == "dot_general":
        advice = _partial_product(failure) if "unreduced" in failure.text else _product(failure)
        if advice:
            return advice
    if name == "gather":
        return _gather(operands[0], operands[1], params["dimension_numbers"])
    if name.startswith("scatter"):
        return (
            "the sharding of the result is ambiguous: pass out_sharding="
            f"{_spec(axes[0])}, as in {operands[0].name or 'x'}.at[...].set(..., "
            f"out_sharding={_spec(axes[0])})"
        )
    if name == "reshape":
        return _reshape(operands[0], params["new_sizes"])
    if name == "with_sharding_constraint":
        return "a constraint changes no type, and its axes are explicit: write " + _resharded(
            operands[0], params["spec"]
        )
    if name == "vmap":
        return _mapped(operands, params["axes"])
    advice = _whole(operands, _whole_dims(failure))
    if name in ALIKE_OPERANDS or failure.duplicate is not None or "broadcasting" in failure.text:
        advice = advice or _alike(failure)
    return advice or (
        f"{failure.text.rstrip('.')}. Give its operands other shardings by "
        "jax.sharding.reshard(x, P(...)), or leave the operation to the partitioner by "
        "jax.sharding.auto_axes"
    )


def _repeated_axis(failure: TypeFailure) -> str:
    """Return the axis that shards two dimensions of a result in JAX's text; empty without one."""
    result = failure.text.partition("illegally sharded result: ")[2]
    names = re.split(r"[@,()\[\]]", result)  # float32[8@x,8@(x,y)]
    axes = [axis for operand in failure.operands for axis in _flat(_dims(operand))]
    return next((axis for axis in axes if names.count(axis) > 1), "")


def _other_mesh(failure: TypeFailure) -> str:
    meshes = dict.fromkeys(map(_mesh_axes, failure.operands))
    listed = " and ".join(str(dict(mesh)) for mesh in meshes if mesh)
    others = (
        o.name
        for o in failure.operands
        if _mesh_axes(o) and f"context mesh {o.aval.sharding.mesh} " not in failure.text
    )
    return (
        f"their meshes are {listed}, which must be one mesh, the one in force: move it before the "
        f"call, by jax.device_put({next(others, '') or 'x'}, jax.NamedSharding(mesh, P(...)))"
    )


def _mesh_axes(operand: Operand) -> tuple[tuple[str, int], ...]:
    mesh = operand.aval.sharding.mesh
    return () if mesh.empty else tuple(mesh.shape.items())


def _product(failure: TypeFailure) -> str:
    first, other = failure.operands
    contracted, batch = failure.params["dimension_numbers"]
    one, two = _dims(first), _dims(other)
    for i, j in zip(*batch, strict=True):
        if one[i] != two[j]:
            return (
                f"a batch dimension is sharded over {_names(one[i])} in {_label(first)} and over "
                f"{_names(two[j])} in {_label(other)}: write "
                + _resharded(other, _with_axes(two, j, one[i]))
            )
    results = [one[i] for i in batch[0]]
    for side, axes, operand in ((0, one, first), (1, two, other)):
        removed = {*contracted[side], *batch[side]}
        results += [axes[d] for d in range(operand.aval.ndim) if d not in removed]
    spec = _spec(_distinct(results))
    if failure.duplicate is not None:
        axis = next(a for a in _flat(results) if _flat(results).count(a) > 1)
        problem = f"two dimensions of the result would be sharded over {axis!r}"
    else:
        axes = [one[i] + two[j] for i, j in zip(*contracted, strict=True) if one[i] and two[j]]
        problem = (
            f"both contracted dimensions are sharded over {_names(dict.fromkeys(_flat(axes)))}, so "
            "the sharding of the result is ambiguous"
        )
    names = first.name or "x", other.name or "y"
    call = f"jnp.matmul({', '.join(names)}, out_sharding={spec})"
    return f"{problem}: pass out_sharding={spec}, as in {call}"


def _partial_product(failure: TypeFailure) -> str:
    """Return the fix for an unreduced result whose axes are not those of the contraction."""
    first, other = failure.operands
    requested = failure.params["out_sharding"]
    (left, right), _ = failure.params["dimension_numbers"]
    axes = _flat(_dims(first)[d] for d in left)
    if requested is None or axes != _flat(_dims(other)[d] for d in right) or not axes:
        return ""
    spec = requested.spec
    entries = "".join(f"{entry!r}, " for entry in spec.partitions)
    return (
        f"the product is summed over {_names(axes)}, and out_sharding leaves "
        f"{_names(sorted(spec.unreduced))} unreduced: pass "
        f"out_sharding=P({entries}unreduced={{{_names(axes)}}})"
    )


def _gather(operand: Operand, indices: Operand, numbers: Any) -> str:
    """Return the sharding of a gather's result: of the indices, then of the slices."""
    from_indices = list(_dims(indices)[:-1])
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    slices = [axes for d, axes in enumerate(_dims(operand)) if d not in dropped]
    count = len(from_indices) + len(slices)
    results = [
        slices.pop(0) if d in numbers.offset_dims else from_indices.pop(0) for d in range(count)
    ]
    spec = _spec(_distinct(results))
    return (
        "the sharding of the result is ambiguous: pass out_sharding="
        f"{spec}, as in {operand.name or 'x'}.at[...].get(out_sharding={spec})"
    )


def _reshape(operand: Operand, sizes: Sequence[int]) -> str:
    mesh = operand.aval.sharding.mesh
    results: list[Axes] = [()] * len(sizes)
    for axes in filter(None, _dims(operand)):
        tiles = math.prod(mesh.shape[a] for a in axes)
        free = [d for d, size in enumerate(sizes) if size % tiles == 0 and not results[d]]
        if free:
            results[free[0]] = axes
    spec = _spec(results)
    return (
        f"the sharding of the result of shape {tuple(sizes)} is ambiguous: pass out_sharding="
        f"{spec}, as in jnp.reshape({operand.name or 'x'}, {tuple(sizes)}, out_sharding={spec})"
    )


def _mapped(operands: Sequence[Operand], dims: Sequence[int]) -> str:
    axes = [_dims(o)[d] if _dims(o) else () for o, d in zip(operands, dims, strict=True)]
    wrong = next(i for i, names in enumerate(axes) if names != axes[0])
    first, other = operands[0], operands[wrong]
    return (
        f"the mapped dimension is sharded over {_names(axes[0])} in {_label(first)} and over "
        f"{_names(axes[wrong])} in {_label(other)}: write "
        + _resharded(other, _with_axes(_dims(other), dims[wrong], axes[0]))
    )


def _whole_dims(failure: TypeFailure) -> frozenset[int]:
    """Return the dimensions along which an operation takes no sharded operand."""
    params, name = failure.params, failure.operation
    first = failure.operands[0].aval if failure.operands else None
    if first is None:
        return frozenset()
    if name == "slice" or name == "dynamic_slice":
        sizes = params.get("slice_sizes") or tuple(
            -(-(stop - start) // step)
            for start, stop, step in zip(
                params["start_indices"],
                params["limit_indices"],
                params["strides"] or (1,) * first.ndim,
                strict=True,
            )
        )
        return frozenset(d for d, size in enumerate(sizes) if size != first.shape[d])
    if name == "pad":
        return frozenset(d for d, added in enumerate(params["padding_config"]) if any(added))
    if name == "tile":
        return frozenset(d for d, count in enumerate(params["reps"]) if count != 1)
    if name in LINEAR_ALGEBRA:
        return frozenset((first.ndim - 2, first.ndim - 1))
    for key in ("dimension", "axis", "reduction_dimension"):
        if isinstance(params.get(key), int) and name not in ("concatenate", "stack"):
            return frozenset((params[key] % max(first.ndim, 1),))
    return frozenset()


def _whole(operands: Sequence[Operand], dims: Collection[int]) -> str:
    for operand in operands:
        axes = _dims(operand)
        cut = [d for d in sorted(dims) if d < len(axes) and axes[d]]
        if cut:
            spec = [() if d in dims else names for d, names in enumerate(axes)]
            return (
                f"dimension {cut[0]} is sharded over {_names(axes[cut[0]])}, and the operation "
                f"takes it whole: write {_resharded(operand, _spec(spec))}"
            )
    return ""


def _alike(failure: TypeFailure) -> str:
    """Return where the shardings of two operands of one rank differ, and the fix."""
    operands = list(failure.operands)
    if failure.operation == "select_n":
        operands = [*operands[1:], operands[0]]
    elif failure.operation == "dynamic_update_slice":
        operands = operands[:2]
    first, *others = [operand for operand in operands if operand.aval.ndim] or operands
    for operand in others:
        pairs = list(zip(_dims(first), _dims(operand), strict=False))
        sizes = zip(first.aval.shape, operand.aval.shape, strict=False)
        differs = [a != b and 1 not in size for (a, b), size in zip(pairs, sizes, strict=False)]
        problem = _twice(failure.duplicate)
        if not problem and True in differs:
            dim = differs.index(True)
            one, other = pairs[dim]
            problem = (
                f"dimension {dim} is sharded over {_names(one)} in {_label(first)} and over "
                f"{_names(other)} in {_label(operand)}"
            )
        if problem:
            spec, moved = _like(first, operand), operand
            if spec is None:
                spec, moved = _spec(_dims(operand)), first
            return f"{problem}: write {_resharded(moved, spec)}"
    return ""


def _twice(spec: Any) -> str:
    """Return which dimensions of a result would be sharded over one axis."""
    axes = [] if spec is None else [entry_axes(entry) for entry in spec.partitions]
    for axis in _flat(axes):
        dims = [d for d, names in enumerate(axes) if axis in names]
        if len(dims) > 1:
            listed = " and ".join(map(str, dims))
            return f"dimensions {listed} of the result would be sharded over {axis!r}"
    return ""


def _like(first: Operand, operand: Operand) -> str | None:
    """Return the spec of an operand that is sharded as another one; None if it can't be."""
    mesh, dims = first.aval.sharding.mesh, []
    for axes, own, size in zip(_dims(first), first.aval.shape, operand.aval.shape, strict=True):
        tiles = math.prod(mesh.shape[a] for a in axes)
        if size % tiles and size != 1:
            return None
        dims.append(axes if size == own or size % tiles == 0 else ())
    return _spec(dims)


def _label(operand: Operand) -> str:
    return operand.name or f"the {aval_text(operand.aval)}"


def _resharded(operand: Operand, spec: object) -> str:
    """Return the expression that reshards an operand, with a placeholder for one without a name."""
    if operand.is_internal:
        names = " and ".join(operand.origins) or "x"
        return f"jax.sharding.reshard({names}, P()) before the call of JAX's function around it"
    suffix = "" if operand.name else f" for the {aval_text(operand.aval)}"
    return f"jax.sharding.reshard({operand.name or 'value'}, {spec}){suffix}"


def _with_axes(dims: Sequence[Axes], dim: int, axes: Axes) -> str:
    """Return a spec with other axes for one dimension; no other dimension keeps them."""
    rest = [tuple(a for a in names if a not in axes) for names in dims]
    rest[dim] = axes
    return _spec(rest)


def _dims(operand: Operand) -> tuple[Axes, ...]:
    """Return the explicit axes that shard each dimension of an operand."""
    return typed_axes(operand.aval) or ((),) * operand.aval.ndim


def _flat(dims: Iterable[Axes]) -> list[str]:
    return [axis for axes in dims for axis in axes]


def _distinct(dims: Iterable[Axes]) -> list[Axes]:
    """Return the axes of each dimension without those of an earlier one."""
    seen: set[str] = set()
    kept = []
    for axes in dims:
        kept.append(tuple(axis for axis in axes if axis not in seen))
        seen |= set(axes)
    return kept


def _names(axes: Iterable[str]) -> str:
    return ", ".join(map(repr, axes)) or "no axis"


def _spec(dims: Sequence[Axes]) -> str:
    return str(PartitionSpec(*spec_entries(dims)))
