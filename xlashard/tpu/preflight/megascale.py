"""Collectives of a program over several slices, which TPU's compiler cuts in two.

What it compiles is the program of one slice: its devices count from 0, its collectives stay inside,
and what goes to the other slices is a send to the host and a receive from there, on which the
runtime of the data-center network does the rest.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from xlashard.geometry.groups import DeviceGroups, DevicePairs
from xlashard.program.calls import runs_of
from xlashard.program.collectives import (
    Collective,
    CollectiveKind,
    collectives_of,
    told_user,
)
from xlashard.program.hlo import Computation, HloText, Instruction, array_types
from xlashard.sharding import Mesh

_KINDS: dict[str, CollectiveKind] = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


def whole_collectives(module: HloText, mesh: Mesh) -> list[Collective]:
    """The collectives of a program, in all of its slices and between them.

    Args:
        module: The compiled program.
        mesh: Its mesh, whose order of devices the groups count in.
    """
    found = collectives_of(module)
    slices = _slices(mesh)
    if len(slices) == 1 or module.num_partitions * module.num_replicas == mesh.size:
        return found
    spread = [replace(c, groups=_in_all(c.groups, slices)) for c in found]
    return [*spread, *_transfers(module, slices)]


def meeting(instruction: Instruction) -> str:
    """The name under which a send and its receive meet; empty for other instructions."""
    if instruction.opcode not in ("send", "recv"):
        return ""
    found = _MEETING.search(instruction.attributes)
    return found[1] if found else ""


def _slices(mesh: Mesh) -> list[list[int]]:
    """The places in the mesh of the devices of each slice."""
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat):
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(position)
    return [slices[number] for number in sorted(slices)]


def _in_all(
    groups: DeviceGroups | DevicePairs, slices: Sequence[list[int]]
) -> DeviceGroups | DevicePairs:
    """The groups of one slice, in each of them."""
    if isinstance(groups, DevicePairs):
        pairs = groups.pairs
        return DevicePairs(tuple((s[a], s[b]) for s in slices for a, b in pairs))
    listed = groups.devices()
    return DeviceGroups.of_list([[s[d] for d in group] for s in slices for group in listed])


def _transfers(module: HloText, slices: Sequence[list[int]]) -> list[Collective]:
    runs = runs_of(module)
    return [
        replace(
            _transfer(module, computation, instruction, slices),
            times=runs[computation.name].times,
            times_known=runs[computation.name].known,
            conditional=runs[computation.name].conditional,
        )
        for computation in module.computations.values()
        if computation.name in runs
        for instruction in computation.instructions.values()
        if instruction.opcode == "send" and _TRANSFER.search(instruction.attributes)
    ]


def _transfer(
    module: HloText, computation: Computation, send: Instruction, slices: Sequence[list[int]]
) -> Collective:
    found = _TRANSFER.search(send.attributes)
    kind = _KINDS.get(found[1] if found else "", "collective-permute")
    operands = tuple(array_types(send.type)[:1])
    received = next(
        (
            i
            for i in computation.instructions.values()
            if i.opcode == "recv" and meeting(i) == meeting(send)
        ),
        None,
    )
    results = operands if received is None else tuple(array_types(received.type)[:1])
    user = None if received is None else told_user(module, computation, received)
    groups: DeviceGroups | DevicePairs = DeviceGroups.of_list(
        [list(group) for group in zip(*slices, strict=True)]
    )
    if kind == "collective-permute":
        turned = [*slices[1:], slices[0]]
        pairs = zip(slices, turned, strict=True)
        groups = DevicePairs(tuple(p for a, b in pairs for p in zip(a, b, strict=True)))
    return Collective(
        kind=kind,
        name=send.name,
        computation=computation.name,
        operands=operands,
        results=results,
        groups=groups,
        asynchronous=True,
        op_name=module.op_name(send),
        frames=module.frames(send),
        needed_by="" if user is None else module.op_name(user),
        needed_by_frames=() if user is None else module.frames(user),
    )
