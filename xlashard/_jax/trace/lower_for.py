"""Lower what `jax.jit` traced for the devices of another mesh, by JAX's own path."""

import copy
import re
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax.private import jax_dispatch, mlir, pxla, replace_name, sharding_impls
from xlashard._jax.runtime.compiler import NamedClient, client_of, platform_of
from xlashard._jax.runtime.shardings import (
    Device,
    default_memory_kind,
    device_list,
    is_compile_only,
)
from xlashard._jax.stablehlo_modules import without_layout_modes
from xlashard._jax.trace.observed_programs import unobserved
from xlashard._jax.trace.target_chip import assume_chip, has_kernels
from xlashard._jax.trace.tracing import bodies
from xlashard.errors import UnsupportedOperationError, XlashardError
from xlashard.support.formatting import near_line
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import is_users_file

if TYPE_CHECKING:
    from xlashard._jax.trace import origins
    from xlashard._jax.trace.origins import Line
else:
    origins = deferred("xlashard._jax.trace.origins")

type DevicesByPosition = Mapping[Device, Device]
"""The new device of each device of a program, in the order of its mesh."""


def lower_for(traced: jax.stages.Traced, devices: DevicesByPosition) -> jax.stages.Lowered:
    """Lower a traced function as if its mesh had been one of other devices.

    The module is the one that JAX lowers for a function whose mesh has those devices: nothing in it
    names a device but by position. JAX resolves shardings and layouts, and its function that reads
    the devices of shardings answers with the new ones meanwhile, in this thread. A layout that the
    user wrote is compared with the default layout of the new devices, that of an array with the
    default layout of its own.

    Args:
        traced: What `jax.jit` traced, with meshes of its own devices, or abstract ones.
        devices: The new device of each of its devices, all of one client.

    Returns:
        The lowered function, which `compile` compiles for the new devices.

    Raises:
        ValueError: As JAX does, for shardings of different devices.
        NotImplementedError: If JAX has no lowering rule for the platform.
    """
    target = next(iter(devices.values()))
    platform = platform_of(target)
    with (
        unobserved(),
        assume_chip(target, in_kernels=has_kernels(traced)),
        _answering(devices, platform, _written_layouts(traced)),
    ):
        lowered = traced.lower(
            lowering_platforms=(platform,), _private_parameters=_parameters_of_one_call()
        )
    return _with_arguments(lowered, devices, lowered._lowering._device_list)


@contextmanager
def rule_errors(name: str, jaxpr: Any, device: Device | None) -> Iterator[None]:
    """Raise errors of JAX's lowering rules for a topology as one that names the operation.

    JAX gives them the traceback of the operation as their cause. Errors of programs for devices at
    hand stay JAX's.

    Args:
        name: Name of the program.
        jaxpr: Its closed jaxpr.
        device: A device that it is lowered for; None if unknown.

    Raises:
        UnsupportedOperationError: If a rule failed.
    """
    try:
        yield
    except Exception as error:
        cause, is_known = error.__cause__, isinstance(error, XlashardError)
        is_of_rule = type(cause).__name__ == "JaxStackTraceBeforeTransformation"
        if is_known or not is_of_rule or device is None or not is_compile_only(device):
            raise
        platform = "TPUs" if platform_of(device) == "tpu" else "GPUs"
        operation, source = _find_failing_operation(jaxpr, error)
        text = " ".join(str(error).split()) or _failed_line(error)
        advice = next(
            (words for sign, words in _ADVICE.items() if re.search(sign, text)), _OTHERWISE
        )
        raise UnsupportedOperationError(  # no-catalogue: needs a topology
            f"{name} can't be lowered for {platform}: {operation} at {source or 'an unknown line'} "
            f"is refused ({text.rstrip('.')}); {advice}",
            operation=operation,
            source=source,
        ) from None


_OTHERWISE = "choose another operation for this platform, such as by jax.lax.platform_dependent"
_ADVICE = {
    "cannot be automatically partitioned": "wrap the call in jax.shard_map",
    "(?i)compiler.?params|rule is not None": (
        "write compiler_params of this platform, or leave them out"
    ),
    "translation rule": "compute it on the host by jax.pure_callback, or before the program",
}
"""Advice by a pattern in JAX's message."""


