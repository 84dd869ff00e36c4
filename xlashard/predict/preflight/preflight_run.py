"""`preflight`: report the memory, time and cost of a program on TPU chips, without a TPU."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import jax

from xlashard._jax.trace.observed_programs import unobserved
from xlashard._jax.trace.target_chip import assume_chip
from xlashard._jax.trace.tracing import inner_shardings
from xlashard.analysis.programs.from_jax import unwrap
from xlashard.analysis.programs.from_script import RecordedProgram
from xlashard.analysis.programs.program import Compilation, CompiledOnly, LoweredModule, Program
from xlashard.analysis.programs.program_reader import check_tracers, find_stage, read
from xlashard.analysis.programs.propagation import parse_pattern
from xlashard.core.sharding import Mesh
from xlashard.errors import (
    ArgumentError,
    DonationWarning,
    MeshError,
    ShardingTypeError,
    XlashardError,
    check_type,
    counted,
)
from xlashard.predict.costs.kernel_costs import KernelCosts, read_kernel_costs
from xlashard.predict.preflight.advice import AdviceTrials
from xlashard.predict.preflight.compilation import compile_for_report, with_buffers
from xlashard.predict.preflight.mesh_mapping import (
    MeshLike,
    argument_placer,
    axes_code,
    axes_text,
    find_topology,
    have_one_order,
    leaves_by_path,
    meshes_of_arguments,
    meshes_of_function,
    meshes_of_program,
    resolve_mesh,
)
from xlashard.predict.preflight.report.build import REPLICATED_ABOVE, build_report
from xlashard.predict.preflight.report.measured import RatesSources, read_calibrations
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import Workload, parse_price
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.consoles import show_progress
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
    values: str = "",
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
        values: Regular expression of the names of values inside whose shardings the report shows,
            as for `explain`.
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
    check_options(workload, compiler_options)
    check_type("replicated_above", replicated_above, (int, float), "a number of bytes")
    check_type("title", title, str, "text")
    check_type("values", values, str, "a regular expression, such as 'attention|logits'")
    parse_pattern(values)
    chip_hour = None if price is None else parse_price(price)
    costs = read_kernel_costs(kernel_costs)
    with short_tracebacks, unobserved(), warnings.catch_warnings(), ExitStack() as progress:
        # The report lists the reason for each argument.
        warnings.simplefilter("ignore", DonationWarning)
        place = find_topology(topology, slices)
        calibrations = read_calibrations(rates, [place.chip])
        name = title or getattr(fun, "__name__", "a program")
        progress.enter_context(show_progress(f"compiling {name} for {place}"))
        on, program, is_laid_out = read_on_topology(fun, args, kwargs, place, mesh)
        if isinstance(program, Compilation):
            if compiler_options or estimate or values:
                raise ArgumentError(
                    f"compiler_options, estimate and values don't apply to {program.name}, which "
                    "is compiled already: leave them out, or pass its Lowered"
                )
            compilation = with_buffers(program)
        else:
            compilation = compile_for_report(
                program, compiler_options, estimate=estimate, values=values
            )
        calibration = calibrations.get(place.chip.name)
        report = build_report(
            compilation,
            place,
            on,
            title=title,
            workload=workload,
            price=chip_hour,
            replicated_above=replicated_above,
            kernel_costs=costs,
            calibration=calibration,
            is_laid_out=is_laid_out,
        )
        if estimate or isinstance(program, Compilation):
            return report
        measured = None if calibration is None else calibration.rates(place.chip)
        return AdviceTrials(report, compilation, on, place, lower_on, costs, measured).run()


def check_options(workload: Workload | None, options: Mapping[str, Any] | None) -> None:
    """Raise if the workload of a step, or options of the compiler, are of another type."""
    expected = "Workload(tokens, model_flops, parameters, active_parameters) of a step"
    check_type("workload", workload, (Workload, NoneType), expected)
    expected = "values by option, such as {'xla_tpu_scoped_vmem_limit_kib': 65536}"
    check_type("compiler_options", options, (Mapping, NoneType), expected)
    for option in options or {}:
        check_type(f"option {option!r} of compiler_options", option, str, "its name")


class PlacedProgram(NamedTuple):
    """A program for the devices of a topology.

    Attributes:
        mesh: Its mesh there.
        program: The program.
        is_laid_out: Whether xlashard laid out the mesh.
    """

    mesh: Mesh
    program: LoweredModule | Compilation
    is_laid_out: bool


def read_on_topology(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: BaseTopology, mesh: Any
) -> PlacedProgram:
    """Return a program for the devices of a topology, with its mesh there.

    Args:
        fun: Function or stage, as in `preflight`.
        args: Positional arguments of a call.
        kwargs: Keyword arguments of a call.
        topology: Topology of the devices.
        mesh: Mesh, as in `preflight`.

    Raises:
        ArgumentError: If there is no mesh, or a program is compiled or placed elsewhere.
    """
    if isinstance(fun, RecordedProgram) and fun.program.mesh is None:
        raise ArgumentError(  # no-catalogue: needs a program that was recorded before
            f"{fun.name} was recorded without a mesh: put its arguments on a mesh of "
            f"{topology.num_devices} emulated devices, or pass preflight the function"
        )
    with assume_chip(topology.devices[0]):
        if find_stage(fun) is not None or not callable(fun):
            program = read(fun, args, kwargs, "preflight")
            return _place(program, topology, mesh)
        return _place_call(fun, args, kwargs, topology, mesh)


def _place_call(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: BaseTopology, mesh: Any
) -> PlacedProgram:
    """Trace a call and lower it for a topology.

    With the mesh of the call, the trace is the one of the user's program. Under another mesh, or
    one of axis sizes alone, the function is traced with that mesh in force.
    """
    fun, args, kwargs = unwrap(fun, args, kwargs)
    check_tracers(fun, args, kwargs)
    leaves = leaves_by_path(fun, args, kwargs)
    own = meshes_of_arguments(leaves) or meshes_of_function(fun)
    if mesh is None and not own:
        program = read(fun, args, kwargs, "preflight", topology.devices[0])
        if isinstance(program, Program) and program.mesh is None:
            on = resolve_mesh(topology, None, meshes_of_program(program))
            program = _read_placed(fun, args, kwargs, on)
        return _place(program, topology, None)
    on = resolve_mesh(topology, mesh, own)
    placed = partial(_read_placed, fun, args, kwargs, on)
    device = on.devices.flat[0]
    traces = [partial(read, fun, args, kwargs, "preflight", device), placed]
    if not _is_alike(own, on):
        traces.reverse()
    placed_program = _place(_first(traces), topology, on)
    meshes = [*own.values()] if mesh is None else [mesh]
    return placed_program._replace(is_laid_out=not _are_on(topology, meshes))


def _are_on(topology: BaseTopology, meshes: Sequence[MeshLike | None]) -> bool:
    """Return True if a mesh has the devices of a topology, whose order it keeps."""
    own = [mesh.devices.flat for mesh in meshes if isinstance(mesh, Mesh)]
    return any(topology.match_devices(devices) is not None for devices in own)


def _is_alike(meshes: Mapping[str, MeshLike], on: Mesh) -> bool:
    """Return True if the first mesh of a call has the axes of a topology's, others its devices."""
    alike = [isinstance(m, Mesh) and dict(m.shape) == dict(on.shape) for m in meshes.values()]
    return bool(alike) and (all(alike) or (alike[0] and have_one_order(meshes.values())))


