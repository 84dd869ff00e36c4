"""Shardings that a program does not follow: found in jaxprs and calls, reported once per site."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import jax

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.global_state import cached_by_jaxpr
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace import tracing
from xlashard._jax.trace.primitive_names import CONSTRAINT
from xlashard.core.program.uneven_shardings import is_strict, warn
from xlashard.core.sharding import NamedSharding, XLACompatibleSharding, from_jax
from xlashard.core.sharding.replicated import custom_memory_kind, names_devices
from xlashard.core.sharding.sharding_texts import as_code, described
from xlashard.errors import IgnoredShardingError, IgnoredShardingWarning, ShardingError, counted
from xlashard.support.lazily import dataclass, deferred

if TYPE_CHECKING:
    from xlashard._jax.trace import origins
else:
    origins = deferred("xlashard._jax.trace.origins")


@dataclass(frozen=True, eq=False)
class IgnoredSharding:
    """Sharding that a program names, and that nothing in the program follows.

    Attributes:
        kind: `constraint`: it stands on an abstract mesh, and the program runs on one device;
            `device_put`: it is on automatic axes inside of the program; `argument`: that of an
            argument of which the program takes the shape only.
        sharding: The sharding.
        aval: The abstract value that would have it.
        path: Path of the argument; empty for the others.
        results: For an argument, the paths of the results of its shape.
        eqn: The equation; None for an argument.
    """

    kind: Literal["constraint", "device_put", "argument"]
    sharding: XLACompatibleSharding
    aval: Any
    path: str = ""
    results: tuple[str, ...] = ()
    eqn: Any = None

    @property
    def reason(self) -> str:
        """Return why the program does not follow it."""
        match self.kind:
            case "constraint":
                return "its mesh is abstract, and nothing else places the program"
            case "device_put":
                return "device_put inside of a program shards nothing over automatic axes"
        return f"the program takes the shape of {self.path} only, so that nothing places it"

    @property
    def advice(self) -> str:
        """Return what to write instead."""
        match self.kind:
            case "constraint":
                return "give NamedSharding(mesh, ...) on devices"
            case "device_put":
                return f"write with_sharding_constraint(x, {as_code(self.sharding)})"
        return f"give out_shardings, such as {as_code(self.sharding)}"

    def instead(self, device: Device) -> str:
        """Return what happens in place of the sharding, on the first device of the program."""
        match self.kind:
            case "constraint":
                return f"the value is on {device}"
            case "device_put":
                return "nothing changes"
        first, more = self.results[0], len(self.results) - 1
        results = f"{first} and {counted(more, 'more result')} are" if more else f"{first} is"
        return f"{results} on {device}"

    def describe(self, function: str, device: Device) -> str:
        """Describe the sharding, what happens in its place, and what to write.

        Args:
            function: The function.
            device: The first device of the program.
        """
        name = f"{self.path or f'a {self.kind}'} of {function} ({aval_text(self.aval)})"
        text = f"{name} is {described(self.sharding)}, but {self.reason}"
        effect = "" if self.kind == "device_put" else f"{self.instead(device)}; "
        return f"{text}: {effect}{self.advice}"


def find_ignored(jaxpr: Any, devices: Sequence[Device]) -> Iterator[IgnoredSharding]:
    """Find constraints and `device_put` in a closed jaxpr that a program on devices ignores."""
    for finding in _candidates(jaxpr):
        if finding.kind == "device_put" or len(devices) == 1:
            yield finding


@cached_by_jaxpr
def _candidates(jaxpr: Any) -> tuple[IgnoredSharding, ...]:
    """Return the shardings in a jaxpr and its inner jaxprs that a program may ignore."""
    candidates: list[IgnoredSharding] = []
    for eqn in tracing.inner_sharding_equations(jaxpr):
        match eqn.primitive.name:
            case "device_put":
                for variable, target in zip(eqn.outvars, eqn.params["devices"], strict=True):
                    sharding = _tiles(target, variable.aval)
                    if sharding is not None and _has_no_effect(sharding):
                        finding = IgnoredSharding("device_put", sharding, variable.aval, eqn=eqn)
                        candidates.append(finding)
            case name if name == CONSTRAINT:
                aval = eqn.outvars[0].aval
                sharding = _tiles(eqn.params["sharding"], aval)
                if sharding is not None and not names_devices(sharding):
                    candidates.append(IgnoredSharding("constraint", sharding, aval, eqn=eqn))
    return tuple(candidates)


def _tiles(target: Any, aval: Any) -> XLACompatibleSharding | None:
    """Return a sharding that cuts a value into several tiles; None for anything else."""
    if not isinstance(target, jax.sharding.Sharding):
        return None
    try:
        sharding = from_jax(target)
    except ShardingError:
        return None
    is_known = isinstance(sharding, XLACompatibleSharding)
    return sharding if is_known and _is_cut(sharding, aval.ndim) else None


def _is_cut(sharding: XLACompatibleSharding, ndim: int) -> bool:
    return sharding.num_devices > 1 and not sharding.rank_tiling(ndim).is_replicated


def _has_no_effect(sharding: XLACompatibleSharding) -> bool:
    """Return True if `device_put` in a program moves a value neither to axes nor to a memory."""
    explicit = isinstance(sharding, NamedSharding) and sharding.mesh.explicit_axes
    return not explicit and custom_memory_kind(sharding) is None


def find_unplaced(
    dropped: Iterable[tuple[str, Any, XLACompatibleSharding | None]],
    results: Iterable[tuple[str, Any]],
) -> Iterator[IgnoredSharding]:
    """Find sharded arguments that a program on one device looks at, and results like them.

    Args:
        dropped: Path, abstract value and sharding of the committed arguments that the program does
            not take.
        results: Path and abstract value of the results without a requested sharding.
    """
    by_shape: dict[Any, list[str]] = {}
    for path, aval in results:
        by_shape.setdefault(aval.shape, []).append(path)
    for path, aval, sharding in dropped:
        if sharding is None or not _is_cut(sharding, aval.ndim):
            continue
        paths = by_shape.pop(aval.shape, None)
        if paths:
            yield IgnoredSharding("argument", sharding, aval, path, tuple(paths))


def report_ignored(
    jaxpr: Any,
    unplaced: Iterable[IgnoredSharding],
    devices: Sequence[Device],
    function: str,
    strict: bool | None,
) -> None:
    """Report the shardings that a program which is about to be lowered ignores.

    Args:
        jaxpr: The closed jaxpr.
        unplaced: Those of arguments that it does not take, see `find_unplaced`.
        devices: Its devices.
        function: The name of the function.
        strict: The option of the function.

    Raises:
        IgnoredShardingError: If strict.
    """
    ignored = list(find_ignored(jaxpr, devices))
    dropped = [*unplaced]
    if dropped:
        results = tuple(chain.from_iterable(each.results for each in dropped))
        ignored.append(replace(dropped[0], results=results))
    for finding in ignored:
        text = finding.describe(function, devices[0])
        line = None if finding.eqn is None else origins.user_line(finding.eqn)
        if is_strict(strict):
            at = "" if line is None else f", at {line[0]}:{line[1]}"
            raise IgnoredShardingError(text + at, path=finding.path)
        warn(text, IgnoredShardingWarning, line)
