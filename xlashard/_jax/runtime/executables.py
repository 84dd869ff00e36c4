"""Inspect, serialize and load compiled programs."""

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src import core, dispatch, tree_util
from jax._src.lax import linalg
from jax._src.lib import hlo
from jax._src.lib import xla_client as xc
from jaxlib import gpu_solver

from xlashard._jax import modules
from xlashard._jax.runtime.compiler import Executable, assigned, client_of
from xlashard._jax.runtime.shardings import Device, device_list, if_reported
from xlashard._jax.runtime.transfer import make_aval

type TreeDef = Any

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
    options.parameter_is_tupled_arguments = dispatch.should_tuple_args(arguments, client.platform)
    return client.deserialize_executable(data, device_list(devices), options)


def aval(
    shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False, sharding: Any = None
) -> Any:
    """Return an abstract value; with a sharding of JAX, that of an array under this sharding."""
    if sharding is None:
        return core.ShapedArray(shape, dtype, weak_type=weak_type)
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


def make_node(kind: type, data: Any, children: Sequence[TreeDef]) -> TreeDef:
    """Return the tree of a node of a registered class, from its `node_data()`.

    Raises:
        RuntimeError: If the class is not registered, or the number of children differs.
    """
    registry = tree_util.default_registry
    return tree_util.pytree.PyTreeDef.from_node_data_and_children(
        registry, (kind, data), list(children)
    )


def jaxlib_version() -> str:
    """Return the version of jaxlib."""
    return jaxlib.__version__


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
    _, _, rest = header.partition("input_output_alias=")
    aliases = _ALIAS.findall(rest[: end_of_braces(rest)])
    # Arguments that are passed as one tuple are its elements.
    return {int(result or 0): int(part or argument) for result, argument, part in aliases}


_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")


def end_of_braces(text: str) -> int:
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
    options = hlo.HloPrintOptions()
    options.print_metadata = debug_info
    return _hlo(module).to_string(options)


def hlo_computation(module: Any) -> Any:
    """Return the module as XLA's computation."""
    return xc._xla.mlir.mlir_module_to_xla_computation(
        modules.to_bytecode(module), use_tuple_args=False, return_tuple=False
    )


def _hlo(module: Any) -> Any:
    return hlo_computation(module).as_hlo_module()
