"""The leaves of a tree that processes exchange: values on the host, or arrays that all hold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from xlashard._jax.transfer import HandleType, Tracer
from xlashard.array import Array
from xlashard.array.holder import check_alive
from xlashard.array.host import read_value, start_read
from xlashard.array.host_put import as_host_value
from xlashard.array.keys import is_key_array, key_handle, keys_over
from xlashard.array.moving import at_path
from xlashard.errors import ArgumentError, XlashardError
from xlashard.lazily import dataclass
from xlashard.wording import typed


@dataclass(eq=False)
class HostLeaf:
    """One value of a tree.

    Attributes:
        path: How a person would write the way to it.
        value: What this process has of it, in its own dtype; of keys their numbers. None for an
            array that was not read, for it is one array in several processes.
        array: The array that it was; of keys that of their numbers.
        keys: The keys, where it was some.
    """

    path: str
    value: np.ndarray | None = None
    array: Array | None = None
    keys: Any = None

    @property
    def type(self) -> str:
        """What must be the same in all processes, in words."""
        x: Any = self.array if self.value is None else self.value
        text = typed(x.dtype.name, x.shape)
        text = text if self.keys is None else f"keys of {jax.random.key_impl(self.keys)}, {text}"
        return f"a global array {text}" if self.value is None else text

    @property
    def ndim(self) -> int:
        """The number of its dimensions, those of one key not counted."""
        if self.keys is not None:
            return self.keys.ndim
        x: Any = self.array if self.value is None else self.value
        return x.ndim

    def like(self, value: np.ndarray) -> Any:
        """A value of this leaf's kind: keys again where it was keys."""
        return value if self.keys is None else keys_over(value, self.keys)


def read_leaves(tree: Any, name: str, use: str, *, whole: bool = False) -> list[HostLeaf]:
    """Reads the leaves of a tree; all transfers to the host start before the first is awaited.

    Args:
        tree: NumPy arrays, numbers, Arrays, arrays and keys of JAX.
        name: What to call the tree in an error.
        use: The function they are read for.
        whole: Whether to read also an array that spans processes and of which each device has all.

    Raises:
        ArgumentError: A value that no device can hold, or a traced one, with its path.
        DeletedError: A deleted array, with its path.
        TransferGuardError: JAX's transfer guards forbid it.
    """
    return read_named(named_leaves(tree, name), use, whole=whole)


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with the way to it as a person would write it."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(name + jax.tree_util.keystr(path), x) for path, x in flat]


def read_named(
    named: Sequence[tuple[str, Any]], use: str, *, whole: bool = False
) -> list[HostLeaf]:
    """As `read_leaves`, of leaves with their paths."""
    leaves = []
    for path, x in named:
        with _at(path):
            leaves.append(_opened(path, x, use))
    read = [leaf for leaf in leaves if leaf.array is not None and _is_read(leaf.array, whole)]
    for leaf in read:
        with _at(leaf.path):
            start_read(leaf.array, explicit=True)
    for leaf in read:
        with _at(leaf.path):
            leaf.value = read_value(leaf.array, explicit=True)
    return leaves


@contextmanager
def _at(path: str) -> Iterator[None]:
    """A block whose errors get the path of a leaf in front."""
    try:
        yield
    except XlashardError as error:
        raise at_path(error, path) from None


def _opened(path: str, x: Any, use: str) -> HostLeaf:
    if isinstance(x, Tracer):
        raise ArgumentError(
            f"it is traced, and {use} exchanges known values: call it outside of jit, grad and vmap"
        )
    keys = x if is_key_array(x) else None
    if keys is not None:
        x = key_handle(keys)
    if not isinstance(x, Array | HandleType):
        return HostLeaf(path, value=as_host_value(x, lambda: "it").value)
    check_alive(x)
    return HostLeaf(path, array=x if isinstance(x, Array) else Array.from_jax(x), keys=keys)


def _is_read(array: Array, whole: bool) -> bool:
    return array.is_fully_addressable or (whole and array.is_fully_replicated)
