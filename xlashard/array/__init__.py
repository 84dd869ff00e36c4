"""Arrays: `Array`, constructors, host transfer, placement and resharding."""

from xlashard.array.core.array import Array as Array
from xlashard.array.core.array import wrap_kinds as wrap_kinds
from xlashard.array.core.array import wrap_tree as wrap_tree
from xlashard.array.device_put import device_put as device_put
