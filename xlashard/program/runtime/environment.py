"""What a compiled program depends on besides its source, and how two of those differ."""

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import libtpu_in_use
from xlashard.errors import ArgumentError, SavedProgramError
from xlashard.lazily import dataclass
from xlashard.program.runtime.device_topology import (
    DeviceFacts,
    TorusFacts,
    device_differences,
    processes_of,
    torus_differences,
)
from xlashard.program.runtime.flags import Flags, flag_differences, flags_here
from xlashard.sharding import Mesh


@dataclass(frozen=True)
class Environment:
    """What a compiled program depends on besides its source.

    Attributes:
        jax: The version of JAX.
        jaxlib: The version of jaxlib.
        libtpu: The version of libtpu; empty for other platforms, and where nobody knows it.
        platform: The platform of the devices: `"cpu"`, `"tpu"`, `"cuda"`.
        runtime: What the platform's runtime says of its version.
        machine: The architecture of the processor, where that runs the program; else empty.
        features: What that processor can do, likewise.
        processes: How many processes there are.
        torus: The torus that the devices are part of, if they are.
        devices: The devices, in the program's order.
        flags: Flags of the compiler, by the environment variable that sets them.
        settings: Settings of JAX that reach the compiler, by name.
    """

    jax: str
    jaxlib: str
    libtpu: str
    platform: str
    runtime: str
    machine: str
    features: tuple[str, ...]
    processes: int
    torus: TorusFacts | None
    devices: tuple[DeviceFacts, ...]
    flags: Flags
    settings: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Environment":
        """Return the environment of a program compiled now for devices."""
        first = devices[0]
        on_host = first.platform == "cpu"
        return cls(
            **_versions(first.platform),
            platform=first.platform,
            runtime=first.client.platform_version,
            machine=platform.machine() if on_host else "",
            features=_processor_features() if on_host else (),
            processes=processes_of(first),
            torus=TorusFacts.of(first),
            devices=tuple(map(DeviceFacts.of, devices)),
            flags=flags_here(),
            settings=_settings(first),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Environment":
        """Parse `to_json`; raises `KeyError`, `TypeError` or `ValueError` for other values."""
        devices = tuple(map(DeviceFacts.from_json, said["devices"]))
        if not devices:
            # no-catalogue: needs an invalid header with a valid checksum
            raise ValueError("no devices")
        texts = ("jax", "jaxlib", "libtpu", "platform", "runtime", "machine")
        flags, settings = (
            tuple((str(name), str(value)) for name, value in said[field])
            for field in ("flags", "settings")
        )
        return cls(
            devices=devices,
            torus=TorusFacts.from_json(said["torus"]),
            processes=int(said["processes"]),
            features=tuple(map(str, said["features"])),
            flags=flags,
            settings=settings,
            **{name: str(said[name]) for name in texts},
        )


def _versions(platform: str) -> dict[str, str]:
    libtpu = libtpu_in_use() if platform == "tpu" else None
    return {"jax": jax.__version__, "jaxlib": executables.jaxlib_version(), "libtpu": libtpu or ""}


def _settings(device: Device) -> tuple[tuple[str, str], ...]:
    return tuple(compiler.default_settings(device).items())


@lru_cache(maxsize=1)
def _processor_features() -> tuple[str, ...]:
    """Return the processor's features as reported by Linux; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(value.split()))
    return ()


@dataclass(frozen=True)
class Target:
    """Where a saved program is to run.

    Attributes:
        devices: Devices in the place of those that it was compiled for; None for those in the same
            places of the torus, or of the same numbers.
        allow_other_flags: Whether flags and settings of the compiler may be others than those that
            it was compiled with, and keeps.
    """

    devices: Sequence[Device] | Mesh | None = None
    allow_other_flags: bool = False


def find_devices(saved: Environment, target: Target) -> tuple[Device, ...]:
    """Return the devices for a saved program, checked against its environment.

    Args:
        saved: What it was compiled for.
        target: Where it is to run.

    Raises:
        ArgumentError: If the target's devices are none.
        SavedProgramError: If the program was made for something else, with all differences.
    """
    try:
        devices = _same_devices(saved) if target.devices is None else _given(saved, target.devices)
    except SavedProgramError:
        # Of another version it would not run on the right ones either.
        _refuse(version_differences(saved, _versions(saved.platform)))
        raise
    here = Environment.of(devices)
    if target.allow_other_flags:
        here = replace(here, flags=saved.flags, settings=saved.settings)
    _refuse(differences(saved, here))
    return devices


def _refuse(found: Sequence[str]) -> None:
    if found:
        raise SavedProgramError(
            f"the saved program does not fit this process: {'; '.join(found)}. Compile and "
            "serialize() it again here"
        )


def _given(saved: Environment, asked: Sequence[Device] | Mesh) -> tuple[Device, ...]:
    devices = asked._flat_devices_tuple if isinstance(asked, Mesh) else tuple(asked)
    if not all(isinstance(d, jax.Device) for d in devices):
        raise ArgumentError("devices must be a Mesh or a sequence of devices such as jax.devices()")
    if len(devices) != len(saved.devices):
        raise SavedProgramError(
            f"the saved program is for {len(saved.devices)} devices, and {len(devices)} were "
            "given: give as many, or compile it for these"
        )
    return devices


def _same_devices(saved: Environment) -> tuple[Device, ...]:
    """Return the devices in the same places of the torus, else those of the same numbers."""
    try:
        all_here = jax.devices(saved.platform)
    except RuntimeError:
        raise SavedProgramError(_other_platform(saved)) from None
    if saved.devices[0].coords:
        placed = {DeviceFacts.of(d).place: d for d in all_here}
        if all(d.place in placed for d in saved.devices):
            return tuple(placed[d.place] for d in saved.devices)
    known = {d.id: d for d in all_here}
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


def _other_platform(saved: Environment) -> str:
    here = ", ".join(sorted({d.platform for d in jax.devices()}))
    advice = "compile and serialize() it again here"
    if saved.torus is not None:
        advice = (
            f"load it where its {len(saved.devices)} {saved.devices[0].kind} devices are, or to "
            "look at it give those of a topology, devices=xlashard.tpu.topology(...).devices"
        )
    return (
        f"the saved program was made for {saved.platform}, and this process has {here} only: "
        f"{advice}"
    )


def version_differences(saved: Environment, here: Mapping[str, str]) -> list[str]:
    """Return the differences of compiler versions, as texts."""
    pairs = ((name, getattr(saved, name), here[name]) for name in ("jaxlib", "jax", "libtpu"))
    return [
        f"it was made with {name} {theirs}, this is {name} {ours}"
        for name, theirs, ours in pairs
        if theirs != ours and theirs and ours
    ]


def differences(saved: Environment, here: Environment) -> list[str]:
    """Return the reasons why a saved program can't run in an environment, as texts."""
    found = version_differences(saved, {n: getattr(here, n) for n in ("jax", "jaxlib", "libtpu")})
    if saved.platform != here.platform:
        return [*found, f"it was made for the platform {saved.platform}, this is {here.platform}"]
    found += [
        f"it was made for {what} {theirs}, this is {ours}"
        for what, theirs, ours in (
            ("the runtime", _build(saved.runtime), _build(here.runtime)),
            ("the processor", saved.machine, here.machine),
        )
        if theirs != ours
    ]
    lacking = [f for f in saved.features if f not in set(here.features)]
    if lacking and saved.machine == here.machine:
        shown = ", ".join(lacking[:6]) + (", ..." if len(lacking) > 6 else "")
        found.append(f"it was made for a processor with {shown}, which this one lacks")
    found += _flag_differences(saved, here)
    found += torus_differences(saved.torus, here.torus)
    if saved.processes != here.processes:
        found.append(f"it was made for {saved.processes} processes, these are {here.processes}")
    return found + device_differences(saved.devices, here.devices)


def _build(runtime: str) -> str:
    """Return the build of a runtime, in one line.

    Which interface it is reached by is said by real devices, and not by those of a topology; which
    generation of TPU it drives is known from the devices.
    """
    said = [line for line in runtime.splitlines() if not re.search("PJRT C API|TFRT TPU", line)]
    return " ".join(" ".join(said).split()) or runtime


def _flag_differences(saved: Environment, here: Environment) -> list[str]:
    found = flag_differences(saved.flags, here.flags, saved.platform)
    theirs, ours = dict(saved.settings), dict(here.settings)
    found += [
        f"it was compiled under {name}={theirs[name]}, which is {ours[name]} here"
        for name in theirs
        if name in ours and theirs[name] != ours[name]
    ]
    if found:
        found[-1] += " (allow_other_flags=True loads it with the flags that it was compiled with)"
    return found
