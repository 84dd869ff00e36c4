"""What processes do together."""

from xlashard.legacy.table.entry import Entry

_HERE = "xlashard.legacy.era.multihost_utils"
_THERE = "jax.experimental.multihost_utils"
# Since when it takes GlobalDeviceArrays no more.
_GONE = "0.4.7"
_KINDS = (
    "Specs may be None for replicated, and the era's. Without `jax_array` it gives what the era's "
    "`pjit` takes: "
)
_WHO = "Values keep their dtypes, and errors name the processes and the paths of what differs."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        _THERE,
        _GONE,
        "differs",
        _HERE,
        "from xlashard import multihost",
        "What is not listed here is as it is today.",
    ),
    Entry(
        f"{_THERE}.process_allgather",
        _GONE,
        "works",
        f"{_HERE}:process_allgather",
        "multihost.process_allgather(x, tiled=True)",
    ),
    Entry(
        f"{_THERE}.broadcast_one_to_all",
        _GONE,
        "differs",
        f"{_HERE}:broadcast_one_to_all",
        "multihost.broadcast_one_to_all(x)",
        _WHO,
    ),
    Entry(
        f"{_THERE}.sync_global_devices",
        _GONE,
        "differs",
        f"{_HERE}:sync_global_devices",
        "multihost.sync_global_devices(name)",
        "An error says who did not come, or came with another name.",
    ),
    Entry(
        f"{_THERE}.assert_equal",
        _GONE,
        "differs",
        f"{_HERE}:assert_equal",
        "multihost.assert_equal(x)",
        _WHO,
    ),
    Entry(
        f"{_THERE}.host_local_array_to_global_array",
        _GONE,
        "differs",
        f"{_HERE}:host_local_array_to_global_array",
        "multihost.host_local_array_to_global_array(x, mesh, specs)",
        _KINDS + "GlobalDeviceArrays.",
    ),
    Entry(
        f"{_THERE}.global_array_to_host_local_array",
        _GONE,
        "differs",
        f"{_HERE}:global_array_to_host_local_array",
        "multihost.global_array_to_host_local_array(x, mesh, specs)",
        _KINDS + "this process's part.",
    ),
)
