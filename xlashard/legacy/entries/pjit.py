"""Entries of the names of `jax.experimental.pjit`."""

from xlashard.legacy.entries.entry import EntryTable, imports, refused, works

_PJIT = "jax.experimental.pjit"

_API = "xlashard._jax.legacy_api"

_SHARDINGS = "xlashard._jax.runtime.shardings"

_MESHES = "xlashard.legacy.modules.maps"

_PARSED = "xlashard.legacy.shardings.parsed_specs"

_MARKERS = "xlashard.legacy.shardings.partition_spec"

_CLASSES = "xlashard.legacy.modules.sharding"

_SUPERDIMS = "xlashard.legacy.shardings.superdims"
_OPS = "xlashard.legacy.shardings.op_shardings"

_STAGES = "xlashard.legacy.modes.host_local"

_INTERNALS = "xlashard.legacy.modes.pjit_internals"

_NAMED = "jax.sharding.NamedSharding(mesh, spec)"

_JIT = "jax.jit(f, in_shardings=..., out_shardings=...)"

_CONSTRAINT = "jax.lax.with_sharding_constraint(x, sharding)"

_BACKEND = "import jax.extend.backend"

_FROM_LOCAL = "jax.make_array_from_process_local_data(sharding, local)"

_PRIMITIVE = "jaxpr.eqns[0].primitive"

_INNER = "xlashard has other compilation stages than JAX had then"

