"""What `jax.interpreters.sharded_jit` held."""

from xlashard.legacy.refusals import Refusal
from xlashard.legacy.specs import PartitionSpec

sharded_jit = Refusal("jax.interpreters.sharded_jit.sharded_jit")
with_sharding_constraint = Refusal("jax.interpreters.sharded_jit.with_sharding_constraint")

__all__ = [
    "PartitionSpec",
    "sharded_jit",
    "with_sharding_constraint",
]
