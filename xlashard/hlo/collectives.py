"""Collectives of a compiled program, from its optimised HLO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xlashard.geometry.groups import AxisParts, ReplicaGroups, SourceTargetPairs
from xlashard.geometry.mesh import MeshGrid
from xlashard.hlo.call_graph import CallSite, makers, nearest_user
from xlashard.hlo.collective_kinds import KINDS, TRAITS, CollectiveKind, CollectiveTraits
from xlashard.hlo.module import Computation, Frame, HloModule, Instruction
from xlashard.hlo.shapes import Shape

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program. All bytes are those of one device and one run of it.

    Attributes:
        kind: Kind of collective.
        name: The instruction's name; that of its start, where it is asynchronous.
        computation: The computation that it stands in.
        operands: Operand types per device.
        results: Result types per device. For a ragged-all-to-all, whose sizes are data, both are
            the capacity.
        groups: Replica groups, or the source-target pairs of a permutation.
        times: Number of runs in one execution of the program: the product of the trip counts of
            the loops around it, with 1 for a loop of unknown trip count.
        times_known: Whether the trip counts of all loops around it are known.
        conditional: Whether it is in a branch; `times` assumes that the branch is taken.
        asynchronous: Whether its start and its end are apart, with other work between them.
        op_name: JAX's name of the operation whose value it gathers, reduces or exchanges, or the
            path of the argument; empty if unknown.
        frames: The source lines that the operation comes from, the innermost first.
        needed_by: JAX's name of the nearest operation with known lines that uses the result,
            directly or through other operations.
        needed_by_frames: The lines of that operation.
    """

    kind: CollectiveKind
    name: str
    computation: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    groups: ReplicaGroups | SourceTargetPairs
    times: int = 1
    times_known: bool = True
    conditional: bool = False
    asynchronous: bool = False
    op_name: str = ""
    frames: tuple[Frame, ...] = ()
    needed_by: str = ""
    needed_by_frames: tuple[Frame, ...] = ()

    @property
    def traits(self) -> CollectiveTraits:
        """Return the way in which collectives of its kind move data."""
        return TRAITS[self.kind]

    @property
    def cause(self) -> tuple[str, tuple[Frame, ...]]:
        """Return the name and lines of the operation that requires it: of a gather, its user."""
        if self.needed_by and (self.kind == "all-gather" or not self.frames):
            return self.needed_by, self.needed_by_frames
        return self.op_name, self.frames

    @property
    def is_rematerialized(self) -> bool:
        """Return whether it moves a value of the forward pass again, by `jax.checkpoint` or XLA."""
        # One of an argument has the argument's path as name.
        named = is_rematerialized(self.op_name) or is_rematerialized(self.needed_by)
        return named or ".remat" in self.name

    @property
    def operand_bytes(self) -> int:
        """Return the operand bytes of a device."""
        return sum(t.nbytes for t in self.operands)

    @property
    def result_bytes(self) -> int:
        """Return the result bytes of a device."""
        return sum(t.nbytes for t in self.results)

    @property
    def payload_bytes(self) -> int:
        """Return the larger of both: the whole value that a group gathers, reduces or exchanges."""
        return max(self.operand_bytes, self.result_bytes)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a device sends under an optimal algorithm; the mean over devices.

        With groups of `n` devices that is `(n-1)/n` of the payload, and twice as much for an
        all-reduce. A permutation sends its payload once for each pair of two different devices;
        the mean is that over the devices that are named in a pair.
        """
        payload = self.payload_bytes
        if isinstance(self.groups, SourceTargetPairs):
            named = len({device for pair in self.groups.pairs for device in pair})
            return payload * self.groups.moving // max(named, 1)
        return int(self.traits.sent_bytes(payload, max(self.groups.size, 1)))

    def axes(self, mesh: "MeshGrid | Mesh") -> AxisParts | None:
        """Return the parts of mesh axes along which it runs; None where no axes match.

        Args:
            mesh: The mesh of the program.

        Example:
            >>> from xlashard.hlo import read_collectives
            >>> (gather,) = read_collectives('''HloModule m, num_partitions=4
            ...
            ... ENTRY %e (p: f32[2]) -> f32[4] {
            ...   %p = f32[2]{0} parameter(0)
            ...   ROOT %g = f32[4]{0} all-gather(%p), replica_groups=[2,2]<=[4], dimensions={0}
            ... }''')
            >>> [part.name for part in gather.axes(MeshGrid(("data", "model"), (2, 2)))]
            ['model']
        """
        return self.groups.axes(_grid(mesh))

    def axis_names(self, mesh: "MeshGrid | Mesh") -> tuple[str, ...] | None:
        """Return the names of the axes along which it runs; None where no axes match."""
        parts = self.axes(mesh)
        return None if parts is None else tuple(dict.fromkeys(part.name for part in parts))


def is_rematerialized(op_name: str) -> bool:
    """Return whether an operation computes a value of the forward pass again.

    `jax.checkpoint` names the operations that it repeats, and the barrier before them.

    Example:
        >>> is_rematerialized("f/transpose(jvp())/checkpoint/rematted_computation/dot_general")
        True
        >>> is_rematerialized("f/transpose(jvp())/checkpoint/dot_general")
        False
    """
    is_barrier = op_name.endswith(("/remat", "/remat2", "/checkpoint"))
    return "rematted_computation" in op_name or is_barrier


def _grid(mesh: "MeshGrid | Mesh") -> MeshGrid:
    if isinstance(mesh, MeshGrid):
        return mesh
    return MeshGrid(mesh.axis_names, tuple(mesh.shape.values()))


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one kind along the same axes, together.

    Bytes are those of one device in one execution of the program, so that a collective in a loop
    counts once for each of its runs.

    Attributes:
        kind: Kind of collective.
        along: The axes as text, `data, model`; their groups, where they match no axes of the mesh
            or no mesh was given.
        count: Number of them in the program's text.
        times: Number of their runs.
        operand_bytes: Operand bytes of a device.
        result_bytes: Result bytes of a device.
        payload_bytes: Bytes of the larger of the two, collective by collective.
        sent_bytes: Bytes that a device sends under an optimal algorithm.
    """

    kind: CollectiveKind
    along: str
    count: int
    times: int
    operand_bytes: int
    result_bytes: int
    payload_bytes: int
    sent_bytes: int


