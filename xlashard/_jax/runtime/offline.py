"""Compilation in another process, in whole or its first phase: its input and its result as bytes.

The compilers for GPUs and TPUs abort their process on some programs. What a worker process compiles
costs its own life only.

The first phase of TPU's compiler goes from StableHLO to scheduled HLO with its buffers. Extensions
of PJRT's C API run a compiler phase by phase, and describe several slices to it. jaxlib has no
binding for them, so their functions are called here. Each takes one structure of numbers and
pointers of eight bytes, which begins with its size; `pjrt_c_api.h` and
`pjrt_c_api_{phase_compile,multi_slice}_extension.h` of XLA specify them. Within a major version of
the API, fields and functions are only added, at the end.
"""

import ctypes
import json
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.private import cloud_tpu_init, jax_compiler, xc
from xlashard._jax.runtime.compiler import CompileRequest, Executable, compile_options
from xlashard._jax.runtime.executables import OfflineExecutable
from xlashard._jax.runtime.shardings import Device, device_list, is_compile_only
from xlashard._jax.runtime.topologies import (
    can_serialize,
    devices_of,
    is_requested,
    load_libtpu,
    request_of,
    serialized_slice,
)
from xlashard.errors import TopologyError
from xlashard.support import wire


class RefusalError(RuntimeError):
    """The compiler's refusal of a program, as jaxlib raises it.

    Attributes:
        error_code_string: `RESOURCE_EXHAUSTED` for a program that exceeds a memory.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.error_code_string = code


BEGUN = "begun"
"""File in the folder of a saved input while the compiler runs; it stays after a crash."""
_INPUT, _RESULT = "input", "result"


RUNNER = "xlashard._jax.runtime.offline:run_saved"
"""Function of a worker process that runs a saved input."""


def save_input(saved: Any, folder: Path) -> dict[str, Any]:
    """Write an input to a folder, and return the request of `run_saved`."""
    (folder / _INPUT).write_bytes(pickle.dumps(saved))
    return {"folder": str(folder)}


class CompileInput(NamedTuple):
    """Input of a compilation for a topology, serialized: any process can run it.

    Attributes:
        module: Bytecode of the module.
        options: Options of the compiler.
        topology: Name and options of the topology.
        devices: Ids of the devices, in the program's order.
    """

    module: bytes
    options: bytes
    topology: tuple[str, dict[str, Any]]
    devices: tuple[int, ...]

    runner = RUNNER

    @classmethod
    def of(cls, module: modules.Module, request: CompileRequest) -> Self:
        """Return the input of a compilation.

        Args:
            module: The module.
            request: Devices of a topology, and options.

        Raises:
            RuntimeError: For an unknown option of the compiler.
        """
        options = compile_options(module, request).SerializeAsString()
        devices = request.devices
        ids = tuple(device.id for device in devices)
        return cls(modules.to_portable_bytecode(module), options, request_of(devices[0]), ids)

    save = save_input

    def prepare(self) -> None:
        """Do nothing: making the devices of the topology is part of the compilation."""

    def run(self) -> Executable:
        """Compile the module.

        Raises:
            RuntimeError: With the compiler's message, if it refuses the module or an option.
        """
        known = {device.id: device for device in _devices(json.dumps(self.topology))}
        devices = [known[number] for number in self.devices]
        return jax_compiler.backend_compile_and_load(
            devices[0].client,
            modules.from_bytecode(self.module),
            device_list(devices),
            xc.CompileOptions.ParseFromString(self.options),
            [],
        )


@lru_cache(maxsize=16)
def _devices(topology: str) -> list[Device]:
    return devices_of(*json.loads(topology))


def compiles_elsewhere(request: CompileRequest) -> bool:
    """Return True if another process can compile for the devices of a request.

    Where devices of their kind are at hand, the compiler uses them.

    Args:
        request: Devices and options.
    """
    device = request.devices[0]
    return (
        is_compile_only(device)
        # Modules for GPUs have the numbers of callbacks only.
        and (device.platform == "gpu" or not request.host_callbacks)
        and is_requested(device)
        and jax_compiler._get_cross_compile_backend(device.client) is None
    )


def run_saved(request: dict[str, Any]) -> dict[str, Any]:
    """Run the compiler on a saved input; for a worker process.

    Args:
        request: `folder` of the input; `keep` to write the executable there.

    Returns:
        `error` and `code` of the compiler, which are empty if it accepted the module, and its
        `seconds` and `cpu_seconds`.
    """
    folder = Path(request["folder"])
    begun, saved = folder / BEGUN, pickle.loads((folder / _INPUT).read_bytes())
    saved.prepare()
    begun.touch()
    began, cpu_began, error, code = time.perf_counter(), time.process_time(), "", ""
    try:
        executable = saved.run()
        if request.get("keep"):
            result = OfflineExecutable.of(executable), executable.serialize()
            (folder / _RESULT).write_bytes(pickle.dumps(result))
    except RuntimeError as raised:
        error, code = str(raised), getattr(raised, "error_code_string", "")
    finally:
        begun.unlink()
    return {
        "error": error,
        "code": code,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
    }


def read_result(folder: Path) -> tuple[OfflineExecutable, bytes]:
    """Return the executable that `run_saved` kept in a folder, and its machine code."""
    return pickle.loads((folder / _RESULT).read_bytes())


_PHASE = b"phase1_hlo_opts"
"""Partitioning, fusion, layouts, scheduling, rematerialization and buffer assignment."""
_MAJOR_VERSION = 0
_FUNCTIONS, _PHASE_COMPILE, _MEGASCALE, _MULTI_SLICE = -1, 9, 18, 22
"""The API's own functions, and the numbers of extensions."""
_OUT_OF_MEMORY = 8
"""`PJRT_Error_Code_RESOURCE_EXHAUSTED`."""