ENTRIES: EntryTable = {
    _PJIT: {
        "": works("0.8.0", "jax.jit, jax.P, jax.sharding"),
        "pjit": works("0.8.0", _JIT, "xlashard.legacy.modes.pjit").noting(
            "It also takes `in_axis_resources` and `out_axis_resources`, removed in 0.4.14."
        ),
        "AUTO": works("0.4.7", "xlashard.AUTO", f"{_MARKERS}:AUTO_ON_MESH").but(
            "`AUTO(mesh)`, the form since 0.4.9, is `AUTO`: the mesh is the one in force."
        ),
        "with_sharding_constraint": works("0.4.24", _CONSTRAINT, "xlashard.legacy.modes.pjit"),
        "FROM_GDA": works("0.4.9", "xlashard.UNSPECIFIED", "xlashard"),
        "NamedSharding": works("0.4.11", "jax.sharding.NamedSharding", "xlashard"),
        "OpShardingSharding": works("0.4.2", "xlashard.OpShardingSharding"),
        "Sharding": works("0.4.2", "jax.sharding.Sharding", "xlashard"),
        "_AUTOAxisResource": works("0.4.2", "type(xlashard.AUTO)", f"{_MARKERS}:AutoAxisResource"),
        "_FromGdaSingleton": works("0.4.2", "type(xlashard.FROM_GDA)", _MARKERS),
        "_is_from_gda": works("0.4.2", "x == xlashard.FROM_GDA", _MARKERS),
        "_is_auto": works("0.4.2", "x == xlashard.AUTO", _MARKERS),
        "_is_unspecified": works("0.4.2", "x is xlashard.UNSPECIFIED", _MARKERS),
        "_is_unspecified_or_from_gda_or_auto": works(
            "0.4.2", "x in (AUTO, FROM_GDA, UNSPECIFIED)", _MARKERS
        ),
        "_UNSPECIFIED": works("0.8.0", "xlashard.UNSPECIFIED", _SHARDINGS),
        "_UnspecifiedValue": works("0.4.2", "type(xlashard.UNSPECIFIED)", _SHARDINGS),
        "Mesh": works("0.4.7", "jax.sharding.Mesh", _MESHES),
        "PmapSharding": works("0.4.2", "xlashard.PmapSharding", _CLASSES),
        "XLACompatibleSharding": works("0.4.2", "jax.sharding.Sharding", _CLASSES),
        "PjitSharding": works("0.4.2", "jax.sharding.Sharding"),
        "PjitShardingMinusUnspecified": works("0.4.2", "jax.sharding.Sharding"),
        "MeshSharding": works("0.4.2", "jax.sharding.NamedSharding"),
        "MeshShardingMinusUnspecified": works("0.4.2", "jax.sharding.NamedSharding"),
        "unflatten_array": works("0.4.2", f"{_SUPERDIMS}.unflatten_array(sizes, devices)"),
        "unflatten_superdims": works("0.4.2", f"{_SUPERDIMS}.unflatten_superdims(devices)"),
        "explode_superdims": works("0.4.2", f"{_SUPERDIMS}.explode_superdims(sizes, dims)"),
        "strides_for_sizes": works("0.4.2", f"{_SUPERDIMS}.strides_for_sizes(sizes)"),
        "SpecSync": works("0.4.2", f"{_PARSED}.SpecSync"),
        "REPLICATED": works("0.4.2", "jax.P()", _PARSED),
        "ParsedPartitionSpec": works("0.4.16", f"{_PARSED}.ParsedPartitionSpec"),
        "CanonicalizedParsedPartitionSpec": works(
            "0.4.2", f"{_PARSED}.CanonicalizedParsedPartitionSpec"
        ),
        "_prepare_axis_resources": works("0.4.16", "jax.tree.leaves(specs)", _PARSED),
        "get_array_mapping": works("0.4.16", f"{_PARSED}.get_array_mapping(spec)"),
        "get_unconstrained_dims": works("0.4.2", f"{_PARSED}.get_unconstrained_dims(sharding)"),
        "_get_partition_spec": works("0.4.2", "sharding.spec", _PARSED),
        "_get_single_pspec": works("0.4.2", "sharding.spec", _PARSED),
        "_create_mesh_pspec_sharding_from_parsed_pspec": works(
            "0.4.9", _NAMED, f"{_PARSED}:mesh_sharding"
        ),
        "parse_flatten_op_sharding": works("0.4.16", f"{_OPS}.parse_flatten_op_sharding(op, mesh)"),
        "_get_op_sharding_from_executable": works("0.4.16", "compiled.input_shardings", _OPS),
        "_get_ppspec_from_executable": works(
            "0.4.2", f"{_OPS}.get_pspec_from_executable(c, mesh)", _OPS
        ),
        "_get_pspec_from_executable": works("0.4.16", f"{_OPS}.get_pspec_from_executable(c, mesh)"),
        "_get_op_sharding": works(
            "0.4.9", "op_sharding.tuple_shardings", f"{_OPS}:flatten_op_sharding"
        ),
        "flatten_axis_resources": works("0.4.2", "jax.tree.broadcast(specs, args)", _INTERNALS),
        "to_op_sharding_sharding": works(
            "0.4.2", f"{_INTERNALS}.to_op_sharding_sharding(sharding, ndim)"
        ),
        "hashable_pytree": works("0.4.16", "jax.tree.flatten(tree)", _INTERNALS),
        "global_to_local": works("0.4.7", "x.sharding.shard_shape(x.shape)", _INTERNALS),
        "local_to_global": works("0.4.7", f"{_FROM_LOCAL}.shape", _INTERNALS),
        "pjit_check_aval_sharding": works(
            "0.4.2", "sharding.shard_shape(shape)", f"{_INTERNALS}:check_aval_shardings"
        ),
        "_create_sharding_for_array": works("0.4.2", _NAMED, _INTERNALS),
        "pjit_p": works("0.7.0", _PRIMITIVE, "xlashard.core.pjit.pjit_primitive"),
        "sharding_constraint_p": works(
            "0.4.2", _PRIMITIVE, "xlashard.core.pjit.constraint:constraint_p"
        ),
        "xc": works("0.8.0", _BACKEND, f"{_API}:xla_client"),
        "_pjit_call_impl": refused("0.4.14", "pjit(f)(x)").because(_INNER),
        "_pjit_jaxpr": refused("0.4.14", "pjit(f).trace(x).jaxpr").because(_INNER),
        "_pjit_lower": refused("0.4.14", "pjit(f).lower(x)").because(_INNER),
        **imports(_PJIT, "0.8.0"),
    },
    "jax.stages": {
        "Lowered.as_text": works(
            "0.4.31", "lowered.as_text('stablehlo')", f"{_STAGES}:lowered_text"
        ),
        "Lowered.compiler_ir": works(
            "0.4.31", "lowered.compiler_ir('stablehlo')", f"{_STAGES}:lowered_ir"
        ),
        "Compiled.compiler_ir": works("0.3.25", "compiled.as_text()", f"{_STAGES}:compiled_ir"),
        "Compiled.cost_analysis": works(
            "0.5.0", "compiled.cost_analysis()", f"{_STAGES}:compiled_costs"
        ).but("`[0]` of the result is the result, which was in a list"),
    },
}
