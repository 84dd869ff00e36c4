"""`jax._src.device_array`."""

from typing import Any

from xlashard.legacy.arrays.device_arrays import DeviceArray, make_device_array
from xlashard.legacy.arrays.device_arrays import DeviceArray as _DeviceArray
from xlashard.legacy.arrays.shards import Device
from xlashard.legacy.modules.entry import Entry, members

Buffer = DeviceArray

device_array_types: list[Any] = [DeviceArray]

_DEVICE_ARRAY = "jax._src.device_array"

ENTRIES: tuple[Entry, ...] = (
    Entry(_DEVICE_ARRAY, "0.4.14", "works", __name__, "jax.Array"),
    *members(
        _DEVICE_ARRAY,
        "0.4.14",
        __name__,
        {
            "DeviceArray": "jax.Array",
            "_DeviceArray": "jax.Array",
            "make_device_array": "jax.device_put(buffer, device)",
        },
    ),
)
