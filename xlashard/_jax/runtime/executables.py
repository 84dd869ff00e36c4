"""Inspect, serialize and load compiled programs."""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src import core, dispatch, tree_util
from jax._src.lax import linalg
from jax._src.lib import _jax, hlo
from jax._src.lib import xla_client as xc
from jaxlib import gpu_solver

from xlashard._jax.lower import modules
from xlashard._jax.lower.lowering import LoweredBody
from xlashard._jax.runtime.compiler import Executable, assigned, client_of
from xlashard._jax.runtime.shardings import Device, device_list
from xlashard._jax.runtime.transfer import make_aval

type TreeDef = Any

_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def versions() -> tuple[str, str]:
    """The versions of JAX and of jaxlib."""
    return jax.__version__, jaxlib.__version__


def to_bytes(executable: Executable) -> bytes:
    """What PJRT needs to load a program again.

    Raises:
        RuntimeError: If the platform's plugin can't give it.
    """
    return executable.serialize()


def fingerprint(executable: Executable) -> str:
    """What the runtime tells a loaded program from others by, in hex; empty where it won't say."""
    try:
        found = executable.fingerprint
    except (AttributeError, RuntimeError):  # not every PJRT plugin has one
        return ""
    return found.hex() if isinstance(found, bytes) else str(found or "")


def from_bytes(data: bytes, devices: Sequence[Device], arguments: int) -> Executable:
    """Loads what `to_bytes` gave, to run on devices.

    PJRT trusts these bytes: they are machine code.

    Args:
        data: The bytes.
        devices: The device assignment.
        arguments: How many arguments the program takes.

    Raises:
        RuntimeError: If PJRT refuses them.
    """
    # Programs find these libraries by name. Lowering rules load them, and here none has run.
    linalg.initialize_lapack()
    gpu_solver.initialize_hybrid_kernels()
    client = client_of(devices[0])
    options = assigned(devices, client)
    options.parameter_is_tupled_arguments = dispatch.should_tuple_args(arguments, client.platform)
    return client.deserialize_executable(data, device_list(devices), options)


def empty_body() -> LoweredBody:
    """What stays of the body of a program without effects and callbacks, once it is compiled."""
    return LoweredBody(
        module=None,
        main=None,
        ordered_effects=(),
        has_effects=False,
        keepalives=(),
        host_callbacks=(),
    )


def aval(
    shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False, sharding: Any = None
) -> Any:
    """An abstract value; with a sharding of JAX, as arrays that lie so have it."""
    if sharding is None:
        return core.ShapedArray(shape, dtype, weak_type=weak_type)
    return make_aval(shape, dtype, sharding, weak_type)


def is_typed_by_mesh(value: Any) -> bool:
    """True if an abstract value has a mesh in its type."""
    return not value.sharding.mesh.empty


@lru_cache(maxsize=1)
def _key_dtypes() -> dict[str, Any]:
    keys = (
        jax.eval_shape(lambda implementation=implementation: jax.random.key(0, impl=implementation))
        for implementation in _KEY_IMPLEMENTATIONS
    )
    return {str(key.dtype): key.dtype for key in keys}


def dtype_of(name: str) -> Any:
    """The dtype of a name, a NumPy one or that of keys.

    Raises:
        TypeError: If there is none.
    """
    return _key_dtypes().get(name) or np.dtype(name)


def physical(value: Any) -> Any:
    """The abstract value of the integers behind a key array."""
    return core.physical_aval(value)


def key_data(value: Any) -> Any:
    """The integers behind a key array."""
    return jax.random.key_data(value)


def keys_of(data: np.ndarray, dtype: Any) -> Any:
    """The key array of integers."""
    for implementation in _KEY_IMPLEMENTATIONS:
        keys = jax.random.wrap_key_data(jnp.asarray(data), impl=implementation)
        if keys.dtype == dtype:
            return keys
    # no-catalogue: dtypes of other keys are refused before
    raise TypeError(f"no implementation of {dtype}")


def make_node(kind: type, data: Any, children: Sequence[TreeDef]) -> TreeDef:
    """The tree of a node of a registered class, by what its `node_data()` says.

    Raises:
        RuntimeError: If the class is not registered, or its children are not as many as its data.
    """
    registry = tree_util.default_registry
    return tree_util.pytree.PyTreeDef.from_node_data_and_children(
        registry, (kind, data), list(children)
    )


def jaxlib_version() -> str:
    """The version of jaxlib."""
    return jaxlib.__version__


def compiled_text(executable: Any) -> str:
    """The optimised HLO."""
    return "\n\n".join(m.to_string() for m in executable.hlo_modules())


def compiled_cost(executable: Any) -> dict[str, float]:
    """XLA's estimates for the optimised program: FLOP, bytes accessed, ..."""
    found = executable.cost_analysis()
    return dict(found[0] if isinstance(found, list | tuple) else found)


def compiled_memory(executable: Any) -> Any:
    """Bytes per device: arguments, results, aliases, temporaries, code."""
    return executable.get_compiled_memory_stats()


