"""The record of a program that every report takes, and of its compiled form."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import jax

from xlashard._jax.lowering import LoweredBody
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace.jaxprs import callback_results
from xlashard._jax.trace.lower_for import DevicesByPosition
from xlashard._jax.trace.tracing import count_bytes
from xlashard._jax.tree_definitions import split_leaves
from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.core.program.donation import UnusedDonation, find_unused
from xlashard.core.program.plan import ProgramPlan
from xlashard.core.sharding import Mesh, Sharding, XLACompatibleSharding
from xlashard.errors import ArgumentError
from xlashard.hlo.collectives import Collective
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Frame

if TYPE_CHECKING:
    from xlashard._jax.runtime.offline import CompileInput, PhaseInput

type Origin = Literal["array", "host", "shape", "unknown"]
"""Kind of value that a call passes: an array of devices, a value of the host, or its shape."""


@dataclass(frozen=True, eq=False)
class ProgramValue:
    """Argument, result or closed-over array of a program.

    Attributes:
        path: Its path, as the user writes it: `state['params']['w']`.
        aval: Its abstract value.
        requested: The sharding that the caller requested for it; None if unspecified.
        current: The sharding of the argument of the call; None for a value of the host.
        committed: True if the argument is committed to its devices.
        origin: What the call passes; `unknown` for results, and for a stage without its call.
        donated: True if its buffers may be reused.
        is_chosen: True if its sharding was chosen under `AUTO`.
        sharding: Its sharding in the compiled program; None before, and for an argument that the
            program drops.
        lowered_sharding: Its sharding in the lowered module; None leaves it to the partitioner.
    """

    path: str
    aval: Any
    requested: Sharding | None = None
    current: XLACompatibleSharding | None = None
    committed: bool = False
    origin: Origin = "unknown"
    donated: bool = False
    is_chosen: bool = False
    sharding: XLACompatibleSharding | None = None
    lowered_sharding: XLACompatibleSharding | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole value."""
        return count_bytes(self.aval)

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the shard on one device."""
        return self.bytes_under(self.sharding)

    def bytes_under(self, sharding: XLACompatibleSharding | None) -> int:
        """Return the bytes of the shard on one device under a sharding; 0 without one."""
        if sharding is None:
            return 0
        tiling = sharding.rank_tiling(self.aval.ndim)
        return count_bytes(self.aval, tiling.shard_shape(self.aval.shape, uneven=True))


@dataclass(frozen=True, eq=False)
class Program(ABC):
    """A program: what is known of it before it is lowered for devices.

    It has types and shardings, and no arrays but those that the function closes over.

    Attributes:
        name: The function's name.
        in_tree: The tree of `(args, kwargs)`, without static arguments.
        out_tree: The tree of the result.
        arguments: The arguments, in order.
        results: The results, in order.
        mesh: The mesh of its devices, by whose axes values are sharded; None without one.
        jaxpr: The closed jaxpr; None for a program without its trace.
        source: Name and location of the function: `step at train.py:12`; empty if unknown.
        constants: The closed-over arrays that are constants in each device's program.
        module_paths: The user's path of an argument, by its path in the module, where they differ.
        unknown: What the stage that it was made of does not keep, as one clause.
    """

    name: str
    in_tree: Any
    out_tree: Any
    arguments: tuple[ProgramValue, ...]
    results: tuple[ProgramValue, ...]
    mesh: Mesh | None = None
    jaxpr: Any = None
    source: str = ""
    constants: tuple[ProgramValue, ...] = ()
    module_paths: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""

    @abstractmethod
    def lower(self, devices: DevicesByPosition | None = None) -> "LoweredModule":
        """Lower the program.

        Args:
            devices: The new device of each of its devices, in the order of its mesh; None for its
                own.
        """

    def with_layout(
        self, jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any], mesh: Mesh | None = None
    ) -> "Program":
        """Return the program of another jaxpr of the same types, under other shardings.

        Args:
            jaxpr: The closed jaxpr.
            ins: The sharding of each argument, which is then placed nowhere; None for its own.
            outs: The sharding of each result; None for its own.
            mesh: The mesh of the shardings; None for its own.
        """
        raise NotImplementedError  # no-catalogue: each kind of program with a trace has its own

    def onto(self, mesh: Mesh) -> "Program":
        """Return the program with the shardings of its boundary on another mesh, by axis names.

        Args:
            mesh: The mesh under which it was traced.
        """
        raise NotImplementedError  # no-catalogue: each kind of program with a trace has its own

    def with_choices(self, arguments: Sequence[bool], results: Sequence[bool]) -> "Program":
        """Return the program with the shardings that were chosen marked.

        Args:
            arguments: For each argument, True if its sharding was chosen.
            results: For each result likewise.
        """
        chosen = [
            tuple(replace(value, is_chosen=mark) for value, mark in zip(side, marks, strict=True))
            for side, marks in ((self.arguments, arguments), (self.results, results))
        ]
        return replace(self, arguments=chosen[0], results=chosen[1])


def find_fed_back(program: Program) -> tuple[tuple[int, int], ...]:
    """Return the positions of arguments and of results that the next call is likely to get.

    A donated argument, or one of several arrays, is taken for fed back if the function returns a
    tree of its structure and types; and any array whose path a result has, as those of a module
    that the function changes.

    Args:
        program: The program.
    """
    arguments, out_tree = program.arguments, program.out_tree
    ins = [_read_type(value.aval) for value in arguments]
    outs = [_read_type(value.aval) for value in program.results]
    args, kwargs = split_leaves(program.in_tree, range(program.in_tree.num_leaves))
    results = out_tree, range(out_tree.num_leaves)
    by_path = {value.path: position for position, value in enumerate(arguments)}
    tied: dict[int, int] = {}

    def tie(structure: Any, leaves: Sequence[int]) -> bool:
        if not leaves or (len(leaves) == 1 and not arguments[leaves[0]].donated):
            return False
        for other, candidate_leaves in (results, *split_leaves(*results)):
            if structure != other or not tied.keys().isdisjoint(candidate_leaves):
                continue
            if [ins[i] for i in leaves] == [outs[i] for i in candidate_leaves]:
                tied.update(zip(candidate_leaves, leaves, strict=True))
                return True
        return False

    for tree in (*split_leaves(*args), *split_leaves(*kwargs)):
        if not tie(*tree):
            for child in split_leaves(*tree):
                tie(*child)
    for position, value in enumerate(program.results):
        source = by_path.get(value.path)
        if source is not None and ins[source] == outs[position]:
            tied.setdefault(position, source)
    return tuple(sorted((argument, result) for result, argument in tied.items()))


def _read_type(aval: Any) -> tuple[Any, Any]:
    return getattr(aval, "shape", None), getattr(aval, "dtype", aval)


def pick_shardings(new: Sequence[Any], own: Sequence[Any]) -> tuple[Any, ...]:
    """Return new shardings, or old ones where they are None."""
    return tuple([old if each is None else each for each, old in zip(new, own, strict=True)])


def find_mesh(context: Any, shardings: Iterable[Any]) -> Mesh | None:
    """Return the first mesh of devices; None without one.

    Args:
        context: The mesh in force, or None.
        shardings: Shardings in the order in which they count; others than shardings are left out.
    """
    meshes = (context, *(getattr(sharding, "mesh", None) for sharding in shardings))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh) and not mesh.empty), None)


def put_on_mesh(sharding: Any, mesh: Mesh) -> Any:
    """Return a named sharding on another mesh that has its axes; other values unchanged."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    if sharding.mesh == mesh or not set(sharding.mesh.axis_names) <= set(mesh.axis_names):
        return sharding
    # Platforms name their memories differently: the default one is meant.
    return type(sharding)(mesh, sharding.spec)


