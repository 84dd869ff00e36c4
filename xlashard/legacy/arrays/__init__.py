"""The array classes of 2022: `GlobalDeviceArray`, `DeviceArray` and `ShardedDeviceArray`.

| file | contents |
|---|---|
| `gda`, `gda_constructors` | `GlobalDeviceArray` and its `from_...` constructors |
| `shards` | the index and replica id of each shard |
| `device_arrays` | `DeviceArray`, `ShardedDeviceArray` and their constructors |
"""