def along_text(collective: Collective, grid: "MeshGrid | Mesh | None") -> str:
    """Return the axes along which a collective runs, or else its groups, as text."""
    parts = None if grid is None else collective.axes(grid)
    if parts is None:
        return str(collective.groups)
    return ", ".join(map(str, parts)) if parts else "no other device"


def summarize(
    collectives: Sequence[Collective], mesh: "MeshGrid | Mesh | None" = None
) -> tuple[CollectiveTotal, ...]:
    """Add collectives up by kind and by the axes that they run along.

    Args:
        collectives: Collectives of a program.
        mesh: The mesh whose axes name the groups.

    Returns:
        A total for each kind and axes, those that send most bytes first.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, hlo
        >>> mesh = Mesh(np.array(jax.devices()), ("data",))
        >>> x = jax.ShapeDtypeStruct((16, 4), "float32", sharding=NamedSharding(mesh, P("data")))
        >>> program = hlo.read(jax.jit(lambda x: x.sum(0)).lower(x).compile())
        >>> [(t.kind, t.along, t.times) for t in summarize(program.collectives, mesh)]
        [('all-reduce', 'data', 1)]
    """
    alike: dict[tuple[CollectiveKind, str], list[Collective]] = {}
    for collective in collectives:
        key = collective.kind, along_text(collective, mesh)
        alike.setdefault(key, []).append(collective)
    totals = [CollectiveTotal(*key, **add_up(members)) for key, members in alike.items()]
    return tuple(sorted(totals, key=lambda t: (-t.sent_bytes, KINDS.index(t.kind), t.along)))


def add_up(collectives: Sequence[Collective]) -> dict[str, int]:
    """Return the numbers of collectives, of all their runs, by the fields of a `CollectiveTotal`.

    Args:
        collectives: The collectives.
    """
    return {
        "count": len(collectives),
        "times": sum(c.times for c in collectives),
        "operand_bytes": sum(c.times * c.operand_bytes for c in collectives),
        "result_bytes": sum(c.times * c.result_bytes for c in collectives),
        "payload_bytes": sum(c.times * c.payload_bytes for c in collectives),
        "sent_bytes": sum(c.times * c.sent_bytes for c in collectives),
    }


