"""Compiled programs as bytes, and what else a saved program needs of JAX to live again."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src import core, dispatch, tree_util
from jax._src.lax import linalg
from jaxlib import gpu_solver

from xlashard._jax.compiling import Executable, assigned, client_of
from xlashard._jax.lowering import LoweredBody
from xlashard._jax.shardings import Device, device_list
from xlashard._jax.transfer import make_aval

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


def nothing_kept() -> LoweredBody:
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
