"""Programs of pjit-ed functions and of their stages."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace.lower_for import DevicesByPosition, move_mesh, rule_errors
from xlashard._jax.trace.target_chip import trace_for_chip
from xlashard._jax.trace.tracing import shaped, source_of
from xlashard.analysis.programs.program import (
    Compilation,
    CompiledOnly,
    LoweredModule,
    Origin,
    Program,
    ProgramValue,
    find_mesh,
    forgotten_by,
    pick_shardings,
    put_on_mesh,
)
from xlashard.core.pjit.arguments import Argument, describe_arguments
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.compile import with_user_shardings
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.lower import closed_over_sharding
from xlashard.core.pjit.shardings.automatic import planned_call
from xlashard.core.pjit.shardings.resolve import ProgramPlacement
from xlashard.core.pjit.stages.compiled import Compiled, Executable
from xlashard.core.pjit.stages.info import StageInfo
from xlashard.core.pjit.stages.traced import Lowered, Traced
from xlashard.core.pjit.trace import Call, inner_shardings
from xlashard.core.program.compile import compile_program, resolve_program
from xlashard.core.program.donation import NO_DONATION
from xlashard.core.program.executables import HloShardings, LoadedExecutable
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.lowered import LoweredProgram
from xlashard.core.program.plan import option_items
from xlashard.core.sharding import Mesh, XLACompatibleSharding, move_to
from xlashard.errors import ArgumentError
from xlashard.hlo.hlo_program import HloProgram, read_modules

if TYPE_CHECKING:
    from xlashard._jax.runtime.offline import CompileInput, PhaseInput


@dataclass(frozen=True, eq=False, kw_only=True)
class PjitProgram(Program):
    """A traced call of a pjit-ed function.

    Attributes:
        function: The function.
        call: The call.
    """

    function: Function
    call: Call

    def lower(self, devices: DevicesByPosition | None = None) -> "PjitModule":
        """Lower the program; see `Program.lower`."""
        call = self.call
        if devices is not None:
            # Of a program whose meshes are all abstract.
            assigned = tuple(devices.values())
            call = replace(call, assign=lambda count: assigned[:count])
        call = planned_call(self.function, call)
        program = self if call.auto is self.call.auto else read_call(self.function, call)
        request = self.function.request_program(call)
        if devices is not None:
            request = _move_request(request, devices)
        traced = Traced(self.function, call)
        with rule_errors(self.name, self.jaxpr, request.placement.devices[0]):
            lowered = self.function.lower(call, request)
        platform = compiler.platform_of(request.placement.devices[0])
        return read_lowered(Lowered(traced, request, lowered, platform), program)

    def with_layout(
        self, jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any], mesh: Mesh | None = None
    ) -> "PjitProgram":
        """Return the program under other shardings; see `Program.with_layout`."""
        values = [
            value.update(sharding=None)
            if new and isinstance(value, jax.ShapeDtypeStruct)
            else value
            for value, new in zip(self.call.values, ins, strict=True)
        ]
        call = replace(
            self.call,
            traced=self.call.traced._replace(jaxpr=jaxpr, in_avals=(*jaxpr.in_avals,), shared={}),
            values=tuple(values),
            mesh=mesh or self.call.mesh,
            in_shardings=pick_shardings(ins, self.call.in_shardings),
            out_shardings=pick_shardings(outs, self.call.out_shardings),
        )
        return replace(self, call=call, jaxpr=jaxpr, mesh=mesh or self.mesh)

    def onto(self, mesh: Mesh) -> "PjitProgram":
        """Return the program on another mesh; see `Program.onto`."""
        call = replace(
            self.call,
            mesh=mesh,
            in_shardings=tuple([put_on_mesh(s, mesh) for s in self.call.in_shardings]),
            out_shardings=tuple([put_on_mesh(s, mesh) for s in self.call.out_shardings]),
        )
        return read_call(self.function, call).with_paths(*self.paths)

    @property
    def paths(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the path of each argument, and of each result."""
        return tuple([v.path for v in self.arguments]), tuple([v.path for v in self.results])

    def with_paths(self, arguments: Sequence[str], results: Sequence[str]) -> "PjitProgram":
        """Return the program with other paths of its arguments and results."""
        return replace(
            self,
            arguments=tuple(map(_rename, self.arguments, arguments)),
            results=tuple(map(_rename, self.results, results)),
        )


def _rename(value: ProgramValue, path: str) -> ProgramValue:
    return replace(value, path=path)