def alias_bytes(executable: Any) -> int | None:
    """How many bytes of its arguments its results take over, on each device; None if unknown."""
    try:
        return executable.get_compiled_memory_stats().alias_size_in_bytes
    except Exception:  # not every PJRT plugin answers
        return None


def extra_bytes(executable: Any) -> int | None:
    """How much memory a run takes on each device, arguments and results apart; None if unknown.

    Results that take over an argument's memory make it less.
    """
    try:
        found = executable.get_compiled_memory_stats()
        return found.temp_size_in_bytes - found.alias_size_in_bytes
    except Exception:  # not every PJRT plugin answers
        return None


def aliases(executable: Any) -> dict[int, int]:
    """For each result that takes over an argument's buffers, that argument."""
    return aliases_in(executable.hlo_modules()[0].to_string().partition("\n")[0])


def aliases_in(header: str) -> dict[int, int]:
    """The same, from the first line of a module's text."""
    _, _, rest = header.partition("input_output_alias={")
    found = {}
    for result, argument, part in _ALIAS.findall(rest[: _closing(rest)]):
        # Arguments that travel as one tuple are its parts.
        found[int(result or 0)] = int(part or argument)
    return found


_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")


def _closing(text: str) -> int:
    """Where the brace closes that was open before a text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return i
    return len(text)


def lowered_cost(client: Any, module: Any) -> dict[str, float]:
    """XLA's estimates for the module as it is, before optimisation."""
    return dict(xc._xla.hlo_module_cost_analysis(client, _hlo(module)))


def hlo_text(module: Any, *, debug_info: bool = False) -> str:
    """The module as HLO text, with or without where each operation comes from."""
    options = hlo.HloPrintOptions()
    options.print_metadata = debug_info
    return _hlo(module).to_string(options)


def hlo_computation(module: Any) -> Any:
    """The module as XLA's computation."""
    return xc._xla.mlir.mlir_module_to_xla_computation(
        modules.to_bytecode(module), use_tuple_args=False, return_tuple=False
    )


def _hlo(module: Any) -> Any:
    return hlo_computation(module).as_hlo_module()


@dataclass(frozen=True)
class _Text:
    """An HLO module of which only the text is left."""

    text: str

    def to_string(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class OfflineExecutable:
    """Answers what PJRT's executable would, of a program that can't be loaded here.

    Attributes:
        modules: The optimised HLO, module by module.
        cost: XLA's estimates.
        memory: Bytes per device, by PJRT's names; None where it didn't say.
        layouts: Those of parameters and of results, as text.
        memory_kinds: Of each result.
    """

    modules: tuple[str, ...]
    cost: Mapping[str, float]
    memory: Mapping[str, int] | None
    layouts: tuple[tuple[str, ...], tuple[str, ...]]
    memory_kinds: tuple[str, ...]

    def hlo_modules(self) -> list[_Text]:
        return [_Text(text) for text in self.modules]

    def cost_analysis(self) -> dict[str, float]:
        return dict(self.cost)

    def get_compiled_memory_stats(self) -> SimpleNamespace | None:
        return None if self.memory is None else SimpleNamespace(**self.memory)

    def get_parameter_layouts(self) -> list[Any]:
        return [_layout(text) for text in self.layouts[0]]

    def get_output_layouts(self) -> list[Any]:
        return [_layout(text) for text in self.layouts[1]]

    def get_output_memory_kinds(self) -> list[list[str]]:
        return [list(self.memory_kinds)]


def _layout(text: str) -> Any:
    layout = _jax.PjRtLayout.__new__(_jax.PjRtLayout)
    layout.__setstate__((text.encode(),))
    return layout


def describe(executable: Executable) -> bytes:
    """What a compiled program says of itself, as bytes."""
    memory = _if_said(executable.get_compiled_memory_stats)
    cost = _if_said(executable.cost_analysis)
    said = {
        "modules": [module.to_string() for module in executable.hlo_modules()],
        "cost": dict(cost[0] if isinstance(cost, list | tuple) else cost or {}),
        "memory": None if memory is None else _numbers(memory),
        "layouts": [
            [str(layout) for layout in executable.get_parameter_layouts()],
            [str(layout) for layout in executable.get_output_layouts()],
        ],
        "memory_kinds": list(executable.get_output_memory_kinds()[0]),
    }
    return zlib.compress(json.dumps(said).encode())


def _if_said(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RuntimeError:  # not every compiler answers before its program is loaded
        return None


def _numbers(stats: Any) -> dict[str, int]:
    found = {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}
    return {name: value for name, value in found.items() if type(value) is int}


def described(data: bytes | memoryview) -> OfflineExecutable:
    """The program that `describe` has described.

    Raises:
        ValueError: If the bytes are none of such.
    """
    try:
        said = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from None  # no-catalogue: needs a damaged file
    ins, outs = (tuple(map(str, side)) for side in said["layouts"])
    memory = said["memory"]
    return OfflineExecutable(
        modules=tuple(map(str, said["modules"])),
        cost={str(name): float(value) for name, value in said["cost"].items()},
        memory=None if memory is None else {str(n): int(value) for n, value in memory.items()},
        layouts=(ins, outs),
        memory_kinds=tuple(map(str, said["memory_kinds"])),
    )
