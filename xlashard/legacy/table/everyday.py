"""Names that programs of the era use on every page: trees, keys, settings, backends, devices."""

from xlashard.legacy.table.entry import Entry, members

_ERA = "xlashard.legacy.era"
_API = f"{_ERA}.api"
_BRIDGE = f"{_ERA}.xla_bridge"


def _trees(*names: str) -> dict[str, str]:
    return {name: f"jax.tree.{name.removeprefix('tree_')}" for name in names}


ENTRIES: tuple[Entry, ...] = (
    *members(
        "jax",
        "0.6.0",
        "jax.tree_util",
        _trees(
            *("tree_flatten", "tree_leaves", "tree_map", "tree_structure", "tree_transpose"),
            *("tree_unflatten",),
        ),
    ),
    *members("jax", "0.6.0", "jax.tree_util", {"treedef_is_leaf": "jax.tree_util.treedef_is_leaf"}),
    *members("jax", "0.3.16", f"{_ERA}.trees", {"tree_multimap": "jax.tree.map"}),
    *members("jax.tree_util", "0.3.16", f"{_ERA}.trees", {"tree_multimap": "jax.tree.map"}),
    *members("jax.tree_util", "0.7.0", f"{_ERA}.trees", {"build_tree": "jax.tree.unflatten"}),
    *members(
        "jax.tree_util",
        "0.4.26",
        f"{_ERA}.trees",
        {
            "AttributeKeyPathEntry": "jax.tree_util.GetAttrKey",
            "GetitemKeyPathEntry": "jax.tree_util.DictKey",
        },
    ),
    Entry(
        "jax.tree_util.register_keypaths",
        "0.4.26",
        "differs",
        f"{_ERA}.trees:register_keypaths",
        "jax.tree_util.register_pytree_with_keys",
        "The keys of a type come into the paths of messages only by the function of today.",
    ),
    *members("jax", "0.4.14", "jax.core", {"ShapedArray": "jax.core.ShapedArray"}),
    *members("jax", "0.4.14", _API, {"curry": "functools.partial"}),
    *members("jax", "0.4.36", _API, {"clear_backends": "jax.extend.backend.clear_backends()"}),
    *members(
        "jax",
        "0.10.0",
        "xlashard",
        {
            "device_put_replicated": "jax.device_put(x, jax.NamedSharding(mesh, jax.P()))",
            "device_put_sharded": "jax.device_put(stacked, jax.NamedSharding(mesh, jax.P('x')))",
        },
    ),
    Entry(
        "jax.xla_computation",
        "0.4.34",
        "refused",
        f"{_API}:xla_computation",
        "jax.jit(f).lower(x).compiler_ir('hlo')",
        "functions are lowered by `jit` alone",
    ),
    Entry(
        "jax.soft_pmap", "0.3.25", "refused", f"{_API}:soft_pmap", "jax.vmap", "it went with xmap"
    ),
    Entry(
        "jax.mask",
        "0.3.16",
        "refused",
        f"{_API}:mask",
        "jax.numpy.where(valid, x, 0)",
        "no function is rewritten for padded arrays any more",
    ),
    Entry("jax.config", "0.4.25", "works", f"{_ERA}.config", "jax.config"),
    *members("jax.config", "0.4.25", f"{_ERA}.config", {"config": "jax.config"}),
    *members(
        "jax.random",
        "0.4.24",
        f"{_ERA}.keys",
        {
            "KeyArray": "jax.Array",
            "PRNGKeyArray": "jax.Array",
            "default_prng_impl": "jax.random.key_impl(jax.random.key(0))",
            "rbg_key": "jax.random.key(seed, impl='rbg')",
            "threefry2x32_key": "jax.random.key(seed, impl='threefry2x32')",
            "threefry_2x32": "jax.extend.random.threefry_2x32",
            "unsafe_rbg_key": "jax.random.key(seed, impl='unsafe_rbg')",
        },
    ),
    *members(
        "jax.random",
        "0.4.31",
        f"{_ERA}.keys",
        {"shuffle": "jax.random.permutation(key, x, independent=True)"},
    ),
    Entry(
        "jax._src.random.prng.PRNGKeyArray.unsafe_raw_array",
        "0.4.24",
        "works",
        f"{_ERA}.keys:unsafe_raw_array",
        "jax.random.key_data(keys)",
    ),
    Entry("jax.prng", "0.4.24", "works", f"{_ERA}.prng", "import jax.extend.random"),
    *members(
        "jax.prng",
        "0.4.24",
        f"{_ERA}.prng",
        {
            "PRNGKeyArray": "jax.Array",
            "rbg_prng_impl": "jax.extend.random.rbg_prng_impl",
            "seed_with_impl": "jax.extend.random.seed_with_impl",
            "threefry_2x32": "jax.extend.random.threefry_2x32",
            "threefry_prng_impl": "jax.extend.random.threefry_prng_impl",
            "unsafe_rbg_prng_impl": "jax.extend.random.unsafe_rbg_prng_impl",
        },
    ),
    Entry("jax.lib.xla_bridge", "0.9.0", "works", _BRIDGE, "import jax.extend.backend"),
    *members(
        "jax.lib.xla_bridge",
        "0.4.4",
        _BRIDGE,
        {
            "device_count": "jax.device_count()",
            "devices": "jax.devices()",
            "local_device_count": "jax.local_device_count()",
            "local_devices": "jax.local_devices()",
            "process_count": "jax.process_count()",
            "process_index": "jax.process_index()",
        },
    ),
    *members("jax.lib.xla_bridge", "0.5.0", _BRIDGE, {"default_backend": "jax.default_backend()"}),
    *members(
        "jax.lib.xla_bridge",
        "0.8.0",
        _BRIDGE,
        {
            "get_backend": "jax.extend.backend.get_backend",
            "get_compile_options": "jax.extend.backend.get_compile_options",
        },
    ),
    Entry("jax._src.lib.xla_bridge", "0.4.6", "works", _BRIDGE, "import jax.extend.backend"),
    Entry(
        "jax.lib.xla_client",
        "0.9.0",
        "differs",
        "xlashard._jax.era:xla_client",
        "import jax.extend.xla",
        "it has what jaxlib has today",
    ),
    Entry(
        "jax.lib.xla_extension",
        "0.9.0",
        "differs",
        "xlashard._jax.era:xla_extension",
        "import jax.extend.xla",
        "it has what jaxlib has today",
    ),
    *members(
        "jax.experimental",
        "0.9.0",
        f"{_ERA}.devices",
        {"disable_x64": "jax.enable_x64(False)", "enable_x64": "jax.enable_x64(True)"},
    ),
    Entry(
        "jax.experimental.loops",
        "0.3.16",
        "refused",
        f"{_API}:loops",
        "jax.lax.fori_loop",
        "loops are functions of their state",
    ),
    Entry(
        "jax.experimental.optimizers",
        "0.3.16",
        "works",
        "jax.example_libraries.optimizers",
        "import jax.example_libraries.optimizers",
    ),
    Entry(
        "jax.experimental.stax",
        "0.3.16",
        "works",
        "jax.example_libraries.stax",
        "import jax.example_libraries.stax",
    ),
    *members("jax.ad_checkpoint", "0.10.0", "jax", {"checkpoint": "jax.checkpoint"}),
    *members("jax.ad_checkpoint", "0.10.0", "jax", {"remat": "jax.checkpoint"}),
    *members(
        "jax.experimental.compilation_cache.compilation_cache",
        "0.4.26",
        f"{_ERA}.compilation_cache",
        {
            "initialize_cache": "jax.config.update('jax_compilation_cache_dir', path)",
            "is_initialized": "jax.config.jax_compilation_cache_dir is not None",
        },
    ),
    *members("jax._src.util", "0.4.14", f"{_ERA}.util", {"prod": "math.prod"}),
    *members(
        "jax._src.test_util",
        "0.6.0",
        f"{_ERA}.devices",
        {"create_global_mesh": "jax.make_mesh(shape, names)"},
    ),
    *members("jax.dlpack", "0.7.0", f"{_ERA}.devices", {"to_dlpack": "x.__dlpack__()"}),
    Entry(
        "jax.Device.live_buffers",
        "0.4.36",
        "differs",
        f"{_ERA}.devices:live_buffers",
        "jax.live_arrays()",
        "arrays over several devices are not among them; jax.live_arrays() has all",
    ),
)
