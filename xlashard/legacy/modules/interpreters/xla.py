"""`jax.interpreters.xla`, also reachable as `jax.xla`."""

from typing import Any

import jax

import xlashard
from xlashard._jax.legacy_api import core, xla_client
from xlashard.legacy.arrays.device_arrays import DeviceArray, make_device_array
from xlashard.legacy.arrays.device_arrays import DeviceArray as _DeviceArray
from xlashard.legacy.modes.array_mode import as_jax_arrays
from xlashard.legacy.modules.entry import Entry, RemovedApi, imported_modules, imports, members

__getattr__ = imported_modules("jax.interpreters.xla")

Device = jax.Device
xc = xla_client
ShapedArray = core.ShapedArray

abstractify = core.shaped_abstractify
pytype_aval_mappings = core.pytype_aval_mappings

backend_specific_translations = RemovedApi("jax.interpreters.xla.backend_specific_translations")
register_translation = RemovedApi("jax.interpreters.xla.register_translation")
translations = RemovedApi("jax.interpreters.xla.translations")
xla_call_p = RemovedApi("jax.interpreters.xla.xla_call_p")


def device_put(x: Any, device: Any = None) -> tuple[jax.Array, ...]:
    """Return the buffers of a value on one device: a tuple of one array.

    Args:
        x: An array, a NumPy array or a number.
        device: The device; the default one if None.
    """
    return (as_jax_arrays(xlashard.device_put(x, device)),)


_HOME = "jax.interpreters.xla"

_NOTE = "`isinstance` is True for every fully addressable array, including today's."
_MLIR = "jax.interpreters.mlir.register_lowering(primitive, rule)"
_RULES = "JAX's lowering rules emit MLIR instead of calling XLA builders"

_REFUSED = (
    ("backend_specific_translations", _MLIR, _RULES),
    ("register_translation", _MLIR, _RULES),
    ("translations", _MLIR, _RULES),
    ("xla_call_p", "jaxpr.eqns[0].primitive.name == 'jit'", "jit and pjit are one primitive"),
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.4.7", "works", __name__, "jax.core, jax.interpreters.mlir"),
    Entry("jax.xla", "0.4.14", "works", __name__, "jax.core, jax.interpreters.mlir"),
    *(
        Entry(f"{home}.DeviceArray", gone, "differs", f"{__name__}:DeviceArray", "jax.Array", _NOTE)
        for home, gone in ((_HOME, "0.4.12"), ("jax.xla", "0.4.14"))
    ),
    Entry(
        f"{_HOME}._DeviceArray", "0.4.9", "differs", f"{__name__}:_DeviceArray", "jax.Array", _NOTE
    ),
    Entry(
        f"{_HOME}.make_device_array", "0.4.9", "works", f"{__name__}:make_device_array", "buffer"
    ),
    Entry(f"{_HOME}.Device", "0.4.14", "works", f"{__name__}:Device", "jax.Device"),
    Entry(
        f"{_HOME}.ShapedArray", "0.4.14", "works", f"{__name__}:ShapedArray", "jax.core.ShapedArray"
    ),
    Entry(f"{_HOME}.abstractify", "0.8.2", "works", f"{__name__}:abstractify", "jax.typeof(x)"),
    Entry(
        f"{_HOME}.pytype_aval_mappings",
        "0.8.2",
        "works",
        f"{__name__}:pytype_aval_mappings",
        "jax.typeof(x)",
    ),
    *(
        Entry(f"{_HOME}.{name}", "0.4.14", "refused", f"{__name__}:{name}", today, note)
        for name, today, note in _REFUSED
    ),
    *members(_HOME, "0.4.14", __name__, {"device_put": "(jax.device_put(x, device),)"}),
    *(
        Entry(f"{home}.xc", "0.4.14", "works", f"{__name__}:xc", "import jax.extend.backend")
        for home in (_HOME, "jax.xla")
    ),
    *members(_HOME, "0.8.2", __name__, imports(_HOME)),
)
