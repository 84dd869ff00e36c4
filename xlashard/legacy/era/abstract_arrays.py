"""`jax.abstract_arrays`: types of arrays."""

from xlashard._jax.era import core, jaxprs
from xlashard.legacy.era.core import raise_to_shaped

ShapedArray = core.ShapedArray
array_types = jaxprs.array_types

__all__ = ["ShapedArray", "array_types", "raise_to_shaped"]
