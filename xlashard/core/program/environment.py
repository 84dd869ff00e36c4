"""Environment of a compiled program: versions, processor, devices and settings."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import jax

from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import Device, is_compile_only, slice_of
from xlashard._jax.runtime.topologies import find_cuda_plugin, libtpu_in_use, torus_wraps
from xlashard.core.sharding import Mesh
from xlashard.errors import counted
from xlashard.support.lazily import dataclass

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
class DeviceFacts:
    """Facts of a device that a compiled program depends on.

    Attributes:
        id: Its number.
        process: Its process.
        kind: Its kind, such as `"TPU v4"`.
        coords: Its coordinates in the torus; empty for other devices.
        core: Its core on the chip.
        slice: Its slice, for slices that are joined by a network.
        capability: Compute capability of a GPU, such as `"9.0"`; empty for other devices.
    """

    id: int
    process: int
    kind: str
    coords: tuple[int, ...]
    core: int
    slice: int = 0
    capability: str = ""

    @classmethod
    def of(cls, device: Device) -> "DeviceFacts":
        """Return the facts of a device."""
        is_gpu = device.platform == "gpu"
        return cls(
            id=device.id,
            process=device.process_index,
            kind=device.device_kind,
            # Only devices in a torus have coordinates; those of a GPU are its node and number, and
            # differ between a topology and real devices.
            coords=() if is_gpu else tuple(getattr(device, "coords", None) or ()),
            core=getattr(device, "core_on_chip", None) or 0,
            slice=slice_of(device),
            capability=str(getattr(device, "compute_capability", "")) if is_gpu else "",
        )

    @property
    def position(self) -> tuple[int, ...]:
        """Return its position among all devices of its torus."""
        return self.slice, *self.coords, self.core

    def __str__(self) -> str:
        core = f", core {self.core}" if self.core else ""
        of_slice = f" of slice {self.slice}" if self.slice else ""
        return f"{self.coords}{core}{of_slice}"


@dataclass(frozen=True)
class TorusFacts:
    """Facts of the whole torus of a program's devices.

    Attributes:
        shape: Chips along each dimension, in each slice.
        slices: Number of slices.
        devices: Number of devices, in all slices.
        wraps: Whether the links of each dimension close to a ring; empty where the shape
            determines it.
    """

    shape: tuple[int, ...]
    slices: int
    devices: int
    wraps: tuple[bool, ...]

    @classmethod
    def of(cls, device: Device) -> "TorusFacts | None":
        """Return the facts of a device's torus; None for a device outside of a torus."""
        if not DeviceFacts.of(device).coords:
            return None
        facts = [DeviceFacts.of(other) for other in device.client.devices()]
        return cls(
            shape=tuple(max(along) + 1 for along in zip(*(f.coords for f in facts), strict=True)),
            slices=len({f.slice for f in facts}),
            devices=len(facts),
            wraps=torus_wraps(device),
        )

    def __str__(self) -> str:
        slices = f"{self.slices} slices of " if self.slices > 1 else ""
        shape = "x".join(map(str, self.shape))
        return f"{slices}{shape} chips with {counted(self.devices, 'device')}"


def _process_count(device: Device) -> int:
    """Return the number of processes of a device's client."""
    if is_compile_only(device):
        return len({other.process_index for other in device.client.devices()})
    return jax.process_count()


@dataclass(frozen=True)
class Environment:
    """Versions, processor, devices and settings that a compiled program depends on.

    Attributes:
        jax: The version of JAX.
        jaxlib: The version of jaxlib.
        libtpu: The version of libtpu; empty for other platforms, and where unknown.
        platform: The platform of the devices: `"cpu"`, `"tpu"`, `"gpu"`.
        runtime: The version text of the platform's runtime.
        machine: The architecture of the processor that runs the program; empty for others.
        features: The features of this processor; empty for others.
        processes: Number of processes.
        torus: The torus of the devices, if any.
        devices: The devices, in the program's order.
        flags: Flags of the compiler, by the environment variable that sets them.
        settings: Settings of JAX that reach the compiler, by name.
        plugin: Package and version of JAX's CUDA plugin; empty for other platforms.
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
    plugin: str = ""

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Environment":
        """Return the environment of a program compiled now for devices."""
        first = devices[0]
        on_host = first.platform == "cpu"
        return cls(
            **versions(first.platform),
            platform=first.platform,
            runtime=_runtime(first),
            machine=platform.machine() if on_host else "",
            features=_processor_features() if on_host else (),
            processes=_process_count(first),
            torus=TorusFacts.of(first),
            devices=tuple(map(DeviceFacts.of, devices)),
            flags=flags_here(),
            settings=tuple(compiler.default_settings(first).items()),
        )

    def __post_init__(self) -> None:
        if not self.devices:
            # no-catalogue: needs an invalid header with a valid checksum
            raise ValueError("no devices")


def versions(platform: str) -> dict[str, str]:
    """Return the versions of the compiler's packages."""
    libtpu = libtpu_in_use() if platform == "tpu" else None
    plugin = find_cuda_plugin() if platform == "gpu" else None
    return {
        "jax": jax.__version__,
        "jaxlib": executables.jaxlib_version(),
        "libtpu": libtpu or "",
        "plugin": f"{plugin[0]} {plugin[2]}" if plugin else "",
    }