@dataclass(frozen=True, eq=False)
class CompiledOnly(Program):
    """A program of which only the compiled form is at hand."""

    def lower(self, devices: DevicesByPosition | None = None) -> "LoweredModule":
        """Refuse to lower it; see `Program.lower`.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            f"{self.name} is compiled already: pass its Lowered, or the function and its arguments"
        )


def forgotten_by(stage: str, *, has_requests: bool) -> str:
    """Return the facts that a stage without its call does not keep, as one clause.

    Args:
        stage: Name of the stage's class.
        has_requests: True if it keeps the shardings with which its results were lowered.
    """
    values = "arguments' shardings" if has_requests else "shardings"
    return (
        f"moves, gathers at constraints, who chose {values} (a {stage} keeps no arguments and no "
        "jaxpr)"
    )


@dataclass(frozen=True, eq=False)
class ModuleRecord:
    """Parameters and results of a module, before and after its compilation.

    Attributes:
        program: The program.
        plan: Devices, values, partitioner and options of the module.
        avals: The abstract values of the module's parameters and results, tokens left out.
        parameters: The position of each argument among the parameters; None if it is dropped.
        written: The paths of the last results, which are new values of references.
        tokens: Number of ordering tokens before the parameters, and before the results.
    """

    program: Program
    plan: ProgramPlan
    avals: tuple[tuple[Any, ...], tuple[Any, ...]]
    parameters: tuple[int | None, ...]
    written: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, eq=False)
class LoweredModule(ModuleRecord, ABC):
    """A StableHLO module for some devices, with its program.

    Attributes:
        body: The module, and the objects that it keeps alive.
        stage: The public stage of it, whose `compile` returns a callable program.
    """

    body: LoweredBody
    stage: Any

    @property
    def module(self) -> Any:
        """Return the module of MLIR."""
        return self.body.module

    def as_text(self) -> str:
        """Return the module as text."""
        return self.stage.as_text()

    def as_compiled(
        self,
        shardings: tuple[Sequence[XLACompatibleSharding], Sequence[XLACompatibleSharding]],
        **facts: Any,
    ) -> "Compilation":
        """Return the compiled form.

        Args:
            shardings: The shardings of the module's parameters, and of its results.
            **facts: Other facts of the compilation, by the names of its attributes.
        """
        record = {each.name: getattr(self, each.name) for each in fields(ModuleRecord)}
        settled = tuple(shardings[0]), tuple(shardings[1])
        return Compilation(**record, shardings=settled, **facts)

    def move(self, devices: DevicesByPosition) -> "LoweredModule":
        """Return the module for other devices, lowered again where its program keeps a trace."""
        return self.program.lower(devices)

    @abstractmethod
    def compile(self, options: Mapping[str, Any] | None = None) -> "Compilation":
        """Compile the module.

        Args:
            options: Compiler options for this compilation.

        Raises:
            CompileError: If the compiler refuses the module or an option.
            ProgramTooLargeError: If it needs more memory than a device has.
        """

    @abstractmethod
    def compiler_input(
        self, options: Mapping[str, Any]
    ) -> "AbstractContextManager[PhaseInput | CompileInput]":
        """Return the input of a compilation for a topology; see `xlashard._jax.runtime.offline`."""

    @abstractmethod
    def read_dump(self, module: HloProgram) -> "Compilation":
        """Return the compiled form of a module that the compiler dumped."""


@dataclass(frozen=True, eq=False)
class WatchedValues:
    """Values inside of a program whose shardings a report shows.

    Attributes:
        pattern: Regular expression that their names match.
        module: The module with the sharding of each value, before the partitioner divides it.
        is_propagated: False if the compiler left no module with the shardings that it chose.
    """

    pattern: re.Pattern[str]
    module: HloProgram
    is_propagated: bool


type LinePicker = Callable[[Sequence[Frame]], object]
"""Returns the relevant line of a call stack, the innermost frame first."""


@dataclass(frozen=True, eq=False)
class Compilation(ModuleRecord):
    """A compiled program: shardings, donations and HLO.

    Attributes:
        shardings: The shardings of the module's parameters, and of its results.
        aliases: For each result that reuses an argument's buffers, the position of that argument,
            both counted with the tokens.
        read_modules: Returns the compiled modules, given a picker of lines.
        has_requests: True if the shardings requested of its results are known.
        executable: PJRT's executable; None for an estimate, and if the program is too large.
        seconds: Compile time.
        options: Compiler options of the caller.
        too_large: Whether the compiler rejected the program for its memory.
        is_estimate: Whether the compiler was stopped before code generation.
        log: What the compiler wrote to its log; empty if unknown, as for a cached program.
        degraded: Reason why the compiler's dump is missing or cut off; empty if it is whole.
        watched: The values inside whose shardings a report shows; None for none.
    """

    shardings: tuple[tuple[XLACompatibleSharding, ...], tuple[XLACompatibleSharding, ...]]
    aliases: Mapping[int, int]
    read_modules: Callable[[LinePicker], tuple[HloProgram, ...]] = field(repr=False)
    has_requests: bool = True
    executable: Any = None
    seconds: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    too_large: bool = False
    is_estimate: bool = False
    log: str = ""
    degraded: str = ""
    watched: WatchedValues | None = None

    @property
    def name(self) -> str:
        """Return the function's name."""
        return self.program.name

    @property
    def jaxpr(self) -> Any:
        """Return the closed jaxpr of the traced function; None for a program without its trace."""
        return self.program.jaxpr

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the device assignment."""
        return self.plan.devices

    @cached_property
    def mesh(self) -> Mesh | None:
        """Return the mesh of the devices; of a loaded program, that of its shardings."""
        return find_mesh(self.plan.mesh, chain(*self.shardings))

    @cached_property
    def sources(self) -> SourceLocator:
        """Return the locator of the source lines that a report shows."""
        return SourceLocator.of(self.program.source)

    @cached_property
    def modules(self) -> tuple[HloProgram, ...]:
        """Return the compiled modules, with the lines of this function."""
        return self.read_modules(self.sources.own_line)

    @property
    def module(self) -> HloProgram:
        """Return the compiled module of a program that has only one."""
        return self.modules[0]

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives of the compiled modules."""
        collectives = (module.collectives_on(self.mesh) for module in self.modules)
        return tuple(chain.from_iterable(collectives))

    @cached_property
    def refusals(self) -> Mapping[str, UnusedDonation]:
        """Return the reasons why donated parameters keep their buffers, by path."""
        unused = find_unused(self.plan.settle_values(self.shardings), self.aliases, self.tokens)
        return {refused.value.name: refused for refused in unused.values()}

    @cached_property
    def argument_names(self) -> Mapping[str, str]:
        """Return the path of each argument, by its path in the module."""
        own = {value.path: value.path for value in self.program.arguments}
        return {**own, **self.program.module_paths}

    @cached_property
    def arguments(self) -> tuple[ProgramValue, ...]:
        """Return the arguments of the call, in order."""
        return tuple(
            value
            if i is None
            else replace(
                value,
                sharding=self.shardings[0][i],
                lowered_sharding=self.plan.args[i].sharding,
            )
            for value, i in zip(self.program.arguments, self.parameters, strict=True)
        )

    @cached_property
    def closed_over(self) -> tuple[ProgramValue, ...]:
        """Return the closed-over arrays that are parameters of the program."""
        return tuple(
            ProgramValue(
                f"closed over [{n}]",
                self.avals[0][i],
                sharding=self.shardings[0][i],
                lowered_sharding=self.shardings[0][i],
            )
            for n, i in enumerate(self.closed_positions)
        )

    @cached_property
    def closed_positions(self) -> tuple[int, ...]:
        """Return the positions of closed-over arrays among the parameters."""
        arguments = set(self.parameters)
        return tuple(i for i in range(len(self.avals[0])) if i not in arguments)

    @cached_property
    def results(self) -> tuple[ProgramValue, ...]:
        """Return the results, in order, then the new values of references."""
        own, avals = self.program.results, self.avals[1]
        first = len(avals) - len(self.written)
        # The module pins the results of callbacks.
        pinned = frozenset() if self.jaxpr is None else callback_results(self.jaxpr)
        values = []
        for i, (aval, plan) in enumerate(zip(avals, self.plan.results, strict=True)):
            path, requested, is_chosen = f"result {i}", None, False
            if i < first:
                path, requested, is_chosen = own[i].path or path, own[i].requested, own[i].is_chosen
            else:
                path = self.written[i - first]
            lowered = None if i in pinned and requested is None else plan.sharding
            values.append(
                ProgramValue(
                    path,
                    aval,
                    requested=lowered,
                    is_chosen=is_chosen,
                    sharding=self.shardings[1][i],
                    lowered_sharding=lowered,
                )
            )
        return tuple(values)
