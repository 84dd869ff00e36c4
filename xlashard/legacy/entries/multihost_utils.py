"""Entries of the names of `jax.experimental.multihost_utils`."""

from xlashard.legacy.entries.entry import EntryTable, works

# The first release that does not take GlobalDeviceArrays.
_GONE = "0.4.7"

_KINDS = (
    "Specs may be None for replicated, and the `PartitionSpec` of 2022. With `jax_array` off it "
    "returns the arguments of `legacy.pjit`: "
)

_WHO = "Values keep their dtypes, and errors name the processes and the paths of what differs."

ENTRIES: EntryTable = {
    "jax.experimental.multihost_utils": {
        "": works(_GONE, "from xlashard import multihost").but("Its other names are unchanged."),
        "process_allgather": works(_GONE, "multihost.process_allgather(x, tiled=True)"),
        "broadcast_one_to_all": works(
            _GONE, "multihost.broadcast_one_to_all(x)", "xlashard.multihost"
        ).but(_WHO),
        "sync_global_devices": works(
            _GONE, "multihost.sync_global_devices(name)", "xlashard.multihost"
        ).but("Errors name the missing processes, or those with another name."),
        "assert_equal": works(_GONE, "multihost.assert_equal(x)", "xlashard.multihost").but(_WHO),
        "host_local_array_to_global_array": works(
            _GONE, "multihost.host_local_array_to_global_array(x, mesh, specs)"
        ).but(f"{_KINDS}GlobalDeviceArrays."),
        "global_array_to_host_local_array": works(
            _GONE, "multihost.global_array_to_host_local_array(x, mesh, specs)"
        ).but(f"{_KINDS}host-local arrays."),
    },
}
