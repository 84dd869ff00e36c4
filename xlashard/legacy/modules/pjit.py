"""`jax.experimental.pjit`, with the internals that programs use."""

from xlashard import NamedSharding, OpShardingSharding
from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard.legacy.arrays.gda import GlobalDeviceArray as GDA
from xlashard.legacy.modules.entry import Entry, imports, refused, works, works_in
from xlashard.legacy.shardings.partition_spec import AutoAxisResource

PjitSharding = OpShardingSharding | UnspecifiedValue | AutoAxisResource
PjitShardingMinusUnspecified = OpShardingSharding | AutoAxisResource
MeshSharding = NamedSharding | UnspecifiedValue | AutoAxisResource
MeshShardingMinusUnspecified = NamedSharding | AutoAxisResource

_HOME = "jax.experimental.pjit"

_SHARDINGS = "xlashard._jax.runtime.shardings"
_STAGES = "xlashard.legacy.modes.mode_stages"
_INTERNALS = "xlashard.legacy.modes.pjit_internals"
_PARSED = "xlashard.legacy.shardings.parsed_specs"
_MARKERS = "xlashard.legacy.shardings.partition_spec"
_CLASSES = "xlashard.legacy.shardings.sharding_classes"
_OPS = "xlashard.legacy.shardings.op_shardings"

_SPECS = "sharding.spec"
_NAMED = "jax.sharding.NamedSharding(mesh, spec)"
_FROM_LOCAL = "jax.make_array_from_process_local_data(sharding, local)"
_SHARD_SHAPE = "sharding.shard_shape(shape)"
_PRIMITIVE = "jaxpr.eqns[0].primitive"
_INNER = "xlashard has other compilation stages than JAX had then"

