"""Reads specs and tile assignments with the functions inside of pjit, maps and pxla."""

import jax
import numpy as np
from jax.experimental import maps
from jax.experimental.pjit import (
    AUTO,
    ParsedPartitionSpec,
    PartitionSpec,
    _prepare_axis_resources,
    get_array_mapping,
    pjit,
)
from jax.experimental.sharding import MeshPspecSharding
from jax.interpreters import pxla
from jax.interpreters.sharded_jit import PartitionSpec as OldSpec


def tile_counts(spec, mesh):
    """Into how many pieces each dimension is cut."""
    parsed = ParsedPartitionSpec.from_user_input(spec, "spec")
    return [int(np.prod([mesh.shape[a] for a in axes])) for axes in parsed]


def main():
    mesh = maps.Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "mp"))
    assert OldSpec is PartitionSpec or OldSpec("dp") == PartitionSpec("dp")
    assert tile_counts(PartitionSpec("dp", None, ("mp",)), mesh) == [2, 1, 4]
    assert PartitionSpec("dp", None) == ("dp", None)
    assert isinstance(PartitionSpec("dp"), tuple)
    assert PartitionSpec("dp") + (None, "mp") == ("dp", None, "mp")
    assert dict(get_array_mapping(PartitionSpec("dp", ("mp",)))) == {"dp": 0, "mp": 1}

    axes = {"w": PartitionSpec("dp", "mp"), "b": None}
    parsed, entries, treedef, any_auto = _prepare_axis_resources(axes, "in_axis_resources")
    assert len(entries) == 2 and not any_auto
    assert treedef.num_leaves == 2
    assert sorted(parsed) == ["b", "w"]

    sharding = MeshPspecSharding(mesh, PartitionSpec("mp"))
    assert isinstance(sharding, jax.sharding.NamedSharding)
    indices = sharding.devices_indices_map((8, 2))
    assert len(set(map(str, indices.values()))) == 4
    x = jax.device_put(np.arange(16.0).reshape(8, 2), sharding)
    assert x.sharding.shard_shape(x.shape) == (2, 2)

    aval = jax.core.ShapedArray((8, 2), np.float32)
    spec = pxla.mesh_sharding_specs(mesh.shape, mesh.axis_names)(
        aval, get_array_mapping(PartitionSpec("mp"))
    )
    assert isinstance(spec, pxla.ShardingSpec)
    assert pxla.spec_to_indices((8, 2), spec)[1][0] == slice(2, 4)

    semantics = maps._positional_semantics
    saved, semantics.val = semantics.val, maps._PositionalSemantics.GLOBAL
    try:
        with mesh:
            doubled = pjit(lambda v: v * 2, PartitionSpec("dp"), PartitionSpec("dp"))(np.ones(8))
            lowered = pjit(lambda v: v * 2, AUTO, AUTO).lower(
                jax.ShapeDtypeStruct((8,), np.float32), _global_avals=True
            )
            compiled = lowered.compile()
    finally:
        semantics.val = saved
    np.testing.assert_array_equal(doubled, np.full(8, 2.0))
    assert len(compiled.input_shardings[0]) == 1

    @maps.Mesh(mesh.devices, ("a", "b"))
    def names():
        return maps.thread_resources.env.physical_mesh.axis_names

    assert names() == ("a", "b")
    assert jax.experimental.maps.thread_resources.env.physical_mesh.devices.shape == ()
    try:
        maps.xmap(lambda x: x, in_axes={0: "i"}, out_axes={0: "i"})(np.ones(8))
    except Exception as error:
        assert "shard_map" in str(error) or "pjit" in str(error)
    else:
        raise AssertionError("xmap did something")


if __name__ == "__main__":
    main()
