"""Private names of JAX: the list of those in use, and programs on a JAX that lacks some."""
