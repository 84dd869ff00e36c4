"""Turn the shardings that a jaxpr prescribes into constraints on automatic axes, or remove them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AxisType

from xlashard._jax.private import core
from xlashard._jax.runtime.shardings import UNSPECIFIED, AbstractMesh, JaxNamedSharding
from xlashard._jax.trace.primitive_names import CONSTRAINT
from xlashard._jax.trace.rewriting import replace_bodies
from xlashard._jax.trace.tracing import Jaxpr, bodies, replace_fields

type Constraint = Callable[[Any], tuple["core.Primitive", dict[str, Any]]]
"""Returns primitive and parameters that constrain a value to a spec."""

_CASTS = frozenset(("mesh_cast", "reshard"))
"""Primitives that change the sharding in the type of a value, and not the value."""
_PRESCRIBING = frozenset(("dst_sharding", "out_sharding", "sharding"))


def prescribe_by_constraints(jaxpr: Jaxpr, constraint: Constraint | None) -> Jaxpr:
    """Return a jaxpr of explicit mesh axes as one of automatic axes.

    Values get types without shardings. What operations prescribe (`out_sharding=`, `reshard`)
    becomes constraints, but for specs of operations that shard nothing, which JAX writes itself.

    Args:
        jaxpr: The closed jaxpr.
        constraint: Makes a constraint; None for none, and to remove those of the jaxpr, too.
    """
    return _Prescriptions(constraint).convert(jaxpr)


class _Prescriptions:
    def __init__(self, constraint: Constraint | None) -> None:
        self._constraint = constraint
        self._jaxprs: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def convert(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return a jaxpr, closed or not, on automatic axes."""
        known = self._jaxprs.get(id(jaxpr))
        if known is None:
            known = self._jaxprs[id(jaxpr)] = jaxpr, self._convert_jaxpr(jaxpr)
        return known[1]

    def _convert_jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        variables: dict[Any, Any] = {}

        def convert_atom(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                return core.Literal(atom.val, _without_sharding(atom.aval))
            if atom not in variables:
                kind = core.DropVar if isinstance(atom, core.DropVar) else core.Var
                variables[atom] = kind(_without_sharding(atom.aval))
            return variables[atom]

        sides = {
            name: list(map(convert_atom, getattr(jaxpr, name))) for name in ("constvars", "invars")
        }
        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            operands = list(map(convert_atom, eqn.invars))
            name = eqn.primitive.name
            if name in _CASTS or (name == CONSTRAINT and self._constraint is None):
                new, variables[eqn.outvars[0]] = [], operands[0]
            else:
                new = [
                    replace_bodies(eqn, map(self.convert, bodies(eqn))).replace(
                        invars=operands, outvars=list(map(convert_atom, eqn.outvars))
                    )
                ]
                new = [each.replace(params=dict(self._parameters(each))) for each in new]
            for each in (*new, *self._constraints(eqn, variables)):
                eqns.append(each.replace(ctx=_automatic_context(each.ctx)))
        outvars = list(map(convert_atom, jaxpr.outvars))
        return replace_fields(
            jaxpr, **sides, eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info
        )

    def _parameters(self, eqn: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of an equation, on automatic axes."""
        for name, value in eqn.params.items():
            if name == "mesh" and isinstance(value, jax.sharding.Mesh | AbstractMesh):
                yield name, with_automatic_axes(value)
            elif name in ("in_shardings", "out_shardings") and self._constraint is None:
                yield name, (UNSPECIFIED,) * len(value)
            elif name in ("in_shardings", "out_shardings"):
                yield name, tuple(map(_on_automatic_axes, value))
            elif name == "sharding" and eqn.primitive.name == CONSTRAINT:
                yield name, _on_automatic_axes(value)
            elif name in _PRESCRIBING and isinstance(value, JaxNamedSharding):
                yield name, None
            else:
                yield name, value

    def _constraints(self, eqn: Any, variables: dict[Any, Any]) -> Iterator[Any]:
        """Yield a constraint of the result of an equation that prescribes its sharding."""
        is_cast = eqn.primitive.name == "reshard"
        if self._constraint is None or eqn.primitive.name in (CONSTRAINT, "mesh_cast"):
            return
        named = (eqn.params[name] for name in _PRESCRIBING if name in eqn.params)
        sharding = next((each for each in named if isinstance(each, JaxNamedSharding)), None)
        if sharding is None or not (is_cast or any(sharding.spec)):
            return
        (result,) = eqn.outvars
        value = variables[result]
        if isinstance(value, core.Literal):
            return
        primitive, params = self._constraint(jax.sharding.PartitionSpec(*sharding.spec))
        variables[result] = core.Var(value.aval)
        yield eqn.replace(
            primitive=primitive, params=params, invars=[value], outvars=[variables[result]]
        )


def _automatic_context(context: Any) -> Any:
    """Return the context of an equation, in which a mesh has automatic axes."""
    if AxisType.Explicit not in context.cur_abstract_mesh.axis_types:
        return context
    with (
        context.manager,
        jax.sharding.use_abstract_mesh(with_automatic_axes(context.cur_abstract_mesh)),
    ):
        return core.current_jaxpr_eqn_context()


def with_automatic_axes(mesh: Any) -> Any:
    """Return a mesh with automatic axes in place of explicit ones."""
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple([AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types])
    if isinstance(mesh, jax.sharding.Mesh):
        return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update(axis_types=types)


def _on_automatic_axes(sharding: Any) -> Any:
    if not isinstance(sharding, JaxNamedSharding):
        return sharding
    return type(sharding)(with_automatic_axes(sharding.mesh), sharding.spec)


def _without_sharding(aval: Any) -> Any:
    """Return a type without explicit axes."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return aval
    whole = jax.sharding.PartitionSpec(*[None] * len(aval.shape))
    return aval.update(
        sharding=jax.sharding.NamedSharding(with_automatic_axes(sharding.mesh), whole)
    )
