"""`jax.interpreters.xla` and `jax.xla`."""

from xlashard.legacy.era.modules import imports
from xlashard.legacy.table.entry import Entry, members

_HOME = "jax.interpreters.xla"
_ERA = "xlashard.legacy.era.xla"

_NOTE = "`isinstance` holds for every array on this process's devices, also for those of today."
_MLIR = "jax.interpreters.mlir.register_lowering(primitive, rule)"
_RULES = "XLA's own builders are gone from JAX, whose rules write MLIR"

_REFUSED = (
    ("backend_specific_translations", _MLIR, _RULES),
    ("register_translation", _MLIR, _RULES),
    ("translations", _MLIR, _RULES),
    ("xla_call_p", "jaxpr.eqns[0].primitive.name == 'jit'", "jit is one primitive with pjit"),
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.4.7", "works", _ERA, "jax.core, jax.interpreters.mlir"),
    Entry("jax.xla", "0.4.14", "works", _ERA, "jax.core, jax.interpreters.mlir"),
    *(
        Entry(f"{home}.DeviceArray", gone, "differs", f"{_ERA}:DeviceArray", "jax.Array", _NOTE)
        for home, gone in ((_HOME, "0.4.12"), ("jax.xla", "0.4.14"))
    ),
    Entry(f"{_HOME}._DeviceArray", "0.4.9", "differs", f"{_ERA}:_DeviceArray", "jax.Array", _NOTE),
    Entry(f"{_HOME}.make_device_array", "0.4.9", "works", f"{_ERA}:make_device_array", "buffer"),
    Entry(f"{_HOME}.Device", "0.4.14", "works", f"{_ERA}:Device", "jax.Device"),
    Entry(f"{_HOME}.ShapedArray", "0.4.14", "works", f"{_ERA}:ShapedArray", "jax.core.ShapedArray"),
    Entry(f"{_HOME}.abstractify", "0.8.2", "works", f"{_ERA}:abstractify", "jax.typeof(x)"),
    Entry(
        f"{_HOME}.pytype_aval_mappings",
        "0.8.2",
        "works",
        f"{_ERA}:pytype_aval_mappings",
        "jax.typeof(x)",
    ),
    *(
        Entry(f"{_HOME}.{name}", "0.4.14", "refused", f"{_ERA}:{name}", today, note)
        for name, today, note in _REFUSED
    ),
    *members(_HOME, "0.4.14", _ERA, {"device_put": "(jax.device_put(x, device),)"}),
    *(
        Entry(f"{home}.xc", "0.4.14", "works", f"{_ERA}:xc", "import jax.extend.backend")
        for home in (_HOME, "jax.xla")
    ),
    *members(_HOME, "0.8.2", _ERA, imports(_HOME)),
)
