"""Entries of the names of `jax.interpreters` and `jax.lib`."""

from xlashard.legacy.entries.entry import EntryTable, imports, moved, refused, works

_HERE = "xlashard.legacy.modules.interpreters"
_PXLA = "jax.interpreters.pxla"

_XLA = "jax.interpreters.xla"

_AD = "jax.interpreters.ad"

_BATCHING = "jax.interpreters.batching"

_PE = "jax.interpreters.partial_eval"

_API = "xlashard._jax.legacy_api"

_PE_API = f"{_API}:partial_eval.trace_to_jaxpr"

_SHARDINGS = "xlashard._jax.runtime.shardings"

_ARRAYS = "xlashard.legacy.arrays.device_arrays"

_MESHES = "xlashard.legacy.modules.maps"

_PARSED = "xlashard.legacy.shardings.parsed_specs"

_MARKERS = "xlashard.legacy.shardings.partition_spec"

_CLASSES = "xlashard.legacy.modules.sharding"

_OPS = "xlashard.legacy.shardings.op_shardings"

_INTERNALS = "xlashard.legacy.modes.pjit_internals"

_ON_SEVERAL = (
    "`isinstance` is True for every fully addressable array on several devices, including today's."
)

_ADDRESSABLE = "`isinstance` is True for every fully addressable array, including today's."

_NAMED = "jax.sharding.NamedSharding(mesh, spec)"

_JIT = "jax.jit(f, in_shardings=..., out_shardings=...)"

_CONSTRAINT = "jax.lax.with_sharding_constraint(x, sharding)"

_ARGUMENTS = "jax.jit takes its arguments today"

_EQUIVALENT = "x.sharding.is_equivalent_to(sharding, x.ndim)"

_WAYS = "hlo_sharding.tile_assignment_dimensions()"

_PIECES = "[jax.device_put(x[index], device) for index, device in zip(indices, devices)]"

_BACKEND = "import jax.extend.backend"

_OPTIONS = "jax.extend.backend.get_compile_options"

_MAPPING = "xlashard.legacy.shardings.parsed_specs.get_array_mapping(spec)"

_PADDED = "jax.numpy.where(valid, x, 0)"

_MASKING = "xlashard.legacy.modules.interpreters"

_TABLES = "xlashard.legacy.modules.rule_tables"

_MLIR = "jax.interpreters.mlir.register_lowering(primitive, rule)"

_VMAP = "jax.vmap(f)"

_CONSTRUCTED = "its constructor and its methods take other arguments"

_RULES = "JAX's lowering rules emit MLIR instead of calling XLA builders"

_SHARDED = dict.fromkeys(
    ("ShardedDeviceArray", "_ShardedDeviceArray"),
    works("0.4.14", "jax.Array", _ARRAYS).but(_ON_SEVERAL),
)