def _failed_line(error: Exception) -> str:
    """Return the class of an error without a message, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return ": ".join(filter(None, (type(error).__name__, frames[-1].line if frames else "")))


def _find_failing_operation(jaxpr: Any, error: Exception) -> tuple[str, str]:
    """Return the name and the line of the operation whose lowering rule failed."""
    stack = traceback.walk_tb(error.__cause__ and error.__cause__.__traceback__)
    lines = {(frame.f_code.co_filename, line) for frame, line in stack}
    words, every = set(re.findall(r"\w+", str(error))), list(_equations_with_lines(jaxpr, None))
    candidates = [(eqn, line) for eqn, line in every if line in lines]
    candidates = candidates or [(eqn, line) for eqn, line in every if eqn.primitive.name in words]
    # A rule may lower a function of its own, whose operations only the message has.
    inner = tuple(f"{word}_" for word in words if "_" in word)
    candidates = candidates or [each for each in every if each[0].primitive.name.startswith(inner)]
    if not candidates:
        return "an operation", ""

    def rank(each: "tuple[Any, Line | None]") -> tuple[bool, ...]:
        # The operation rather than the calls around it.
        name = each[0].primitive.name
        return name not in words, name != "pallas_call", bool(list(bodies(each[0])))

    eqn, line = min(candidates, key=rank)
    return eqn.primitive.name, "" if line is None else near_line(*line)


def _equations_with_lines(jaxpr: Any, caller: "Line | None") -> "Iterator[tuple[Any, Line | None]]":
    """Yield all equations with their lines; those of a function of JAX have its caller's."""
    for eqn in jaxpr.eqns:
        line = origins.user_line(eqn)
        line = caller if line is None or not is_users_file(line[0]) else line
        yield eqn, line
        for body in bodies(eqn):
            yield from _equations_with_lines(body, line)


def _parameters_of_one_call() -> Any:
    """Return parameters of a lowering that equal no others.

    They are part of the key of JAX's cache of lowered functions, where the module must not be found
    by a lowering for the platform's real devices.
    """

    class OneCall(mlir.LoweringParameters):
        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

    return OneCall()


def _written_layouts(traced: jax.stages.Traced) -> list[Any]:
    params = traced.lojax._params
    return [layout for side in ("in_layouts", "out_layouts") for layout in params[side] if layout]


_lock = threading.RLock()


@contextmanager
def _answering(devices: DevicesByPosition, platform: str, written: Sequence[Any]) -> Iterator[None]:
    """Let JAX lower for other devices in this thread.

    Args:
        devices: The new device of each device.
        platform: Name of the lowering rules of the new devices.
        written: The layouts that the user wrote.
    """
    thread, ids = threading.get_ident(), set(map(id, written))
    with _lock:
        find, is_default = pxla._get_and_check_device_assignment, pxla.is_default_layout
        # Programs that a lowering rule runs are for the devices at hand.
        waiting = {thread}

        def find_devices(*args: Any) -> tuple[Any, tuple[Device, ...] | None, int]:
            client, assignment, count = find(*args)
            if threading.get_ident() not in waiting:
                return client, assignment, count
            waiting.clear()
            new = _move_assignment(assignment, count, devices)
            return NamedClient(client_of(new[0]), platform), new, count

        def is_default_layout(layout: Any, sharding: Any, aval: Any) -> bool:
            if id(layout) in ids and threading.get_ident() == thread:
                sharding = move_sharding(sharding, devices)
            return is_default(layout, sharding, aval)

        replace_name(pxla, "_get_and_check_device_assignment", find_devices)
        replace_name(pxla, "is_default_layout", is_default_layout)
        try:
            yield
        finally:
            replace_name(pxla, "_get_and_check_device_assignment", find)
            replace_name(pxla, "is_default_layout", is_default)


