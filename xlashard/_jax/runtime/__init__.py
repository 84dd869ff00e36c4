"""JAX and jaxlib at run time: clients, executables, buffers, transfers and topologies."""