_WORKS = {
    "xlashard.legacy.modes.pjit": (
        ("with_sharding_constraint", "0.4.24", "jax.lax.with_sharding_constraint(x, sharding)"),
    ),
    "xlashard": (
        ("FROM_GDA", "0.4.9", "xlashard.UNSPECIFIED"),
        ("NamedSharding", "0.4.11", "jax.sharding.NamedSharding"),
        ("OpShardingSharding", "0.4.2", "xlashard.OpShardingSharding"),
        ("Sharding", "0.4.2", "jax.sharding.Sharding"),
    ),
    _MARKERS: (
        ("_AUTOAxisResource", "0.4.2", "type(xlashard.AUTO)", "AutoAxisResource"),
        ("_FromGdaSingleton", "0.4.2", "type(xlashard.FROM_GDA)"),
        ("_is_from_gda", "0.4.2", "x == xlashard.FROM_GDA"),
        ("_is_auto", "0.4.2", "x == xlashard.AUTO"),
        ("_is_unspecified", "0.4.2", "x is xlashard.UNSPECIFIED"),
        ("_is_unspecified_or_from_gda_or_auto", "0.4.2", "x in (AUTO, FROM_GDA, UNSPECIFIED)"),
    ),
    _SHARDINGS: (
        ("_UNSPECIFIED", "0.8.0", "xlashard.UNSPECIFIED"),
        ("_UnspecifiedValue", "0.4.2", "type(xlashard.UNSPECIFIED)"),
    ),
    "xlashard.legacy.shardings.legacy_mesh": (("Mesh", "0.4.7", "jax.sharding.Mesh"),),
    _CLASSES: (
        ("PmapSharding", "0.4.2", "xlashard.PmapSharding"),
        ("XLACompatibleSharding", "0.4.2", "jax.sharding.Sharding"),
    ),
    __name__: (
        ("PjitSharding", "0.4.2", "jax.sharding.Sharding"),
        ("PjitShardingMinusUnspecified", "0.4.2", "jax.sharding.Sharding"),
        ("MeshSharding", "0.4.2", "jax.sharding.NamedSharding"),
        ("MeshShardingMinusUnspecified", "0.4.2", "jax.sharding.NamedSharding"),
    ),
    "xlashard.geometry": (
        ("unflatten_array", "0.4.2", "xlashard.geometry.unflatten_array(sizes, devices)"),
        ("unflatten_superdims", "0.4.2", "xlashard.geometry.unflatten_superdims(devices)"),
        ("explode_superdims", "0.4.2", "xlashard.geometry.explode_superdims(sizes, dims)"),
        ("strides_for_sizes", "0.4.2", "xlashard.geometry.strides_for_sizes(sizes)"),
    ),
    _PARSED: (
        ("SpecSync", "0.4.2", f"{_PARSED}.SpecSync"),
        ("REPLICATED", "0.4.2", "jax.P()"),
        ("ParsedPartitionSpec", "0.4.16", f"{_PARSED}.ParsedPartitionSpec"),
        (
            "CanonicalizedParsedPartitionSpec",
            "0.4.2",
            f"{_PARSED}.CanonicalizedParsedPartitionSpec",
        ),
        ("_prepare_axis_resources", "0.4.16", "jax.tree.leaves(specs)"),
        ("get_array_mapping", "0.4.16", f"{_PARSED}.get_array_mapping(spec)"),
        ("get_unconstrained_dims", "0.4.2", f"{_PARSED}.get_unconstrained_dims(sharding)"),
        ("_get_partition_spec", "0.4.2", _SPECS),
        ("_get_single_pspec", "0.4.2", _SPECS),
        ("_create_mesh_pspec_sharding_from_parsed_pspec", "0.4.9", _NAMED, "mesh_sharding"),
    ),
    _OPS: (
        ("parse_flatten_op_sharding", "0.4.16", f"{_OPS}.parse_flatten_op_sharding(op, mesh)"),
        ("_get_op_sharding_from_executable", "0.4.16", "compiled.input_shardings"),
        ("_get_ppspec_from_executable", "0.4.2", f"{_OPS}.get_pspec_from_executable(c, mesh)"),
        ("_get_pspec_from_executable", "0.4.16", f"{_OPS}.get_pspec_from_executable(c, mesh)"),
        ("_get_op_sharding", "0.4.9", "op_sharding.tuple_shardings", "flatten_op_sharding"),
    ),
    _INTERNALS: (
        ("flatten_axis_resources", "0.4.2", "jax.tree.broadcast(specs, args)"),
        (
            "to_op_sharding_sharding",
            "0.4.2",
            f"{_INTERNALS}.to_op_sharding_sharding(sharding, ndim)",
        ),
        ("hashable_pytree", "0.4.16", "jax.tree.flatten(tree)"),
        ("global_to_local", "0.4.7", "x.sharding.shard_shape(x.shape)"),
        ("local_to_global", "0.4.7", f"{_FROM_LOCAL}.shape"),
        ("pjit_check_aval_sharding", "0.4.2", _SHARD_SHAPE, "check_aval_shardings"),
        ("_create_sharding_for_array", "0.4.2", _NAMED),
    ),
    "xlashard.pjit.primitive": (("pjit_p", "0.7.0", _PRIMITIVE),),
    "xlashard.pjit.constraint": (("sharding_constraint_p", "0.4.2", _PRIMITIVE, "constraint_p"),),
    "xlashard._jax.legacy_api": (("xc", "0.8.0", "import jax.extend.backend", "xla_client"),),
}
_OF_STAGES = {
    _STAGES: (
        ("Lowered.as_text", "0.4.31", "lowered.as_text('stablehlo')", "lowered_text"),
        ("Lowered.compiler_ir", "0.4.31", "lowered.compiler_ir('stablehlo')", "lowered_ir"),
        ("Compiled.compiler_ir", "0.3.25", "compiled.as_text()", "compiled_ir"),
    )
}

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.8.0", "works", __name__, "jax.jit, jax.P, jax.sharding"),
    *works(
        _HOME,
        "0.8.0",
        "xlashard.legacy.modes.pjit",
        pjit=(
            "jax.jit(f, in_shardings=..., out_shardings=...)",
            "It also takes `in_axis_resources` and `out_axis_resources`, removed in 0.4.14.",
        ),
    ),
    Entry(
        f"{_HOME}.AUTO",
        "0.4.7",
        "differs",
        f"{_MARKERS}:AUTO_ON_MESH",
        "xlashard.AUTO",
        "`AUTO(mesh)`, the form since 0.4.9, is `AUTO`: the mesh is the one in force.",
    ),
    *works_in(_HOME, _WORKS),
    *refused(_HOME, "0.4.14", "pjit(f)(x)", _INNER, "_pjit_call_impl"),
    *refused(_HOME, "0.4.14", "pjit(f).trace(x).jaxpr", _INNER, "_pjit_jaxpr"),
    *refused(_HOME, "0.4.14", "pjit(f).lower(x)", _INNER, "_pjit_lower"),
    *imports(_HOME, "0.8.0"),
    *works_in("jax.stages", _OF_STAGES),
)
