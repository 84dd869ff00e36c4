"""What a compiled program depends on besides its source, and how two of those differ."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

from xlashard._jax import executables
from xlashard._jax.shardings import Device
from xlashard.errors import ArgumentError, SavedProgramError
from xlashard.sharding import Mesh

# They decide how a program is compiled. It keeps what it was compiled with, so they are written
# down for whoever wants to know, and not compared.
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclass(frozen=True)
class DeviceFacts:
    """What a program depends on of one of its devices.

    Attributes:
        id: Its number.
        process: The process that it belongs to.
        kind: What it is, such as `"TPU v4"`.
        coords: Where in its torus it is; empty for devices without such places.
        core: Which core of its chip it is.
    """

    id: int
    process: int
    kind: str
    coords: tuple[int, ...]
    core: int


@dataclass(frozen=True)
class Environment:
    """What a compiled program depends on besides its source.

    Attributes:
        jax: The version of JAX.
        jaxlib: The version of jaxlib.
        platform: The platform of the devices: `"cpu"`, `"tpu"`, `"cuda"`.
        runtime: What the platform's runtime says of its version.
        machine: The architecture of the processor, where that runs the program; else empty.
        features: What that processor can do, likewise.
        processes: How many processes there are.
        devices: The devices, in the program's order.
        flags: Flags of the compiler, by the environment variable that sets them.
    """

    jax: str
    jaxlib: str
    platform: str
    runtime: str
    machine: str
    features: tuple[str, ...]
    processes: int
    devices: tuple[DeviceFacts, ...]
    flags: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Environment":
        """That of a program compiled here and now for devices."""
        versions = executables.versions()
        first = devices[0]
        on_host = first.platform == "cpu"
        return cls(
            jax=versions[0],
            jaxlib=versions[1],
            platform=first.platform,
            runtime=first.client.platform_version,
            machine=platform.machine() if on_host else "",
            features=_processor_features() if on_host else (),
            processes=jax.process_count(),
            devices=tuple(map(_facts, devices)),
            flags=tuple((n, os.environ[n]) for n in _FLAG_VARIABLES if os.environ.get(n)),
        )

    def to_json(self) -> dict[str, Any]:
        """It as JSON says it."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Environment":
        """What `to_json` gave; raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        devices = tuple(
            DeviceFacts(
                id=int(d["id"]),
                process=int(d["process"]),
                kind=str(d["kind"]),
                coords=tuple(map(int, d["coords"])),
                core=int(d["core"]),
            )
            for d in said["devices"]
        )
        if not devices:
            raise ValueError("no devices")
        return cls(
            devices=devices,
            processes=int(said["processes"]),
            features=tuple(map(str, said["features"])),
            flags=tuple((str(name), str(value)) for name, value in said["flags"]),
            **{n: str(said[n]) for n in ("jax", "jaxlib", "platform", "runtime", "machine")},
        )


def _facts(device: Device) -> DeviceFacts:
    return DeviceFacts(
        id=device.id,
        process=device.process_index,
        kind=device.device_kind,
        # Only devices in a torus have them.
        coords=tuple(getattr(device, "coords", None) or ()),
        core=getattr(device, "core_on_chip", None) or 0,
    )


@lru_cache(maxsize=1)
def _processor_features() -> tuple[str, ...]:
    """What the processor can do, as Linux says it; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(value.split()))
    return ()


def find_devices(saved: Environment, asked: Sequence[Device] | Mesh | None) -> tuple[Device, ...]:
    """The devices on which a saved program is to run, once they are known to be right for it.

    Args:
        saved: Of the saved program.
        asked: Devices in the place of the saved ones, in the program's order; None for the devices
            of the same numbers.

    Raises:
        ArgumentError: If what was asked for are no devices.
        SavedProgramError: If the program was made for something else, with all differences.
    """
    _refuse(_software_differences(saved), saved)
    if asked is None:
        devices = _same_numbers(saved)
    else:
        devices = asked._flat_devices_tuple if isinstance(asked, Mesh) else tuple(asked)
        if not all(isinstance(d, jax.Device) for d in devices):
            raise ArgumentError(
                "devices must be a Mesh or a sequence of devices such as jax.devices()"
            )
        if len(devices) != len(saved.devices):
            raise SavedProgramError(
                f"the saved program is for {len(saved.devices)} devices, and {len(devices)} were "
                "given: give as many, or compile it for these"
            )
    _refuse(differences(saved, Environment.of(devices)), saved)
    return devices


