"""The array classes of 2022, and the constructors of arrays for `pmap`.

| file | contents |
|---|---|
| `gda` | `GlobalDeviceArray` |
| `shards` | the index and replica id of each shard, and arrays that are made of shards |
| `device_arrays` | `DeviceArray`, `ShardedDeviceArray` and their constructors |
| `buffer_arrays` | `make_device_array` and `make_sharded_device_array`, which return `Array`s |
| `stacked` | `device_put_sharded`, `device_put_replicated` and `unstacked_shards` |
"""
