"""Entries of the names of `jax.experimental.host_callback`."""

from xlashard.legacy.entries.entry import EntryTable, refused, works

ENTRIES: EntryTable = {
    "jax.experimental.host_callback": {
        "": works("0.4.36", "jax.experimental.io_callback").but("see its names"),
        "call": works("0.4.36", "jax.experimental.io_callback").but(
            "`call_with_device` is refused; under vmap the function gets one element at a time"
        ),
        "id_tap": works("0.4.36", "jax.debug.callback").but(
            "the list of transformations is empty, and under vmap the function gets one "
            "element at a time"
        ),
        "id_print": works("0.4.36", "jax.debug.print").but(
            "under vmap each element is printed by itself"
        ),
        "CallbackException": works("0.4.36", "jax.errors.JaxRuntimeError"),
        "barrier_wait": works("0.4.36", "jax.effects_barrier()"),
        "outside_call_p": refused("0.4.36", "jax.experimental.io_callback").because(
            "callbacks are another primitive"
        ),
        "call_with_device": refused("0.4.36", "jax.experimental.io_callback").because(
            "callbacks do not receive the device of their program"
        ),
        "stop_outfeed_receiver": refused("0.4.36", "jax.effects_barrier()").because(
            "callbacks need no receiver thread"
        ),
    },
}
