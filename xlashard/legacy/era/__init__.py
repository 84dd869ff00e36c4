"""The modules of JAX that programs of the era import: one here for each, with what it had."""
