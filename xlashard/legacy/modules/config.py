"""`jax.config` as a module, and its removed flags."""

import jax

from xlashard.legacy.modules.entry import Entry, members

config = jax.config


ENTRIES: tuple[Entry, ...] = (
    Entry("jax.config", "0.4.25", "works", __name__, "jax.config"),
    *members("jax.config", "0.4.25", __name__, {"config": "jax.config"}),
    Entry(
        name="jax.config.jax_array",
        gone="0.4.7",
        treatment="works",
        source="xlashard.legacy.modes.config_flags:jax_array",
        today="isinstance(x, jax.Array)",
    ),
    Entry(
        name="jax.config.jax_parallel_functions_output_gda",
        gone="0.4.7",
        treatment="works",
        source="xlashard.legacy.modes.config_flags:parallel_functions_output_gda",
        today="jax.jit(f, out_shardings=shardings)",
    ),
    *(
        Entry(
            name=name,
            gone="0.7.0",
            treatment="works",
            source="xlashard.legacy.modes.config_flags:spmd_mode",
            today="jax.jit(f)(x)",
        )
        for name in ("jax.config.jax_spmd_mode", "jax.spmd_mode")
    ),
    Entry(
        name="jax.config.jax_pmap_no_rank_reduction",
        gone="0.8.0",
        treatment="differs",
        source="xlashard.legacy.modes.config_flags:pmap_no_rank_reduction",
        today="xlashard.unstacked_shards(x)",
        note=(
            "With it on, `device_buffers` of arrays with a PmapSharding, which `jax.pmap` returns "
            "while the removed names are installed, keep the mapped dimension of size 1"
        ),
    ),
)
