"""Hardware that TPUs and GPUs share: chips, topologies, meshes on them and links along axes.

`chip` holds the figures of a chip, `mesh_layout` lays mesh axes on the dimensions of a topology,
`base_topology` makes meshes of compile-only devices, `links` finds the links along mesh axes.
"""