type _Address = int


class PhaseInput(NamedTuple):
    """Input of the first phase of TPU's compiler, serialized: any process can run it.

    Attributes:
        module: Bytecode of the module.
        options: Options of the compiler, with the folder of its dumps.
        topology: Description of one slice.
        slices: Number of slices.
    """

    module: bytes
    options: bytes
    topology: bytes
    slices: int

    runner = RUNNER

    @classmethod
    def of(cls, module: modules.Module, request: CompileRequest) -> Self:
        """Return the input of a compilation.

        Args:
            module: The module.
            request: Devices of a TPU topology, and options.

        Raises:
            RuntimeError: For an unknown option of the compiler.
        """
        topology, slices = serialized_slice(request.devices)
        options = compile_options(module, request).SerializeAsString()
        return cls(modules.to_portable_bytecode(module), options, topology, slices)

    save = save_input

    prepare = staticmethod(load_libtpu)

    def run(self) -> None:
        """Partition, optimize and schedule the module for TPUs and assign its buffers.

        The compiler's dumps are the result: those of a whole compilation up to
        `after_optimizations`.

        Raises:
            RuntimeError: With the compiler's message, if it refuses the module or an option.
            TopologyError: If the installed libtpu can't run this phase alone.
        """
        options = self.options
        fields = ((1, self.module), (2, b"stablehlo_bytecode"), (4, _PHASE))
        program = b"".join(wire.field(number, value) for number, value in fields)
        with ExitStack() as stack:
            topology = stack.enter_context(_topology(self.topology))
            if self.slices > 1:
                config = stack.enter_context(_multi_slice_config(topology, self.slices))
                options += wire.field(6, config)
            *_, compiler = _checked(_PHASE_COMPILE, 0, 0, 0)
            stack.callback(_call, _PHASE_COMPILE, 1, 0, compiler)
            texts = (c_char_p * 2)(program, _PHASE)
            sizes = (c_size_t * 2)(len(program), len(_PHASE))
            text, size = ctypes.addressof(texts), ctypes.addressof(sizes)
            run = (compiler, text, size, 1, text + 8, size + 8, 1, _address(options), len(options))
            results = _checked(_PHASE_COMPILE, 2, 0, *run, topology, 0, 0, 0)
            _call(_PHASE_COMPILE, 4, 0, *results[-3:])


