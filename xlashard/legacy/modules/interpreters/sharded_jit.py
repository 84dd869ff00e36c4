"""`jax.interpreters.sharded_jit`."""

from xlashard.legacy.modules.entry import Entry, RemovedApi
from xlashard.legacy.shardings.partition_spec import PartitionSpec

sharded_jit = RemovedApi("jax.interpreters.sharded_jit.sharded_jit")
with_sharding_constraint = RemovedApi("jax.interpreters.sharded_jit.with_sharding_constraint")

_NO_SHARDED_JIT = "jax.jit takes its arguments today"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "jax.interpreters.sharded_jit",
        "0.3.16",
        "differs",
        __name__,
        "jax.jit",
        "`PartitionSpec` works; the functions are refused.",
    ),
    Entry(
        "jax.interpreters.sharded_jit.sharded_jit",
        "0.3.16",
        "refused",
        f"{__name__}:sharded_jit",
        "jax.jit(f, in_shardings=..., out_shardings=...)",
        _NO_SHARDED_JIT,
    ),
    Entry(
        "jax.interpreters.sharded_jit.with_sharding_constraint",
        "0.3.16",
        "refused",
        f"{__name__}:with_sharding_constraint",
        "jax.lax.with_sharding_constraint(x, sharding)",
        _NO_SHARDED_JIT,
    ),
)