ENTRIES: EntryTable = {
    _PXLA: {
        **_SHARDED,
        "": works("0.8.2", "jax.sharding, xlashard"),
        "Mesh": works("0.4.11", "jax.sharding.Mesh", _MESHES),
        "thread_resources": works("0.8.2", "jax.sharding.get_mesh()", _MESHES),
        "ResourceEnv": works("0.4.7", "with jax.set_mesh(mesh): ...", _MESHES),
        "EMPTY_ENV": works("0.4.7", "jax.sharding.get_mesh()", _MESHES),
        "NamedSharding": works("0.4.9", "jax.sharding.NamedSharding", "xlashard"),
        **moved(
            "0.10.0",
            "xlashard",
            *("ShardingSpec", "Chunked", "NoSharding", "Unstacked", "ShardedAxis", "Replicated"),
        ),
        "AUTO": works("0.4.16", "xlashard.AUTO", f"{_MARKERS}:AUTO_ON_MESH"),
        "_AUTOAxisResource": works("0.4.4", "type(xlashard.AUTO)", f"{_MARKERS}:AutoAxisResource"),
        "_is_auto": works("0.4.4", "x == xlashard.AUTO", _MARKERS),
        "_is_unspecified": works("0.4.36", "x is xlashard.UNSPECIFIED", _MARKERS),
        "_UNSPECIFIED": works("0.11.0", "xlashard.UNSPECIFIED", _SHARDINGS),
        "_UnspecifiedValue": works("0.4.4", "type(xlashard.UNSPECIFIED)", _SHARDINGS),
        "ArrayMappingOrAutoOrUnspecified": works("0.4.16", "collections.OrderedDict"),
        "mesh_sharding_specs": works("0.4.24", _NAMED, _OPS),
        "partitioned_sharding_spec": works("0.4.1", _NAMED, _OPS),
        "pmap_sharding_spec": works("0.4.16", _NAMED, _OPS),
        "spec_to_indices": works("0.10.0", "sharding.devices_indices_map(shape)", _OPS),
        "tile_aval_nd": works("0.4.16", "sharding.shard_shape(shape)", _OPS),
        "untile_aval_nd": works("0.4.16", "jax.ShapeDtypeStruct(shape, dtype)", _OPS),
        "show_axes": works("0.4.7", "', '.join(axes)"),
        "_hashable_index": works("0.4.4", "index"),
        "InputsHandlerMode": works("0.4.14", _PIECES),
        "_shard_arg": works("0.4.14", _PIECES),
        "shard_args": works("0.4.14", _PIECES),
        "device_put": works(
            "0.4.14",
            "[jax.device_put(x, device) for device in devices]",
            f"{_HERE}:buffers_on",
        ),
        "_pmap_sharding_spec": works("0.4.1", _NAMED, f"{_OPS}:pmap_sharding_spec_of_parts"),
        "ArrayMapping": works("0.11.0", "collections.OrderedDict"),
        "_create_mesh_pspec_sharding": works("0.4.4", _NAMED, f"{_CLASSES}:on_mesh"),
        "xc": works("0.8.2", _BACKEND, f"{_API}:xla_client"),
        "ShapedArray": works("0.4.16", "jax.core.ShapedArray"),
        "_get_array_mapping": works("0.4.4", _MAPPING, f"{_PARSED}:array_mapping_of_resource"),
        "array_mapping_to_axis_resources": works(
            "0.11.0", f"{_PARSED}.get_single_pspec(parsed)", _PARSED
        ),
        "get_num_ways_dim_sharded": works("0.4.11", _WAYS, _OPS),
        "_get_num_ways_dim_sharded": works("0.4.4", _WAYS, _OPS),
        "is_op_sharding_replicated": works("0.7.2", "sharding.is_fully_replicated", _OPS),
        "are_op_shardings_equal": works("0.7.2", "sharding.is_equivalent_to(other, ndim)", _OPS),
        "make_sharded_device_array": works(
            "0.4.14", "jax.make_array_from_single_device_arrays(...)", _ARRAYS
        ),
        "multi_host_supported_collectives": works("0.4.16", _JIT).but(
            "nothing reads it: every collective runs on several hosts"
        ),
        "new_mesh_sharding_specs": works("0.4.16", _NAMED, f"{_OPS}:mesh_sharding_specs"),
        "_check_gda_or_array_xla_sharding_match": works("0.4.7", _EQUIVALENT, _INTERNALS),
        **dict.fromkeys(
            (
                *("ExecuteReplicated", "MeshExecutable", "OutputType"),
                *(
                    "custom_resource_typing_rules",
                    "global_result_handlers",
                    "lower_mesh_computation",
                ),
                *("lower_sharding_computation", "parallel_callable", "resource_typecheck"),
                *("shard_arg_handlers", "spmd_primitive_batchers", "xla_pmap_p"),
                *("PmapExecutable", "local_avals_to_results_handler", "stage_parallel_callable"),
                *("sharding_spec_sharding_proto", "vtile_manual", "xla_pmap_impl"),
            ),
            refused(
                "0.4.14", "jax.jit(f, in_shardings=..., out_shardings=...).lower(*args).compile()"
            ).because("it was internal to JAX, and today's JAX does not use it"),
        ),
        **imports(_PXLA, "0.8.2"),
    },
    "jax.pxla": {"": works("0.4.14", "jax.sharding, xlashard"), **_SHARDED},
    **{
        f"jax.{package}.sharded_jit": {
            "": works("0.3.16", "jax.jit").but("`PartitionSpec` works; the functions are refused."),
            "sharded_jit": refused("0.3.16", _JIT).because(_ARGUMENTS),
            "with_sharding_constraint": refused("0.3.16", _CONSTRAINT).because(_ARGUMENTS),
        }
        for package in ("experimental", "interpreters")
    },
    "jax.interpreters.masking": {
        "": works("0.3.16", _PADDED).but("rules can be registered, and masking is refused"),
        **dict.fromkeys(
            ("defnaryop", "defvectorized", "masking_rules"),
            works("0.3.16", _PADDED, _MASKING).but("nothing reads the rules"),
        ),
        **dict.fromkeys(
            ("mask_fun", "mask_subtrace", "mask_trace"),
            refused("0.3.16", _PADDED).because("JAX has no transformation for padded arrays"),
        ),
    },
    "jax": {
        name: works("0.11.0", f"import jax.interpreters.{name}", f"jax.interpreters.{name}:")
        for name in ("ad", "batching", "mlir", "partial_eval")
    },
    _AD: {
        **{
            name: works("0.8.2", f"{_AD}.{name}", _TABLES).but(
                "JAX has rules of other arguments in other tables, which precede"
            )
            for name in ("primitive_jvps", "primitive_transposes")
        },
        **{
            name: works("0.9.0", advice, f"{_API}:ad.")
            for advice, names in (
                (f"{_AD}.defjvp(primitive, rule)", ("standard_jvp", "standard_jvp2")),
                (f"{_AD}.defjvp(primitive, None)", ("defjvp_zero", "zero_jvp")),
                (f"{_AD}.deflinear2(primitive, rule)", ("linear_jvp", "linear_transpose2")),
                ("jax.custom_vjp", ("custom_lin_p",)),
            )
            for name in names
        },
        "bilinear_transpose": works(
            "0.9.0", f"{_AD}.defbilinear(primitive, lhs, rhs)", f"{_API}:ad."
        ).but("its rules get both values, as since JAX 0.4.4"),
        "CustomVJPException": works("0.4.36", "Exception", f"{_API}:ad."),
        "config": works("0.4.26", "jax.config", "jax:config"),
        "reducing_transposes": works("0.10.0", f"{_AD}.primitive_transposes", f"{_API}:ad."),
        "source_info_util": works("0.4.26", "eqn.source_info", f"{_API}:source_info_util"),
        "zeros_like_jaxval": works("0.4.36", "jax.numpy.zeros_like(x)", "jax.numpy:zeros_like"),
        "zeros_like_p": works("0.9.0", "jax.numpy.zeros_like(x)").but(
            "no equation has it: `jax.numpy.zeros_like` is a broadcast"
        ),
    },
    _BATCHING: {
        **{
            name: works("0.4.36", f"{_BATCHING}.{name}", _TABLES).but(
                "today's takes rules, and has none to read"
            )
            for name in ("axis_primitive_batchers", "primitive_batchers")
        },
        "spmd_axis_primitive_batchers": works(
            "0.4.36", f"{_BATCHING}.fancy_primitive_batchers", _TABLES
        ),
        "BatchTrace": works("0.9.0", _VMAP, f"{_API}:batching.").but(_CONSTRUCTED),
        "BatchTracer": works("0.9.0", "jax.core.Tracer", f"{_API}:batching.").but(_CONSTRUCTED),
        "NotMapped": works("0.10.0", "type(None)", "types:NoneType"),
        "not_mapped": works("0.11.0", "None"),
        **{
            name: refused("0.9.0", f"{_BATCHING}.{advice}").because(
                "batching rules take other arguments"
            )
            for name, advice in (
                ("batch_jaxpr", "batch_jaxpr_axes"),
                ("broadcast_batcher", "defbroadcasting(primitive)"),
                ("reducer_batcher", "defreducer(primitive, identity)"),
                ("vectorized_batcher", "defvectorized(primitive)"),
            )
        },
    },
    _PE: {
        "trace_to_jaxpr": works("0.4.36", f"{_PE}.trace_to_jaxpr_nounits", f"{_PE_API}_nounits"),
        **dict.fromkeys(
            ("DynamicJaxprTrace", "JaxprTrace"),
            works("0.9.0", "jax.make_jaxpr(f)(*args)", f"{_API}:partial_eval.").but(_CONSTRUCTED),
        ),
        **dict.fromkeys(
            (
                *("const_fold_rules", "custom_staging_rules", "forwarding_rules"),
                *("move_binders_to_front", "partial_eval_jaxpr_custom"),
            ),
            works("0.9.0", "jax.make_jaxpr(f)(*args)", f"{_API}:partial_eval."),
        ),
        **dict.fromkeys(
            ("extend_jaxpr_stack", "trace_to_jaxpr_final", "trace_to_subjaxpr_dynamic"),
            refused("0.4.36", f"{_PE}.trace_to_jaxpr_dynamic(fun, avals)").because(
                "JAX has one current trace instead of a stack of traces"
            ),
        ),
    },
    "jax.interpreters.mlir": {
        "_lowerings": works("0.8.0", "jax.interpreters.mlir._lowerings", _TABLES).but(
            "today's have the rules as an attribute of entries"
        ),
        "ReplicaAxisContext": refused("0.11.0", "context.module_context.axis_context").because(
            "every program is partitioned by XLA, and none is replicated"
        ),
    },
    _XLA: {
        "": works("0.4.7", "jax.core, jax.interpreters.mlir"),
        "DeviceArray": works("0.4.12", "jax.Array", _ARRAYS).but(_ADDRESSABLE),
        "_DeviceArray": works("0.4.9", "jax.Array", _ARRAYS).but(_ADDRESSABLE),
        "make_device_array": works("0.4.9", "buffer", _ARRAYS),
        "Device": works("0.4.14", "jax.Device"),
        "ShapedArray": works("0.4.14", "jax.core.ShapedArray"),
        "abstractify": works("0.8.2", "jax.typeof(x)", f"{_API}:core.shaped_abstractify"),
        "pytype_aval_mappings": works("0.8.2", "jax.typeof(x)", f"{_API}:core."),
        "device_put": works("0.4.14", "(jax.device_put(x, device),)"),
        "xc": works("0.4.14", _BACKEND, f"{_API}:xla_client"),
        **dict.fromkeys(
            ("backend_specific_translations", "translations"),
            works("0.4.14", _MLIR, _TABLES).but(
                "as `register_translation`; a rule that is read can't be called"
            ),
        ),
        "canonicalize_dtype": works("0.8.0", "jax.dtypes.canonicalize_dtype(dtype)", "jax.dtypes"),
        "wrap_name": works("0.4.4", "f'{transform}({name})'", "xlashard.legacy.modules.core"),
        "lower_fun": works("0.4.4", "jax.interpreters.mlir.lower_fun(fun)"),
        "register_translation": works("0.4.14", _MLIR).but(
            "rules of `lower_fun` alone are registered; programs that lower others are refused"
        ),
        "xe": works("0.4.36", "import jax.extend.xla").but(
            "it has the attributes of today's jaxlib; `PmapFunction` has no instances"
        ),
        **dict.fromkeys(
            ("AxisEnv", "TranslationContext", "XlaOp", "xops"),
            refused("0.4.31", _MLIR).because(_RULES),
        ),
        "xla_call_p": refused("0.4.14", "jaxpr.eqns[0].primitive.name == 'jit'").because(
            "jit and pjit are one primitive"
        ),
        **imports(_XLA, "0.8.2"),
    },
    "jax.xla": {
        "": works("0.4.14", "jax.core, jax.interpreters.mlir"),
        "DeviceArray": works("0.4.14", "jax.Array", _ARRAYS).but(_ADDRESSABLE),
        "xc": works("0.4.14", _BACKEND, f"{_API}:xla_client"),
    },
    "jax.lib.xla_bridge": {
        "": works("0.9.0", _BACKEND),
        "default_backend": works("0.5.0", "jax.default_backend()"),
        "device_count": works("0.4.4", "jax.device_count()"),
        "devices": works("0.4.4", "jax.devices()"),
        "local_device_count": works("0.4.4", "jax.local_device_count()"),
        "local_devices": works("0.4.4", "jax.local_devices()"),
        "process_count": works("0.4.4", "jax.process_count()"),
        "process_index": works("0.4.4", "jax.process_index()"),
        "get_backend": works("0.8.0", "jax.extend.backend.get_backend", f"{_API}:xla_bridge."),
        "get_compile_options": works("0.8.0", _OPTIONS, f"{_API}:compile_options"),
        "_backends": works(
            "0.9.0",
            "jax.extend.backend.backends()",
            "xlashard.legacy.modules.interpreters:STARTED_BACKENDS",
        ),
    },
    "jaxlib.xla_client.Client": {
        "get_default_device_assignment": works("0.10.0", "jax.devices()[:count]").but(
            "its order is that of `jax.devices()`, in which today's `jax.pmap` places shards"
        )
    },
    "jax._src.lib.xla_bridge": {"": works("0.4.6", _BACKEND)},
    "jax._src.lib": {
        "xla_extension_version": works(
            "0.6.0", "jax.__version_info__", f"{_API}:lib.jaxlib_extension_version"
        )
    },
    "jax._src.clusters": {
        "TpuCluster": works(
            "0.4.24", "jax.distributed.initialize()", f"{_API}:clusters.GceTpuCluster"
        ).but("its methods take other arguments")
    },
    "jax.lib": dict.fromkeys(
        ("xla_client", "xla_extension"),
        works("0.9.0", "import jax.extend.xla", _API).but(
            "it has the attributes of today's jaxlib"
        ),
    ),
}
