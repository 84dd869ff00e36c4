"""Classes of JAX from which errors of this package derive, so that programs catch both alike."""

from contextlib import suppress
from functools import lru_cache

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from xlashard._jax.private import core, named_sharding
from xlashard.errors import JaxVersionError


@lru_cache(maxsize=8)
def find_error_class(name: str) -> type[Exception] | None:
    """Return a class of JAX by its name; None where the installed JAX lacks it.

    Two classes derive from `Exception` alone and have no public name, so that handlers of errors
    about explicit meshes and repeated axes write the private one.
    """
    with suppress(JaxVersionError):
        match name:
            case "JaxRuntimeError":
                return jax.errors.JaxRuntimeError
            case "ShardingTypeError":
                return core.ShardingTypeError
            case "DuplicateSpecError":
                return named_sharding.DuplicateSpecError
            case "IndivisibleError":
                return _read_indivisible_error()
    return None


def _read_indivisible_error() -> type[Exception]:
    """Return the class by which JAX refuses a size that the axes of a spec do not divide."""
    try:
        NamedSharding(AbstractMesh((2,), ("x",)), PartitionSpec("x")).shard_shape((1,))
    except ValueError as error:
        return type(error)
    return ValueError
