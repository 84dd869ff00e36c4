"""Chips that programs are compiled for, on a machine without them.

| modules | contents |
|---|---|
| `chip` | figures of a chip |
| `figures` | reading of the TOML files that have the figures, each beside its source |
| `mesh_layout` | mesh axes laid on the dimensions of a topology |
| `base_topology` | meshes of compile-only devices, and the links along their axes |
| `tpu/` | generations of TPUs, names of topologies, their devices |
| `gpu/` | models of GPUs, machines of clouds, names of topologies, their devices |
"""
