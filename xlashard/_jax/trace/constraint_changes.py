"""Other shardings in the constraints of a jaxpr."""

from collections.abc import Mapping
from typing import Any

import jax

from xlashard._jax.trace.origins import Line, source_line
from xlashard._jax.trace.primitive_names import CONSTRAINT
from xlashard._jax.trace.rewriting import Rewriting
from xlashard._jax.trace.tracing import entry_axes

type _Axes = tuple[tuple[str, ...], ...]


class ConstraintChanges(Rewriting):
    """Other shardings of values that constraints shard.

    Args:
        specs: The axes of each dimension, by the line of the constraint, the value's shape, and
            the axes that the constraint gives: a helper may constrain several values.
    """

    def __init__(self, specs: Mapping[tuple[Line, tuple[int, ...], _Axes], _Axes]) -> None:
        super().__init__()
        self._specs = specs

    def _equations(self, eqn: Any) -> list[Any]:
        if eqn.primitive.name != CONSTRAINT:
            return super()._equations(eqn)
        line, aval, sharding = source_line(eqn), eqn.outvars[0].aval, eqn.params["sharding"]
        if line is None or not isinstance(sharding, jax.sharding.NamedSharding):
            return [eqn]
        own = [*sharding.spec, *[None] * (aval.ndim - len(sharding.spec))]
        before = tuple(() if e is jax.P.UNCONSTRAINED else entry_axes(e) for e in own)
        spec = self._specs.get((line, aval.shape, before))
        if spec is None:
            return [eqn]
        open_dims = eqn.params.get("unconstrained_dims", ())
        entries = [
            jax.P.UNCONSTRAINED if dim in open_dims and not axes else tuple(axes) or None
            for dim, axes in enumerate(spec)
        ]
        # The class of the sharding, which may be xlashard's.
        changed = type(sharding)(sharding.mesh, jax.P(*entries), memory_kind=sharding.memory_kind)
        params = {**eqn.params, "sharding": changed}
        if open_dims:
            params["unconstrained_dims"] = {dim for dim in open_dims if not spec[dim]}
        return [eqn.replace(params=params)]
