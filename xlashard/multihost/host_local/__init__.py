"""Conversion between host-local arrays and global arrays.

| modules | contents |
|---|---|
| `conversions` | the two public functions |
| `host_mesh` | the contiguous block of a mesh that belongs to one process |
| `views` | conversion of concrete values, without a copy where the shards already match |
| `conversion_primitives` | the same conversion as a pair of linear JAX primitives |
"""