def _read_placed(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on: Mesh
) -> Program | LoweredModule | Compilation:
    """Trace a call under the mesh of a topology, with arguments on that mesh.

    Raises:
        MeshError: If the function names devices elsewhere inside.
    """
    args, kwargs = jax.tree.map(argument_placer(on), (args, kwargs))
    with jax.set_mesh(on):
        program = read(fun, args, kwargs, "preflight", on.devices.flat[0])
    if not isinstance(program, Program):
        return program
    for sharding in inner_shardings(program.jaxpr):
        if not set(sharding.device_set) <= set(on.devices.flat):
            # no-catalogue: the call is traced again
            raise MeshError(f"{program.name} names other devices than {axes_text(on)}")
    return program.onto(on)


_ABOUT_MESHES = (ShardingTypeError, MeshError)


def _first[R](attempts: Sequence[Callable[[], R]]) -> R:
    """Return the first result; the error of the first attempt if all fail.

    A mesh of local devices in a constraint or a shard_map contradicts another one in force.
    """
    first, *others = attempts
    try:
        return first()
    except Exception as error:
        if isinstance(error, XlashardError) and not isinstance(error, _ABOUT_MESHES):
            raise
        for attempt in others:
            with suppress(Exception):
                return attempt()
        raise


def _place(
    program: Program | LoweredModule | Compilation,
    topology: BaseTopology,
    mesh: Any,
) -> PlacedProgram:
    """Return a program lowered for the devices of a topology, with its mesh there.

    Args:
        program: The program, as far as it has come.
        topology: The topology.
        mesh: Its mesh on the topology, or what `resolve_mesh` takes.
    """
    if isinstance(program, Compilation):
        _check_compiled(program, topology)
        on = program.mesh or resolve_mesh(topology, mesh, {})
        return PlacedProgram(on, program, not _are_on(topology, [program.mesh, mesh]))
    own = program.program.mesh if isinstance(program, LoweredModule) else program.mesh
    if isinstance(program, LoweredModule):
        own = own or program.plan.mesh
    caller_mesh = mesh
    if mesh is None:
        named = {"the program": own} if own is not None else meshes_of_program(program)
        mesh = resolve_mesh(topology, None, named)
    on, is_laid_out = resolve_mesh(topology, mesh, {}), not _are_on(topology, [own, caller_mesh])
    if isinstance(program, LoweredModule) and isinstance(program.program, CompiledOnly):
        lowered = program
        if not set(program.plan.devices) <= set(topology.devices):
            lowered = program.move(_map_devices(program.program.name, own, on))
    else:
        source = program.program if isinstance(program, LoweredModule) else program
        lowered = lower_on(source.onto(on) if own is None else source, on)
    check_devices(lowered, topology)
    return PlacedProgram(on, lowered, is_laid_out)


