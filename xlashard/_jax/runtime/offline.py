"""Compilation in another process: its input and its result as bytes.

The compilers for GPUs and TPUs abort their process on some programs. What a worker process compiles
costs its own life only.
"""

import json
import pickle
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import jax
from jax._src import compiler as jax_compiler
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc

from xlashard._jax import modules
from xlashard._jax.runtime.compiler import CompileRequest, Executable, compile_options
from xlashard._jax.runtime.executables import buffer_assignment, compiled_cost
from xlashard._jax.runtime.shardings import Device, device_list, if_reported, is_compile_only
from xlashard._jax.runtime.topologies import devices_of, is_requested, request_of


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
        return cls(modules.to_bytecode(module), options, request_of(devices[0]), ids)

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


def read_result(folder: Path) -> "tuple[OfflineExecutable, bytes]":
    """Return the executable that `run_saved` kept in a folder, and its machine code."""
    return pickle.loads((folder / _RESULT).read_bytes())


@dataclass(frozen=True)
class StoredModule:
    """HLO module that was compiled elsewhere.

    Attributes:
        text: Its text.
        proto: Its HloModuleProto; empty if the text alone is stored.
    """

    text: str
    proto: bytes = b""

    def to_string(self) -> str:
        return self.text

    def as_serialized_hlo_module_proto(self) -> bytes:
        return self.proto


@dataclass(frozen=True, eq=False)
class OfflineExecutable:
    """Executable that another process compiled or saved; it answers PJRT's queries.

    Attributes:
        modules: The optimized HLO, module by module.
        cost: XLA's cost estimates; None if the compiler reported none.
        memory: Bytes per device, by PJRT's names; None if the compiler reported none.
        layouts: The layouts of parameters and of results, as text.
        memory_kinds: The memory kind of each result.
        shardings: Serialized shardings of parameters and of results; empty if not stored.
        buffers: The serialized BufferAssignmentProto; empty if unknown.
    """

    modules: tuple[StoredModule, ...]
    cost: Mapping[str, float] | None
    memory: Mapping[str, int] | None
    layouts: tuple[tuple[str, ...], tuple[str, ...]]
    memory_kinds: tuple[str, ...]
    shardings: tuple[tuple[bytes, ...], tuple[bytes, ...]] = ((), ())
    buffers: bytes = b""

    @classmethod
    def of(cls, executable: Executable) -> Self:
        """Return the properties of an executable."""
        stats = if_reported(executable.get_compiled_memory_stats)
        sides = executable.get_parameter_shardings(), executable.get_output_shardings()
        parameters, results = (
            tuple(sharding.SerializeToString() for sharding in side or ()) for side in sides
        )
        return cls(
            modules=tuple(
                StoredModule(module.to_string(), module.as_serialized_hlo_module_proto())
                for module in executable.hlo_modules()
            ),
            cost=if_reported(lambda: compiled_cost(executable)),
            memory=None if stats is None else _numbers(stats),
            buffers=buffer_assignment(executable),
            layouts=(
                tuple(map(str, executable.get_parameter_layouts())),
                tuple(map(str, executable.get_output_layouts())),
            ),
            memory_kinds=tuple(executable.get_output_memory_kinds()[0]),
            shardings=(parameters, results),
        )

    def hlo_modules(self) -> list[StoredModule]:
        return list(self.modules)

    def cost_analysis(self) -> dict[str, float]:
        if self.cost is None:
            # no-catalogue: Compiled.cost_analysis returns None in its place
            raise jax.errors.JaxRuntimeError("the compiler reported no costs")
        return dict(self.cost)

    def get_compiled_memory_stats(self) -> SimpleNamespace | None:
        if self.memory is None:
            return None
        buffers = {"serialized_buffer_assignment_proto": self.buffers} if self.buffers else {}
        return SimpleNamespace(**self.memory, **buffers)

    def get_parameter_layouts(self) -> list[Any]:
        return [_layout(text) for text in self.layouts[0]]

    def get_output_layouts(self) -> list[Any]:
        return [_layout(text) for text in self.layouts[1]]

    def get_output_memory_kinds(self) -> list[list[str]]:
        return [list(self.memory_kinds)]

    def get_parameter_shardings(self) -> list[Any]:
        return [_sharding(data) for data in self.shardings[0]]

    def get_output_shardings(self) -> list[Any]:
        return [_sharding(data) for data in self.shardings[1]]


def _sharding(data: bytes) -> Any:
    sharding = xc.OpSharding()
    sharding.ParseFromString(data)
    return sharding


def _layout(text: str) -> Any:
    layout = _jax.PjRtLayout.__new__(_jax.PjRtLayout)
    layout.__setstate__((text.encode(),))
    return layout


def describe(executable: Executable) -> bytes:
    """Serialize the properties of a compiled program, for a file."""
    found = OfflineExecutable.of(executable)
    properties = {
        "modules": [module.text for module in found.modules],
        "cost": found.cost or {},
        "memory": found.memory,
        "layouts": found.layouts,
        "memory_kinds": found.memory_kinds,
    }
    return zlib.compress(json.dumps(properties).encode())


def _numbers(stats: Any) -> dict[str, int]:
    values = {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}
    return {name: value for name, value in values.items() if type(value) is int}


def described(data: bytes | memoryview) -> OfflineExecutable:
    """Return the offline executable of the bytes that `describe` returned.

    Raises:
        ValueError: For other bytes.
    """
    try:
        properties = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from None  # no-catalogue: needs a damaged file
    ins, outs = (tuple(map(str, side)) for side in properties["layouts"])
    memory, cost = properties["memory"], properties["cost"]
    return OfflineExecutable(
        modules=tuple(StoredModule(str(text)) for text in properties["modules"]),
        cost={str(name): float(value) for name, value in cost.items()} or None,
        memory=None if memory is None else {str(n): int(value) for n, value in memory.items()},
        layouts=(ins, outs),
        memory_kinds=tuple(map(str, properties["memory_kinds"])),
    )
