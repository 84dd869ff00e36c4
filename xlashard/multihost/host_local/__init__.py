"""Conversion between host-local arrays and global arrays.

| modules | contents |
|---|---|
| `convert` | the two public functions |
| `host_mesh` | the contiguous block of a mesh that belongs to one process |
| `views` | conversion of concrete values, without a copy where the shards already match |
| `primitives` | the same conversion as a pair of linear JAX primitives |
"""
