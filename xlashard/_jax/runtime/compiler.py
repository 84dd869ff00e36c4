"""The PJRT client: compile a module, and ask what came of it."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src import compiler, config, core, dispatch, xla_bridge
from jax._src.interpreters import pxla
from jax._src.layout import AutoLayout, Layout

from xlashard._jax.lower import modules
from xlashard._jax.runtime.shardings import Device, device_list, hlo_text
from xlashard._jax.runtime.transfer import HandleType
from xlashard.errors import ArgumentError
from xlashard.lazily import dataclass

type Executable = Any
type Handle = jax.Array


def client_of(device: Device) -> Any:
    """The PJRT client that a device belongs to."""
    return xla_bridge.get_device_backend(device)


def platform_of(device: Device) -> str:
    """The platform by which lowering rules are looked up: `"cpu"`, `"tpu"`, `"cuda"`."""
    client = client_of(device)
    return xla_bridge.canonicalize_platform(getattr(client, "_raw_platform", client.platform))


def known_platform(name: str) -> str:
    """The name of a platform, if there are lowering rules for it.

    Raises:
        ArgumentError: If JAX knows none of that name.
    """
    known = xla_bridge.known_platforms() - {"gpu"}
    if name not in known:
        raise ArgumentError(
            f"JAX has no lowering rules for a platform {name!r}; it has some for "
            + ", ".join(p for p in ("cpu", "cuda", "rocm", "tpu") if p in known)
        )
    return name


def devices_of(backend: str) -> list[Device]:
    """This process's devices of a platform."""
    return xla_bridge.get_backend(backend).local_devices()


@dataclass(frozen=True)
class CompileRequest:
    """How a module is to be compiled.

    Attributes:
        devices: The device assignment.
        shardy: Whether Shardy partitions, not GSPMD.
        free_args: For each argument, whether the partitioner may choose its sharding.
        free_results: For each result, whether the partitioner may choose its sharding.
        options: Options of the compiler, by name.
        host_callbacks: From the lowering.
    """

    devices: tuple[Device, ...]
    shardy: bool
    free_args: tuple[bool, ...]
    free_results: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...] = ()
    host_callbacks: tuple[Any, ...] = ()


def compile_module(module: modules.Module, request: CompileRequest) -> Executable:
    """Compiles through JAX's persistent cache, where one is configured.

    Raises:
        RuntimeError: With the compiler's text, if it refuses the module or an option.
    """
    devices = request.devices
    client = client_of(devices[0])
    options = _compile_options(module, request)
    callbacks = list(request.host_callbacks)
    return compiler.compile_or_get_cached(
        client, module, _device_grid(devices)[0], options, callbacks, device_list(devices), None
    )


_hits: ContextVar[list[str] | None] = ContextVar("persistent cache hits", default=None)


@contextmanager
def persistent_cache_hits() -> Iterator[list[str]]:
    """Lists what is found in JAX's persistent cache within the block, by this thread."""
    found: list[str] = []
    token = _hits.set(found)
    try:
        yield found
    finally:
        _hits.reset(token)


def note_event(event: str, **_: Any) -> None:
    """Listens to JAX's events."""
    found = _hits.get()
    if found is not None and event == "/jax/compilation_cache/cache_hits":
        found.append(event)


def drops_cached_code(request: CompileRequest) -> bool:
    """True if a client keeps a program's machine code only where it compiled it.

    Such a client writes what came out of JAX's persistent cache without its code, and the program
    fails where it runs.
    """
    return client_of(request.devices[0]).platform == "cpu"


def compile_uncached(module: modules.Module, request: CompileRequest) -> Executable:
    """Compiles, whatever JAX's persistent cache holds.

    Raises:
        RuntimeError: With the compiler's text, if it refuses the module or an option.
    """
    devices = request.devices
    return compiler.backend_compile_and_load(
        client_of(devices[0]),
        module,
        device_list(devices),
        _compile_options(module, request),
        list(request.host_callbacks),
    )


def fingerprint(module: modules.Module, request: CompileRequest) -> bytes:
    """A digest of all that the compiler is given, but for where the operations come from.

    The request must have no host callbacks: a module names them by number only.

    Raises:
        RuntimeError: If the compiler has no such option.
    """
    devices = request.devices
    digest = hashlib.sha256(modules.to_bytecode(modules.without_locations(module)))
    digest.update(_compile_options(module, request).SerializeAsString())
    digest.update(repr([(d.platform, d.id) for d in devices]).encode())
    return digest.digest()


def settings(request: CompileRequest) -> dict[str, str]:
    """What decides how a module is compiled, besides itself and its devices, in words.

    Where the compiler writes its dumps and caches is not among it.

    Raises:
        RuntimeError: If the compiler has no such option.
    """
    options = assigned(
        request.devices, client_of(request.devices[0]), env_options_overrides=dict(request.options)
    )
    said = {
        "profile version": options.profile_version,
        "free arguments": request.free_args,
        "free results": request.free_results,
    }
    own = {name: repr(value) for name, value in (said | dict(request.options)).items()}
    return _configured(options) | own


def default_settings(device: Device) -> dict[str, str]:
    """Those of JAX's settings that reach the compiler of a device, as they stand."""
    return _configured(assigned([device], client_of(device)))