def lower_on(program: Program, on: Mesh) -> LoweredModule:
    """Lower a program for the devices of a mesh."""
    with assume_chip(on.devices.flat[0]):
        return program.lower(_map_devices(program.name, program.mesh, on))


def _map_devices(name: str, own: Mesh | None, on: Mesh) -> dict[Any, Any]:
    """Return the topology's device of each device of a program, in the order of its mesh.

    Raises:
        ArgumentError: If the meshes have other axes.
    """
    new = list(on.devices.flat)
    is_alike = own is not None and own.shape == on.shape
    if own is None or (not is_alike and set(own.devices.flat) <= set(new)):
        return {device: device for device in new}
    if own.size != on.size:
        raise ArgumentError(
            f"{name} names the mesh {axes_text(own)} over {counted(own.size, 'device')}, which "
            f"does not map to {axes_text(on)}: pass mesh={{{axes_code(own)}}} and a topology of as "
            "many devices, or build the mesh in the function from its arguments"
        )
    return dict(zip(own.devices.flat, new, strict=True))


def _check_compiled(compilation: Compilation, topology: BaseTopology) -> None:
    """Raise if a program was compiled for other devices than those of a topology."""
    name, devices = compilation.name, compilation.devices
    if topology.match_devices(devices) is None:
        raise ArgumentError(
            f"{name} is a Compiled, machine code for {counted(len(devices), 'device')} of "
            f"{devices[0].device_kind}, not for those of {topology.name}: pass its Lowered, or the "
            "function and its arguments"
        )
    _check_size(name, devices, topology)


def check_devices(lowered: LoweredModule, topology: BaseTopology) -> None:
    """Raise if a program is lowered for devices outside the topology."""
    name, devices = lowered.program.name, lowered.plan.devices
    strangers = set(devices) - set(topology.devices)
    if strangers:
        kind = next(iter(strangers)).device_kind
        raise ArgumentError(
            f"{name} is placed on {counted(len(devices), 'device')} of {kind}, "
            f"not on those of {topology.name}: leave device= and backend= out, or make its mesh "
            f"with tpu.topology({topology.name!r}).mesh({{...}})"
        )
    mesh = lowered.program.mesh
    if mesh is not None and len(devices) < mesh.size:
        raise ArgumentError(
            f"{name} runs on {counted(len(devices), 'device')}: jax.jit drops its arguments on "
            f"{axes_text(mesh)}, since no result depends on them; return a value that depends on "
            "them, or write keep_unused=True"
        )
    _check_size(name, devices, topology)


def _check_size(name: str, devices: Sequence[Any], topology: BaseTopology) -> None:
    if len(devices) < topology.num_devices:
        raise ArgumentError(
            f"{name} uses {counted(len(devices), 'device')} of the "
            f"{topology.num_devices} of {topology.name}: pass a topology with as many devices, "
            f"or a mesh over all of them"
        )