def find_collectives(module: HloModule, call_sites: Mapping[str, CallSite]) -> list[Collective]:
    """Return the collectives of a module.

    Args:
        module: The module.
        call_sites: Call sites of its computations.
    """
    collectives: list[tuple[Computation, Instruction, CollectiveKind, CallSite]] = [
        (computation, instruction, kind, call_sites[computation.name])
        for computation in module.computations.values()
        if computation.name in call_sites
        for instruction in computation.instructions.values()
        if (kind := _kind(instruction)) is not None
    ]
    started = {_channel(i) for c, i, _, _ in collectives if c.starts_collective}
    return [
        _collective(module, computation, instruction, kind, run)
        for computation, instruction, kind, run in collectives
        if not (_is_later_part(computation, run) and _channel(instruction) in started)
    ]


def _is_later_part(computation: Computation, run: CallSite) -> bool:
    """Return whether a collective in this computation continues one that started elsewhere."""
    is_fused = run.caller is not None and run.caller.opcode == "fusion"
    return is_fused and computation.continues_collective


def _channel(instruction: Instruction) -> object:
    return instruction.opcode, instruction.attributes.channel


def _kind(instruction: Instruction) -> CollectiveKind | None:
    """Return the kind of a collective; None for other instructions and for a done."""
    opcode = instruction.opcode.removesuffix("-start")
    return next((kind for kind in KINDS if kind == opcode), None)


def _collective(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    kind: CollectiveKind,
    run: CallSite,
) -> Collective:
    operands = computation.operand_arrays(instruction)
    if kind == "ragged-all-to-all":
        # The other operands are the result buffer, offsets and sizes.
        operands = operands[:1]
    results = _result_types(computation, instruction, operands)
    caller = run.caller if run.caller is not None and run.caller.opcode == "fusion" else None
    if caller is not None and kind == "all-reduce" and _is_scatter(caller):
        kind, results = "reduce-scatter", caller.shape.arrays
    named = [instruction, *([caller] if caller is not None else [])]
    frames = next((i.frames for i in named if i.frames), ())
    op_name = next((i.op_name for i in named if i.op_name), "")
    site = module.computations[run.site] if caller is not None else computation
    user = nearest_user(site, caller or instruction)
    if not (frames or op_name or user):
        # XLA omits source lines where it reshards a value for the program's results.
        maker = next((i for i in makers(site, caller or instruction) if i.op_name), None)
        if maker is not None:
            op_name, frames = maker.op_name, maker.frames
    return Collective(
        kind=kind,
        name=instruction.name,
        computation=computation.name,
        operands=tuple(operands),
        results=tuple(results),
        groups=_groups(module, instruction, kind),
        times=run.times,
        times_known=run.known,
        conditional=run.conditional,
        asynchronous=run.asynchronous
        or instruction.opcode.endswith("-start")
        or computation.starts_collective,
        op_name=op_name,
        frames=frames,
        needed_by="" if user is None else user.op_name,
        needed_by_frames=() if user is None else user.frames,
    )


def _is_scatter(fusion: Instruction) -> bool:
    return any(name.startswith("all-reduce-scatter") for name in fusion.calls)


def _result_types(
    computation: Computation, instruction: Instruction, operands: Sequence[Shape]
) -> tuple[Shape, ...]:
    if not instruction.opcode.endswith("-start"):
        return instruction.shape.arrays
    for user in computation.users.get(instruction.name, ()):
        if user.opcode.endswith("-done"):
            return user.shape.arrays
    # The type of a start begins with the operands and may end with values of the runtime.
    types = instruction.shape.arrays
    return types[len(operands) : 2 * len(operands)] or types


def _groups(
    module: HloModule, instruction: Instruction, kind: CollectiveKind
) -> ReplicaGroups | SourceTargetPairs:
    attributes = instruction.attributes
    if TRAITS[kind].traffic == "pairs":
        return attributes.pairs or SourceTargetPairs(())
    everyone = ReplicaGroups.everyone(module.num_partitions * module.num_replicas)
    if _counts_replicas(module, instruction, kind) and module.num_replicas == 1:
        # The groups number replicas, each with all of its partitions.
        return everyone
    return attributes.groups or everyone


def _counts_replicas(module: HloModule, instruction: Instruction, kind: CollectiveKind) -> bool:
    """Return whether the groups number replicas, each with all of its partitions."""
    if TRAITS[kind].traffic != "ring" or module.num_partitions == 1:
        return False
    return instruction.attributes.channel is not None and not instruction.attributes.global_ids