def _refuse(differences: Sequence[str], saved: Environment) -> None:
    if differences:
        raise SavedProgramError(
            "the saved program does not fit this process: "
            + "; ".join(differences)
            + ". Compile and serialize() it again here"
        )


def _software_differences(saved: Environment) -> list[str]:
    jax_version, jaxlib_version = executables.versions()
    pairs = (("jaxlib", saved.jaxlib, jaxlib_version), ("jax", saved.jax, jax_version))
    return [
        f"it was made with {what} {theirs}, this is {what} {ours}"
        for what, theirs, ours in pairs
        if theirs != ours
    ]


def _same_numbers(saved: Environment) -> tuple[Device, ...]:
    try:
        known = {d.id: d for d in jax.devices(saved.platform)}
    except RuntimeError:
        here = ", ".join(sorted({d.platform for d in jax.devices()}))
        raise SavedProgramError(
            f"the saved program was made for {saved.platform}, and this process has {here} only: "
            "compile and serialize() it again here"
        ) from None
    missing = [str(d.id) for d in saved.devices if d.id not in known]
    if not missing:
        return tuple(known[d.id] for d in saved.devices)
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    advice = "compile and serialize() it again for the devices at hand"
    if len(known) >= len(saved.devices):
        advice = f"give others in their place, devices=jax.devices()[:{len(saved.devices)}]"
    raise SavedProgramError(
        f"the saved program was made for {len(saved.devices)} {saved.platform} devices, of which "
        f"this process, having {len(known)}, lacks number {shown}: {advice}"
    )


def differences(saved: Environment, here: Environment) -> list[str]:
    """Why a program that was made for some devices can't run on others, in words; often nothing."""
    found = [
        f"it was made for {what} {theirs}, this is {ours}"
        for what, theirs, ours in (
            ("the platform", saved.platform, here.platform),
            ("the runtime", _line(saved.runtime), _line(here.runtime)),
            ("the processor", saved.machine, here.machine),
        )
        if theirs != ours
    ]
    lacking = [f for f in saved.features if f not in set(here.features)]
    if lacking and saved.machine == here.machine:
        shown = ", ".join(lacking[:6]) + (", ..." if len(lacking) > 6 else "")
        found.append(f"it was made for a processor with {shown}, which this one lacks")
    if saved.processes != here.processes:
        found.append(f"it was made for {saved.processes} processes, these are {here.processes}")
    return found or _device_differences(saved.devices, here.devices)


def _line(text: str) -> str:
    return " ".join(text.split())


def _device_differences(saved: Sequence[DeviceFacts], here: Sequence[DeviceFacts]) -> list[str]:
    for i, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
        if theirs.kind != ours.kind:
            return [f"its device {i} was made for a {theirs.kind}, this is a {ours.kind}"]
        if theirs.process != ours.process:
            return [
                f"its device {i} belonged to process {theirs.process}, this one to process "
                f"{ours.process}"
            ]
        place, other = _offset(theirs, saved[0]), _offset(ours, here[0])
        if place != other:
            return [
                f"its device {i} was at {theirs.coords} in the torus, core {theirs.core}, its "
                f"first one at {saved[0].coords}; here they are at {ours.coords}, core "
                f"{ours.core}, and {here[0].coords}"
            ]
    return []


def _offset(device: DeviceFacts, first: DeviceFacts) -> tuple[int, ...]:
    """Where a device is, seen from the first one: a program may move, but not be bent."""
    if len(device.coords) != len(first.coords):
        return (*device.coords, device.core)
    return (*(a - b for a, b in zip(device.coords, first.coords, strict=True)), device.core)
