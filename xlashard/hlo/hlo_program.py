"""Analysis of compiled modules, of one slice of TPUs or several, read from whatever holds them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlashard.errors import ArgumentError, counted
from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs
from xlashard.hlo.buffers import PeakBuffer, buffers_at_peak
from xlashard.hlo.call_graph import CallSite, find_call_sites, nearest_user, trip_count
from xlashard.hlo.collective_kinds import TRAITS, CollectiveKind
from xlashard.hlo.collectives import Collective, find_collectives
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.proto_reader import read_proto
from xlashard.hlo.shapes import HBM
from xlashard.hlo.text_reader import read_text, split_modules
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from xlashard._jax.runtime import executables, shardings
else:
    # For programs and meshes of JAX; text and files are read without it.
    executables = deferred("xlashard._jax.runtime.executables")
    shardings = deferred("xlashard._jax.runtime.shardings")
from xlashard.support.tracebacks import short_tracebacks


class HloProgram(HloModule):
    """One compiled module with its call graph, collectives and live ranges.

    Computations, instructions and the buffer assignment are members of `HloModule`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> step = jax.jit(lambda x: jax.lax.fori_loop(0, 12, lambda _, x: jnp.sin(x), x))
        >>> program = read(step.lower(1.0).compile())
        >>> (body,) = [c for c, site in program.call_sites.items() if site.times == 12][-1:]
        >>> {i.opcode for i in program.computations[body].instructions.values()} >= {"parameter"}
        True
    """

    @property
    def call_sites(self) -> Mapping[str, CallSite]:
        """Return the call site of each computation that the entry reaches, with its runs."""
        return find_call_sites(self)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives, in the order of the computations.

        A start and its done are one collective. One that a fusion or an asynchronous computation
        wraps is found where the wrapper is called, and one in a computation with several callers
        is one collective that runs as often as the calls together. The fusion in which TPU's
        compiler hides a reduce-scatter, as an all-reduce of which each device keeps a slice, counts
        as reduce-scatter. One with invalid replica groups, which `not_understood` counts, is taken
        to run over all devices.
        """
        return tuple(find_collectives(self, self.call_sites))

    @cached_property
    def _on_meshes(self) -> "dict[Mesh | None, tuple[Collective, ...]]":
        return {}

    def collectives_on(self, mesh: "Mesh | None") -> tuple[Collective, ...]:
        """Return the collectives of the program, in all of its slices and between them.

        For several slices of TPUs, the compiler emits the program of a single one: device numbers
        start at 0, collectives stay inside the slice, and transfers to other slices are sends to
        and receives from the host.

        Args:
            mesh: Its mesh, whose order replica groups index; None if it has none.
        """
        if mesh not in self._on_meshes:
            self._on_meshes[mesh] = _collectives_on(self, mesh)
        return self._on_meshes[mesh]

    @cached_property
    def host_transfers(self) -> tuple[Instruction, ...]:
        """Return the instructions that exchange data with the host, in the order of the module.

        They are calls of Python functions, infeeds and outfeeds, and copies from or to the host's
        memory. Programs of several slices of TPUs send to other slices by way of the host, which
        does not count.
        """
        return tuple(
            instruction
            for name in self.call_sites
            for instruction in self.computations[name].instructions.values()
            if _is_host_transfer(instruction)
        )

    @cached_property
    def unknown_loops(self) -> tuple[str, ...]:
        """Return the names of the loops whose trip count the module does not determine."""
        return tuple(
            loop.name
            for name in self.call_sites
            for loop in self.computations[name].instructions.values()
            if loop.opcode == "while" and trip_count(self, self.computations[name], loop) is None
        )

    def buffers_at_peak(self, memory: int = HBM) -> list[PeakBuffer]:
        """Return the temporaries that are live when the heap of a memory is fullest.

        Args:
            memory: Memory space of layouts; 0 is the device's main memory.

        Returns:
            The buffers, largest first; empty without a buffer assignment.
        """
        heaps = [a for a in self.allocations if a.is_temporary and a.memory == memory]
        return [buffer for heap in heaps for buffer in buffers_at_peak(heap)]


