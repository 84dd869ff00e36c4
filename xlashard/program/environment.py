"""Environment of a compiled program: versions, processor, devices and settings."""

import os
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
from xlashard.program.device_topology import (
    DeviceFacts,
    TorusFacts,
    device_differences,
    processes_of,
    torus_differences,
)
from xlashard.sharding import Mesh

type Flags = tuple[tuple[str, str], ...]
"""Names and texts of the environment variables with flags."""

_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FLAG_PREFIX = "--xla_"
NOT_COMPILED_IN = (
    *("--xla_dump_", "--xla_force_host_platform_device_count", "--xla_hlo_profile"),
    *("--xla_tpu_use_enhanced_launch_barrier", "--xla_gpu_cuda_data_dir", "--xla_cpu_collective_"),
    *("--xla_gpu_per_fusion_autotune_cache_dir", "--xla_gpu_kernel_cache_file"),
)
"""Flags that do not change the program: output folders, the number of host devices, and flags that
JAX sets on a TPU."""
_OF_PLATFORMS = {"cpu": "--xla_cpu_", "tpu": "--xla_tpu_", "gpu": "--xla_gpu_"}


@dataclass(frozen=True)
class Environment:
    """Versions, processor, devices and settings that a compiled program depends on.

    Attributes:
        jax: The version of JAX.
        jaxlib: The version of jaxlib.
        libtpu: The version of libtpu; empty for other platforms, and where unknown.
        platform: The platform of the devices: `"cpu"`, `"tpu"`, `"cuda"`.
        runtime: The version text of the platform's runtime.
        machine: The architecture of the processor that runs the program; empty for others.
        features: The features of this processor; empty for others.
        processes: Number of processes.
        torus: The torus of the devices, if any.
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
    def from_json(cls, record: Mapping[str, Any]) -> "Environment":
        """Parse `to_json`; raises `KeyError`, `TypeError` or `ValueError` for other values."""
        devices = tuple(map(DeviceFacts.from_json, record["devices"]))
        if not devices:
            # no-catalogue: needs an invalid header with a valid checksum
            raise ValueError("no devices")
        texts = ("jax", "jaxlib", "libtpu", "platform", "runtime", "machine")
        flags, settings = (
            tuple((str(name), str(value)) for name, value in record[field])
            for field in ("flags", "settings")
        )
        return cls(
            devices=devices,
            torus=TorusFacts.from_json(record["torus"]),
            processes=int(record["processes"]),
            features=tuple(map(str, record["features"])),
            flags=flags,
            settings=settings,
            **{name: str(record[name]) for name in texts},
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
class LoadTarget:
    """Devices and flags for the loading of a saved program.

    Attributes:
        devices: Devices to load it on; None for those with the same positions in the torus, or with
            the same ids.
        allow_other_flags: Whether the compiler's flags and settings may differ from those of its
            compilation, which it keeps.
    """

    devices: Sequence[Device] | Mesh | None = None
    allow_other_flags: bool = False


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


def _requested(saved: Environment, requested: Sequence[Device] | Mesh) -> tuple[Device, ...]:
    devices = requested._flat_devices_tuple if isinstance(requested, Mesh) else tuple(requested)
    if not all(isinstance(d, jax.Device) for d in devices):
        raise ArgumentError("devices must be a Mesh or a sequence of devices such as jax.devices()")
    if len(devices) != len(saved.devices):
        raise SavedProgramError(
            f"the saved program is for {len(saved.devices)} devices, and devices has "
            f"{len(devices)}: pass {len(saved.devices)} devices, or compile it for these"
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
    here = ", ".join(sorted({d.platform for d in jax.devices()}))
    advice = "compile and serialize() it again here"
    if saved.torus is not None:
        advice = (
            f"load it where its {len(saved.devices)} {saved.devices[0].kind} devices are, or to "
            "inspect it pass those of a topology, devices=xlashard.tpu.topology(...).devices"
        )
    return (
        f"the saved program was made for {saved.platform}, and this process has {here} only: "
        f"{advice}"
    )


def version_differences(saved: Environment, here: Mapping[str, str]) -> list[str]:
    """Return the differences of compiler versions, as texts."""
    pairs = ((name, getattr(saved, name), here[name]) for name in ("jaxlib", "jax", "libtpu"))
    return [
        f"it was made with {name} {old}, this is {name} {new}"
        for name, old, new in pairs
        if old != new and old and new
    ]


def differences(saved: Environment, here: Environment) -> list[str]:
    """Return the reasons why a saved program can't run in an environment, as texts."""
    found = version_differences(saved, {n: getattr(here, n) for n in ("jax", "jaxlib", "libtpu")})
    if saved.platform != here.platform:
        return [*found, f"it was made for the platform {saved.platform}, this is {here.platform}"]
    found += [
        f"it was made for {what} {old}, this is {new}"
        for what, old, new in (
            ("the runtime", _build(saved.runtime), _build(here.runtime)),
            ("the processor", saved.machine, here.machine),
        )
        if old != new
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

    Lines about the interface, which only real devices have, and about the generation of TPU, which
    the devices have, are left out.
    """
    lines = [line for line in runtime.splitlines() if not re.search("PJRT C API|TFRT TPU", line)]
    return " ".join(" ".join(lines).split()) or runtime


def _flag_differences(saved: Environment, here: Environment) -> list[str]:
    found = flag_differences(saved.flags, here.flags, saved.platform)
    old, new = dict(saved.settings), dict(here.settings)
    found += [
        f"it was compiled under {name}={old[name]}, which is {new[name]} here"
        for name in old
        if name in new and old[name] != new[name]
    ]
    if found:
        found[-1] += " (allow_other_flags=True loads it with the flags that it was compiled with)"
    return found


def flags_here() -> Flags:
    """Return the compiler flags of this process."""
    return tuple((name, os.environ[name]) for name in _FLAG_VARIABLES if os.environ.get(name))


def flag_differences(saved: Flags, here: Flags, platform: str) -> list[str]:
    """Return the differences of flags that affect the compilation for a platform, as texts.

    Args:
        saved: Flags of a program's compilation.
        here: Flags of another process.
        platform: `cpu`, `tpu`, `cuda`, ...
    """
    old, new = (_compiled_in(flags, platform) for flags in (saved, here))
    found = []
    for variable, name in dict.fromkeys([*old, *new]):
        was, now = old.get((variable, name)), new.get((variable, name))
        if was == now:
            continue
        if now is None:
            found.append(f"it was compiled with {name}={was} in {variable}, which is not set here")
        elif was is None:
            found.append(f"it was compiled without {name}, and {variable} has {name}={now} here")
        else:
            found.append(f"it was compiled with {name}={was} in {variable}, which is {now} here")
    return found


def _compiled_in(flags: Flags, platform: str) -> Mapping[tuple[str, str], str]:
    """Return the values of flags that matter, by variable and name; the last one counts."""
    own = platform if platform in ("cpu", "tpu") else "gpu"
    others = tuple(prefix for name, prefix in _OF_PLATFORMS.items() if name != own)
    found: dict[tuple[str, str], str] = {}
    for variable, text in flags:
        if variable == "LIBTPU_INIT_ARGS" and own != "tpu":
            continue
        for word in _flag_words(text):
            name, _, value = word.partition("=")
            if name.startswith(_FLAG_PREFIX) and not name.startswith((*NOT_COMPILED_IN, *others)):
                found[variable, name] = value or "true"
    return found


def _flag_words(text: str) -> list[str]:
    """Return the flags in a variable's text, or in the file that it names."""
    if text.lstrip().startswith("-"):
        return text.split()
    try:
        return Path(text.strip()).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []
