"""Entries of the names of `jax.experimental.maps`."""

from xlashard.legacy.entries.entry import EntryTable, imports, refused, works

_MAPS = "jax.experimental.maps"

_FLAGS = "xlashard.legacy.modes.config_flags"

_FROM_LOCAL = "jax.make_array_from_process_local_data(sharding, local)"

_SHARD_MAP = "jax.shard_map(f, mesh=mesh, in_specs=P('x'), out_specs=P('x'))"

_NO_XMAP = "xmap and its loops have no replacement with the same interface"

ENTRIES: EntryTable = {
    _MAPS: {
        "": works("0.4.31", "jax.sharding"),
        "Mesh": works("0.4.11", "jax.sharding.Mesh").noting(
            "It makes today's meshes, and meshes of fake devices, hashable or not."
        ),
        "thread_resources": works("0.4.31", "jax.sharding.get_mesh()").noting(
            "It has the attributes `env`, which can be assigned, and `stack`."
        ),
        "Loop": works("0.4.31", "jax.lax.map(f, xs)").but(_NO_XMAP),
        "ResourceEnv": works("0.4.31", "with jax.set_mesh(mesh): ...").but(
            "Its `loops` are `()`, because `xmap` was removed; others cannot be assigned."
        ),
        "_positional_semantics": works("0.4.7", _FROM_LOCAL, f"{_FLAGS}:POSITIONAL").noting(
            "Its `val` has an effect while `jax_array` is off."
        ),
        "mesh": works("0.3.15", "with jax.set_mesh(jax.sharding.Mesh(devices, axis_names)): ..."),
        "EMPTY_ENV": works("0.4.31", "jax.sharding.get_mesh()"),
        "_PositionalSemantics": works("0.4.7", _FROM_LOCAL, _FLAGS),
        "FrozenDict": works("0.4.31", "types.MappingProxyType"),
        "SerialLoop": refused("0.4.31", "jax.lax.map(f, xs)").because(_NO_XMAP),
        "serial_loop": refused("0.4.31", "jax.lax.map(f, xs)").because(_NO_XMAP),
        **dict.fromkeys(
            ("make_xmap_callable", "xmap", "xmap_p"),
            refused("0.4.31", _SHARD_MAP).because(_NO_XMAP),
        ),
        **imports(_MAPS, "0.4.31"),
    },
    "jax._src.mesh.Mesh": {
        "_local_to_global": works("0.4.31", f"{_FROM_LOCAL}.shape"),
        "_global_to_local": works("0.4.31", "x.sharding.shard_shape(x.shape)"),
    },
}