def read_function(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: Device | None = None,
) -> PjitProgram:
    """Trace a call of a pjit-ed function.

    Args:
        function: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        device: A device of the topology that the program is for; None for those at hand.
    """
    call, _ = trace_for_chip(lambda: function.trace(args, kwargs), device)
    return read_call(function, call)


def read_stage(stage: Any) -> Program | LoweredModule | Compilation:
    """Return the program of a stage of a pjit-ed function, or of a loaded or foreign program."""
    match stage:
        case Executable():
            return read_executable(stage)
        case Lowered():
            return read_lowered(stage)
    return read_call(stage._function, stage._call)


def read_traced(stage: Traced | Lowered, values: Mapping[int, Any]) -> PjitProgram:
    """Return the program of a stage, with other values for some arguments, by their ids."""
    traced = stage._traced if isinstance(stage, Lowered) else stage
    call = traced._call
    others = tuple([values.get(id(value), value) for value in call.values])
    return read_call(traced._function, replace(call, values=others))


def read_call(function: Function, call: Call, unknown: str = "") -> PjitProgram:
    """Return the program of a traced call.

    Args:
        function: The pjit-ed function.
        call: The call.
        unknown: What is not known of the call, as one clause.
    """
    traced = call.traced
    placed = describe_arguments(call.values, traced.arg_names, traced.in_avals, runs=False)
    chosen = call.moves or (False,) * len(placed)
    arguments = tuple(
        ProgramValue(
            path=argument.path,
            aval=argument.aval,
            requested=requested,
            current=argument.sharding,
            committed=argument.committed,
            origin=_find_origin(value, argument.sharding),
            donated=donated,
            is_chosen=is_chosen,
        )
        for value, argument, requested, donated, is_chosen in zip(
            call.values, placed, call.in_shardings, call.donated, chosen, strict=True
        )
    )
    avals = map(shaped, traced.jaxpr.out_avals)
    chosen = call.chosen_results or (False,) * len(traced.result_paths)
    results = zip(traced.result_paths, avals, call.out_shardings, chosen, strict=True)
    return PjitProgram(
        name=traced.name,
        in_tree=traced.in_tree,
        out_tree=traced.out_tree,
        arguments=arguments,
        results=tuple(
            ProgramValue(path or "", aval, requested, is_chosen=is_chosen)
            for path, aval, requested, is_chosen in results
        ),
        mesh=_find_mesh(call, placed),
        jaxpr=traced.jaxpr,
        source=source_of(traced.jaxpr) or "",
        unknown=unknown,
        function=function,
        call=call,
    )


def _find_mesh(call: Call, arguments: Sequence[Argument]) -> Mesh | None:
    """Return the mesh of devices that a traced call names first; None without one."""
    named = [
        *call.in_shardings,
        *(argument.sharding for argument in arguments if argument.committed),
        *call.out_shardings,
        *inner_shardings(call.traced.jaxpr),
        *map(closed_over_sharding, call.traced.jaxpr.consts),
    ]
    return find_mesh(call.mesh, named)


def _find_origin(value: Any, current: XLACompatibleSharding | None) -> Origin:
    if isinstance(value, jax.ShapeDtypeStruct):
        return "shape"
    return "host" if current is None else "array"


def _move_request(request: LoweringRequest, devices: DevicesByPosition) -> LoweringRequest:
    """Return the request for a program on other devices."""
    own = request.placement
    new = tuple([devices.get(device, device) for device in own.devices])
    # Hundreds of values have some ten shardings.
    moved = {s: move_to(s, devices) for s in {*own.in_shardings, *own.out_shardings}}
    placement = ProgramPlacement(
        devices=new,
        mesh=move_mesh(own.mesh, devices),
        in_shardings=tuple([moved[s] for s in own.in_shardings]),
        out_shardings=tuple([moved[s] for s in own.out_shardings]),
        committed=own.committed,
    )
    return replace(request, placement=placement, moved_from=own.devices)


