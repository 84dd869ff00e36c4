"""Names that programs of the era use on every page: trees, keys, settings, backends."""

from xlashard.legacy.table.entry import Entry

_ERA = "xlashard.legacy.era"

ENTRIES: tuple[Entry, ...] = (
    Entry("jax.tree_map", "0.6.0", "works", "jax.tree_util:tree_map", "jax.tree.map"),
    Entry("jax.tree_leaves", "0.4.6", "works", "jax.tree_util:tree_leaves", "jax.tree.leaves"),
    Entry("jax.tree_flatten", "0.4.6", "works", "jax.tree_util:tree_flatten", "jax.tree.flatten"),
    Entry(
        "jax.tree_unflatten",
        "0.4.6",
        "works",
        "jax.tree_util:tree_unflatten",
        "jax.tree.unflatten",
    ),
    Entry(
        "jax.tree_structure", "0.4.6", "works", "jax.tree_util:tree_structure", "jax.tree.structure"
    ),
    Entry(
        "jax.tree_transpose", "0.4.6", "works", "jax.tree_util:tree_transpose", "jax.tree.transpose"
    ),
    Entry(
        "jax.treedef_is_leaf",
        "0.4.6",
        "works",
        "jax.tree_util:treedef_is_leaf",
        "jax.tree_util.treedef_is_leaf",
    ),
    Entry("jax.tree_multimap", "0.3.16", "works", f"{_ERA}.trees:tree_multimap", "jax.tree.map"),
    Entry(
        "jax.tree_util.tree_multimap",
        "0.3.16",
        "works",
        f"{_ERA}.trees:tree_multimap",
        "jax.tree.map",
    ),
    Entry("jax.ShapedArray", "0.4.1", "works", "jax.core:ShapedArray", "jax.core.ShapedArray"),
    Entry(
        "jax.abstract_arrays",
        "0.4.16",
        "works",
        f"{_ERA}.abstract_arrays",
        "jax.core",
    ),
    Entry(
        "jax.abstract_arrays.ShapedArray",
        "0.4.16",
        "works",
        f"{_ERA}.abstract_arrays:ShapedArray",
        "jax.core.ShapedArray",
    ),
    Entry("jax.random.KeyArray", "0.4.24", "works", f"{_ERA}.keys:KeyArray", "jax.Array"),
    Entry("jax.config", "0.4.25", "works", f"{_ERA}.config", "jax.config"),
    Entry("jax.config.config", "0.4.25", "works", f"{_ERA}.config:config", "jax.config"),
    Entry("jax.linear_util", "0.4.24", "works", f"{_ERA}.linear_util", "jax.extend.linear_util"),
    Entry(
        "jax.linear_util.wrap_init",
        "0.4.24",
        "works",
        f"{_ERA}.linear_util:wrap_init",
        "jax.extend.linear_util.wrap_init",
    ),
    Entry("jax.lib.xla_bridge", "0.8.0", "works", f"{_ERA}.xla_bridge", "jax.extend.backend"),
    Entry(
        "jax.lib.xla_bridge.get_backend",
        "0.8.0",
        "works",
        f"{_ERA}.xla_bridge:get_backend",
        "jax.extend.backend.get_backend",
    ),
    Entry("jax._src.lib.xla_bridge", "0.4.1", "works", f"{_ERA}.xla_bridge", "jax.extend.backend"),
    Entry("jax.util", "0.8.0", "works", f"{_ERA}.util", "functools"),
    Entry(
        "jax.device_put_sharded",
        "0.10.0",
        "works",
        "xlashard:device_put_sharded",
        "jax.device_put(stacked, sharding)",
    ),
    Entry(
        "jax.device_put_replicated",
        "0.10.0",
        "works",
        "xlashard:device_put_replicated",
        "jax.device_put(x, sharding)",
    ),
    Entry(
        "jax.core.new_main",
        "0.4.36",
        "refused",
        f"{_ERA}.core:new_main",
        "jax.extend.core.take_current_trace()",
        "JAX keeps one trace at a time and no stack of them",
    ),
)
