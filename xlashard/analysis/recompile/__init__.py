"""Record of cache misses per function, and explanations of the recompilations among them."""
