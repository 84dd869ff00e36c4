"""Arrays: `Array`, constructors, host transfer, placement and resharding."""

from xlashard._jax.registration import install_arrays
from xlashard._jax.runtime.dispatch import Wrappers
from xlashard.core.array.array_class.array import Array as Array
from xlashard.core.array.array_class.array import wrap_kinds as wrap_kinds
from xlashard.core.array.array_class.array import wrap_tree as wrap_tree
from xlashard.core.array.array_class.closed_over import check_constant
from xlashard.core.array.array_class.handles import wrap_first
from xlashard.core.array.device_put import device_put as device_put

install_arrays(Array, Wrappers(wrap_first, wrap_tree, wrap_kinds), check_constant)
