"""`jax.lib.xla_bridge`, `xla_client` and `xla_extension`."""

import jax

from xlashard._jax import legacy_api
from xlashard.legacy.modules.entry import Entry, members

backends = legacy_api.xla_bridge.backends
default_backend = jax.default_backend
device_count = jax.device_count
devices = jax.devices
get_backend = legacy_api.xla_bridge.get_backend
get_compile_options = legacy_api.compile_options
host_count = jax.host_count
host_id = jax.host_id
host_ids = jax.host_ids
local_device_count = jax.local_device_count
local_devices = jax.local_devices
process_count = jax.process_count
process_index = jax.process_index
READERS = {name: (jax, legacy_api.xla_bridge) for name in ("process_index", "process_count")}
"""The modules in which JAX reads a name that tests patch here with `mock.patch`."""

register_backend_factory = legacy_api.xla_bridge.register_backend_factory
xla_client = legacy_api.xla_client

ENTRIES: tuple[Entry, ...] = (
    Entry("jax.lib.xla_bridge", "0.9.0", "works", __name__, "import jax.extend.backend"),
    *members(
        "jax.lib.xla_bridge",
        "0.4.4",
        __name__,
        {
            "device_count": "jax.device_count()",
            "devices": "jax.devices()",
            "local_device_count": "jax.local_device_count()",
            "local_devices": "jax.local_devices()",
            "process_count": "jax.process_count()",
            "process_index": "jax.process_index()",
        },
    ),
    *members("jax.lib.xla_bridge", "0.5.0", __name__, {"default_backend": "jax.default_backend()"}),
    *members(
        "jax.lib.xla_bridge",
        "0.8.0",
        __name__,
        {
            "get_backend": "jax.extend.backend.get_backend",
            "get_compile_options": "jax.extend.backend.get_compile_options",
        },
    ),
    Entry("jax._src.lib.xla_bridge", "0.4.6", "works", __name__, "import jax.extend.backend"),
    Entry(
        "jax.lib.xla_client",
        "0.9.0",
        "differs",
        "xlashard._jax.legacy_api:xla_client",
        "import jax.extend.xla",
        "it has the attributes of today's jaxlib",
    ),
    Entry(
        "jax.lib.xla_extension",
        "0.9.0",
        "differs",
        "xlashard._jax.legacy_api:xla_extension",
        "import jax.extend.xla",
        "it has the attributes of today's jaxlib",
    ),
)
