"""`preflight`: what a program would take, do and cost on TPU chips, on a machine without one."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError, DonationWarning, counted
from xlashard.pjit import Compiled, Lowered, Traced, pjit
from xlashard.pjit.function import Function
from xlashard.pjit.signature import function_name
from xlashard.sharding import Mesh
from xlashard.tpu.preflight.argument_sharding import (
    MeshLike,
    argument_placer,
    check_named_shardings,
    resolve_mesh,
)
from xlashard.tpu.preflight.compilation import compile_for_report
from xlashard.tpu.preflight.report.build import REPLICATED_ABOVE, ReportOptions, build_report
from xlashard.tpu.preflight.report.preflight_model import (
    Workload,
)
from xlashard.tpu.preflight.report.preflight_report import PreflightReport
from xlashard.tpu.preflight.report.pricing import parse_price
from xlashard.tpu.topologies import Topology
from xlashard.tpu.topologies import topology as find_topology


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
    """Says what a program would take, do and cost on TPU chips; none is needed for that.

    The program is compiled for the topology by libtpu. One that is too large for the chips gives
    the same report, whose `outcome` says so.

    Args:
        fun: A function made by `xlashard.pjit`, with whatever was said of it (shardings, donation,
            ...); a plain function; or a stage, `Traced` or `Lowered`, which needs no arguments.
        *args: Arguments of a call. A `jax.ShapeDtypeStruct` does for an array. What lies on
            another mesh (arrays on this machine's devices, for example) is taken to lie on the
            topology along axes of the same names.
        topology: The chips: `"v5p-128"`, `"v5e:4x4"`, or an `xlashard.tpu.topology`.
        mesh: Names and sizes of the mesh axes, such as `{"data": 8, "model": 4}`; or a mesh. It is
            in force while the function is traced. By default that of the arguments.
        slices: How many slices of the topology there are.
        workload: For a step of training what it does, for tokens per second and utilisation.
        price: Of one chip for an hour, for what a step costs: `4.2`, `"4.20 USD"`.
        replicated_above: From how many bytes on what every device holds whole is named.
        compiler_options: Options of the compiler, as of `Lowered.compile`.
        title: What the report says of where the program comes from.
        **kwargs: Keyword arguments of the call.

    Returns:
        The report. `print(report)` shows it, `report.to_json()` keeps it.

    Raises:
        TopologyError: If there is no such topology, the mesh can't lie on it, or libtpu is missing.
        ArgumentError: If `fun` is none of the above, or the price is no number.
        CompileError: If the compiler refuses the program for another reason than its size.
        ResourceError: As the call itself would, and so are all its other errors.

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
    extras = ReportOptions(
        title, workload, None if price is None else parse_price(price), replicated_above
    )
    with short_tracebacks, warnings.catch_warnings():
        # The report says it, with the reason, of each argument.
        warnings.simplefilter("ignore", DonationWarning)
        place = topology if isinstance(topology, Topology) else find_topology(topology, slices)
        on, lowered = lower_for(fun, args, kwargs, place, mesh)
        compilation = compile_for_report(lowered, compiler_options)
        return build_report(compilation, place, on, extras)


def lower_for(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: Topology, mesh: Any
) -> tuple[Mesh, Lowered]:
    """The mesh on the topology's devices, and the module for them.

    Args:
        fun: A function or a stage, as `preflight` takes it.
        args: Arguments of a call.
        kwargs: Those that go by name.
        topology: The devices.
        mesh: As `preflight` takes it.
    """
    if isinstance(fun, Traced | Lowered):
        if args or kwargs:
            raise ArgumentError(
                f"a {type(fun).__name__} has its arguments already, but preflight was given more: "
                "write xlashard.preflight(stage, topology=...), or give the function and arguments"
            )
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


def _of_stage(stage: Traced | Lowered, topology: Topology, mesh: Any) -> tuple[Mesh, Lowered]:
    if isinstance(stage, Lowered):
        _check_devices(stage, topology)
        own = stage._program.plan.mesh
        return (own if isinstance(own, Mesh) else resolve_mesh(topology, mesh, {})), stage
    call = stage._call
    arguments = dict(zip(stage._face.paths, call.values, strict=True))
    check_named_shardings(arguments)
    on = resolve_mesh(topology, call.mesh if mesh is None else mesh, arguments)
    here = replace(call.on([*map(argument_placer(on), call.values)]), mesh=call.mesh or on)
    lowered = Traced(stage._function, here).lower()
    _check_devices(lowered, topology)
    return on, lowered


def _function(fun: Any) -> Any:
    if isinstance(fun, Compiled):
        raise ArgumentError(
            f"{fun.fun_name} is compiled already, and a compiled program has forgotten its module: "
            "give preflight the function, or the Lowered that it was compiled from"
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
            f"preflight takes a function made by xlashard.pjit, and {name} is one of jax.jit, "
            f"which keeps what was said of it to itself: write {name} = xlashard.jit(...), which "
            "takes the same options"
        )
    return pjit(fun)


def _check_devices(lowered: Lowered, topology: Topology) -> None:
    """Raises if a module is for other devices than those of a topology."""
    devices = lowered._program.plan.devices
    strangers = set(devices) - set(topology.devices)
    if strangers:
        kind = next(iter(strangers)).device_kind
        raise ArgumentError(
            f"{lowered.fun_name} was lowered for {counted(len(devices), 'device')} of {kind}, not "
            f"for those of {topology.name}: make its mesh from them, "
            f"tpu.topology({topology.name!r}).mesh({{...}}), and give preflight that topology"
        )
    if len(devices) < topology.num_devices:
        raise ArgumentError(
            f"{lowered.fun_name} uses {counted(len(devices), 'device')} of the "
            f"{topology.num_devices} of {topology.name}: give a topology of that many, or a mesh "
            "over all of them"
        )
