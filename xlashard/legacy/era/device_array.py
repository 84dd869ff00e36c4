"""`jax._src.device_array`: the class of arrays on one device."""

from typing import Any

from xlashard.legacy.device_arrays import DeviceArray
from xlashard.legacy.device_arrays import DeviceArray as _DeviceArray
from xlashard.legacy.device_makers import make_device_array
from xlashard.legacy.shards import Device

Buffer = DeviceArray

__all__ = [
    "Buffer",
    "Device",
    "DeviceArray",
    "_DeviceArray",
    "device_array_types",
    "make_device_array",
]


device_array_types: list[Any] = [DeviceArray]