def _runtime(device: Device) -> str:
    """Return the version text of the runtime of a device."""
    plugin = find_cuda_plugin()
    if device.platform == "gpu" and is_compile_only(device) and plugin:
        # The client of a topology reports the name of the GPU; real ones report CUDA's version.
        return f"cuda {plugin[1]}000"
    return device.client.platform_version


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


def version_differences(saved: Environment, current: Mapping[str, str]) -> list[str]:
    """Return the differences of compiler versions, as texts."""
    names = ("jaxlib", "jax", "libtpu", "plugin")
    pairs = ((name, getattr(saved, name), current[name]) for name in names)
    return [
        f"it was made with {name} {old}, this is {name} {new}"
        for name, old, new in pairs
        if old != new and old and new
    ]


def differences(saved: Environment, current: Environment) -> list[str]:
    """Return the reasons why a saved program can't run in an environment, as texts."""
    texts = version_differences(saved, vars(current))
    if saved.platform != current.platform:
        return [
            *texts,
            f"it was made for the platform {saved.platform}, this is {current.platform}",
        ]
    texts += [
        f"it was made for {what} {old}, this is {new}"
        for what, old, new in (
            ("the runtime", _build(saved.runtime), _build(current.runtime)),
            ("the processor", saved.machine, current.machine),
        )
        if old != new
    ]
    lacking = [f for f in saved.features if f not in set(current.features)]
    if lacking and saved.machine == current.machine:
        shown = ", ".join(lacking[:6]) + (", ..." if len(lacking) > 6 else "")
        texts.append(f"it was made for a processor with {shown}, which this one lacks")
    texts += _flag_differences(saved, current)
    texts += torus_differences(saved.torus, current.torus)
    if saved.processes != current.processes:
        texts.append(f"it was made for {saved.processes} processes, these are {current.processes}")
    return texts + device_differences(saved.devices, current.devices)


def _build(runtime: str) -> str:
    """Return the build of a runtime, in one line.

    Lines about the interface, which only real devices have, and about the generation of TPU, which
    the devices have, are left out; of CUDA's version the major number counts.
    """
    if cuda := re.search(r"\bcuda (\d+)", runtime):
        return f"cuda {int(cuda[1]) // 1000}"
    lines = [line for line in runtime.splitlines() if not re.search("PJRT C API|TFRT TPU", line)]
    return " ".join(" ".join(lines).split()) or runtime


def _flag_differences(saved: Environment, current: Environment) -> list[str]:
    texts = flag_differences(saved.flags, current.flags, saved.platform)
    old, new = dict(saved.settings), dict(current.settings)
    texts += [
        f"it was compiled under {name}={old[name]}, which is {new[name]} here"
        for name in old
        if name in new and old[name] != new[name]
    ]
    if texts:
        texts[-1] += " (allow_other_flags=True loads it with the flags that it was compiled with)"
    return texts


def flags_here() -> Flags:
    """Return the compiler flags of this process."""
    return tuple((name, os.environ[name]) for name in _FLAG_VARIABLES if os.environ.get(name))


def flag_differences(saved: Flags, current: Flags, platform: str) -> list[str]:
    """Return the differences of flags that affect the compilation for a platform, as texts.

    Args:
        saved: Flags of a program's compilation.
        current: Flags of another process.
        platform: `cpu`, `tpu`, `cuda`, ...
    """
    old, new = (_compiled_in(flags, platform) for flags in (saved, current))
    texts = []
    for variable, name in dict.fromkeys([*old, *new]):
        was, now = old.get((variable, name)), new.get((variable, name))
        if was == now:
            continue
        if now is None:
            texts.append(f"it was compiled with {name}={was} in {variable}, which is not set here")
        elif was is None:
            texts.append(f"it was compiled without {name}, and {variable} has {name}={now} here")
        else:
            texts.append(f"it was compiled with {name}={was} in {variable}, which is {now} here")
    return texts


