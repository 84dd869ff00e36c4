"""Entries of `jax` itself, `jax.tree_util`, `jax.config`, and single names of other modules."""

from xlashard.legacy.entries.entry import EntryTable, refused, works

_FLAGS = "xlashard.legacy.modes.config_flags"

IGNORED = {
    True: {
        **dict.fromkeys(
            ("experimental_cpp_jit", "experimental_cpp_pjit", "experimental_cpp_pmap"), "0.4.8"
        ),
        "jax_coordination_service": "0.4.16",
        "jax_eager_pmap": "0.6.0",
    },
    False: {
        "jax_experimental_subjaxpr_lowering_cache": "0.4.4",
        "jax_host_callback_ad_transforms": "0.4.16",
        "jax_host_callback_inline": "0.4.36",
        "jax_host_callback_outfeed": "0.4.36",
        "experimental_xmap_ensure_fixed_sharding": "0.4.31",
        "experimental_xmap_spmd_lowering": "0.4.31",
        "experimental_xmap_spmd_lowering_manual": "0.4.31",
    },
}
"""Settings of 2022 without an effect and the release that removed them, by their default."""

ENTRIES: EntryTable = {
    "jax": {
        "tree_flatten": works("0.6.0", "jax.tree.flatten", "jax.tree_util"),
        "tree_leaves": works("0.6.0", "jax.tree.leaves", "jax.tree_util"),
        "tree_map": works("0.6.0", "jax.tree.map", "jax.tree_util"),
        "tree_structure": works("0.6.0", "jax.tree.structure", "jax.tree_util"),
        "tree_transpose": works("0.6.0", "jax.tree.transpose", "jax.tree_util"),
        "tree_unflatten": works("0.6.0", "jax.tree.unflatten", "jax.tree_util"),
        "treedef_is_leaf": works("0.6.0", "jax.tree_util.treedef_is_leaf"),
        "tree_multimap": works("0.3.16", "jax.tree.map"),
        "ShapedArray": works("0.4.14", "jax.core.ShapedArray"),
        "array_ref": works("0.9.0", "jax.new_ref(x)", "jax:new_ref"),
        "ArrayRef": works("0.9.0", "jax.Ref", "jax:Ref"),
        "flatten_fun_nokwargs": works(
            "0.4.14", "jax.api_util.flatten_fun_nokwargs", "jax.api_util"
        ),
        "curry": works("0.4.14", "functools.partial"),
        "clear_backends": works("0.4.36", "jax.extend.backend.clear_backends()"),
        "spmd_mode": works("0.7.0", "jax.jit(f)(x)", _FLAGS),
        "device_put_replicated": works(
            "0.10.0", "jax.device_put(x, jax.NamedSharding(mesh, jax.P()))", "xlashard"
        ),
        "device_put_sharded": works(
            "0.10.0", "jax.device_put(stacked, jax.NamedSharding(mesh, jax.P('x')))", "xlashard"
        ),
        "xla_computation": works("0.4.34", "jax.jit(f).lower(x).compiler_ir('hlo')").but(
            "`axis_env`, `in_parts` and `out_parts` are refused"
        ),
        "soft_pmap": refused("0.3.25", "jax.vmap").because("it was removed with xmap"),
        "mask": refused("0.3.16", "jax.numpy.where(valid, x, 0)").because(
            "JAX has no transformation for padded arrays"
        ),
        "pmap": works(
            "0.8.0", "jax.shard_map(f, mesh=mesh, in_specs=P('batch'), out_specs=P('batch'))"
        ).noting(
            "An index of a result is the shard of one device; an index of today's `jax.pmap` "
            "result is replicated."
        ),
    },
    "jax.tree_util": {
        "tree_multimap": works("0.3.16", "jax.tree.map"),
        "build_tree": works("0.7.0", "jax.tree.unflatten"),
        "AttributeKeyPathEntry": works("0.4.26", "jax.tree_util.GetAttrKey"),
        "GetitemKeyPathEntry": works("0.4.26", "jax.tree_util.DictKey"),
        "register_keypaths": works("0.4.26", "jax.tree_util.register_pytree_with_keys").but(
            "JAX's messages use the keys only if they are registered with today's function."
        ),
    },
    "jax.experimental": {
        "disable_x64": works("0.9.0", "jax.enable_x64(False)"),
        "enable_x64": works("0.9.0", "jax.enable_x64(True)"),
        "mutable_array": works("0.9.0", "jax.new_ref(x)", "jax:new_ref"),
        "MutableArray": works("0.9.0", "jax.Ref", "jax:Ref"),
        "with_sharding_constraint": works(
            "0.3.16",
            "jax.lax.with_sharding_constraint(x, sharding)",
            "xlashard.legacy.modes.pjit",
        ),
    },
    "jax.experimental.x64_context": {
        "": works("0.9.0", "jax.enable_x64"),
        "disable_x64": works("0.9.0", "jax.enable_x64(False)"),
        "enable_x64": works("0.9.0", "jax.enable_x64(True)"),
    },
    "jax.experimental.layout": {
        "DeviceLocalLayout": works(
            "0.7.0", "jax.experimental.layout.Layout", "jax.experimental.layout:Layout"
        ),
        "with_dll_constraint": works(
            "0.7.0",
            "jax.experimental.layout.with_layout_constraint(x, layout)",
            "jax.experimental.layout:with_layout_constraint",
        ),
    },
    "jax.extend.ffi": {"": works("0.8.0", "import jax.ffi", "jax.ffi")},
    "jax.ref": {
        "array_ref": works("0.9.0", "jax.new_ref(x)", "jax:new_ref"),
        "ArrayRef": works("0.9.0", "jax.Ref", "jax:Ref"),
    },
    "jax.experimental.loops": {
        "": works("0.3.16", "jax.lax.fori_loop", "jax.lax").but("`Scope` is refused"),
        "Scope": refused("0.3.16", "jax.lax.fori_loop").because(
            "JAX's loops are functions of their state"
        ),
    },
    **{
        f"jax.experimental.{name}": {"": works("0.3.16", f"import {home}", home)}
        for name in ("optimizers", "stax")
        for home in (f"jax.example_libraries.{name}",)
    },
    "jax.ad_checkpoint": {
        "checkpoint": works("0.10.0", "jax.checkpoint"),
        "remat": works("0.10.0", "jax.checkpoint", "jax"),
    },
    "jax._src.api": {"FLAGS": works("0.4.7", "jax.config", f"{_FLAGS}:config")},
    "jax._src.test_util": {"create_global_mesh": works("0.6.0", "jax.make_mesh(shape, names)")},
    "jax.dlpack": {"to_dlpack": works("0.7.0", "x.__dlpack__()")},
    "jax.Device": {
        "live_buffers": works("0.4.36", "jax.live_arrays()").but(
            "arrays over several devices are excluded; jax.live_arrays() returns all"
        )
    },
    "jax.experimental.compilation_cache.compilation_cache": {
        "initialize_cache": works("0.4.26", "jax.config.update('jax_compilation_cache_dir', path)"),
        "is_initialized": works("0.4.26", "jax.config.jax_compilation_cache_dir is not None"),
    },
    "jax.config": {
        "": works("0.4.25", "jax.config"),
        "config": works("0.4.25", "jax.config"),
        "jax_array": works("0.4.7", "isinstance(x, jax.Array)", _FLAGS),
        "jax_parallel_functions_output_gda": works(
            "0.4.7",
            "jax.jit(f, out_shardings=shardings)",
            f"{_FLAGS}:parallel_functions_output_gda",
        ),
        **{
            name: works(gone, "jax.jit(f)", _FLAGS).but("it has no effect")
            for names in IGNORED.values()
            for name, gone in names.items()
        },
        **{
            f"define_{kind}_state": works(
                "0.4.20",
                "contextvars.ContextVar(name)",
                f"xlashard._jax.legacy_api:settings.{kind}_state",
            )
            for kind in ("bool", "enum", "float", "int", "string")
        },
        "jax_spmd_mode": works("0.7.0", "jax.jit(f)(x)", f"{_FLAGS}:spmd_mode"),
        "jax_pmap_no_rank_reduction": works(
            "0.8.0", "xlashard.unstacked_shards(x)", f"{_FLAGS}:pmap_no_rank_reduction"
        ).but(
            "With it on, `device_buffers` of arrays with a PmapSharding, which `jax.pmap` returns "
            "while the removed names are installed, keep the mapped dimension of size 1"
        ),
    },
}
