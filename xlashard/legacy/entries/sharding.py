"""Entries of the names of `jax.sharding`, and of `PartitionSpec` in each of its modules."""

from xlashard.legacy.entries.entry import EntryTable, moved, works

_NAMED = "jax.sharding.NamedSharding(mesh, spec)"

_POSITIONAL = "jax.sharding.NamedSharding(jax.make_mesh(shape, names), P(*names))"

_PROTO = "sharding._to_xla_hlo_sharding(ndim).to_proto()"

_MARKERS = "xlashard.legacy.shardings.partition_spec"

_SPEC = (
    "It is a tuple, and JAX accepts it as its own. It is equal to today's spec with the same "
    "entries, but has another hash; specs that JAX returns (`x.sharding.spec`) are today's."
)

_FITS = works("0.4.24", "sharding.shard_shape(shape)")

_TO_OP_SHARDING = works("0.4.14", _PROTO, "xlashard.legacy.modules.sharding:op_sharding_of")

_PMAP = works("0.10.0", "jax.sharding.NamedSharding(mesh, P('devices'))").noting(
    "It is `xlashard.PmapSharding`, whose `devices` have the attributes of a NumPy array."
)

_SHARDINGS = {
    "MeshPspecSharding": works("0.4.9", _NAMED).noting(
        "It is `NamedSharding`, its name since 0.4.1."
    ),
    "OpShardingSharding": works("0.4.12", _NAMED, "xlashard").noting(
        "It is `xlashard.OpShardingSharding`."
    ),
    "GSPMDSharding": works("0.7.0", _NAMED, "xlashard").noting("It is `xlashard.GSPMDSharding`."),
    "PmapSharding": _PMAP,
    "PositionalSharding": works("0.7.0", _POSITIONAL).noting(
        "Results of `jax.jit` have the equivalent `GSPMDSharding`."
    ),
    "XLACompatibleSharding": works("0.4.34", "jax.sharding.Sharding").noting(
        "Every sharding with an XLA equivalent is an instance."
    ),
}

ENTRIES: EntryTable = {
    "jax": {
        "experimental.PartitionSpec": works("0.4.12", "jax.P", _MARKERS).but(_SPEC),
        "experimental.pjit.PartitionSpec": works("0.4.11", "jax.P", _MARKERS).but(_SPEC),
        "interpreters.pxla.PartitionSpec": works("0.4.11", "jax.P", _MARKERS).but(_SPEC),
        "experimental.sharded_jit.PartitionSpec": works("0.3.16", "jax.P", _MARKERS).but(_SPEC),
        "interpreters.sharded_jit.PartitionSpec": works("0.3.16", "jax.P", _MARKERS).but(_SPEC),
    },
    "jax.sharding": {
        **_SHARDINGS,
        "PartitionSpec": works("0.7.1", "jax.P", _MARKERS).but(_SPEC),
        "use_mesh": works("0.7.2", "jax.set_mesh(mesh)", "jax:set_mesh"),
        "AxisTypes": works("0.5.3", "jax.sharding.AxisType").but(
            "a mesh takes one type for each axis instead of a dictionary"
        ),
        "Mesh": works("0.7.1", "jax.sharding.Mesh", "xlashard.legacy.modules.maps").noting(
            "It makes today's meshes, also of unhashable devices."
        ),
    },
    "jax._src.sharding": {
        **_SHARDINGS,
        **moved("0.4.9", "jax.sharding", "NamedSharding", "SingleDeviceSharding"),
    },
    "jax.experimental.sharding": {
        "": works("0.3.25", "jax.sharding"),
        "MeshPspecSharding": works("0.3.25", _NAMED),
    },
    "jax.experimental.shard": {
        "": works("0.7.0", "jax.sharding"),
        "reshard": works("0.7.0", "jax.sharding.reshard"),
        "auto_axes": works("0.7.0", "jax.sharding.auto_axes(f, out_sharding=spec)"),
        "explicit_axes": works("0.7.0", "jax.sharding.explicit_axes(f, in_sharding=spec)"),
    },
    "jax.experimental.shard_alike": {
        "": works("0.11.0", "jax.lax.with_sharding_constraint"),
        "shard_alike": works(
            "0.11.0", "jax.lax.with_sharding_constraint(y, jax.typeof(x).sharding)"
        ).but("it has no effect under GSPMD"),
    },
    "jax._src.sharding_impls": {
        "AUTO": works("0.9.0", "xlashard.AUTO", f"{_MARKERS}:AUTO_ON_MESH").but(
            "It is not a class: `AUTO` and `AUTO(mesh)` are equal, on the mesh in force at the "
            "call."
        ),
        "PmapSharding": _PMAP,
        "PositionalSharding": works("0.7.0", _POSITIONAL),
        "GSPMDSharding.is_compatible_aval": _FITS,
        "GSPMDSharding._to_xla_op_sharding": _TO_OP_SHARDING,
        "GSPMDSharding._op_sharding": works("0.4.14", _PROTO),
        "SingleDeviceSharding.is_compatible_aval": _FITS,
    },
    "jax._src.named_sharding.NamedSharding": {
        "is_compatible_aval": _FITS,
        "_to_xla_op_sharding": _TO_OP_SHARDING,
        "_parsed_pspec": works("0.7.1", "sharding.spec"),
    },
}
