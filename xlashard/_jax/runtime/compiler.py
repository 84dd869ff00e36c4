"""Compile modules with the PJRT client, and read shardings and layouts of executables."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.private import (
    jax_compiler,
    jax_dispatch,
    pxla,
    xc,
    xla_bridge,
)
from xlashard._jax.runtime.shardings import (
    Device,
    device_list,
    hlo_text,
    if_reported,
    is_auto_layout,
)
from xlashard.errors import ArgumentError
from xlashard.support.lazily import dataclass

type Executable = Any
type Handle = jax.Array


def client_of(device: Device) -> Any:
    """Return the PJRT client of a device."""
    return device.client


def platform_of(device: Device) -> str:
    """Return the platform of a device's lowering rules: `"cpu"`, `"tpu"`, `"cuda"`."""
    client = client_of(device)
    return xla_bridge.canonicalize_platform(getattr(client, "_raw_platform", client.platform))


class NamedClient:
    """PJRT client under the name of its lowering rules.

    That of a group of GPUs is named `gpu`, which JAX resolves to a platform at hand.

    Args:
        client: The client.
        platform: Name of its lowering rules.
    """

    def __init__(self, client: Any, platform: str) -> None:
        self._client = client
        self.platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def known_platform(name: str) -> str:
    """Return the name of a platform, if JAX has lowering rules for it.

    Raises:
        ArgumentError: For an unknown platform.
    """
    known = xla_bridge.known_platforms() - {"gpu"}
    if name not in known:
        raise ArgumentError(
            f"JAX has no lowering rules for the platform {name!r}, only for "
            + ", ".join(p for p in ("cpu", "cuda", "rocm", "tpu") if p in known)
        )
    return name


def devices_of(backend: str) -> list[Device]:
    """Return the local devices of a platform."""
    return xla_bridge.get_backend(backend).local_devices()


@dataclass(frozen=True)
class CompileRequest:
    """Options of one compilation.

    Attributes:
        devices: The device assignment.
        shardy: True for the Shardy partitioner, False for GSPMD.
        free_args: For each argument, True if the partitioner may choose its sharding.
        free_results: For each result, True if the partitioner may choose its sharding.
        options: Options of the compiler, by name.
        host_callbacks: From the lowering.
    """

    devices: tuple[Device, ...]
    shardy: bool
    free_args: tuple[bool, ...]
    free_results: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...] = ()
    host_callbacks: tuple[Any, ...] = ()

    @property
    def leaves_dumps(self) -> bool:
        """True if the compiler is to write dumps.

        JAX's persistent cache ignores that option, and the dump of a program that it has lacks the
        buffer assignment.
        """
        return any(name == "xla_dump_to" for name, _ in self.options)


def compile_module(module: modules.Module, request: CompileRequest) -> Executable:
    """Compile a module through JAX's persistent cache, where one is configured.

    Raises:
        RuntimeError: With the compiler's message, if it refuses the module or an option.
    """
    if request.leaves_dumps:
        return compile_uncached(module, request)
    devices = request.devices
    client = client_of(devices[0])
    options = compile_options(module, request)
    callbacks = list(request.host_callbacks)
    return jax_compiler.compile_or_get_cached(
        client, module, _device_grid(devices)[0], options, callbacks, device_list(devices), None
    )


_hits: ContextVar[list[str] | None] = ContextVar("persistent cache hits", default=None)


@contextmanager
def persistent_cache_hits() -> Iterator[list[str]]:
    """Collect this thread's hits in JAX's persistent cache within a block."""
    hits: list[str] = []
    token = _hits.set(hits)
    try:
        yield hits
    finally:
        _hits.reset(token)


def note_event(event: str, **_: Any) -> None:
    """Record a hit in the persistent cache; a listener of JAX's events."""
    hits = _hits.get()
    if hits is not None and event == "/jax/compilation_cache/cache_hits":
        hits.append(event)