@dataclass(frozen=True, eq=False, kw_only=True)
class PjitModule(LoweredModule):
    """A lowered pjit-ed function; its stage is `Lowered`."""

    def compile(self, options: Mapping[str, Any] | None = None) -> Compilation:
        """Compile the module; see `LoweredModule.compile`.

        Raises:
            ArgumentError: If it was lowered for another platform than that of its devices.
        """
        stage, own = self.stage, compiler.platform_of(self.plan.devices[0])
        if stage._platform != own:
            raise ArgumentError(
                f"{stage.fun_name} was lowered for {stage._platform}, but its devices are of "
                f"{own}: omit lowering_platforms to explain its program"
            )
        if options:
            compiled = stage.compile(options)._compiled
        else:
            compiled = stage._traced._function.compile(stage._traced._call, stage._request)
        return read_compiled(compiled, self.program)

    def compiler_input(
        self, options: Mapping[str, Any]
    ) -> "AbstractContextManager[PhaseInput | CompileInput]":
        """Return the input of a compilation; see `LoweredModule.compiler_input`."""
        return self.stage._compiler_input(options)

    def read_dump(self, module: HloProgram) -> Compilation:
        """Return the compiled form of a dumped module; see `LoweredModule.read_dump`."""
        compiled = resolve_program(self.stage._program, LoadedExecutable(), HloShardings(module))
        named = with_user_shardings(compiled, self.stage._request.placement)
        return self.as_compiled(
            (named.in_shardings, named.out_shardings),
            aliases=module.aliases,
            read_modules=lambda _: (module,),
        )


def read_lowered(stage: Lowered, program: PjitProgram | None = None) -> PjitModule:
    """Return the module of a lowered stage.

    Args:
        stage: The stage.
        program: Its program; None to read it from the stage.
    """
    program = program or read_call(stage._traced._function, stage._traced._call)
    return _read_module(program, stage._program, stage)


def _read_module(
    program: Program, module: LoweredProgram | CompiledProgram, stage: Any = None
) -> PjitModule:
    # Parameters of closed-over arrays are the first.
    numbers = count(len(module.in_avals) - sum(module.kept))
    arguments = program.arguments
    written = [arguments[r].path if isinstance(r, int) else "closed over" for r in module.written]
    return PjitModule(
        program=program,
        plan=module.plan,
        avals=(module.in_avals, tuple(map(shaped, module.out_avals))),
        parameters=tuple([next(numbers) if is_kept else None for is_kept in module.kept]),
        written=tuple([f"{name} as written" for name in written]),
        tokens=len(module.body.ordered_effects),
        body=module.body,
        stage=stage,
    )


def read_executable(stage: Executable) -> Compilation:
    """Return the program of a compiled or loaded stage, which keeps no call."""
    info, compiled = stage._info, stage._compiled
    avals = zip(info.paths, map(shaped, info.in_avals), info.donated, strict=True)
    results = zip(compiled.plan.results, info.out_avals, strict=False)
    unknown = forgotten_by(type(stage).__name__, has_requests=compiled.lowered is not None)
    program = CompiledOnly(
        name=info.name,
        in_tree=info.in_tree,
        out_tree=info.out_tree,
        arguments=tuple(ProgramValue(p, aval, donated=donated) for p, aval, donated in avals),
        results=tuple(ProgramValue(plan.name, shaped(aval)) for plan, aval in results),
        unknown=unknown,
    )
    return read_compiled(compiled, program)


def read_compiled(compiled: CompiledProgram, program: Program) -> Compilation:
    """Return the compiled form of a program."""
    executable = compiled.executable
    return _read_module(program, compiled).as_compiled(
        (compiled.in_shardings, compiled.out_shardings),
        aliases=executables.aliases(executable),
        read_modules=lambda place: read_modules(compiled.executable_with_lines(place)),
        has_requests=compiled.lowered is not None,
        executable=executable,
        log=getattr(executable, "log", ""),
    )


def make_stage(module: LoweredModule, options: Mapping[str, Any] | None = None) -> Compiled:
    """Compile a module to the stage that runs, saves and loads programs of this package.

    Args:
        module: The module, of a pjit-ed function or of one of `jax.jit`.
        options: Compiler options for this compilation.
    """
    if isinstance(module, PjitModule):
        return module.stage.compile(options)
    program = module.program
    lowered = LoweredProgram(
        module.plan,
        module.body,
        NO_DONATION,
        *module.avals,
        kept=tuple([position is not None for position in module.parameters]),
        stateful=bool(module.written or module.tokens),
    )
    info = StageInfo(
        name=program.name,
        in_tree=program.in_tree,
        out_tree=program.out_tree,
        in_avals=tuple(value.aval for value in program.arguments),
        out_avals=tuple(value.aval for value in program.results),
        paths=tuple(value.path for value in program.arguments),
        donated=tuple(value.donated for value in program.arguments),
    )
    return Compiled(info, compile_program(lowered, option_items(options)), program.jaxpr)
