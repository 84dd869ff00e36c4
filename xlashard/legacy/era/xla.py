"""What `jax.interpreters.xla` held, beside what it holds today."""

import jax

from xlashard._jax.era import core
from xlashard.legacy.device_arrays import DeviceArray
from xlashard.legacy.device_arrays import DeviceArray as _DeviceArray
from xlashard.legacy.device_makers import make_device_array
from xlashard.legacy.refusals import Refusal

Device = jax.Device
ShapedArray = core.ShapedArray

abstractify = core.shaped_abstractify
pytype_aval_mappings = core.pytype_aval_mappings

backend_specific_translations = Refusal("jax.interpreters.xla.backend_specific_translations")
register_translation = Refusal("jax.interpreters.xla.register_translation")
translations = Refusal("jax.interpreters.xla.translations")
xla_call_p = Refusal("jax.interpreters.xla.xla_call_p")

__all__ = [
    "Device",
    "DeviceArray",
    "ShapedArray",
    "_DeviceArray",
    "abstractify",
    "backend_specific_translations",
    "core",
    "make_device_array",
    "pytype_aval_mappings",
    "register_translation",
    "translations",
    "xla_call_p",
]
