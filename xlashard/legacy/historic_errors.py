"""Errors that handlers of 2022 catch too, by the built-in classes that JAX raised then."""

from xlashard.errors import ArgumentError, PlacementError, ShardingError, TilingError


class GdaBufferError(PlacementError, AssertionError):
    """A buffer of a GlobalDeviceArray with another shape or dtype than the array's shards."""


class SpecOutOfSyncError(ShardingError, AssertionError):
    """A request for the spec that the user wrote, of a parsed spec that has changed since."""


class DeviceOrderError(TilingError, NotImplementedError):
    """An order of devices that is not that of a transposed mesh."""


class KeywordArgumentError(ArgumentError, NotImplementedError):
    """An argument that was passed to `pjit` by name while `jax_array` is off."""