def drops_cached_code(request: CompileRequest) -> bool:
    """Return True if the client can't serialize programs that it loaded from the persistent cache.

    Such a client serializes them without machine code, and they fail where they run.
    """
    return client_of(request.devices[0]).platform == "cpu"


def compile_uncached(module: modules.Module, request: CompileRequest) -> Executable:
    """Compile a module without JAX's persistent cache.

    Raises:
        RuntimeError: With the compiler's message, if it refuses the module or an option.
    """
    devices = request.devices
    return jax_compiler.backend_compile_and_load(
        client_of(devices[0]),
        module,
        device_list(devices),
        compile_options(module, request),
        list(request.host_callbacks),
    )


def fingerprint(module: modules.Module, request: CompileRequest) -> bytes:
    """Return a digest of the compiler's input, source locations excepted.

    The request must have no host callbacks: a module names them by number only.

    Raises:
        RuntimeError: For an unknown option of the compiler.
    """
    devices = request.devices
    digest = hashlib.sha256(modules.to_bytecode(modules.without_locations(module)))
    digest.update(compile_options(module, request).SerializeAsString())
    digest.update(repr([(d.platform, d.id) for d in devices]).encode())
    return digest.digest()


def settings(request: CompileRequest) -> dict[str, str]:
    """Return the settings that a compiled program depends on, besides its module and devices.

    The folders of the compiler's dumps and caches are left out.

    Raises:
        RuntimeError: For an unknown option of the compiler.
    """
    options = assigned(
        request.devices, client_of(request.devices[0]), env_options_overrides=dict(request.options)
    )
    values = {
        "profile version": options.profile_version,
        "free arguments": request.free_args,
        "free results": request.free_results,
    }
    own = {name: repr(value) for name, value in (values | dict(request.options)).items()}
    return _configured(options) | own


def default_settings(device: Device) -> dict[str, str]:
    """Return the current settings of JAX that affect the compiler of a device."""
    return _configured(assigned([device], client_of(device)))


def _configured(options: Any) -> dict[str, str]:
    build, settings = options.executable_build_options, jax.config.values
    values = {
        "optimization level": build.optimization_level,
        "memory fitting level": build.memory_fitting_level,
        "jax_disable_most_optimizations": settings["jax_disable_most_optimizations"],
        "jax_compiler_enable_remat_pass": settings["jax_compiler_enable_remat_pass"],
    }
    return {name: repr(value) for name, value in values.items()}


def assigned(devices: Sequence[Device], client: Any, **how: Any) -> Any:
    """Return the compiler's options for one replica over devices."""
    return jax_compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=_device_grid(devices),
        backend=client,
        **how,
    )


def _device_grid(devices: Sequence[Device]) -> np.ndarray:
    return np.array([list(devices)], dtype=object)


def compile_options(module: modules.Module, request: CompileRequest) -> Any:
    """Return the options of a compilation as XLA takes them.

    Raises:
        RuntimeError: For an unknown option of the compiler.
    """
    devices = request.devices
    client = client_of(devices[0])
    options = assigned(
        devices,
        client,
        env_options_overrides=dict(request.options),
        detailed_logging=jax_compiler.use_detailed_logging(module),
    )
    build = options.executable_build_options
    build.use_shardy_partitioner = request.shardy
    # A program without results has the empty tuple as its result.
    build.allow_spmd_sharding_propagation_to_output = list(request.free_results) or [False]
    build.allow_spmd_sharding_propagation_to_parameters = list(request.free_args)
    options.parameter_is_tupled_arguments = jax_dispatch.should_tuple_args(
        len(request.free_args), client.platform
    )
    return options


def reported_shardings(executable: Executable, of: str, count: int) -> list[str] | None:
    """Return the shardings of a compiled program in the HLO syntax, None if it reports none.

    Args:
        executable: The compiled program.
        of: `"parameters"` or `"outputs"`.
        count: The number of parameters or outputs.
    """
    if of == "parameters":
        shardings = executable.get_parameter_shardings()
    else:
        shardings = executable.get_output_shardings()
    if not shardings or not count:
        return None if count else []
    shardings = list(shardings)
    if len(shardings) == 1 and shardings[0].tuple_shardings:
        # Arguments that are passed as one tuple.
        shardings = list(shardings[0].tuple_shardings)
    texts = [hlo_text(s) for s in shardings]
    # XLA replaces a tuple of equal shardings by one sharding.
    texts = texts * count if len(texts) == 1 else texts
    return texts if len(texts) == count else None


