"""Arrays: `Array`, constructors, host transfer, placement and resharding."""

from xlashard._jax.registration import install_arrays
from xlashard._jax.runtime.dispatch import Wrappers
from xlashard.core.array.array_class.array import Array as Array
from xlashard.core.array.array_class.array import wrap_tree as wrap_tree
from xlashard.core.array.array_class.closed_over import check_constant
from xlashard.core.array.array_class.handles import wrap_output
from xlashard.core.array.device_put import device_put as device_put

install_arrays(Array, Wrappers(wrap_output, wrap_tree), check_constant)
