"""Shardings of jaxpr values, as specified by arguments and constraints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xlashard._jax.trace.origins import Line, Scope, source_line
from xlashard.analysis.explain.closed_dimensions import (
    DimensionSource,
    constraint_of,
    find_sources,
    list_axes,
)
from xlashard.core.sharding import Mesh, NamedSharding, Sharding

type Axes = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ConstraintChange:
    """A constraint that differs from the sharding of the value's source.

    Attributes:
        lines: Its line, and the lines of the operations between.
        arguments: Arguments that the value depends on.
        moved: Mesh axes that shard another dimension, or none, under the constraint.
        closed: Mesh axes that shard no dimension under the constraint.
        used: All mesh axes of the constraint.
    """

    lines: frozenset[Line]
    arguments: frozenset[str]
    moved: frozenset[str]
    closed: frozenset[str]
    used: frozenset[str]


@dataclass(frozen=True, eq=False)
class ValueShardings:
    """Shardings of the values of a jaxpr.

    Attributes:
        jaxpr: Closed jaxpr of the program.
        arguments: Path and sharding of each argument; None for an unspecified sharding.
        mesh: The mesh.
    """

    jaxpr: Any
    arguments: Sequence[tuple[str, Sharding | None]]
    mesh: Mesh

    @cached_property
    def _top(self) -> Scope:
        return Scope.of(self.jaxpr)

    @cached_property
    def _arguments(self) -> Mapping[Any, tuple[str, Sharding | None]]:
        return dict(zip(self.jaxpr.invars, self.arguments, strict=False))

    @cached_property
    def equations(self) -> Mapping[Line, list[tuple[Scope, Any]]]:
        """Equations by source line, with their scopes."""
        equations: dict[Line, list[tuple[Scope, Any]]] = {}
        for scope in self._top.all():
            for eqn in scope.jaxpr.eqns:
                line = source_line(eqn)
                if line is not None:
                    equations.setdefault(line, []).append((scope, eqn))
        return equations

    @cached_property
    def constraints(self) -> tuple[tuple[Scope, Any, NamedSharding], ...]:
        """Constraints on the axes of the mesh."""
        return tuple(
            (scope, eqn, sharding)
            for scope in self._top.all()
            for eqn in scope.jaxpr.eqns
            if (sharding := self._constraint_sharding(eqn)) is not None
        )

    @cached_property
    def changes(self) -> tuple[ConstraintChange, ...]:
        """Constraints that differ from arguments and other constraints."""
        changes = []
        for scope, eqn, sharding in self.constraints:
            value = eqn.invars[0]
            own = list_axes(sharding, value.aval.ndim)
            by_dim = self.sources(scope, value)
            sources = [s for each in by_dim for s in each]
            moved = {
                axis
                for dim, each in enumerate(by_dim)
                for source in each
                for axis in source.axes
                if axis not in own[dim]
            }
            if moved:
                line = source_line(eqn)
                lines = frozenset().union(*(s.lines for s in sources))
                paths = frozenset(s.path for s in sources if s.path)
                if line is not None:
                    lines |= {line}
                used = frozenset(axis for axes in own for axis in axes)
                changes.append(
                    ConstraintChange(lines, paths, frozenset(moved), frozenset(moved - used), used)
                )
        return tuple(changes)

    def sources(self, scope: Scope, value: Any) -> list[list[DimensionSource]]:
        """Return the sharding sources of each dimension of a value.

        Args:
            scope: Scope of the value.
            value: Variable of its jaxpr.
        """
        return [
            [
                source
                for source in find_sources(scope, value, dim, self._arguments, self.mesh)
                if source.sharding.mesh == self.mesh
            ]
            for dim in range(len(getattr(value.aval, "shape", ())))
        ]

    def _constraint_sharding(self, eqn: Any) -> NamedSharding | None:
        sharding = constraint_of(eqn, self.mesh)
        return sharding if sharding is not None and sharding.mesh == self.mesh else None


def local_shape(
    shape: Sequence[int], sharding: NamedSharding, without: frozenset[str]
) -> tuple[int, ...]:
    """Return the shape of a shard, ignoring some axes."""
    sizes = sharding.mesh.shape
    cut = list_axes(sharding, len(shape))
    return tuple(
        size // max(math.prod(sizes[a] for a in axes if a not in without), 1)
        for size, axes in zip(shape, cut, strict=True)
    )
