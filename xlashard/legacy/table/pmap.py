"""`jax.pmap`, whose results are something else today."""

from xlashard.legacy.table.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "jax.pmap",
        "0.8.0",
        "works",
        "xlashard.legacy.pmap:pmap",
        "jax.shard_map(f, mesh=mesh, in_specs=P('batch'), out_specs=P('batch'))",
        "One index of a result is the piece of one device again; of today's `jax.pmap` it is a "
        "copy on every device.",
    ),
)
