"""Inspect, serialize and load compiled programs, and describe those of other processes."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.private import (
    gpu_solver,
    hlo_lib,
    jax_dispatch,
    lib_jax,
    linalg,
    xc,
)
from xlashard._jax.runtime.compiler import Executable, assigned, client_of
from xlashard._jax.runtime.shardings import Device, device_list, if_reported
from xlashard._jax.runtime.transfer import make_aval
from xlashard.geometry.hlo_text import read_aliases
from xlashard.support.lazily import dataclass

_KEY_NAMES = ("threefry2x32", "rbg", "unsafe_rbg")


def to_bytes(executable: Executable) -> bytes:
    """Return the serialized executable.

    Raises:
        RuntimeError: If the platform's plugin can't serialize it.
    """
    return executable.serialize()


def fingerprint(executable: Executable) -> str:
    """Return the runtime's fingerprint of a program in hex; empty if it has none."""
    digest = if_reported(lambda: executable.fingerprint)
    return digest.hex() if isinstance(digest, bytes) else str(digest or "")


def from_bytes(data: bytes, devices: Sequence[Device], arguments: int) -> Executable:
    """Load a serialized executable onto devices.

    PJRT trusts these bytes, which contain machine code.

    Args:
        data: The result of `to_bytes`.
        devices: The device assignment.
        arguments: The number of the program's arguments.

    Raises:
        RuntimeError: If PJRT refuses the bytes.
    """
    # Programs look these libraries up by name; otherwise lowering rules load them.
    linalg.initialize_lapack()
    gpu_solver.initialize_hybrid_kernels()
    client = client_of(devices[0])
    options = assigned(devices, client)
    options.parameter_is_tupled_arguments = jax_dispatch.should_tuple_args(
        arguments, client.platform
    )
    return client.deserialize_executable(data, device_list(devices), options)


def aval(
    shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False, sharding: Any = None
) -> Any:
    """Return an abstract value; with a sharding of JAX, that of an array under this sharding."""
    if sharding is None:
        return jax.core.ShapedArray(shape, dtype, weak_type=weak_type)
    return make_aval(shape, dtype, sharding, weak_type)


@lru_cache(maxsize=1)
def _key_dtypes() -> dict[str, Any]:
    keys = [jax.eval_shape(partial(jax.random.key, 0, impl=name)) for name in _KEY_NAMES]
    return {str(key.dtype): key.dtype for key in keys}


def dtype_of(name: str) -> Any:
    """Return the dtype of a name, of NumPy or of keys.

    Raises:
        TypeError: For an unknown name.
    """
    return _key_dtypes().get(name) or np.dtype(name)


def keys_of(data: np.ndarray, dtype: Any) -> Any:
    """Return the key array of integers."""
    return jax.random.wrap_key_data(jnp.asarray(data), impl=dtype._impl.name)


@lru_cache(maxsize=1)
def jaxlib_version() -> str:
    """Return the version of jaxlib."""
    return metadata.version("jaxlib")


def compiled_text(executable: Any) -> str:
    """Return the optimized HLO text."""
    return "\n\n".join(m.to_string() for m in executable.hlo_modules())


def hlo_modules(executable: Any) -> list[bytes | str]:
    """Return the optimized modules as serialized HloModuleProto; as text where that is stored."""
    return [
        module.as_serialized_hlo_module_proto() or module.to_string()
        for module in executable.hlo_modules()
    ]


def buffer_assignment(executable: Any) -> bytes:
    """Return the serialized BufferAssignmentProto; empty if the platform does not report it."""
    stats = if_reported(executable.get_compiled_memory_stats)
    return getattr(stats, "serialized_buffer_assignment_proto", b"")


def compiled_cost(executable: Any) -> dict[str, float]:
    """Return XLA's cost estimates of the optimized program: FLOP, bytes accessed, ...

    Raises:
        JaxRuntimeError: If the platform has no estimates, such as that of GPUs in a topology.
    """
    costs = executable.cost_analysis()
    return dict(costs[0] if isinstance(costs, list | tuple) else costs)


def compiled_memory(executable: Any) -> Any:
    """Return the bytes per device of arguments, results, aliases, temporaries and code."""
    return executable.get_compiled_memory_stats()


def aliases(executable: Any) -> dict[int, int]:
    """Return for each result that aliases an argument the position of that argument."""
    header = executable.hlo_modules()[0].to_string().partition("\n")[0]
    rest = header.partition("input_output_alias=")[2]
    return read_aliases(rest[: _end_of_braces(rest)])


def _end_of_braces(text: str) -> int:
    """Return the offset past the brace that closes the one at the start of a text."""
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    return len(text)


def lowered_cost(client: Any, module: Any) -> dict[str, float]:
    """Return XLA's cost estimates of a module before optimization."""
    return dict(xc._xla.hlo_module_cost_analysis(client, _hlo(module)))


def hlo_text(module: Any, *, debug_info: bool = False) -> str:
    """Return the module as HLO text, with or without source locations."""
    options = hlo_lib.HloPrintOptions()
    options.print_metadata = debug_info
    return _hlo(module).to_string(options)


def hlo_computation(module: Any) -> Any:
    """Return the module as XLA's computation."""
    return xc._xla.mlir.mlir_module_to_xla_computation(
        modules.to_bytecode(module), use_tuple_args=False, return_tuple=False
    )


def _hlo(module: Any) -> Any:
    return hlo_computation(module).as_hlo_module()


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
        log: What the compiler wrote to its log; empty if unknown.
    """

    modules: tuple[StoredModule, ...]
    cost: Mapping[str, float] | None
    memory: Mapping[str, int] | None
    layouts: tuple[tuple[str, ...], tuple[str, ...]]
    memory_kinds: tuple[str, ...]
    shardings: tuple[tuple[bytes, ...], tuple[bytes, ...]] = ((), ())
    buffers: bytes = b""
    log: str = ""

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
    layout = lib_jax.PjRtLayout.__new__(lib_jax.PjRtLayout)
    layout.__setstate__((text.encode(),))
    return layout


def describe(executable: Executable) -> bytes:
    """Serialize the properties of a compiled program, for a file."""
    offline = OfflineExecutable.of(executable)
    properties = {
        "modules": [module.text for module in offline.modules],
        "cost": offline.cost or {},
        "memory": offline.memory,
        "layouts": offline.layouts,
        "memory_kinds": offline.memory_kinds,
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
