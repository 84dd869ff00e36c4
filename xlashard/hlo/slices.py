"""Collectives of programs for several slices of TPUs.

The compiler emits the program of a single slice: device numbers start at 0, collectives stay inside
the slice, and transfers to other slices are sends to and receives from the host. The frontend
attributes of a send name the collective that it belongs to.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax

from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs
from xlashard.hlo.call_graph import nearest_user
from xlashard.hlo.collective_kinds import TRAITS, CollectiveKind
from xlashard.hlo.collectives import Collective
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Computation, Instruction

_KINDS: dict[str, CollectiveKind] = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_TRANSFER, _RENDEZVOUS = "_xla_megascale_transfer_type", "_xla_host_transfer_rendezvous"
"""Frontend attributes of a send and its recv."""


def multislice_collectives(module: HloProgram, mesh: jax.sharding.Mesh | None) -> list[Collective]:
    """Return the collectives of a program, in all of its slices and between them.

    Args:
        module: The compiled module.
        mesh: Its mesh, whose order replica groups index; None if it has none.
    """
    found = list(module.collectives)
    # GPUs, and slices that the program names itself, have numbers of all devices.
    if mesh is None or module.num_partitions * module.num_replicas == mesh.size:
        return found
    slices = _slices(mesh)
    spread = [replace(c, groups=_in_all(c.groups, slices)) for c in found]
    return [*spread, *_transfers(module, slices)]


def rendezvous_name(instruction: Instruction) -> str:
    """Return the rendezvous name shared by a send and its recv; empty for other instructions."""
    if instruction.opcode not in ("send", "recv"):
        return ""
    return instruction.attributes.frontend.get(_RENDEZVOUS, "")


def _slices(mesh: jax.sharding.Mesh) -> list[list[int]]:
    """Return the mesh positions of the devices of each slice."""
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat):
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(position)
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
    received = next(
        (
            i
            for i in computation.instructions.values()
            if i.opcode == "recv" and rendezvous_name(i) == rendezvous_name(send)
        ),
        None,
    )
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
