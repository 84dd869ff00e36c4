"""`preflight`: report the memory, time and cost of a program on TPU chips, without a TPU."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from xlashard._jax.trace import jitted
from xlashard._jax.trace.cudnn import assume_cudnn
from xlashard._jax.trace.rewriting import DeviceMap
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.stages.compiled import Compiled
from xlashard.core.pjit.stages.from_jax import (
    argument_leaves,
    call_of_stage,
    traced_call,
    unwrapped,
)
from xlashard.core.pjit.stages.recorded import RecordedProgram
from xlashard.core.pjit.stages.traced import Lowered, Traced
from xlashard.core.pjit.trace import Call
from xlashard.core.sharding import Mesh
from xlashard.errors import (
    ArgumentError,
    DonationWarning,
    ShardingTypeError,
    XlashardError,
    counted,
)
from xlashard.predict.costs.kernel_costs import KernelCosts, read_kernel_costs
from xlashard.predict.preflight.compilation import Compilation, compile_for_report, read_compiled
from xlashard.predict.preflight.mesh_mapping import (
    MeshLike,
    argument_placer,
    find_topology,
    map_call,
    meshes_of_arguments,
    meshes_of_call,
    meshes_of_function,
    resolve_mesh,
)
from xlashard.predict.preflight.report.build import REPLICATED_ABOVE, build_report
from xlashard.predict.preflight.report.measured import RatesSources, read_calibrations
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import Workload, parse_price
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.tracebacks import short_tracebacks


def preflight(
    fun: Any,
    *args: Any,
    topology: str | BaseTopology,
    mesh: MeshLike | None = None,
    slices: int = 1,
    workload: Workload | None = None,
    price: float | str | None = None,
    replicated_above: int = REPLICATED_ABOVE,
    compiler_options: Mapping[str, Any] | None = None,
    estimate: bool = False,
    kernel_costs: KernelCosts | None = None,
    rates: RatesSources | None = None,
    title: str = "",
    **kwargs: Any,
) -> PreflightReport:
    """Report the memory, time, collectives and cost of a program on TPUs or GPUs, without one.

    libtpu or JAX's CUDA plugin compiles the program for the topology. A program that exceeds the
    HBM gets a full report, with `outcome` `out of memory`.

    Args:
        fun: A function of `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit`, with its
            shardings and donation; a plain function; or, without arguments, a `Traced` or `Lowered`
            of one for any devices, a `Compiled` for the topology, or a program of
            `record_programs`.
        *args: Arguments of a call, or a `jax.ShapeDtypeStruct` per array. A sharding on another
            mesh, such as one of local devices, maps to the topology by axis names.
        topology: Topology, or its name: `"v5p-128"`, `"v5e:4x4"`, `"h100-32"`, `"p5.48xlarge"`.
        mesh: Mesh axis sizes, such as `{"data": 8, "model": 4}`, or a mesh, in effect while the
            function is traced. Default: the mesh of the arguments, of the function's shardings, in
            force, or of constraints inside; abstract meshes too.
        slices: Number of slices of the topology.
        workload: Tokens and model FLOP of a training step, for tokens per second and MFU.
        price: Cost per chip-hour: `4.2`, `"4.20 USD"`.
        replicated_above: Minimum bytes of the fully replicated values that the report lists.
        compiler_options: Compiler options, as for `Lowered.compile`.
        estimate: Whether to stop the compiler before it generates code, which takes 95 % of the
            compile time. Memory then lacks the code; all else is the same.
        kernel_costs: Costs of kernels whose work their modules and authors don't say: seconds or a
            `KernelCost`, by the name that the report shows.
        rates: File of a chip's measured rates, which `xlashard preflight --calibrate` writes, or
            its content.
        title: Title of the report, such as the source of the program.
        **kwargs: Keyword arguments of the call.

    Returns:
        The report. `print(report)` displays it, `report.to_json()` serializes it.

    Raises:
        TopologyError: If the topology is unknown, the mesh doesn't match it, libtpu is missing, or
            for an estimate can't stop before code generation.
        ArgumentError: If `fun`, `price`, `kernel_costs` or `rates` is invalid.
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
        >>> [(c.kind, c.along) for c in report.traffic]
        [('all-gather', 'data')]
    """
    chip_hour = None if price is None else parse_price(price)
    costs = read_kernel_costs(kernel_costs)
    with short_tracebacks, warnings.catch_warnings():
        # The report lists the reason for each argument.
        warnings.simplefilter("ignore", DonationWarning)
        place = find_topology(topology, slices)
        calibrations = read_calibrations(rates, [place.chip])
        stage = jitted.inner_stage(fun)
        if isinstance(stage, Compiled | jax.stages.Compiled):
            _check_stage(stage, args, kwargs)
            compilation = read_compiled(stage, _forgotten_by(stage))
            on = _check_compiled(compilation, place, mesh)
            if compiler_options or estimate:
                raise ArgumentError(
                    f"compiler_options and estimate don't apply to {compilation.program.info.name},"
                    " which is compiled already: leave them out, or pass its Lowered"
                )
        else:
            on, lowered = lower_for(fun, args, kwargs, place, mesh)
            compilation = compile_for_report(
                lowered, compiler_options, estimate=estimate, forgotten=_forgotten_by(stage)
            )
        return build_report(
            compilation,
            place,
            on,
            title=title,
            workload=workload,
            price=chip_hour,
            replicated_above=replicated_above,
            kernel_costs=costs,
            calibration=calibrations.get(place.chip.name),
        )


def lower_for(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: BaseTopology, mesh: Any
) -> tuple[Mesh, Lowered]:
    """Return the mesh on the topology's devices and the lowered program.

    Args:
        fun: Function or stage, as in `preflight`.
        args: Positional arguments of a call.
        kwargs: Keyword arguments of a call.
        topology: Topology to lower for.
        mesh: Mesh, as in `preflight`.
    """
    with assume_cudnn(topology.devices[0]):
        return _lower(fun, args, kwargs, topology, mesh)


def _lower(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: BaseTopology, mesh: Any
) -> tuple[Mesh, Lowered]:
    stage = fun if isinstance(fun, RecordedProgram) else jitted.inner_stage(fun)
    if stage is not None:
        _check_stage(stage, args, kwargs)
        if isinstance(stage, RecordedProgram):
            stage, mesh = _moved_recording(stage, topology)
        return _of_stage(stage, topology, mesh)
    if not callable(fun):
        raise ArgumentError(
            f"preflight takes a function and its arguments, not {type(fun).__name__}: write "
            "xlashard.preflight(f, x, topology=...), without calling f"
        )
    fun, args, kwargs = unwrapped(fun, args, kwargs)
    arguments = argument_leaves(fun, args, kwargs)
    meshes = meshes_of_arguments(arguments) or meshes_of_function(fun)
    if mesh is None and not meshes:
        meshes = meshes_of_call(traced_call(fun, args, kwargs)[1])
    on = resolve_mesh(topology, mesh, meshes)
    function, call = _traced_on(on, fun, args, kwargs)
    return on, _lowered(function, map_call(call, on), topology)


def _traced_on(
    on: Mesh, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Function, Call]:
    """Trace a call under the mesh of a topology; in the context of the caller if JAX refuses it.

    A mesh of local devices in a constraint or a shard_map contradicts the one in force.
    """
    try:
        with jax.set_mesh(on):
            return traced_call(fun, *jax.tree.map(argument_placer(on), (args, kwargs)))
    except Exception as error:
        if isinstance(error, XlashardError) and not isinstance(error, ShardingTypeError):
            raise
        with suppress(Exception):
            return traced_call(fun, args, kwargs)
        raise


def _moved_recording(program: RecordedProgram, topology: BaseTopology) -> tuple[Traced, Mesh]:
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


def _check_stage(stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments besides a stage."""
    if args or kwargs:
        raise ArgumentError(
            f"preflight takes no arguments with a {type(stage).__name__}: write "
            "xlashard.preflight(stage, topology=...), or pass the function and its arguments"
        )