def _configured(options: Any) -> dict[str, str]:
    build = options.executable_build_options
    said = {
        "optimization level": build.optimization_level,
        "memory fitting level": build.memory_fitting_level,
        "jax_disable_most_optimizations": jax.config.values["jax_disable_most_optimizations"],
        "jax_compiler_enable_remat_pass": config.enable_remat_opt_pass.value,
    }
    return {name: repr(value) for name, value in said.items()}


def assigned(devices: Sequence[Device], client: Any, **how: Any) -> Any:
    """Options of the compiler for one replica over devices."""
    return compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=_device_grid(devices),
        backend=client,
        **how,
    )


def _device_grid(devices: Sequence[Device]) -> np.ndarray:
    grid = np.empty((1, len(devices)), dtype=object)
    grid[0, :] = devices
    return grid


def _compile_options(module: modules.Module, request: CompileRequest) -> Any:
    devices = request.devices
    client = client_of(devices[0])
    compile_options = assigned(
        devices,
        client,
        env_options_overrides=dict(request.options),
        detailed_logging=compiler.use_detailed_logging(module),
    )
    build = compile_options.executable_build_options
    build.use_shardy_partitioner = request.shardy
    # A program without results still has one: the empty tuple.
    build.allow_spmd_sharding_propagation_to_output = list(request.free_results) or [False]
    build.allow_spmd_sharding_propagation_to_parameters = list(request.free_args)
    compile_options.parameter_is_tupled_arguments = dispatch.should_tuple_args(
        len(request.free_args), client.platform
    )
    return compile_options


def reported_shardings(executable: Executable, of: str, count: int) -> list[str] | None:
    """What the partitioner chose, in the HLO syntax, or None where it does not say.

    Args:
        executable: The compiled program.
        of: `"parameters"` or `"outputs"`.
        count: How many there are.
    """
    if of == "parameters":
        found = executable.get_parameter_shardings()
    else:
        found = executable.get_output_shardings()
    if not found or not count:
        return None if count else []
    found = list(found)
    if len(found) == 1 and found[0].tuple_shardings:
        # Arguments that travel as one tuple.
        found = list(found[0].tuple_shardings)
    if len(found) == 1:
        # XLA puts one sharding in place of a tuple of equal ones.
        found = found * count
    return [hlo_text(s) for s in found] if len(found) == count else None


def executable_shardings(
    executable: Executable, num_devices: int
) -> tuple[list[str], list[str]] | None:
    """The shardings of all parameters and results in the HLO syntax, or None if it doesn't say."""
    counts = len(executable.get_parameter_layouts()), len(executable.get_output_layouts())
    if num_devices == 1:
        # The partitioner did not run.
        return ["{replicated}"] * counts[0], ["{replicated}"] * counts[1]
    parameters = reported_shardings(executable, "parameters", counts[0])
    outputs = reported_shardings(executable, "outputs", counts[1])
    return None if parameters is None or outputs is None else (parameters, outputs)


def output_memory_kinds(executable: Executable, count: int) -> list[str | None]:
    """The memory of each result."""
    try:
        kinds = list(executable.get_output_memory_kinds()[0])
    except Exception:  # not every PJRT plugin answers
        return [None] * count
    return kinds if len(kinds) == count else [None] * count


def raw_layouts(executable: Executable) -> tuple[list[Any], list[Any]] | None:
    """The layouts of parameters and results, or None where the plugin does not say.

    They compare equal to the `_pjrt_layout` of handles that lie so.
    """
    try:
        return list(executable.get_parameter_layouts()), list(executable.get_output_layouts())
    except Exception:  # not every PJRT plugin answers
        return None


def layouts_of(executable: Executable) -> tuple[list[Any], list[Any]] | None:
    """The layouts of parameters and results as JAX writes them, or None."""
    raw = raw_layouts(executable)
    if raw is None:
        return None
    read = Layout.from_pjrt_layout
    return [read(x) for x in raw[0]], [read(x) for x in raw[1]]


def dispatch_layouts(layouts: Sequence[Any], shardings: Sequence[Any], avals: Sequence[Any]) -> Any:
    """Layouts with None where they are the default, as argument placement wants them."""
    return pxla.get_dispatch_layouts(layouts, shardings, avals)


def custom_layout(handle: Any) -> Any:
    """The layout of an array in memory, where it is not the default one there; else None."""
    if type(handle) is not HandleType:
        return None
    return _unless_default(handle._pjrt_layout, handle.sharding, handle.aval)


def custom_struct_layout(struct: jax.ShapeDtypeStruct) -> Any:
    """The layout that a `jax.ShapeDtypeStruct` names, where it is not the default one."""
    layout = struct.format.layout
    if layout is None or isinstance(layout, type(AutoLayout)):
        return layout
    aval = core.ShapedArray(struct.shape, struct.dtype)
    return None if pxla.is_default_layout(layout, struct.sharding, aval) else layout


@lru_cache(maxsize=4096)
def _unless_default(pjrt_layout: Any, sharding: Any, aval: Any) -> Any:
    layout = Layout.from_pjrt_layout(pjrt_layout)
    return None if pxla.is_default_layout(layout, sharding, aval) else layout


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Whether the compiler refused a program for the memory that it takes."""
    return getattr(error, "error_code_string", "") == "RESOURCE_EXHAUSTED"


def error_text(error: RuntimeError) -> str:
    """What XLA says, without the places in its own source where it says it."""
    return str(error).partition("\n=== Source Location Trace")[0].rstrip()
