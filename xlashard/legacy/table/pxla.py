"""`jax.interpreters.pxla`, `jax.interpreters.sharded_jit`, and `jax.pxla`."""

from xlashard.legacy.era.modules import imports
from xlashard.legacy.table.entry import Entry, members

_HOME = "jax.interpreters.pxla"
_ERA = "xlashard.legacy.era.pxla"
_PARSE = "xlashard.sharding.parse"

_INNER = "it was a part of JAX's machinery, and nothing asks it any more"
_PROGRAM = "jax.jit(f, in_shardings=..., out_shardings=...).lower(*args).compile()"
_NO_SHARDED_JIT = "JAX has no sharded_jit any more, and what it was told is said to jit"

_PIECES = "[jax.device_put(x[index], device) for index, device in zip(indices, devices)]"

_WORKS = (
    ("Mesh", "0.4.11", "jax.sharding.Mesh"),
    ("thread_resources", "0.8.2", "jax.sharding.get_mesh()"),
    ("ResourceEnv", "0.4.7", "with jax.set_mesh(mesh): ..."),
    ("EMPTY_ENV", "0.4.7", "jax.sharding.get_mesh()"),
    ("NamedSharding", "0.4.9", "jax.sharding.NamedSharding"),
    ("ShardingSpec", "0.10.0", "xlashard.ShardingSpec"),
    ("Chunked", "0.10.0", "xlashard.Chunked"),
    ("NoSharding", "0.10.0", "xlashard.NoSharding"),
    ("Unstacked", "0.10.0", "xlashard.Unstacked"),
    ("ShardedAxis", "0.10.0", "xlashard.ShardedAxis"),
    ("Replicated", "0.10.0", "xlashard.Replicated"),
    ("AUTO", "0.4.16", "xlashard.AUTO"),
    ("_AUTOAxisResource", "0.4.4", "type(xlashard.AUTO)"),
    ("_is_auto", "0.4.4", "x == xlashard.AUTO"),
    ("_UNSPECIFIED", "0.11.0", "xlashard.UNSPECIFIED"),
    ("_UnspecifiedValue", "0.4.4", "type(xlashard.UNSPECIFIED)"),
    ("_is_unspecified", "0.4.36", "x is xlashard.UNSPECIFIED"),
    ("ArrayMapping", "0.11.0", "collections.OrderedDict"),
    ("ArrayMappingOrAutoOrUnspecified", "0.4.16", "collections.OrderedDict"),
    ("mesh_sharding_specs", "0.4.24", "jax.sharding.NamedSharding(mesh, spec)"),
    ("partitioned_sharding_spec", "0.4.1", "jax.sharding.NamedSharding(mesh, spec)"),
    ("pmap_sharding_spec", "0.4.16", "jax.sharding.NamedSharding(mesh, spec)"),
    ("ShapedArray", "0.4.16", "jax.core.ShapedArray"),
    ("spec_to_indices", "0.10.0", "sharding.devices_indices_map(shape)"),
    ("array_mapping_to_axis_resources", "0.11.0", f"{_PARSE}.get_partition_spec(parsed)"),
    ("_get_array_mapping", "0.4.4", f"{_PARSE}.get_array_mapping(spec)"),
    ("get_num_ways_dim_sharded", "0.4.11", "hlo_sharding.tile_assignment_dimensions()"),
    ("_get_num_ways_dim_sharded", "0.4.4", "hlo_sharding.tile_assignment_dimensions()"),
    ("is_op_sharding_replicated", "0.7.2", "sharding.is_fully_replicated"),
    ("are_op_shardings_equal", "0.7.2", "sharding.is_equivalent_to(other, ndim)"),
    ("_create_mesh_pspec_sharding", "0.4.4", "jax.sharding.NamedSharding(mesh, spec)"),
    ("device_put", "0.4.14", "[jax.device_put(x, device) for device in devices]"),
    ("make_sharded_device_array", "0.4.14", "jax.make_array_from_single_device_arrays(...)"),
    ("tile_aval_nd", "0.4.16", "sharding.shard_shape(shape)"),
    ("untile_aval_nd", "0.4.16", "jax.ShapeDtypeStruct(shape, dtype)"),
    ("show_axes", "0.4.7", "', '.join(axes)"),
    ("_hashable_index", "0.4.4", "index"),
    ("InputsHandlerMode", "0.4.14", _PIECES),
    ("_shard_arg", "0.4.14", _PIECES),
    ("shard_args", "0.4.14", _PIECES),
    ("_pmap_sharding_spec", "0.4.1", "jax.sharding.NamedSharding(mesh, spec)"),
    (
        "_check_gda_or_array_xla_sharding_match",
        "0.4.7",
        "x.sharding.is_equivalent_to(sharding, x.ndim)",
    ),
    ("xc", "0.8.2", "import jax.extend.backend"),
)

_REFUSED = (
    *("ExecuteReplicated", "MeshExecutable", "OutputType"),
    *("custom_resource_typing_rules", "global_result_handlers", "lower_mesh_computation"),
    *("lower_sharding_computation", "parallel_callable", "resource_typecheck"),
    *("shard_arg_handlers", "spmd_primitive_batchers", "xla_pmap_p"),
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.8.2", "works", _ERA, "jax.sharding, xlashard"),
    Entry("jax.pxla", "0.4.14", "works", _ERA, "jax.sharding, xlashard"),
    *(
        Entry(
            f"{home}.{name}",
            "0.4.14",
            "differs",
            f"{_ERA}:{name}",
            "jax.Array",
            "`isinstance` holds for every array on several devices of this process, also for "
            "those of today.",
        )
        for home in (_HOME, "jax.pxla")
        for name in ("ShardedDeviceArray", "_ShardedDeviceArray")
    ),
    *(
        Entry(f"{_HOME}.{name}", gone, "works", f"{_ERA}:{name}", today)
        for name, gone, today in _WORKS
    ),
    *(
        Entry(f"{_HOME}.{name}", "0.4.14", "refused", f"{_ERA}:{name}", _PROGRAM, _INNER)
        for name in _REFUSED
    ),
    *members(_HOME, "0.8.2", _ERA, imports(_HOME)),
    Entry(
        "jax.interpreters.sharded_jit",
        "0.3.16",
        "differs",
        "xlashard.legacy.era.sharded_jit",
        "jax.jit",
        "`PartitionSpec` is there; the functions refuse.",
    ),
    Entry(
        "jax.interpreters.sharded_jit.sharded_jit",
        "0.3.16",
        "refused",
        "xlashard.legacy.era.sharded_jit:sharded_jit",
        "jax.jit(f, in_shardings=..., out_shardings=...)",
        _NO_SHARDED_JIT,
    ),
    Entry(
        "jax.interpreters.sharded_jit.with_sharding_constraint",
        "0.3.16",
        "refused",
        "xlashard.legacy.era.sharded_jit:with_sharding_constraint",
        "jax.lax.with_sharding_constraint(x, sharding)",
        _NO_SHARDED_JIT,
    ),
)
