"""`preflight`: report the memory, time and cost of a program on TPU chips, without a TPU."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard._jax.trace.device_map import DeviceMap
from xlashard.errors import ArgumentError, DonationWarning, counted
from xlashard.pjit import Compiled, Lowered, RecordedProgram, Traced, pjit
from xlashard.pjit.function import Function
from xlashard.pjit.signature import function_name
from xlashard.sharding import Mesh, NamedSharding
from xlashard.tpu.preflight.compilation import compile_for_report
from xlashard.tpu.preflight.report.build import REPLICATED_ABOVE, build_report
from xlashard.tpu.preflight.report.preflight_report import PreflightReport
from xlashard.tpu.preflight.report.pricing import Workload, parse_price
from xlashard.tpu.topologies import Topology
from xlashard.tpu.topologies import topology as find_topology
from xlashard.wording import typed

type MeshLike = Mesh | jax.sharding.AbstractMesh | Mapping[str, int]
"""Axis names and sizes, on any devices."""


def preflight(
    fun: Any,
    *args: Any,
    topology: str | Topology,
    mesh: MeshLike | None = None,
    slices: int = 1,
    workload: Workload | None = None,
    price: float | str | None = None,
    replicated_above: int = REPLICATED_ABOVE,
    compiler_options: Mapping[str, Any] | None = None,
    title: str = "",
    **kwargs: Any,
) -> PreflightReport:
    """Report the memory, time, collectives and cost of a program on TPU chips, without a TPU.

    libtpu compiles the program for the topology. A program that exceeds the HBM gets a full report,
    with `outcome` `out of memory`.

    Args:
        fun: A function made by `xlashard.pjit`, with its shardings and donation; a plain function;
            or a stage, `Traced` or `Lowered`, or a program of `record_programs`, without
            arguments.
        *args: Arguments of a call, or a `jax.ShapeDtypeStruct` per array. A sharding on another
            mesh, such as one of local devices, maps to the topology by axis names.
        topology: Topology, or its name: `"v5p-128"`, `"v5e:4x4"`.
        mesh: Mesh axis sizes, such as `{"data": 8, "model": 4}`, or a mesh, in effect while the
            function is traced. Default: the mesh of the arguments.
        slices: Number of slices of the topology.
        workload: Tokens and model FLOP of a training step, for tokens per second and MFU.
        price: Cost per chip-hour: `4.2`, `"4.20 USD"`.
        replicated_above: Minimum bytes of the fully replicated values that the report lists.
        compiler_options: Compiler options, as for `Lowered.compile`.
        title: Title of the report, such as the source of the program.
        **kwargs: Keyword arguments of the call.

    Returns:
        The report. `print(report)` displays it, `report.to_json()` serializes it.

    Raises:
        TopologyError: If the topology is unknown, the mesh doesn't match it, or libtpu is missing.
        ArgumentError: If `fun` or `price` is invalid.
        CompileError: If compilation fails for a reason other than memory.
        ResourceError: As raised by a call; other errors of a call propagate too.

    Example:
        >>> import jax, xlashard
        >>> from xlashard import P
        >>> x = jax.ShapeDtypeStruct((1024, 512), "bfloat16")
        >>> gram = xlashard.pjit(lambda x: x @ x.T, in_shardings=P("data"))
        >>> report = preflight(gram, x, topology="v5e-16", mesh={"data": 16})
        >>> report.outcome, report.memory.argument_bytes
        ('fits', 65536)
        >>> [(t.collective.kind, t.collective.along) for t in report.traffic]
        [('all-gather', 'data')]
    """
    chip_hour = None if price is None else parse_price(price)
    with short_tracebacks, warnings.catch_warnings():
        # The report lists the reason for each argument.
        warnings.simplefilter("ignore", DonationWarning)
        place = topology if isinstance(topology, Topology) else find_topology(topology, slices)
        on, lowered = lower_for(fun, args, kwargs, place, mesh)
        compilation = compile_for_report(lowered, compiler_options)
        return build_report(
            compilation,
            place,
            on,
            title=title,
            workload=workload,
            price=chip_hour,
            replicated_above=replicated_above,
        )


def lower_for(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: Topology, mesh: Any
) -> tuple[Mesh, Lowered]:
    """Return the mesh on the topology's devices and the lowered program.

    Args:
        fun: Function or stage, as in `preflight`.
        args: Positional arguments of a call.
        kwargs: Keyword arguments of a call.
        topology: Topology to lower for.
        mesh: Mesh, as in `preflight`.
    """
    if isinstance(fun, Traced | Lowered | RecordedProgram):
        if args or kwargs:
            raise ArgumentError(
                f"preflight takes no arguments with a {type(fun).__name__}: write "
                f"xlashard.preflight(stage, topology=...), or pass the function and its arguments"
            )
        if isinstance(fun, RecordedProgram):
            fun, mesh = _moved_recording(fun, topology)
        return _of_stage(fun, topology, mesh)
    function = _function(fun)
    parameters = function._function.parameters
    paths, values = parameters.paths(args, kwargs), parameters.leaves(args, kwargs)
    arguments = dict(zip(paths, values, strict=True))
    check_named_shardings(arguments)
    on = resolve_mesh(topology, mesh, arguments)
    args, kwargs = jax.tree.map(argument_placer(on), (args, kwargs))
    with jax.set_mesh(on):
        lowered = function.lower(*args, **kwargs)
    _check_devices(lowered, topology)
    return on, lowered


def _moved_recording(program: RecordedProgram, topology: Topology) -> tuple[Traced, Mesh]:
    """Return a recorded program on a topology, and the mesh there."""
    own = program.mesh
    if own is None:
        raise ArgumentError(  # no-catalogue: needs a program that was recorded before
            f"{program.name} was recorded without a mesh: put its arguments on a mesh of "
            f"{topology.num_devices} emulated devices, or pass preflight the function"
        )
    on = resolve_mesh(topology, own, {})
    pairs = zip(own.devices.flat, on.devices.flat, strict=True)
    return program.moved(DeviceMap(dict(pairs))), on


def _of_stage(stage: Traced | Lowered, topology: Topology, mesh: Any) -> tuple[Mesh, Lowered]:
    if isinstance(stage, Lowered):
        _check_devices(stage, topology)
        own = stage._program.plan.mesh
        return (own if isinstance(own, Mesh) else resolve_mesh(topology, mesh, {})), stage
    call = stage._call
    arguments = dict(zip(stage._info.paths, call.values, strict=True))
    check_named_shardings(arguments)
    on = resolve_mesh(topology, call.mesh if mesh is None else mesh, arguments)
    here = replace(call.on([*map(argument_placer(on), call.values)]), mesh=call.mesh or on)
    lowered = Traced(stage._function, here).lower()
    _check_devices(lowered, topology)
    return on, lowered


def _function(fun: Any) -> Any:
    if isinstance(fun, Compiled):
        raise ArgumentError(
            f"{fun.fun_name} is already compiled: pass preflight the function, or the Lowered "
            f"that it was compiled from"
        )
    if not callable(fun):
        raise ArgumentError(
            f"preflight takes a function and its arguments, not {type(fun).__name__}: write "
            "xlashard.preflight(f, x, topology=...), without calling f"
        )
    if isinstance(getattr(fun, "_function", None), Function):
        return fun
    if hasattr(fun, "lower"):
        name = function_name(getattr(fun, "__wrapped__", fun))
        raise ArgumentError(
            f"{name} was made by jax.jit, whose shardings preflight can't read: write {name} = "
            f"xlashard.jit(...), which accepts the same options"
        )
    return pjit(fun)


def _check_devices(lowered: Lowered, topology: Topology) -> None:
    """Raise if a program is lowered for devices outside the topology."""
    devices = lowered._program.plan.devices
    strangers = set(devices) - set(topology.devices)
    if strangers:
        kind = next(iter(strangers)).device_kind
        raise ArgumentError(
            f"{lowered.fun_name} was lowered for {counted(len(devices), 'device')} of {kind}, "
            f"not for those of {topology.name}: make its mesh with "
            f"tpu.topology({topology.name!r}).mesh({{...}}), and pass preflight that topology"
        )
    if len(devices) < topology.num_devices:
        raise ArgumentError(
            f"{lowered.fun_name} uses {counted(len(devices), 'device')} of the "
            f"{topology.num_devices} of {topology.name}: pass a topology with as many devices, "
            f"or a mesh over all of them"
        )


def resolve_mesh(topology: Topology, mesh: MeshLike | None, arguments: Mapping[str, Any]) -> Mesh:
    """Return the mesh of a preflight: the given one, else that of the arguments.

    Args:
        topology: Topology of the mesh devices.
        mesh: Mesh of the caller. A mesh of other devices contributes axis names and sizes.
        arguments: Argument leaves by path.

    Raises:
        ArgumentError: If there is no mesh, or arguments have different meshes.
        TopologyError: If the mesh doesn't match the topology.
    """
    if mesh is None:
        mesh = _only_mesh(topology, arguments)
    if isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(topology.devices):
        return mesh
    sizes = mesh if isinstance(mesh, Mapping) else mesh.shape
    return topology.mesh({str(name): int(size) for name, size in sizes.items()})


def _only_mesh(
    topology: Topology, arguments: Mapping[str, Any]
) -> Mesh | jax.sharding.AbstractMesh:
    shardings = {path: _sharding(value) for path, value in arguments.items()}
    named = {p: s for p, s in shardings.items() if isinstance(s, jax.sharding.NamedSharding)}
    meshes = {tuple(s.mesh.shape.items()): (path, s.mesh) for path, s in named.items()}
    if len(meshes) == 1:
        return meshes.popitem()[1][1]
    if not meshes:
        raise ArgumentError(
            "mesh is missing, and no argument has a named sharding on the "
            f"{topology.num_devices} devices of {topology.name}: write "
            f"mesh={{'data': {topology.num_devices}}}, or "
            f"--mesh data={topology.num_devices} on the command line"
        )
    meshes_text = " and ".join(
        f"{path} on {', '.join(f'{name}={size}' for name, size in axes)}"
        for axes, (path, _) in meshes.items()
    )
    raise ArgumentError(
        f"the arguments have different meshes, {meshes_text}: specify one, "
        f"mesh={{'data': {topology.num_devices}}}"
    )


def check_named_shardings(arguments: Mapping[str, Any]) -> None:
    """Raise if an argument is sharded over several devices without a named sharding.

    Raises:
        ArgumentError: With the path of the argument.
    """
    for path, value in arguments.items():
        sharding = _sharding(value)
        if sharding is None or isinstance(sharding, jax.sharding.NamedSharding):
            continue
        if sharding.num_devices > 1:
            raise ArgumentError(
                f"{path} ({typed(value.dtype, value.shape)}) is sharded over "
                f"{sharding.num_devices} devices by {sharding}, without mesh axes: write "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))"
            )


def _sharding(value: Any) -> Any:
    return value.sharding if isinstance(value, jax.Array | jax.ShapeDtypeStruct) else None


def argument_placer(mesh: Mesh) -> Callable[[Any], Any]:
    """Return a function that maps an argument leaf to its shape with a sharding on `mesh`.

    Shardings on another mesh map by axis names. Values on a single device stay unspecified.
    """

    def placed(value: Any) -> Any:
        sharding = _sharding(value)
        if sharding is None:
            return value
        weak = bool(getattr(value, "weak_type", False))
        target = None
        if isinstance(sharding, jax.sharding.NamedSharding):
            target = _moved(sharding, mesh)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=target, weak_type=weak)

    return placed


def _moved(sharding: jax.sharding.NamedSharding, mesh: Mesh) -> NamedSharding:
    if sharding.mesh == mesh:
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    # Platforms name their memories differently: use the default memory.
    return NamedSharding(mesh, sharding.spec)