def _of_stage(stage: Any, topology: BaseTopology, mesh: Any) -> tuple[Mesh, Lowered]:
    if isinstance(stage, Compiled | jax.stages.Compiled):
        name, devices = jitted.name_and_devices(stage)
        raise ArgumentError(  # no-catalogue: an error of xlashard compile
            f"{name} is a Compiled, machine code for {_devices_text(devices)}: pass its Lowered, "
            "or the function and its arguments"
        )
    if isinstance(stage, Lowered) and set(stage._program.plan.devices) <= set(topology.devices):
        _check_devices(stage, topology)
        own = stage._program.plan.mesh
        return (own if isinstance(own, Mesh) else resolve_mesh(topology, mesh, {})), stage
    function, call = call_of_stage(stage)
    meshes = meshes_of_arguments(dict(zip(call.traced.arg_names, call.values, strict=True)))
    own = call.mesh if mesh is None else mesh
    on = resolve_mesh(topology, own, meshes or meshes_of_call(call))
    return on, _lowered(function, map_call(call, on), topology)


def _forgotten_by(stage: Any) -> str:
    """Return what the report of a stage lacks, as one clause; empty for a function."""
    lost = "constraints behind collectives, uneven dimensions, repeated work, who chose "
    if isinstance(stage, Compiled | jax.stages.Compiled):
        return f"temporaries at the peak, {lost}shardings (a Compiled keeps no jaxpr)"
    if not isinstance(stage, jax.stages.Lowered) or isinstance(stage, Lowered):
        return ""
    platforms = jitted.target_of(stage)[1]
    others = "" if "tpu" in platforms else f"; operations as lowered for {', '.join(platforms)}"
    return f"{lost}arguments' shardings (a Lowered keeps no jaxpr{others})"


