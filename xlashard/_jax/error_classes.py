"""Classes of JAX from which errors of this package derive, so that programs catch both alike."""

from contextlib import suppress
from functools import lru_cache

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from xlashard._jax.private import core
from xlashard.errors import JaxVersionError


@lru_cache(maxsize=8)
def find_error_class(name: str) -> type[Exception] | None:
    """Return a class of JAX by its name; None where the installed JAX lacks it.

    Three classes have no public name. Two of them derive from `Exception` alone, so that handlers
    of errors about explicit meshes and repeated axes write the private name.
    """
    with suppress(JaxVersionError):
        match name:
            case "JaxRuntimeError":
                return jax.errors.JaxRuntimeError
            case "ShardingTypeError":
                return core.ShardingTypeError
            case "DuplicateSpecError":
                return _read_class(PartitionSpec("x", "x"), Exception)
            case "IndivisibleError":
                return _read_class(PartitionSpec("x"), ValueError)
    return None


def _read_class(spec: PartitionSpec, base: type[Exception]) -> type[Exception]:
    """Return the class by which JAX refuses a spec of an array of one element."""
    try:
        NamedSharding(AbstractMesh((2,), ("x",)), spec).shard_shape((1,) * len(spec))
    except base as error:
        return type(error)
    return base
