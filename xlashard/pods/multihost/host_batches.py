"""Batches of this process: read from a data loader, with its position, and checked."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xlashard._jax.tree_definitions import leaf_paths
from xlashard.core.array.constructors import to_host_array
from xlashard.core.array.placement.put import host_value
from xlashard.errors import ArgumentError, PlacementError, counted
from xlashard.support.lazily import dataclass

_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""Methods that return and set the position of a data loader: of grain; of PyTorch's
StatefulDataLoader and of Hugging Face's datasets."""

_ADVICE = "pass the value that get_state() has returned in this process"
_END = object()


class DataSource:
    """Data loader of this process, read from a position.

    Args:
        source: Iterable of batches.

    Attributes:
        position: Number of batches that were read; after the end, of those of other processes.
        full_rows: Rows of a full batch, as far as it is known: the most rows so far.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        if not isinstance(source, Iterable):
            raise ArgumentError(
                f"source of GlobalBatches is of type {type(source).__name__}: expected an iterable "
                "of batches, such as a grain dataset, or a list of pytrees"
            )
        self.position = self.full_rows = 0
        self._has_ended = False
        self._source = source
        self._iterator: Iterator[Any] | None = None
        self._get_loader_state: Any = None
        self._loader_state: Any = None

    def read(self) -> "HostBatch":
        """Return the next batch.

        Raises:
            StopIteration: The source has ended.
        """
        tree = next(self._open_iterator())
        self.position += 1
        batch = read_host_batch(tree)
        self.full_rows = max(self.full_rows, batch.rows)
        return batch

    def pass_batch(self) -> dict[str, Any]:
        """Count a batch of other processes after the end of this one's; return the state."""
        self.position, self._has_ended = self.position + 1, True
        return self.get_state()

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch that was read."""
        self._open_iterator()
        process = [jax.process_index(), jax.process_count()]
        state: dict[str, Any] = {"batches": self.position, "process": process}
        if self.full_rows:
            # Without it, a last batch would pass for a full one if it is the first after a restart.
            state["rows"] = self.full_rows
        if self._has_ended:
            state["ended"] = True
        if self._get_loader_state is not None:
            # A copy, since a loader may return the very object that it goes on to change.
            value = copy.deepcopy(self._get_loader_state())
            # grain's DataLoader returns bytes, which JSON lacks.
            is_text = isinstance(value, bytes)
            state |= {"source_bytes": value.decode("latin-1")} if is_text else {"source": value}
        return state

    def set_state(self, state: Any) -> None:
        """Set the position from which the source is read.

        Raises:
            ArgumentError: The state is invalid or of another process, or the source cannot return
                to its beginning.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("batches"), int):
            raise ArgumentError(f"state of GlobalBatches.set_state is {state!r:.80}: {_ADVICE}")
        own_index, processes = jax.process_index(), jax.process_count()
        index, count = state.get("process", (own_index, processes))
        if (index, count) != (own_index, processes):
            raise ArgumentError(
                f"state of GlobalBatches.set_state is of process {index} of {count}, but this is "
                f"process {own_index} of {processes}: {_ADVICE}, in a pod of as many processes"
            )
        counts_only = "source" not in state and "source_bytes" not in state
        if counts_only and self._iterator is self._source and self.position:
            raise ArgumentError(
                "state of GlobalBatches.set_state is a number of batches, but the source is an "
                "iterator that was read already: call set_state before the first batch, or pass an "
                "iterable that begins anew, such as a list"
            )
        self.position = state["batches"]
        self.full_rows, self._has_ended = state.get("rows", 0), "ended" in state
        self._iterator = self._get_loader_state = None
        text = state.get("source_bytes")
        self._loader_state = state.get("source") if text is None else text.encode("latin-1")

    def _open_iterator(self) -> Iterator[Any]:
        """Return the iterator, at the position of the state that was set."""
        if self._iterator is not None:
            return self._iterator
        owner, state = self._source, self._loader_state
        names = _find_protocol(owner)
        if names and state is not None:
            # Before the iterator is made: a loader applies its state to the next one.
            getattr(owner, names[1])(state)
        iterator = iter(owner)
        if names is None:
            owner, names = iterator, _find_protocol(iterator)
            if names and state is not None:
                getattr(owner, names[1])(state)
        if names is None and state is not None:
            raise ArgumentError(
                "state of GlobalBatches.set_state has a state of the source, but "
                f"{type(self._source).__name__} has neither set_state nor load_state_dict: pass "
                "the source that the state was saved with"
            )
        for number in range(0 if state is not None else self.position):
            if next(iterator, _END) is _END and not self._has_ended:
                raise ArgumentError(
                    f"state of GlobalBatches.set_state is after {self.position} batches, but the "
                    f"source has {number}: pass the source that the state was saved with"
                )
        self._get_loader_state = getattr(owner, names[0]) if names else None
        self._iterator = iterator
        return iterator


