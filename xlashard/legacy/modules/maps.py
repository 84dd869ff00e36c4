"""`jax.experimental.maps`: meshes, `thread_resources` and `xmap`."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from xlashard.legacy.modules.entry import Entry, differs, imports, refused, works, works_in

type AxisName = Hashable
type ResourceAxisName = Hashable
type MeshAxisName = Any


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

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._items})"


_HOME = "jax.experimental.maps"
_MESHES = "xlashard.legacy.shardings.legacy_mesh"
_MODES = "xlashard.legacy.modes.config_flags"
_NO_XMAP = "xmap and its loops have no replacement with the same interface"
_SHARD_MAP = "jax.shard_map(f, mesh=mesh, in_specs=P('x'), out_specs=P('x'))"
_MAKE = "jax.make_array_from_process_local_data(sharding, local)"

_WORKS = {
    _MESHES: (
        ("mesh", "0.3.15", "with jax.set_mesh(jax.sharding.Mesh(devices, axis_names)): ..."),
        ("EMPTY_ENV", "0.4.31", "jax.sharding.get_mesh()"),
    ),
    _MODES: (("_PositionalSemantics", "0.4.7", _MAKE),),
    __name__: (("FrozenDict", "0.4.31", "types.MappingProxyType"),),
}
_OF_MESH = {
    _MESHES: (
        ("_local_to_global", "0.4.31", f"{_MAKE}.shape"),
        ("_global_to_local", "0.4.31", "x.sharding.shard_shape(x.shape)"),
    )
}

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.4.31", "works", __name__, "jax.sharding"),
    *works(
        _HOME,
        "0.4.11",
        _MESHES,
        Mesh=(
            "jax.sharding.Mesh",
            "It makes today's meshes, and meshes of fake devices, hashable or not.",
        ),
    ),
    *works(
        _HOME,
        "0.4.31",
        _MESHES,
        thread_resources=(
            "jax.sharding.get_mesh()",
            "It has the attributes `env`, which can be assigned, and `stack`.",
        ),
    ),
    *differs(
        _HOME,
        "0.4.31",
        _MESHES,
        Loop=("jax.lax.map(f, xs)", _NO_XMAP),
        ResourceEnv=(
            "with jax.set_mesh(mesh): ...",
            "Its `loops` are `()`, because `xmap` was removed; others cannot be assigned.",
        ),
    ),
    Entry(
        f"{_HOME}._positional_semantics",
        "0.4.7",
        "works",
        f"{_MODES}:POSITIONAL",
        _MAKE,
        "Its `val` has an effect while `jax_array` is off.",
    ),
    *works_in(_HOME, _WORKS),
    *works_in("jax._src.mesh.Mesh", _OF_MESH),
    *refused(_HOME, "0.4.31", "jax.lax.map(f, xs)", _NO_XMAP, "SerialLoop", "serial_loop"),
    *refused(_HOME, "0.4.31", _SHARD_MAP, _NO_XMAP, "make_xmap_callable", "xmap", "xmap_p"),
    *imports(_HOME, "0.4.31"),
)
