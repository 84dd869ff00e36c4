"""`device_get`: pytrees of arrays to the host."""

from typing import Any

import jax

from xlashard._jax.transfer import HandleType
from xlashard.array.array import Array, wrap
from xlashard.array.host import read_value, start_read


def device_get(x: Any) -> Any:
    """Brings values to the host; all transfers start before the first is awaited.

    Args:
        x: An array or a pytree of them.

    Returns:
        `x` with a read-only NumPy array for every array; other leaves as they are.

    Raises:
        NotAddressableError: A value that is not wholly in this process.
        DeletedError: A deleted array.
        TransferGuardError: JAX's transfer guards forbid it, as they do under
            `"disallow_explicit"`.
    """
    leaves, treedef = jax.tree.flatten(x)
    arrays = [wrap(leaf) if type(leaf) is HandleType else leaf for leaf in leaves]
    for array in arrays:
        if isinstance(array, Array):
            start_read(array, explicit=True)
    return treedef.unflatten(
        read_value(array, explicit=True)
        if isinstance(array, Array)
        else (jax.device_get(array) if isinstance(array, jax.Array) else array)
        for array in arrays
    )
