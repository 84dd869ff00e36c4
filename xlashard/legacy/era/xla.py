"""What `jax.interpreters.xla` held, beside what it holds today."""

from typing import Any

import jax

import xlashard
from xlashard._jax.era import core, xla_client
from xlashard.legacy.device_arrays import DeviceArray
from xlashard.legacy.device_arrays import DeviceArray as _DeviceArray
from xlashard.legacy.device_makers import make_device_array
from xlashard.legacy.era.modules import imported_modules
from xlashard.legacy.refusals import Refusal
from xlashard.legacy.worlds import of_one_class

__getattr__ = imported_modules("jax.interpreters.xla")

Device = jax.Device
xc = xla_client
ShapedArray = core.ShapedArray

abstractify = core.shaped_abstractify
pytype_aval_mappings = core.pytype_aval_mappings

backend_specific_translations = Refusal("jax.interpreters.xla.backend_specific_translations")
register_translation = Refusal("jax.interpreters.xla.register_translation")
translations = Refusal("jax.interpreters.xla.translations")
xla_call_p = Refusal("jax.interpreters.xla.xla_call_p")


def device_put(x: Any, device: Any = None) -> tuple[jax.Array, ...]:
    """Return the buffers of a value on one device: a tuple of one array.

    Args:
        x: An array, a NumPy array or a number.
        device: The device; the default one if None.
    """
    return (of_one_class(xlashard.device_put(x, device)),)


__all__ = [
    "Device",
    "DeviceArray",
    "ShapedArray",
    "_DeviceArray",
    "abstractify",
    "backend_specific_translations",
    "core",
    "device_put",
    "make_device_array",
    "pytype_aval_mappings",
    "register_translation",
    "translations",
    "xc",
    "xla_call_p",
]