_HOST_MEMORY = 5
"""Memory space of layouts in the host's memory (`Layout::kHostMemorySpace` of XLA)."""


def _is_host_transfer(instruction: Instruction) -> bool:
    attributes = instruction.attributes
    match instruction.opcode:
        case "infeed" | "outfeed":
            return True
        case "custom-call":
            # JAX's names for CPU and GPU: `xla_ffi_python_cpu_callback`.
            return re.search(r"python_\w+_callback", attributes.call_target) is not None
        case "send" | "recv":
            # TPU programs call Python by a send and a recv of one line.
            handler = attributes.frontend.get("_xla_host_transfer_handler_name", "")
            return bool(handler) and "megascale" not in handler
        case "copy-start":
            spaces = {array.memory_space for array in instruction.shape.arrays}
            return _HOST_MEMORY in spaces
    return False


def read(source: Any) -> HloProgram:
    """Read one compiled module.

    Args:
        source: A compiled program: `Compiled` of xlashard or of JAX, or PJRT's executable; the text
            of a module; the bytes of a serialized `HloModuleProto` or `HloProto`; or the path of a
            file with either, as `xla_dump_to` writes them. Programs and files `*.hlo.pb` are read
            from XLA's own format.

    Returns:
        The module. A program on CPU has its buffer assignment; an `HloProto` of the compilers of
        TPUs and GPUs has the live ranges too.

    Raises:
        ArgumentError: `source` is nothing of these, or holds no module or several.

    Example:
        >>> import jax
        >>> double = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((8,), "float32"))
        >>> program = read(double.compile())
        >>> root = program.computations[program.entry].root
        >>> str(root.shape), program.collectives, dict(program.not_understood)
        ('f32[8]', (), {})
    """
    with short_tracebacks:
        modules = _read_all(source)
        if len(modules) != 1:
            instead = (
                "xlashard.hlo.read_modules(source) returns all of them"
                if modules
                else "pass text that begins with HloModule, or the pathlib.Path of a file"
            )
            raise ArgumentError(
                f"source holds {counted(len(modules), 'HLO module')}, not one: {instead}"
            )
        return modules[0]


def read_modules(source: Any) -> tuple[HloProgram, ...]:
    r"""Read all modules of a compiled program, text or file.

    Args:
        source: As for `read`.

    Raises:
        ArgumentError: `source` is nothing that `read` takes.

    Example:
        >>> text = "HloModule a\n\nENTRY %e {\n  ROOT %c = s32[] constant(1)\n}\n"
        >>> [module.name for module in read_modules(text + text.replace("a", "b", 1))]
        ['a', 'b']
    """
    with short_tracebacks:
        return _read_all(source)


def read_collectives(source: Any) -> tuple[Collective, ...]:
    """Return the collectives of all modules of a compiled program, text or file.

    Args:
        source: As for `read`.

    Returns:
        The collectives, in the order of the computations.

    Raises:
        ArgumentError: `source` is nothing that `read` takes.

    Example:
        >>> found = read_collectives('''HloModule m, num_partitions=2
        ...
        ... ENTRY %main (p: f32[2,4]) -> f32[4,4] {
        ...   %p = f32[2,4]{1,0} parameter(0)
        ...   ROOT %g = f32[4,4]{1,0} all-gather(%p), replica_groups=[1,2]<=[2], dimensions={0}
        ... }''')
        >>> [(c.kind, c.operand_bytes, c.result_bytes, str(c.groups)) for c in found]
        [('all-gather', 32, 64, '1 group of 2 devices')]
    """
    with short_tracebacks:
        return tuple(c for module in _read_all(source) for c in module.collectives)


def _read_all(source: Any) -> tuple[HloProgram, ...]:
    if hasattr(source, "runtime_executable"):
        source = source.runtime_executable()
    if hasattr(source, "hlo_modules"):
        return read_executable(source, executables.buffer_assignment(source))
    if isinstance(source, os.PathLike):
        source = Path(source).read_bytes()
    if isinstance(source, bytes) and source.lstrip().startswith(b"HloModule "):
        source = source.decode()
    if isinstance(source, str):
        return tuple(_read(text) for text in split_modules(source))
    if not isinstance(source, bytes):
        raise ArgumentError(
            f"source is a {type(source).__name__}: expected a compiled program, the text of an HLO "
            "module, bytes of an HloModuleProto or HloProto, or the path of a file"
        )
    return (_read(source),)


