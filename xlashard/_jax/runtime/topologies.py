"""Topologies: compile-only devices, their names and links, and the plugins that make them."""

import importlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax

from xlashard._jax.private import (
    cloud_tpu_init,
    find_libtpu,
    find_name,
    hardware_utils,
    lib_jax,
    plugin_support,
    replace_name,
    xc,
    xla_bridge,
)
from xlashard._jax.runtime.shardings import Device, is_compile_only, slice_of
from xlashard.errors import CompileOnlyError, TopologyError
from xlashard.support.lazily import dataclass, deferred
from xlashard.support.lending import install_command

if TYPE_CHECKING:
    from xlashard.support import wire
else:
    wire = deferred("xlashard.support.wire")

# libtpu reads these variables when it is loaded: query no metadata server, allow several
# processes (no chip is used), write no logs.
_COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # A worker process returns the warnings, and has a folder for the files.
    "TPU_LOG_DIR": os.environ.get("TPU_LOG_DIR", "disabled"),
    **{name: os.environ.get(name, "3") for name in ("TPU_STDERR_LOG_LEVEL", "TPU_MIN_LOG_LEVEL")},
}


def libtpu_version() -> str | None:
    """Return the version of libtpu, or None if it is not installed."""
    return _version("libtpu")


def cuda_plugin_version() -> str | None:
    """Return the version of JAX's CUDA plugin, or None if it is not installed."""
    plugin = find_cuda_plugin()
    return plugin and plugin[2]


