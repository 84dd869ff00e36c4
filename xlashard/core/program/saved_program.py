"""Serialization of compiled programs: executable, plan and closed-over values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import compress
from typing import Any

import jax

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.lowering import LoweredBody
from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.executables import describe, described
from xlashard._jax.runtime.global_state import unsupported
from xlashard._jax.runtime.shardings import Device, is_compile_only
from xlashard.core.program.consistency.fingerprint import ProgramFingerprint
from xlashard.core.program.environment import (
    DeviceFacts,
    Environment,
    LoadTarget,
    differences,
    version_differences,
    versions,
)
from xlashard.core.program.executables import LoadedExecutable
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan
from xlashard.core.program.saved_format import (
    Contents,
    ShardingReader,
    ShardingWriter,
    array_from_bytes,
    array_to_bytes,
    reading,
    type_from_json,
    type_to_json,
)
from xlashard.core.sharding import Mesh, XLACompatibleSharding
from xlashard.errors import ArgumentError, SavedProgramError, counted
from xlashard.support.documents import decode

_EXECUTABLE = "executable"
_DESCRIPTION = "description"

type Sections = dict[str, bytes | memoryview]


def save_program(program: CompiledProgram) -> tuple[dict[str, Any], Sections]:
    """Return a program as JSON, and the bytes that belong to it.

    Args:
        program: The program.

    Raises:
        SavedProgramError: It calls Python functions or refers to objects of this process, or its
            platform has no bytes of it.
    """
    plan, consts = program.plan, program.consts
    _check_self_contained(program)
    sections: Sections = {_EXECUTABLE: _executable_bytes(program)}
    if program.is_compile_only:
        sections[_DESCRIPTION] = describe(program.executable)
    for i, const in enumerate(consts):
        if not _is_whole(const):
            raise SavedProgramError(  # no-catalogue: needs several processes
                f"{program.name} closes over an array of the shape {const.shape} that is sharded "
                "over several processes, so that no process can write it: pass it as an argument"
            )
        sections[_const_name(i)] = array_to_bytes(const)
    writer = ShardingWriter()
    header = {
        "name": plan.name,
        "partitioner": plan.partitioner.value,
        "options": [list(option) for option in plan.options],
        "committed": program.committed,
        "consts": len(consts),
        "in": _values(writer, program.in_avals, program.in_shardings, plan.args),
        "out": _values(writer, program.out_avals, program.out_shardings, plan.results),
        "meshes": writer.meshes,
        "environment": asdict(Environment.of(plan.devices)),
    }
    if not plan.is_of_one_process:
        # Its processes compare this digest, since a saved program has no module.
        module = program.body.module
        header["module"] = modules.digest(module) if module else program.saved_digest
    return header, sections


def _is_whole(const: Any) -> bool:
    # For compile-only devices it was not placed, and may be a host array.
    return not isinstance(const, jax.Array) or (
        const.is_fully_addressable or const.is_fully_replicated
    )


def _check_self_contained(program: CompiledProgram) -> None:
    body = program.body
    if body.callbacks:
        raise SavedProgramError(
            f"{program.name} can't be saved: it calls the Python function"
            f"{'s' if len(body.callbacks) > 1 else ''} {', '.join(body.callbacks)}, which other "
            "processes lack: remove the callback, or compile it where it runs"
        )
    if not body.is_self_contained:
        raise SavedProgramError(  # no-catalogue: effects come with callbacks, refused before
            f"{program.name} can't be saved: it has effects, or refers to objects of this process: "
            "compile it where it runs"
        )


def _executable_bytes(program: CompiledProgram) -> bytes:
    try:
        return program.loaded.to_bytes()
    except RuntimeError as error:
        platform = program.plan.devices[0].platform
        raise SavedProgramError(  # no-catalogue: no supported compiler does this
            f"the runtime of {platform} has no bytes of {program.name}: {error}"
        ) from None


def _const_name(i: int) -> str:
    return f"const{i}"


def _values(
    writer: ShardingWriter,
    avals: Sequence[Any],
    shardings: Sequence[XLACompatibleSharding],
    plans: Sequence[ValuePlan],
) -> list[dict[str, Any]]:
    return [
        type_to_json(aval)
        | {
            "sharding": writer.write(sharding, len(aval.shape)),
            "name": plan.name,
            "layout": plan.layout,
            "memory": plan.memory_kind,
        }
        for aval, sharding, plan in zip(avals, shardings, plans, strict=True)
    ]


def load_program(
    header: Mapping[str, Any],
    contents: Contents,
    target: LoadTarget,
    arguments: tuple[tuple[bool, ...], Sequence[bool]],
) -> CompiledProgram:
    """Return the program of the JSON and sections of `save_program`.

    All checks precede the use of the bytes by PJRT.

    Args:
        header: The JSON.
        contents: The file.
        target: Devices and flags of the caller.
        arguments: For each argument of a call, whether the program takes it, and whether it is
            donated.

    Raises:
        ArgumentError: The target's devices are invalid.
        SavedProgramError: It was compiled for another environment, or is inconsistent.
    """
    with reading():
        environment = decode(Environment, header["environment"])
    chosen = find_devices(environment, target)
    with reading():
        shardings, count = ShardingReader(header["meshes"], chosen), int(header["consts"])
        ins, outs = (_read_values(header[side], shardings) for side in ("in", "out"))
        plan = ProgramPlan(
            name=str(header["name"]),
            devices=chosen,
            args=tuple(plan for plan, _ in ins),
            results=tuple(plan for plan, _ in outs),
            donated=(*(False,) * count, *compress(arguments[1], arguments[0])),
            partitioner=Partitioner(header["partitioner"]),
            options=tuple((str(name), value) for name, value in header["options"]),
        )
        values = [
            array_from_bytes(contents.sections[_const_name(i)], ins[i][1]) for i in range(count)
        ]
        machine_code = bytes(contents.sections[_EXECUTABLE])
        loaded = LoadedExecutable(machine_code)
        program = CompiledProgram(
            loaded=loaded,
            plan=plan,
            in_shardings=_stored_shardings(plan.args),
            out_shardings=_stored_shardings(plan.results),
            in_avals=tuple(aval for _, aval in ins),
            out_avals=tuple(aval for _, aval in outs),
            committed=bool(header["committed"]),
            body=LoweredBody(),
            kept=arguments[0],
            source="a file",
            saved_digest=str(header.get("module", "")),
        )
    _check_widths(program)
    if is_compile_only(chosen[0]):
        loaded.load(partial(_describe, contents, plan))
    else:
        loaded.load(partial(_load, machine_code, plan))
    if not plan.is_of_one_process:
        program.fingerprint = ProgramFingerprint(plan, saved=program.saved_digest)
    layouts = compiler.raw_layouts(loaded.executable)
    if layouts is not None and tuple(map(len, layouts)) != (len(ins), len(outs)):
        raise SavedProgramError(
            f"the saved program's header has {len(ins)} arguments and {len(outs)} results, "
            f"its executable has {len(layouts[0])} and {len(layouts[1])}: serialize() it again"
        )
    program.consts = program.keep(values)
    return program


def _check_widths(program: CompiledProgram) -> None:
    wide = {str(aval.dtype) for aval in unsupported((*program.in_avals, *program.out_avals))}
    if wide:
        raise SavedProgramError(
            f"the saved program {program.name} has {', '.join(sorted(wide))} values, "
            "which JAX supports only with jax_enable_x64: write "
            "jax.config.update('jax_enable_x64', True) before deserialize()"
        )


def _stored_shardings(values: Sequence[ValuePlan]) -> tuple[XLACompatibleSharding, ...]:
    return tuple(value.sharding for value in values if value.sharding is not None)


def _read_values(
    records: Sequence[Mapping[str, Any]], shardings: ShardingReader
) -> list[tuple[ValuePlan, Any]]:
    values = []
    for value in records:
        sharding = shardings.read(value["sharding"])
        aval = type_from_json(value, sharding)
        sharding.is_compatible_aval(aval.shape)
        plan = ValuePlan(
            shape=aval.shape,
            dtype=str(aval.dtype),
            sharding=sharding,
            layout=value["layout"],
            memory_kind=value["memory"],
            name=str(value["name"]),
        )
        values.append((plan, aval))
    return values


def _describe(contents: Contents, plan: ProgramPlan) -> Any:
    """Return an offline executable for compile-only devices."""
    if _DESCRIPTION not in contents.sections:
        raise SavedProgramError(
            f"the saved program {plan.function_name} was compiled on its devices, and the "
            "devices of a topology can't load it: load it there, or compile it for the topology to "
            "inspect it"
        )
    with reading():
        return described(contents.sections[_DESCRIPTION])


def _load(machine_code: bytes, plan: ProgramPlan) -> Any:
    try:
        return executables.from_bytes(machine_code, plan.devices, len(plan.args))
    except RuntimeError as error:
        platform = plan.devices[0].platform
        raise SavedProgramError(  # no-catalogue: no supported compiler does this
            f"the runtime of {platform} can't load {plan.function_name}: {error}; compile and "
            "serialize() it again here"
        ) from None


def find_devices(saved: Environment, target: LoadTarget) -> tuple[Device, ...]:
    """Return the devices for a saved program, checked against its environment.

    Args:
        saved: Environment of its compilation.
        target: Devices and flags of the caller.

    Raises:
        ArgumentError: The target's devices are invalid.
        SavedProgramError: The environments differ; with all differences.
    """
    try:
        devices = (
            _same_devices(saved) if target.devices is None else _requested(saved, target.devices)
        )
    except SavedProgramError:
        # A program of other versions fails on any devices.
        _refuse(version_differences(saved, versions(saved.platform)))
        raise
    current = Environment.of(devices)
    if target.allow_other_flags:
        current = replace(current, flags=saved.flags, settings=saved.settings)
    _refuse(differences(saved, current))
    return devices


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        raise SavedProgramError(
            f"the saved program does not fit this process: {'; '.join(reasons)}. Compile and "
            "serialize() it again here"
        )


def _requested(saved: Environment, requested: Sequence[Device] | Mesh) -> tuple[Device, ...]:
    devices = requested._flat_devices_tuple if isinstance(requested, Mesh) else tuple(requested)
    if not all(isinstance(d, jax.Device) for d in devices):
        raise ArgumentError("devices must be a Mesh or a sequence of devices such as jax.devices()")
    if len(devices) != len(saved.devices):
        needed = counted(len(saved.devices), "device")
        raise SavedProgramError(
            f"the saved program is for {needed}, and devices has {len(devices)}: pass {needed}, or "
            "compile it for these"
        )
    return devices


def _same_devices(saved: Environment) -> tuple[Device, ...]:
    """Return the devices at the same positions of the torus, else those with the same ids."""
    try:
        all_here = jax.devices(saved.platform)
    except RuntimeError:
        raise SavedProgramError(_other_platform(saved)) from None
    if saved.devices[0].coords:
        placed = {DeviceFacts.of(d).position: d for d in all_here}
        if all(d.position in placed for d in saved.devices):
            return tuple(placed[d.position] for d in saved.devices)
    known = {d.id: d for d in all_here}
    missing = [str(d.id) for d in saved.devices if d.id not in known]
    if not missing:
        return tuple(known[d.id] for d in saved.devices)
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    advice = "compile and serialize() it again for the devices at hand"
    if len(known) >= len(saved.devices):
        advice = f"pass other devices, devices=jax.devices()[:{len(saved.devices)}]"
    raise SavedProgramError(
        f"the saved program was made for {len(saved.devices)} {saved.platform} devices, of which "
        f"this process, having {len(known)}, lacks number {shown}: {advice}"
    )


def _other_platform(saved: Environment) -> str:
    platforms = ", ".join(sorted({d.platform for d in jax.devices()}))
    advice = "compile and serialize() it again here"
    if saved.torus is not None or saved.platform == "gpu":
        advice = (
            f"load it where its {len(saved.devices)} {saved.devices[0].kind} devices are, or to "
            "inspect it pass those of a topology, "
            f"devices=xlashard.{saved.platform}.topology(...).devices"
        )
    return (
        f"the saved program was made for {saved.platform}, and this process has {platforms} only: "
        f"{advice}"
    )