def _find_protocol(owner: Any) -> tuple[str, str] | None:
    """Return the names of the methods that return and set a loader's position, if it has them."""
    for names in _PROTOCOLS:
        if all(callable(getattr(owner, name, None)) for name in names):
            return names
    return None


@dataclass(frozen=True)
class HostBatch:
    """Batch of this process.

    Attributes:
        definition: Structure of the pytree.
        paths: Path of each leaf in the pytree.
        leaves: Value of each leaf.
        rows: Size of the first dimension of each leaf that has dimensions.
    """

    definition: Any
    paths: Sequence[str]
    leaves: Sequence[np.ndarray]
    rows: int

    @property
    def types(self) -> tuple[str, ...]:
        """Return path and type of each leaf, without the number of rows."""
        shapes = [", ".join(["rows", *map(str, x.shape[1:])][: x.ndim]) for x in self.leaves]
        named = zip(self.paths, self.leaves, shapes, strict=True)
        return tuple(f"batch{path}: {leaf.dtype.name}[{shape}]" for path, leaf, shape in named)

    def pad(self, rows: int) -> Any:
        """Return the pytree with rows of zeros at the end, up to a number of rows."""
        leaves, end = self.leaves, (0, rows - self.rows)
        if rows != self.rows:
            leaves = [np.pad(x, [end] + [(0, 0)] * (x.ndim - 1)) if x.ndim else x for x in leaves]
        return self.definition.unflatten(leaves)

    def remove_rows(self) -> "HostBatch":
        """Return the batch without its rows, for its type."""
        leaves = [leaf[:0] if leaf.ndim else leaf for leaf in self.leaves]
        return HostBatch(self.definition, self.paths, leaves, 0)


def read_host_batch(tree: Any, name: str = "batch") -> HostBatch:
    """Read the values of a batch, in the dtypes that they have on devices.

    Args:
        tree: Pytree of arrays of NumPy, JAX, PyTorch or TensorFlow, or of ShapeDtypeStructs.
        name: Name of the batch in errors.

    Raises:
        ArgumentError: A value that no device can hold, with its path, or a batch without rows.
        PlacementError: Values of unequal numbers of rows.
    """
    leaves, definition = jax.tree.flatten(tree)
    paths = leaf_paths(tree, "")
    values = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = np.zeros(leaf.shape, leaf.dtype)
        values.append(host_value(to_host_array(leaf), lambda path=path: name + path)[0])
    rows = {name + path: x.shape[0] for path, x in zip(paths, values, strict=True) if x.ndim}
    if not rows:
        raise ArgumentError(f"{name} has no array with rows: give arrays of shape [rows, ...]")
    first = next(iter(rows))
    for path, count in rows.items():
        if count != rows[first]:
            raise PlacementError(
                f"{path} has {counted(count, 'row')}, but {first} has {rows[first]:,}: give arrays "
                "of equal numbers of rows"
            )
    return HostBatch(definition, paths, values, rows[first])