def find_cuda_plugin() -> tuple[str, int, str] | None:
    """Return the package, CUDA's major version and the version of JAX's CUDA plugin, if any."""
    for major in (13, 12):
        package = f"jax-cuda{major}-plugin"
        if version := _version(package):
            return package, major, version
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compile_only_devices(name: str, options: Mapping[str, Any]) -> list[Device]:
    """Return the compile-only devices of a topology.

    Args:
        name: The name in libtpu's syntax: `v5p:2x2x4`.
        options: Further options of libtpu: `num_slices`, `chip_config_name`, `wrap`, ...

    Raises:
        TopologyError: If libtpu is missing or of another version than JAX requires, or for an
            unknown topology.
    """
    if cloud_tpu_init.get_tpu_library_path() is None:
        raise TopologyError(  # no-catalogue: needs an environment without libtpu
            f"compiling for TPUs requires libtpu: {install_command('tpu', "'jax[tpu]'")}"
        )
    check_libtpu(libtpu_version(), metadata.requires("jax") or ())
    try:
        with _libtpu_environment(_COMPILE_ONLY):
            topology = xla_bridge.make_pjrt_tpu_topology(name, **options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        # no-catalogue: names are checked before
        raise TopologyError(f"libtpu has no topology {name}: {reason}") from error
    return _devices_for(topology, name, dict(options))


def gpu_devices(name: str, target: str, layout: str) -> list[Device]:
    """Return the compile-only devices of a group of GPUs.

    Args:
        name: The name of the group, which errors show.
        target: XLA's description of the GPU, as a text proto.
        layout: Nodes, hosts per node and GPUs per host: `4x1x8`.

    Raises:
        TopologyError: If JAX's CUDA plugin is missing, or of another version than jaxlib.
    """
    _check_cuda_plugin()
    try:
        with _cuda_libraries_optional():
            _register_cuda_plugin()
            topology: Any = xla_bridge.make_pjrt_topology(
                "cuda", name, target_config=target, topology=layout
            )
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        # no-catalogue: names are checked before
        raise TopologyError(f"JAX's CUDA plugin has no topology {name}: {reason}") from error
    return _devices_for(topology, name, {"target": target, "layout": layout})


def _check_cuda_plugin() -> None:
    """Refuse to compile for GPUs without JAX's CUDA plugin.

    The plugin has an assembler and the functions of libdevice inside; where ptxas is installed, by
    NVIDIA's wheels or with CUDA, XLA may use that.
    """
    installed, jaxlib = find_cuda_plugin(), metadata.version("jaxlib")
    if installed is None:
        install = install_command("gpu-target", f"'jax-cuda13-plugin=={jaxlib}'")
        raise TopologyError(  # no-catalogue: needs an environment without the plugin
            f"compiling for GPUs requires JAX's CUDA plugin: {install}"
        )
    plugin, _, version = installed
    with warnings.catch_warnings(action="ignore"):
        fits = plugin_support.check_plugin_version(plugin, jaxlib, version)
    if not fits:
        raise TopologyError(  # no-catalogue: needs another plugin
            f"jaxlib {jaxlib} works with {plugin} {jaxlib}, but {plugin} "
            f"{version} is installed: pip install '{plugin}=={jaxlib}'"
        )


def _register_cuda_plugin() -> None:
    """Register the plugin, which JAX leaves out if it finds no cuDNN when it starts."""
    xla_bridge._discover_and_register_pjrt_plugins()
    if "cuda" not in xla_bridge._topology_factories:
        for major in (13, 12):
            if find_spec(f"jax_plugins.xla_cuda{major}") is not None:
                importlib.import_module(f"jax_plugins.xla_cuda{major}").initialize()
                return


def _cuda_libraries_optional() -> AbstractContextManager[None]:
    """Let the plugin load without cuDNN and its siblings on a machine without a GPU."""
    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    # JAX's search for plugins, which every program runs, does without it.
    sees_gpu = find_name(hardware_utils, "has_visible_nvidia_gpu")
    if variable in os.environ or sees_gpu is None or sees_gpu():
        return nullcontext()
    return _environment({variable: "1"})


@contextmanager
def quiet_backends() -> Iterator[None]:
    """Let JAX's backends start within a block without messages about chips that are not there.

    For programs of this package, such as its command line: what JAX prints in the programs of users
    is not ours to change. The extra `gpu-target` installs the CUDA plugin without the libraries
    that only running needs, and JAX prints a traceback for each that is missing; libtpu, on a
    machine without TPUs, reports missing variables for their type and hosts. Variables that the
    user has set stay unchanged.
    """
    discover, registration = (
        xla_bridge.discover_pjrt_plugins,
        xla_bridge._backend_factories.get("tpu"),
    )

    def discover_quietly() -> None:
        with _cuda_libraries_optional():
            discover()

    def probe_quietly() -> Any:
        assert registration is not None
        needed = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
        with _libtpu_environment({n: _COMPILE_ONLY[n] for n in needed if n not in os.environ}):
            return registration.factory()

    with ExitStack() as undo:
        undo.callback(replace_name, xla_bridge, "discover_pjrt_plugins", discover)
        replace_name(xla_bridge, "discover_pjrt_plugins", discover_quietly)
        if registration is not None:
            undo.callback(xla_bridge._backend_factories.__setitem__, "tpu", registration)
            xla_bridge._backend_factories["tpu"] = replace(registration, factory=probe_quietly)
        yield


_REQUESTS: WeakKeyDictionary[Any, tuple[str, dict[str, Any]]] = WeakKeyDictionary()
"""Name and options of topologies, by the client of their devices."""


def _devices_for(topology: Any, name: str, options: dict[str, Any]) -> list[Device]:
    devices = list(topology._make_compile_only_devices())
    _REQUESTS[devices[0].client] = (name, options)
    return devices


def request_of(device: Device) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a device's topology, for `devices_of`.

    Args:
        device: A compile-only device.

    Raises:
        KeyError: If the topology was not made here.
    """
    return _REQUESTS[device.client]


def is_requested(device: Device) -> bool:
    """Return True for a compile-only device of `compile_only_devices` or `gpu_devices`."""
    return device.client in _REQUESTS


def devices_of(name: str, options: Mapping[str, Any]) -> list[Device]:
    """Return the compile-only devices of a topology that another process made.

    Args:
        name: Its name.
        options: Its options.
    """
    if "target" in options:
        return gpu_devices(name, **options)
    return compile_only_devices(name, options)


def can_serialize(device: Device) -> bool:
    """Return True if jaxlib can describe a device's topology to another process, as bytes.

    jaxlib 0.11.1 and older can't.
    """
    return hasattr(lib_jax.get_topology_for_devices([device]), "serialize")


def serialized_slice(devices: Sequence[Device]) -> tuple[bytes, int]:
    """Return the serialized topology of one slice, and the number of slices.

    Args:
        devices: Compile-only devices of a topology.
    """
    name, options = _REQUESTS.get(devices[0].client, ("", {}))
    slices = options.get("num_slices", 1)
    if slices > 1:
        # libtpu can't serialize several slices.
        one = {option: value for option, value in options.items() if option != "num_slices"}
        devices = compile_only_devices(name, one)
    return lib_jax.get_topology_for_devices(list(devices)).serialize(), slices


def load_libtpu() -> None:
    """Load libtpu to compile, without the use of a chip; another process may use the chips."""
    with _libtpu_environment(_COMPILE_ONLY):
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        if not xc.pjrt_plugin_loaded("tpu"):
            path = cloud_tpu_init.get_tpu_library_path()
            xc.load_pjrt_plugin_dynamically("tpu", path or "")
        if not xc.pjrt_plugin_initialized("tpu"):
            xc.initialize_pjrt_plugin("tpu")


def _libtpu_environment(variables: Mapping[str, str]) -> AbstractContextManager[None]:
    """Set environment variables while libtpu is loaded, except on a TPU VM."""
    return nullcontext() if cloud_tpu_init.running_in_cloud_tpu_vm else _environment(variables)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Path of the wraps in libtpu's description of a topology: fields of nested messages.
_WRAPS = (9, 2, 1, 7)


def libtpu_in_use() -> str | None:
    """Return the version of libtpu; None if the library is not that of an installed package."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    package = find_libtpu()
    if path and (package is None or Path(path).parent != Path(package).parent):
        return None
    return libtpu_version()


def torus_wraps(device: Device) -> tuple[bool, ...]:
    """Return for each dimension of a device's torus True if its links form a ring.

    Empty if the topology was created without this property: then its shape decides.
    """
    try:
        if not can_serialize(device):
            return ()
        data = lib_jax.get_topology_for_devices([device]).serialize()
        for field in _WRAPS:
            data = wire.message_type(message=(field, bytes))(data).message
        wraps = wire.message_type(x=(1, int), y=(2, int), z=(3, int))(data)
        return (wraps.x == 1, wraps.y == 1, wraps.z == 1) if data else ()
    except (RuntimeError, NotImplementedError, ValueError):  # not every PJRT plugin supports it
        return ()


_FLAT = ("v2", "v3", "v5e", "v6e")
"""TPU generations with a two-dimensional torus."""


def check_can_hold_arrays(devices: Sequence[Device]) -> None:
    """Refuse compile-only devices as the place of arrays.

    Raises:
        CompileOnlyError: If the devices belong to a topology.
    """
    if devices and is_compile_only(devices[0]):
        name = _text_of_topology(devices[0])
        raise CompileOnlyError(
            f"arrays can't be placed on {name}, a topology for compiling only: pass "
            "jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) instead of an array",
            topology=name,
        )


def compile_only_error(name: str, device: Device) -> CompileOnlyError:
    """Return the error for a call of a program that was compiled for a topology.

    Args:
        name: The name of its function.
        device: A device of the topology.
    """
    topology = _text_of_topology(device)
    return CompileOnlyError(
        f"{name} is compiled for {topology}, a topology without chips, and can't run here: inspect "
        "compiled = pjit(f).lower(*shapes).compile() by compiled.memory_analysis(), "
        ".cost_analysis() and .as_text(), or save it, file.write_bytes(compiled.serialize()), and "
        "load it on a slice of this topology, Compiled.deserialize(file.read_bytes())",
        topology=topology,
    )


def _text_of_topology(device: Device) -> str:
    name, slices = named_topology(device)
    return name if slices == 1 else f"{slices} slices of {name}"


def named_topology(device: Device) -> tuple[str, int]:
    """Return the name of a slice of a device's topology, and the number of slices."""
    if device.platform == "gpu":
        return _REQUESTS.get(device.client, (device.device_kind, {}))[0], 1
    devices = device.client.devices()
    name = _generation(device.device_kind)
    rank = 2 if name in _FLAT else 3
    sizes = (max(d.coords[i] for d in devices) + 1 for i in range(rank))
    slices = len(set(map(slice_of, devices)))
    return f"{name}:{'x'.join(map(str, sizes))}", slices


def _generation(kind: str) -> str:
    """Return the name of a chip in names of topologies: `TPU v5 lite` is `v5e`, `TPU7x` `tpu7x`."""
    name = kind.removeprefix("TPU").strip().replace(" lite", "e")
    return {"v5": "v5p"}.get(name, name if name.startswith("v") else f"tpu{name}")


@dataclass(frozen=True)
class UnassignedDevice:
    """A position in the device assignment of a program that is lowered without devices."""

    id: int
    platform: str = "unassigned"
    device_kind: str = "unassigned"
    process_index: int = 0


@lru_cache(maxsize=16)
def unassigned_devices(count: int) -> tuple[Device, ...]:
    """Return placeholders for devices, for which programs can be lowered but not compiled."""
    return tuple(map(UnassignedDevice, range(count)))


def check_libtpu(installed: str | None, required: Iterable[str]) -> None:
    """Refuse a libtpu of another version than JAX requires.

    Another version compiles most programs, and crashes or miscompiles others.

    Args:
        installed: Its version; None for a library outside of a package, which is accepted.
        required: The requirements of JAX's package, such as `libtpu==0.0.50.*; extra == "tpu"`.

    Raises:
        TopologyError: For another version.
    """
    matches = (re.match(r"libtpu\s*==\s*([\w.]+?)(\.\*)?\s*(?:;|$)", each) for each in required)
    pinned = next((match for match in matches if match is not None), None)
    if installed is None or pinned is None:
        return
    expected, is_open = pinned[1], pinned[2] is not None
    if installed == expected or (is_open and f"{installed}.".startswith(f"{expected}.")):
        return
    version = expected + (pinned[2] or "")
    raise TopologyError(  # no-catalogue: needs another libtpu
        f"jax {jax.__version__} works with libtpu {version}, but libtpu {installed} is installed: "
        f"pip install 'libtpu=={version}'"
    )