def _compiled_in(flags: Flags, platform: str) -> Mapping[tuple[str, str], str]:
    """Return the values of flags that matter, by variable and name; the last one counts."""
    own = platform if platform in ("cpu", "tpu") else "gpu"
    others = tuple(prefix for name, prefix in _OF_PLATFORMS.items() if name != own)
    values: dict[tuple[str, str], str] = {}
    for variable, text in flags:
        if variable == "LIBTPU_INIT_ARGS" and own != "tpu":
            continue
        for word in _flag_words(text):
            name, _, value = word.partition("=")
            if name.startswith(_FLAG_PREFIX) and not name.startswith((*NOT_COMPILED_IN, *others)):
                values[variable, name] = value or "true"
    return values


def _flag_words(text: str) -> list[str]:
    """Return the flags in a variable's text, or in the file that it names."""
    if text.lstrip().startswith("-"):
        return text.split()
    try:
        return Path(text.strip()).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []


def torus_differences(saved: TorusFacts | None, current: TorusFacts | None) -> list[str]:
    """Return the differences of two topologies, as texts."""
    if saved is None or current is None:
        return []
    texts = []
    if (saved.shape, saved.slices, saved.devices) != (
        current.shape,
        current.slices,
        current.devices,
    ):
        texts.append(f"it was made for a topology of {saved}, this is one of {current}")
    elif saved.wraps and current.wraps and saved.wraps != current.wraps:
        texts.append(
            f"it was made for a topology that wraps {_dimensions(saved.wraps)}, this one wraps "
            f"{_dimensions(current.wraps)}"
        )
    return texts


def _dimensions(wraps: Sequence[bool]) -> str:
    names = [name for name, wrap in zip("xyz", wraps, strict=False) if wrap]
    return f"along {' and '.join(names)}" if names else "nowhere"


def device_differences(saved: Sequence[DeviceFacts], current: Sequence[DeviceFacts]) -> list[str]:
    """Return the differences of two device lists, as texts; the first example of each kind.

    A program may move within the torus, if its devices keep their relative positions.
    """
    pairs = list(enumerate(zip(saved, current, strict=True)))
    for i, (old, new) in pairs:
        if not _is_same_kind(old, new):
            return [f"its device {i} was made for a {old.kind}, this is a {new.kind}"]
        if old.capability != new.capability:
            return [
                f"its device {i} was made for compute capability {old.capability}, this has "
                f"{new.capability}"
            ]
    texts = _order_difference(saved, current) or _place_difference(saved, current)
    for i, (old, new) in pairs:
        if old.process != new.process and not texts:
            texts.append(
                f"its device {i} belonged to process {old.process}, this one to process "
                f"{new.process}"
            )
    return texts


def _is_same_kind(saved: DeviceFacts, current: DeviceFacts) -> bool:
    """Return whether devices are of one kind; of GPUs, one name may end before the other.

    An H200 is `NVIDIA H200` to its driver, and `NVIDIA H200 141GB HBM3e` to XLA. A part of a GPU
    (MIG) has the name of the whole before its own.
    """
    if not (saved.capability and current.capability):
        return saved.kind == current.kind
    names = [re.split(r"[ -]", facts.kind) for facts in (saved, current)]
    is_part = [name.count("MIG") for name in names]
    return is_part[0] == is_part[1] and all(a == b for a, b in zip(*names, strict=False))


def _order_difference(saved: Sequence[DeviceFacts], current: Sequence[DeviceFacts]) -> list[str]:
    """Return the first position at which equal devices are in another order."""
    if not saved[0].coords:
        return []
    old, new = [f.position for f in saved], [f.position for f in current]
    if old == new or sorted(old) != sorted(new):
        return []
    i = next(i for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
    return [
        f"its devices are here in another order: device {i} was the one at {saved[i]}, and is the "
        f"one at {current[i]}, which was device {old.index(new[i])}: pass devices=mesh, the mesh "
        "of its compilation"
    ]


def _place_difference(saved: Sequence[DeviceFacts], current: Sequence[DeviceFacts]) -> list[str]:
    for i, (old, new) in enumerate(zip(saved, current, strict=True)):
        if _offset(old, saved[0]) != _offset(new, current[0]):
            return [
                f"its device {i} was at {old} in the torus, its first one at {saved[0]}; here "
                f"they are at {new} and {current[0]}"
            ]
    return []


def _offset(device: DeviceFacts, first: DeviceFacts) -> tuple[int, ...]:
    """Return the position of a device relative to the first one."""
    if len(device.coords) != len(first.coords):
        return device.position
    moved = (a - b for a, b in zip(device.coords, first.coords, strict=True))
    return (device.slice - first.slice, *moved, device.core)
