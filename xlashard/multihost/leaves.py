"""Leaves of a pytree that processes exchange: host values, or arrays that span processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.transfer import HandleType, Tracer
from xlashard.array import Array
from xlashard.array.core.base import check_alive
from xlashard.array.core.handles import is_key_array, key_handle, keys_over
from xlashard.array.placement.put import as_host_value
from xlashard.array.placement.read import read_value, start_read
from xlashard.array.placement.target import at_path, leaf_paths
from xlashard.errors import ArgumentError, XlashardError
from xlashard.lazily import dataclass
from xlashard.wording import typed


@dataclass(eq=False)
class HostLeaf:
    """One leaf of a pytree.

    Attributes:
        path: Path of the leaf, as source text.
        value: Host value in its own dtype; for PRNG keys their key data. None for an array that
            spans processes and was not read.
        array: The device array, if the leaf was one; for PRNG keys the array of their key data.
        keys: The PRNG keys, if the leaf was an array of keys.
    """

    path: str
    value: np.ndarray | None = None
    array: Array | None = None
    keys: Any = None

    @property
    def type(self) -> str:
        """Description that must be equal in all processes."""
        x: Any = self.array if self.value is None else self.value
        text = typed(x.dtype.name, x.shape)
        text = text if self.keys is None else f"keys of {jax.random.key_impl(self.keys)}, {text}"
        return f"a global array {text}" if self.value is None else text

    @property
    def ndim(self) -> int:
        """Number of dimensions, without the dimension of the key data."""
        return next(x for x in (self.keys, self.value, self.array) if x is not None).ndim

    def like(self, value: np.ndarray) -> Any:
        """Return a value of this leaf's kind: PRNG keys if the leaf was an array of keys."""
        return value if self.keys is None else keys_over(value, self.keys)


def read_leaves(tree: Any, name: str, use: str, *, whole: bool = False) -> list[HostLeaf]:
    """Read the leaves of a pytree; all transfers start before the first one is awaited.

    Args:
        tree: NumPy arrays, numbers, Arrays, JAX arrays and PRNG keys.
        name: Name of the argument, for error messages.
        use: Name of the calling function.
        whole: Whether to read fully replicated arrays that span processes as well.

    Raises:
        ArgumentError: A value that no device can hold, or a traced one, with its path.
        DeletedError: A deleted array, with its path.
        TransferGuardError: JAX's transfer guards forbid the transfer.
    """
    return read_named(named_leaves(tree, name), use, whole=whole)


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their paths as source text."""
    return list(zip(leaf_paths(tree, name), jax.tree_util.tree_leaves(tree), strict=True))


def read_named(
    named: Sequence[tuple[str, Any]], use: str, *, whole: bool = False
) -> list[HostLeaf]:
    """Read leaves that are given with their paths; see `read_leaves`."""
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
    """Prefix errors raised in this block with the path of a leaf."""
    try:
        yield
    except XlashardError as error:
        raise at_path(error, path) from None


def _opened(path: str, x: Any, use: str) -> HostLeaf:
    if isinstance(x, Tracer):
        raise ArgumentError(
            f"it is a traced value, but {use} exchanges concrete values: call it outside of jit, "
            "grad and vmap"
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
