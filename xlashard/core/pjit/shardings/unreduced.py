"""Checks of unreduced values in a program, before XLA or JAX's rules fail on them."""

from typing import Any

import numpy as np
from jax.sharding import AxisType, PartitionSpec

from xlashard._jax.lowering import aval_text, uses_shardy
from xlashard._jax.runtime.shardings import read_reduction
from xlashard._jax.trace import tracing
from xlashard._jax.trace.primitive_names import CALLBACKS
from xlashard.core.sharding import NamedSharding, XLACompatibleSharding
from xlashard.errors import UnreducedError


def check_reductions(jaxpr: Any, name: str) -> None:
    """Check the operations of a function on unreduced values.

    Args:
        jaxpr: The function's jaxpr.
        name: The function, for errors.

    Raises:
        UnreducedError: For a callback that would get partial results, for a reshard from one set
            of unreduced axes to another, on which XLA ends the process, and under the GSPMD
            partitioner for any unreduced value.
    """
    for eqn in tracing.equations(jaxpr):
        before = [axes for axes in map(_unreduced, eqn.invars) if axes]
        if not before and not any(map(_unreduced, eqn.outvars)):
            continue
        kind = eqn.primitive.name
        aval = next(v.aval for v in (*eqn.invars, *eqn.outvars) if _unreduced(v))
        check_axes(aval, name)
        if not uses_shardy():
            raise UnreducedError(  # no-catalogue: needs the GSPMD partitioner
                f"{name} has an unreduced value, {aval_text(aval)}, which the GSPMD "
                "partitioner can't reduce: use Shardy, by XLASHARD_PARTITIONER=shardy or "
                "jax.config.update('jax_use_shardy_partitioner', True)"
            )
        if before and kind in CALLBACKS:
            raise UnreducedError(
                f"{name} passes an unreduced value, {aval_text(aval)}, to a {kind}, which "
                "would get partial results: reduce it first, by jax.sharding.reshard(x, P(...)) "
                "without unreduced axes"
            )
        if kind not in ("reshard", "device_put"):
            continue
        for x, out in zip(eqn.invars, eqn.outvars, strict=True):
            problem = reshard_problem(x.aval.sharding.spec, out.aval.sharding.spec, x.aval.dtype)
            if problem:
                raise UnreducedError(
                    f"{name} reshards {aval_text(x.aval)} to {aval_text(out.aval)}: {problem}"
                )


def check_axes(aval: Any, name: str) -> None:
    """Refuse an unreduced value on a mesh that has automatic axes too.

    Raises:
        UnreducedError: With those axes.
    """
    auto = _auto_axes(aval) if unreduced_axes(aval) else []
    if auto:
        raise UnreducedError(
            f"{name} has an unreduced value, {aval_text(aval)}, on a mesh with the Auto axes "
            f"{auto}, where XLA would reduce it twice: use a mesh of Explicit axes, by "
            "Mesh(devices, axis_names, axis_types=(jax.sharding.AxisType.Explicit, ...))"
        )


def has_reductions(aval: Any, sharding: XLACompatibleSharding | None) -> bool:
    """Return True if a traced value's type is unreduced over the same axes as a sharding.

    Inside a program the type stands where they differ: only a reshard changes it.
    """
    typed = getattr(aval, "sharding", None)
    unreduced = frozenset() if typed is None else typed.spec.unreduced
    if not isinstance(sharding, NamedSharding):
        return not unreduced
    return sharding.spec.unreduced == unreduced


def reshard_problem(before: PartitionSpec, after: PartitionSpec, dtype: Any) -> str:
    """Return why a program can't change unreduced axes so; empty if it can."""
    reduction = read_reduction(after)
    if reduction != "sum" and after.unreduced - before.unreduced:
        return (
            f"XLA can't make partial results of a {reduction} of whole values: use device_put "
            "outside of the program"
        )
    if np.issubdtype(dtype, np.complexfloating) and after.unreduced - before.unreduced:
        return (
            f"XLA can't make partial results of {dtype} of whole values: reshard the real and the "
            "imaginary part, or use device_put outside of the program"
        )
    if not before.unreduced or not after.unreduced:
        return ""
    if before.unreduced <= after.unreduced or after.unreduced <= before.unreduced:
        return ""
    return (
        f"XLA can't go from partial results over {sorted(before.unreduced)} to others over "
        f"{sorted(after.unreduced)} at once: reduce first, by jax.sharding.reshard(x, P(...)) "
        "without unreduced axes"
    )


def unreduced_axes(aval: Any) -> frozenset[str]:
    """Return the mesh axes over which the type of a value is unreduced."""
    sharding = getattr(aval, "sharding", None)
    return frozenset() if sharding is None else sharding.spec.unreduced


def _unreduced(variable: Any) -> frozenset[str]:
    return unreduced_axes(variable.aval)


def _auto_axes(aval: Any) -> list[str]:
    """Return the automatic axes of the mesh in a value's type."""
    mesh = aval.sharding.mesh
    types = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return [name for name, size, kind in types if kind == AxisType.Auto and size > 1]
