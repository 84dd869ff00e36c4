"""`jax.experimental.host_callback`, over the callbacks that JAX has today."""

from xlashard.legacy.table.entry import Entry, members

_NAME = "jax.experimental.host_callback"
_ERA = "xlashard.legacy.era.host_callback"

ENTRIES: tuple[Entry, ...] = (
    Entry(_NAME, "0.4.36", "differs", _ERA, "jax.experimental.io_callback", "see its names"),
    Entry(
        f"{_NAME}.call",
        "0.4.36",
        "differs",
        f"{_ERA}:call",
        "jax.experimental.io_callback",
        "`call_with_device` is refused; under vmap the function gets one element at a time",
    ),
    Entry(
        f"{_NAME}.id_tap",
        "0.4.36",
        "differs",
        f"{_ERA}:id_tap",
        "jax.debug.callback",
        "the function is told of no transformations, and under vmap gets one element at a time",
    ),
    Entry(
        f"{_NAME}.id_print",
        "0.4.36",
        "differs",
        f"{_ERA}:id_print",
        "jax.debug.print",
        "under vmap each element is printed by itself",
    ),
    *members(
        _NAME,
        "0.4.36",
        _ERA,
        {
            "CallbackException": "jax.errors.JaxRuntimeError",
            "barrier_wait": "jax.effects_barrier()",
        },
    ),
    Entry(
        f"{_NAME}.call_with_device",
        "0.4.36",
        "refused",
        f"{_ERA}:call_with_device",
        "jax.experimental.io_callback",
        "callbacks of today are not told on which device their program runs",
    ),
    Entry(
        f"{_NAME}.stop_outfeed_receiver",
        "0.4.36",
        "refused",
        f"{_ERA}:stop_outfeed_receiver",
        "jax.effects_barrier()",
        "no thread receives what programs send, so there is none to stop",
    ),
)
