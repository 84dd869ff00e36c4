"""The era's flags."""

from xlashard.legacy.table.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="jax.config.jax_array",
        gone="0.4.7",
        treatment="works",
        source="xlashard.legacy.flags:jax_array",
        today="isinstance(x, jax.Array)",
    ),
    Entry(
        name="jax.config.jax_parallel_functions_output_gda",
        gone="0.4.7",
        treatment="works",
        source="xlashard.legacy.flags:parallel_functions_output_gda",
        today="jax.jit(f, out_shardings=shardings)",
    ),
    Entry(
        name="jax.config.jax_pmap_no_rank_reduction",
        gone="0.8.0",
        treatment="differs",
        source="xlashard.legacy.flags:pmap_no_rank_reduction",
        today="xlashard.unstacked_shards(x)",
        note=(
            "True, which it is if nobody says otherwise, is what pmap does today. It can be set "
            "to False, by which pmap's pieces don't lose their first dimension any more"
        ),
    ),
)
