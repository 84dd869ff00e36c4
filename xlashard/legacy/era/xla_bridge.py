"""`jax.lib.xla_bridge`: backends."""

import jax

from xlashard._jax import era

backends = era.xla_bridge.backends
default_backend = jax.default_backend
device_count = jax.device_count
devices = jax.devices
get_backend = era.xla_bridge.get_backend
get_compile_options = era.compile_options
host_count = jax.host_count
host_id = jax.host_id
host_ids = jax.host_ids
local_device_count = jax.local_device_count
local_devices = jax.local_devices
process_count = jax.process_count
process_index = jax.process_index
READERS = {name: (jax, era.xla_bridge) for name in ("process_index", "process_count")}
"""The modules in which JAX reads a name that tests replace here by `mock.patch`."""

register_backend_factory = era.xla_bridge.register_backend_factory
xla_client = era.xla_client