def _check_compiled(compilation: Compilation, topology: BaseTopology, mesh: Any) -> Mesh:
    """Return the mesh of a program that was compiled for the devices of a topology."""
    program = compilation.program
    name, devices = program.info.name, program.plan.devices
    if not set(devices) <= set(topology.devices):
        raise ArgumentError(
            f"{name} is a Compiled, machine code for {_devices_text(devices)}, not for those of "
            f"{topology.name}: pass its Lowered, or the function and its arguments"
        )
    _check_size(name, devices, topology)
    return program.mesh or resolve_mesh(topology, mesh, {})


def _devices_text(devices: Sequence[Any]) -> str:
    return f"{counted(len(devices), 'device')} of {devices[0].device_kind}"


def _lowered(function: Function, call: Call, topology: BaseTopology) -> Lowered:
    lowered = Traced(function, call).lower()
    _check_devices(lowered, topology)
    return lowered


def _check_devices(lowered: Lowered, topology: BaseTopology) -> None:
    """Raise if a program is lowered for devices outside the topology."""
    devices = lowered._program.plan.devices
    strangers = set(devices) - set(topology.devices)
    if strangers:
        kind = next(iter(strangers)).device_kind
        raise ArgumentError(
            f"{lowered.fun_name} is placed on {counted(len(devices), 'device')} of {kind}, "
            f"not on those of {topology.name}: leave device= and backend= out, or make its mesh "
            f"with tpu.topology({topology.name!r}).mesh({{...}})"
        )
    _check_size(lowered.fun_name, devices, topology)


def _check_size(name: str, devices: Sequence[Any], topology: BaseTopology) -> None:
    if len(devices) < topology.num_devices:
        raise ArgumentError(
            f"{name} uses {counted(len(devices), 'device')} of the "
            f"{topology.num_devices} of {topology.name}: pass a topology with as many devices, "
            f"or a mesh over all of them"
        )
