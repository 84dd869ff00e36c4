"""`jax.experimental.maps`: meshes, `thread_resources` and `xmap`."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from xlashard.legacy.modules.entry import EntryTable, differs, imports, refused, works

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


ENTRIES: EntryTable = {
    _HOME: {
        "": works("0.4.31", "jax.sharding", __name__),
        "Mesh": works(
            "0.4.11",
            "jax.sharding.Mesh",
            _MESHES,
            "It makes today's meshes, and meshes of fake devices, hashable or not.",
        ),
        "thread_resources": works(
            "0.4.31",
            "jax.sharding.get_mesh()",
            _MESHES,
            "It has the attributes `env`, which can be assigned, and `stack`.",
        ),
        "Loop": differs("0.4.31", "jax.lax.map(f, xs)", _MESHES, _NO_XMAP),
        "ResourceEnv": differs(
            "0.4.31",
            "with jax.set_mesh(mesh): ...",
            _MESHES,
            "Its `loops` are `()`, because `xmap` was removed; others cannot be assigned.",
        ),
        "_positional_semantics": works(
            "0.4.7",
            _MAKE,
            f"{_MODES}:POSITIONAL",
            "Its `val` has an effect while `jax_array` is off.",
        ),
        "mesh": works(
            "0.3.15", "with jax.set_mesh(jax.sharding.Mesh(devices, axis_names)): ...", _MESHES
        ),
        "EMPTY_ENV": works("0.4.31", "jax.sharding.get_mesh()", _MESHES),
        "_PositionalSemantics": works("0.4.7", _MAKE, _MODES),
        "FrozenDict": works("0.4.31", "types.MappingProxyType", __name__),
        "SerialLoop": refused("0.4.31", "jax.lax.map(f, xs)", _NO_XMAP),
        "serial_loop": refused("0.4.31", "jax.lax.map(f, xs)", _NO_XMAP),
        **dict.fromkeys(
            ("make_xmap_callable", "xmap", "xmap_p"), refused("0.4.31", _SHARD_MAP, _NO_XMAP)
        ),
        **imports(_HOME, "0.4.31"),
    },
    "jax._src.mesh.Mesh": {
        "_local_to_global": works("0.4.31", f"{_MAKE}.shape", _MESHES),
        "_global_to_local": works("0.4.31", "x.sharding.shard_shape(x.shape)", _MESHES),
    },
}