def read_executable(executable: Any, buffers: bytes) -> tuple[HloProgram, ...]:
    """Read the modules of an executable.

    Args:
        executable: PJRT's executable.
        buffers: Its serialized BufferAssignmentProto; empty if unknown.
    """
    return tuple(_read(module, buffers) for module in executables.hlo_modules(executable))


def _read(module: bytes | str, buffers: bytes = b"") -> HloProgram:
    if isinstance(module, str):
        return HloProgram(**vars(read_text(module)))
    try:
        return HloProgram(**vars(read_proto(module, buffers)))
    except (ValueError, LookupError) as error:
        raise ArgumentError(
            f"source is no HloModuleProto or HloProto: {error}; expected the bytes of a file "
            "*.hlo.pb, as the option xla_dump_hlo_as_proto writes it, or of "
            "as_serialized_hlo_module_proto()"
        ) from None


_KINDS: dict[str, CollectiveKind] = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_TRANSFER = "_xla_megascale_transfer_type"
"""Frontend attribute of a send to another slice: the kind of the collective that it belongs to."""


def _collectives_on(module: HloProgram, mesh: "Mesh | None") -> tuple[Collective, ...]:
    collectives = module.collectives
    # GPUs, and slices that the program names itself, have numbers of all devices.
    if mesh is None or module.num_partitions * module.num_replicas == mesh.size:
        return collectives
    slices = _slices(mesh)
    spread = [replace(c, groups=_in_all(c.groups, slices)) for c in collectives]
    return (*spread, *_transfers(module, slices))


def _slices(mesh: "Mesh") -> list[list[int]]:
    """Return the mesh positions of the devices of each slice."""
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat):
        slices.setdefault(shardings.slice_of(device), []).append(position)
    return [slices[number] for number in sorted(slices)]


def _in_all(
    groups: ReplicaGroups | SourceTargetPairs, slices: Sequence[list[int]]
) -> ReplicaGroups | SourceTargetPairs:
    """Return the groups of one slice, replicated for every slice."""
    if isinstance(groups, SourceTargetPairs):
        pairs = groups.pairs
        return SourceTargetPairs(tuple((s[a], s[b]) for s in slices for a, b in pairs))
    listed = groups.devices()
    return ReplicaGroups.of_list([[s[d] for d in group] for s in slices for group in listed])


def _transfers(module: HloProgram, slices: Sequence[list[int]]) -> list[Collective]:
    sites = module.call_sites
    return [
        replace(
            _transfer(computation, instruction, slices),
            times=sites[computation.name].times,
            times_known=sites[computation.name].known,
            conditional=sites[computation.name].conditional,
        )
        for computation in module.computations.values()
        if computation.name in sites
        for instruction in computation.instructions.values()
        if instruction.opcode == "send" and _TRANSFER in instruction.attributes.frontend
    ]


def _transfer(
    computation: Computation, send: Instruction, slices: Sequence[list[int]]
) -> Collective:
    kind = _KINDS.get(send.attributes.frontend[_TRANSFER], "collective-permute")
    operands = send.shape.arrays[:1]
    received = computation.partner(send)
    results = operands if received is None else received.shape.arrays[:1]
    user = None if received is None else nearest_user(computation, received)
    groups: ReplicaGroups | SourceTargetPairs = ReplicaGroups.of_list(
        [list(group) for group in zip(*slices, strict=True)]
    )
    if TRAITS[kind].traffic == "pairs":
        turned = [*slices[1:], slices[0]]
        pairs = zip(slices, turned, strict=True)
        groups = SourceTargetPairs(tuple(p for a, b in pairs for p in zip(a, b, strict=True)))
    return Collective(
        kind=kind,
        name=send.name,
        computation=computation.name,
        operands=operands,
        results=results,
        groups=groups,
        asynchronous=True,
        op_name=send.op_name,
        frames=send.frames,
        needed_by="" if user is None else user.op_name,
        needed_by_frames=() if user is None else user.frames,
    )