def _move_assignment(
    assignment: tuple[Device, ...] | None, count: int, devices: DevicesByPosition
) -> tuple[Device, ...]:
    """Return the new device assignment of a program.

    Args:
        assignment: Its own; None if all its meshes are abstract.
        count: Number of its devices.
        devices: The new device of each device.
    """
    if assignment is None or (count == 1 and assignment[0] not in devices):
        # Without devices in the program, JAX takes the default one.
        return tuple(devices.values())[:count]
    return tuple([devices[device] for device in assignment])


def move_lowered(lowered: Any, devices: DevicesByPosition) -> jax.stages.Lowered:
    """Return a lowered function of the same module, which compiles for other devices.

    Args:
        lowered: A function that JAX has lowered for one platform, that of the new devices.
        devices: The new device of each of its devices.
    """
    own = lowered._lowering
    assignment = None if own._device_list is None else tuple(own._device_list)
    new = _move_assignment(assignment, own.compile_args["num_devices"], devices)
    return _with_arguments(lowered, devices, device_list(new))


def _with_arguments(lowered: Any, devices: DevicesByPosition, new: Any) -> jax.stages.Lowered:
    """Return a lowered function with arguments of its compilation for other devices.

    Args:
        lowered: The function.
        devices: The new device of each of its devices.
        new: The new device assignment.
    """
    own = lowered._lowering
    args = dict(own.compile_args)
    for side in ("in_shardings", "out_shardings", "intermediate_shardings"):
        args[side] = tuple([move_sharding(sharding, devices) for sharding in args[side]])
    args["context_mesh"] = move_mesh(args["context_mesh"], devices)
    args["backend"] = client_of(new[0])
    count = len(args["global_in_avals"])
    args["tuple_args"] = jax_dispatch.should_tuple_args(count, new[0].platform)
    if new[0].platform == "gpu":
        # The module has the numbers of the callbacks, and the client of a topology takes none.
        args["host_callbacks"] = []
    moved = copy.copy(own)
    moved.compile_args, moved._executable, moved._device_list = args, None, new
    moved._hlo = without_layout_modes(own._hlo, *_positions_of_references(own.compile_args))
    result = copy.copy(lowered)
    result._lowering = moved
    return result


def _positions_of_references(args: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the parameters that are closed-over references, and the results written to them.

    JAX pins their layouts to those of the arrays at hand, which are the default ones.
    """
    mutable, tokens = args["mut"], len(args["ordered_effects"])
    if mutable is None or not mutable.in_mut:
        return [], []
    last = len(args["in_shardings"])
    first = last - len(mutable.in_mut)
    closed = range(first, last)
    results = [i for i, argument in enumerate(mutable.out_mut) if argument in closed]
    return [i + tokens for i in closed], [i + tokens for i in results]


def move_mesh(mesh: Any, devices: DevicesByPosition) -> Any:
    """Return a mesh on the new devices; an abstract one, or one of other devices, unchanged."""
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
        return mesh
    if not devices.keys() >= set(mesh.devices.flat):
        return mesh
    grid = np.empty(mesh.devices.shape, dtype=object)
    grid.flat[:] = [devices[device] for device in mesh.devices.flat]
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def move_sharding(sharding: Any, devices: DevicesByPosition) -> Any:
    """Return a sharding on the new devices; None and an unspecified one unchanged."""
    kind = getattr(sharding, "memory_kind", None)
    if kind == default_memory_kind(next(iter(devices))):
        # Platforms have different names for their default memory.
        kind = None
    match sharding:
        case jax.sharding.NamedSharding():
            mesh = move_mesh(sharding.mesh, devices)
            return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=kind)
        case jax.sharding.SingleDeviceSharding():
            (device,) = sharding.device_set
            return jax.sharding.SingleDeviceSharding(devices.get(device, device), memory_kind=kind)
        case sharding_impls.GSPMDSharding():
            own = [devices.get(device, device) for device in sharding._device_assignment]
            return sharding_impls.GSPMDSharding(own, sharding._hlo_sharding, memory_kind=kind)
    return sharding