def input_kind(device: Device) -> type[PhaseInput] | type[CompileInput]:
    """Return the kind of a compilation that leaves dumps: for TPUs that of the first phase.

    The compiler for GPUs has no such phase, and with an older jaxlib it can't be reached.
    """
    return PhaseInput if device.platform != "gpu" and can_serialize(device) else CompileInput


@contextmanager
def _topology(description: bytes) -> Iterator[_Address]:
    """Yield the topology of its serialized description."""
    *_, topology = _checked(_FUNCTIONS, 114, 0, _address(description), len(description), 0)
    try:
        yield topology
    finally:
        _call(_FUNCTIONS, 83, 0, topology)


@contextmanager
def _multi_slice_config(topology: _Address, slices: int) -> Iterator[bytes]:
    """Yield the serialized configuration of slices of a topology."""
    *_, config = _checked(_MEGASCALE, 3, topology, slices, 0)
    *_, data, size, serialized, release = _checked(_MULTI_SLICE, 4, config, 0, 0, 0, 0)
    try:
        yield ctypes.string_at(data, size)
    finally:
        _Function(release)(serialized)
        _call(_MULTI_SLICE, 0, config)


def _checked(extension: int, position: int, *fields: int) -> tuple[int, ...]:
    """Call a function that returns an error or none; return its fields.

    Args:
        extension: Extension of the function.
        position: Position of the function in the extension.
        *fields: Fields of its structure after the size; 0 for results.
    """
    error, results = _call(extension, position, *fields)
    if not error:
        return results
    *_, text, size = _call(_FUNCTIONS, 1, 0, error, 0, 0)[1]
    *_, code = _call(_FUNCTIONS, 2, 0, error, 0)[1]
    message = ctypes.string_at(text, size).decode(errors="replace")
    _call(_FUNCTIONS, 0, 0, error)
    out_of_memory = "RESOURCE_EXHAUSTED" if code == _OUT_OF_MEMORY else ""
    raise RefusalError(message, out_of_memory)  # no-catalogue: an error of libtpu


def _call(extension: int, position: int, *fields: int) -> tuple[int, tuple[int, ...]]:
    """Call a function; return its result, which has a meaning only for some, and its fields."""
    words = (c_size_t * (1 + len(fields)))(8 * (1 + len(fields)), *fields)
    return _functions(extension)[position](words) or 0, tuple(words[1:])


_Function: Any = ctypes.CFUNCTYPE(c_void_p, c_void_p)


@lru_cache(maxsize=8)
def _functions(extension: int) -> list[Callable[[Any], int | None]]:
    """Return the functions of an extension of libtpu, or of its API.

    Raises:
        TopologyError: If it has another version, or not the extension.
    """
    library = ctypes.CDLL(cloud_tpu_init.get_tpu_library_path())
    library.GetPjrtApi.restype = c_void_p
    # PJRT_Api: size, first extension; size, extensions and numbers of its version; functions.
    at, before = library.GetPjrtApi(), 40
    major, minor = (c_int * 2).from_address(at + 32)
    if extension != _FUNCTIONS:
        # PJRT_Extension_Base: size, number, next extension; functions.
        at, before = c_size_t.from_address(at + 8).value, 24
        while at and c_int.from_address(at + 8).value != extension:
            at = c_size_t.from_address(at + 16).value
    if major != _MAJOR_VERSION or not at:
        raise TopologyError(  # no-catalogue: needs another libtpu
            f"an estimate requires a libtpu that compiles in phases, and this one, with PJRT's C "
            f"API {major}.{minor}, does not: leave estimate=True out"
        )
    count = (c_size_t.from_address(at).value - before) // 8
    addresses = (c_size_t * count).from_address(at + before)
    return [_Function(address) for address in addresses]


def _address(data: bytes) -> _Address:
    """Return the address of bytes that the caller keeps alive."""
    return ctypes.cast(c_char_p(data), c_void_p).value or 0
