"""Comparison of the programs of `jax.jit` between processes, before their first run."""

from collections.abc import Sequence
from typing import Any

from xlashard._jax.lowering import uses_shardy
from xlashard._jax.runtime.compiler import CompileRequest
from xlashard._jax.runtime.jit_calls import JitProgram, watch_first_runs
from xlashard.errors import ShardingError
from xlashard.pjit.lower import ClosedValues
from xlashard.program.consistency import CONSISTENCY
from xlashard.program.consistency.fingerprint import ProgramFingerprint
from xlashard.program.plan import Partitioner, ProgramPlan, ValuePlan
from xlashard.sharding import XLACompatibleSharding, from_jax

_watched: list[bool] = []


def watch_jit_programs() -> None:
    """Compare programs of `jax.jit` as long as the policy of this process includes them."""
    if not _watched:
        _watched.append(True)
        watch_first_runs(_admit)


def _admit(program: JitProgram) -> None:
    if CONSISTENCY.policy.includes_jit:
        CONSISTENCY.admit(_fingerprint(program))


def _fingerprint(program: JitProgram) -> ProgramFingerprint:
    devices = program.devices
    args = _values(program.arguments, program.in_shardings, devices, program.paths)
    names = [f"result[{i}]" for i in range(len(program.results))]
    results = _values(program.results, program.out_shardings, devices, names)
    shardy = uses_shardy()
    plan = ProgramPlan(
        name=program.name,
        devices=devices,
        args=args,
        results=results,
        donated=program.donated,
        partitioner=Partitioner.SHARDY if shardy else Partitioner.GSPMD,
        options=program.options,
    )
    tokens = (False,) * program.ordered_effects
    request = CompileRequest(
        devices,
        shardy,
        (*tokens, *(value.is_free for value in args)),
        (*tokens, *(value.is_free for value in results)),
        program.options,
    )
    closed = ClosedValues(program.closed_over, program.closed_over)
    return ProgramFingerprint(plan, program.module, request, closed=closed)


def _values(
    avals: Sequence[Any], shardings: Sequence[Any], devices: tuple[Any, ...], paths: Sequence[str]
) -> tuple[ValuePlan, ...]:
    return tuple(
        ValuePlan(
            shape=tuple(getattr(aval, "shape", ())),
            dtype=str(getattr(aval, "dtype", aval)),
            sharding=_known(sharding, devices),
            name=path,
        )
        for aval, sharding, path in zip(avals, shardings, paths, strict=True)
    )


def _known(sharding: Any, devices: tuple[Any, ...]) -> XLACompatibleSharding | None:
    """Return a sharding over the devices of a program; None for one that the module alone has."""
    if sharding is None:
        return None
    try:
        known = from_jax(sharding)
        if isinstance(known, XLACompatibleSharding) and tuple(known.devices) == devices:
            return known
    except ShardingError:  # for instance on an abstract mesh
        pass
    return None
