"""Partition specs and shardings under the names of 2022 and 2023.

| file | contents |
|---|---|
| `partition_spec` | `PartitionSpec` as a tuple, and the markers `AUTO` and `FROM_GDA` |
| `parsed_specs` | `ParsedPartitionSpec` and array mappings |
| `sharding_spec` | `ShardingSpec` and its entries, such as `Chunked`; that of a tiling |
| `pmap` | `PmapSharding` |
| `superdims` | mesh axes from the order of devices: `unflatten_array`, ... |
| `op_shardings` | `OpSharding`s, and the `ShardingSpec`s of meshes and of `pmap` |
"""
