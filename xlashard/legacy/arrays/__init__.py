"""The array classes of 2022: `GlobalDeviceArray`, `DeviceArray` and `ShardedDeviceArray`.

| file | contents |
|---|---|
| `gda` | `GlobalDeviceArray` |
| `shards` | the index and replica id of each shard, and arrays that are made of shards |
| `device_arrays` | `DeviceArray`, `ShardedDeviceArray` and their constructors |
"""
