"""Insertion of a layout's sharding constraints into a jaxpr."""

from collections.abc import Iterable
from typing import Any

from xlashard._jax.trace.rewriting import InsertionSite, insert_equations
from xlashard._jax.trace.tracing import bodies
from xlashard.auto.problem import ConstraintSite
from xlashard.pjit.constraint import constraint_p, constraint_params
from xlashard.sharding import Mesh, NamedSharding, PartitionSpec


def insert_constraints(
    jaxpr: Any, mesh: Mesh, constraints: Iterable[tuple[ConstraintSite, PartitionSpec]]
) -> Any:
    """Return a jaxpr with sharding constraints at some places.

    Nothing is traced again, so that JAX's caches of traces keep no constraint. Operands that are
    literals are skipped, and so are sites inside `shard_map`.

    Args:
        jaxpr: The closed jaxpr.
        mesh: The mesh, whose axes are automatic.
        constraints: Each place, with the spec of its value.

    Raises:
        IndexError: If a place isn't in the jaxpr.
    """
    sites = [
        InsertionSite(site.path, site.kind, site.index, NamedSharding(mesh, spec))
        for site, spec in constraints
    ]
    return insert_equations(jaxpr, constraint_p, constraint_params, sites)


def site_value(jaxpr: Any, site: ConstraintSite) -> tuple[Any, Any]:
    """Return the equation and the value of a site; the equation is None for an argument.

    Args:
        jaxpr: The closed jaxpr.
        site: The site.
    """
    path = list(site.path)
    eqn: Any = None
    while path:
        eqn = jaxpr.eqns[path.pop(0)]
        if path:
            jaxpr = list(bodies(eqn))[path.pop(0)]
    match site.kind:
        case "parameter":
            return eqn, jaxpr.invars[site.index]
        case "operand":
            return eqn, eqn.invars[site.index]
        case _:
            return eqn, eqn.outvars[site.index]
