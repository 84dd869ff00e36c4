"""`jax.experimental.maps`: meshes, `thread_resources` and `xmap`."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from xlashard.legacy.modes.array_mode import POSITIONAL as _positional_semantics
from xlashard.legacy.modes.array_mode import PositionalSemantics as _PositionalSemantics
from xlashard.legacy.modules.entry import Entry, RemovedApi, imported_modules, imports, members
from xlashard.legacy.shardings.legacy_mesh import (
    EMPTY_ENV,
    Loop,
    Mesh,
    ResourceEnv,
    mesh,
    thread_resources,
)

type AxisName = Hashable
type ResourceAxisName = Hashable
type MeshAxisName = Any

__getattr__ = imported_modules("jax.experimental.maps")

SerialLoop = RemovedApi("jax.experimental.maps.SerialLoop")
make_xmap_callable = RemovedApi("jax.experimental.maps.make_xmap_callable")
serial_loop = RemovedApi("jax.experimental.maps.serial_loop")
xmap = RemovedApi("jax.experimental.maps.xmap")
xmap_p = RemovedApi("jax.experimental.maps.xmap_p")


class FrozenDict(Mapping[Any, Any]):
    """Immutable, hashable dict.

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


_HOME = "jax.experimental.maps"

_NO_XMAP = "xmap and its loops have no replacement with the same interface"
_SHARD_MAP = "jax.shard_map(f, mesh=mesh, in_specs=P('x'), out_specs=P('x'))"

_REFUSED = (
    ("SerialLoop", "jax.lax.map(f, xs)"),
    ("make_xmap_callable", _SHARD_MAP),
    ("serial_loop", "jax.lax.map(f, xs)"),
    ("xmap", _SHARD_MAP),
    ("xmap_p", _SHARD_MAP),
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.4.31", "works", __name__, "jax.sharding"),
    Entry(
        f"{_HOME}.Mesh",
        "0.4.11",
        "works",
        f"{__name__}:Mesh",
        "jax.sharding.Mesh",
        "It makes today's meshes, and meshes of fake devices, hashable or not.",
    ),
    Entry(
        f"{_HOME}.mesh",
        "0.3.15",
        "works",
        f"{__name__}:mesh",
        "with jax.set_mesh(jax.sharding.Mesh(devices, axis_names)): ...",
    ),
    Entry(
        f"{_HOME}.thread_resources",
        "0.4.31",
        "works",
        f"{__name__}:thread_resources",
        "jax.sharding.get_mesh()",
        "It has the attributes `env`, which can be assigned, and `stack`.",
    ),
    Entry(
        f"{_HOME}.ResourceEnv",
        "0.4.31",
        "differs",
        f"{__name__}:ResourceEnv",
        "with jax.set_mesh(mesh): ...",
        "Its `loops` are `()`, because `xmap` was removed; others cannot be assigned.",
    ),
    Entry(
        f"{_HOME}.EMPTY_ENV", "0.4.31", "works", f"{__name__}:EMPTY_ENV", "jax.sharding.get_mesh()"
    ),
    Entry(
        f"{_HOME}._PositionalSemantics",
        "0.4.7",
        "works",
        f"{__name__}:_PositionalSemantics",
        "jax.make_array_from_process_local_data(sharding, local)",
    ),
    Entry(
        f"{_HOME}._positional_semantics",
        "0.4.7",
        "works",
        f"{__name__}:_positional_semantics",
        "jax.make_array_from_process_local_data(sharding, local)",
        "Its `val` has an effect while `jax_array` is off.",
    ),
    Entry(f"{_HOME}.Loop", "0.4.31", "differs", f"{__name__}:Loop", "jax.lax.map(f, xs)", _NO_XMAP),
    *(
        Entry(f"{_HOME}.{name}", "0.4.31", "refused", f"{__name__}:{name}", today, _NO_XMAP)
        for name, today in _REFUSED
    ),
    Entry(
        "jax._src.mesh.Mesh._local_to_global",
        "0.4.31",
        "works",
        "xlashard.legacy.shardings.legacy_mesh:local_to_global",
        "jax.make_array_from_process_local_data(sharding, local).shape",
    ),
    Entry(
        "jax._src.mesh.Mesh._global_to_local",
        "0.4.31",
        "works",
        "xlashard.legacy.shardings.legacy_mesh:global_to_local",
        "x.sharding.shard_shape(x.shape)",
    ),
    *members(_HOME, "0.4.31", __name__, imports(_HOME)),
    Entry(
        f"{_HOME}.FrozenDict", "0.4.31", "works", f"{__name__}:FrozenDict", "types.MappingProxyType"
    ),
)