def executable_shardings(
    executable: Executable, num_devices: int
) -> tuple[list[str], list[str]] | None:
    """Return the shardings of all parameters and results, or None if the program reports none."""
    counts = len(executable.get_parameter_layouts()), len(executable.get_output_layouts())
    if num_devices == 1:
        # The partitioner did not run.
        return ["{replicated}"] * counts[0], ["{replicated}"] * counts[1]
    parameters = reported_shardings(executable, "parameters", counts[0])
    outputs = reported_shardings(executable, "outputs", counts[1])
    return None if parameters is None or outputs is None else (parameters, outputs)


def output_memory_kinds(executable: Executable, count: int) -> list[str | None]:
    """Return the memory kind of each result."""
    kinds = if_reported(lambda: list(executable.get_output_memory_kinds()[0]))
    return kinds if kinds is not None and len(kinds) == count else [None] * count


def raw_layouts(executable: Executable) -> tuple[list[Any], list[Any]] | None:
    """Return the layouts of parameters and results, or None if the plugin reports none.

    They are comparable with the `_pjrt_layout` of handles.
    """
    return if_reported(
        lambda: (list(executable.get_parameter_layouts()), list(executable.get_output_layouts()))
    )


@lru_cache(maxsize=4096)
def layout_from_raw(layout: Any) -> Any:
    """Return an element of `raw_layouts` as JAX's `Layout`."""
    return Layout.from_pjrt_layout(layout)


def dispatch_layouts(*args: Any) -> Any:
    """Return layouts for the placement of arguments, with None for default layouts."""
    return pxla.get_dispatch_layouts(*args)


def custom_layout(handle: Any) -> Any:
    """Return the layout of an array if it differs from the default one, else None."""
    if type(handle) is not xc.ArrayImpl:
        return None
    return _unless_default(handle._pjrt_layout, handle.sharding, handle.aval)


def have_same_layout(handles: Sequence[Any]) -> bool:
    """Return True if some arrays have one layout, the default one or another."""
    return len({handle._pjrt_layout for handle in handles}) == 1


def custom_struct_layout(struct: jax.ShapeDtypeStruct) -> Any:
    """Return the layout of a `jax.ShapeDtypeStruct`, None for the default one."""
    layout = struct.format.layout
    if layout is None or is_auto_layout(layout):
        return layout
    aval = jax.core.ShapedArray(struct.shape, struct.dtype)
    return None if pxla.is_default_layout(layout, struct.sharding, aval) else layout


@lru_cache(maxsize=4096)
def _unless_default(pjrt_layout: Any, sharding: Any, aval: Any) -> Any:
    layout = Layout.from_pjrt_layout(pjrt_layout)
    return None if pxla.is_default_layout(layout, sharding, aval) else layout


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return True if the compiler refused a program because it needs too much memory."""
    return getattr(error, "error_code_string", "") == "RESOURCE_EXHAUSTED"


def error_text(error: RuntimeError) -> str:
    """Return XLA's message without the locations in XLA's own sources."""
    return str(error).partition("\n=== Source Location Trace")[0].rstrip()


def alias_bytes(executable: Any) -> int | None:
    """Return the bytes of arguments per device that results alias; None if unknown."""
    return if_reported(lambda: executable.get_compiled_memory_stats().alias_size_in_bytes)


def extra_bytes(executable: Any) -> int | None:
    """Return the bytes per device of a run beyond arguments and results; None if unknown.

    Results that alias an argument reduce the number.
    """
    stats = if_reported(executable.get_compiled_memory_stats)
    return None if stats is None else stats.temp_size_in_bytes - stats.alias_size_in_bytes
