"""`jax.experimental.maps`: meshes, what is in force, and `xmap`."""

from xlashard.legacy.era.modules import imports
from xlashard.legacy.table.entry import Entry, members

_HOME = "jax.experimental.maps"
_ERA = "xlashard.legacy.era.maps"

_NO_XMAP = "JAX has no xmap and none of its loops any more"
_SHARD_MAP = "jax.shard_map(f, mesh=mesh, in_specs=P('x'), out_specs=P('x'))"

_REFUSED = (
    ("SerialLoop", "jax.lax.map(f, xs)"),
    ("make_xmap_callable", _SHARD_MAP),
    ("serial_loop", "jax.lax.map(f, xs)"),
    ("xmap", _SHARD_MAP),
    ("xmap_p", _SHARD_MAP),
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.4.31", "works", _ERA, "jax.sharding"),
    Entry(
        f"{_HOME}.Mesh",
        "0.4.11",
        "works",
        f"{_ERA}:Mesh",
        "jax.sharding.Mesh",
        "What it makes are meshes of today; also of fake devices, and of those without a hash.",
    ),
    Entry(
        f"{_HOME}.mesh",
        "0.3.15",
        "works",
        f"{_ERA}:mesh",
        "with jax.set_mesh(jax.sharding.Mesh(devices, axis_names)): ...",
    ),
    Entry(
        f"{_HOME}.thread_resources",
        "0.4.31",
        "works",
        f"{_ERA}:thread_resources",
        "jax.sharding.get_mesh()",
        "Of its attributes `env`, which can be assigned, and `stack` are there.",
    ),
    Entry(
        f"{_HOME}.ResourceEnv",
        "0.4.31",
        "differs",
        f"{_ERA}:ResourceEnv",
        "with jax.set_mesh(mesh): ...",
        "Its `loops` are `()`, for there is no `xmap`; with others it can't be put in force.",
    ),
    Entry(f"{_HOME}.EMPTY_ENV", "0.4.31", "works", f"{_ERA}:EMPTY_ENV", "jax.sharding.get_mesh()"),
    Entry(
        f"{_HOME}._PositionalSemantics",
        "0.4.7",
        "works",
        f"{_ERA}:_PositionalSemantics",
        "jax.make_array_from_process_local_data(sharding, local)",
    ),
    Entry(
        f"{_HOME}._positional_semantics",
        "0.4.7",
        "works",
        f"{_ERA}:_positional_semantics",
        "jax.make_array_from_process_local_data(sharding, local)",
        "Its `val` counts where `jax_array` is off, as it did.",
    ),
    Entry(f"{_HOME}.Loop", "0.4.31", "differs", f"{_ERA}:Loop", "jax.lax.map(f, xs)", _NO_XMAP),
    *(
        Entry(f"{_HOME}.{name}", "0.4.31", "refused", f"{_ERA}:{name}", today, _NO_XMAP)
        for name, today in _REFUSED
    ),
    Entry(
        "jax._src.mesh.Mesh._local_to_global",
        "0.4.31",
        "works",
        "xlashard.legacy.meshes:local_to_global",
        "jax.make_array_from_process_local_data(sharding, local).shape",
    ),
    Entry(
        "jax._src.mesh.Mesh._global_to_local",
        "0.4.31",
        "works",
        "xlashard.legacy.meshes:global_to_local",
        "x.sharding.shard_shape(x.shape)",
    ),
    *members(_HOME, "0.4.31", _ERA, imports(_HOME)),
    Entry(f"{_HOME}.FrozenDict", "0.4.31", "works", f"{_ERA}:FrozenDict", "types.MappingProxyType"),
)
