"""What `jax.experimental.maps` held."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from xlashard.legacy.era.modules import imported_modules
from xlashard.legacy.meshes import Mesh, mesh
from xlashard.legacy.positional import POSITIONAL as _positional_semantics
from xlashard.legacy.positional import PositionalSemantics as _PositionalSemantics
from xlashard.legacy.refusals import Refusal
from xlashard.legacy.thread_resources import EMPTY_ENV, Loop, ResourceEnv, thread_resources

type AxisName = Hashable
type ResourceAxisName = Hashable
type MeshAxisName = Any

__getattr__ = imported_modules("jax.experimental.maps")

SerialLoop = Refusal("jax.experimental.maps.SerialLoop")
make_xmap_callable = Refusal("jax.experimental.maps.make_xmap_callable")
serial_loop = Refusal("jax.experimental.maps.serial_loop")
xmap = Refusal("jax.experimental.maps.xmap")
xmap_p = Refusal("jax.experimental.maps.xmap_p")

__all__ = [
    "EMPTY_ENV",
    "AxisName",
    "FrozenDict",
    "Loop",
    "Mesh",
    "MeshAxisName",
    "ResourceAxisName",
    "ResourceEnv",
    "SerialLoop",
    "_PositionalSemantics",
    "_positional_semantics",
    "make_xmap_callable",
    "mesh",
    "serial_loop",
    "thread_resources",
    "xmap",
    "xmap_p",
]


class FrozenDict(Mapping[Any, Any]):
    """A dict that can't be changed and has a hash, made by the arguments of `dict`.

    Example:
        >>> axes = FrozenDict({"x": 0}, y=1)
        >>> axes["y"], axes == {"x": 0, "y": 1}, hash(axes) == hash(FrozenDict(y=1, x=0))
        (1, True, True)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._items = dict(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, FrozenDict) else other)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._items})"
