"""Names of JAX 0.5 to 0.10 for meshes and shardings, and of the first years."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlashard import legacy
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.shardings.partition_spec import PartitionSpec

X = np.arange(16.0, dtype=np.float32).reshape(8, 2)


@pytest.fixture(autouse=True, scope="module")
def installed():
    with legacy.installed():
        yield


@pytest.fixture
def explicit() -> jax.sharding.Mesh:
    from jax.sharding import AxisTypes

    assert (AxisTypes.Hidden, AxisTypes.Collective) == (
        jax.sharding.AxisType.Auto,
        jax.sharding.AxisType.Manual,
    )
    return jax.make_mesh(axis_shapes=(8,), axis_names=("x",), axis_types=(AxisTypes.Visible,))


def test_use_mesh_auto_axes_explicit_axes_and_reshard(explicit: jax.sharding.Mesh) -> None:
    from jax.experimental.shard import auto_axes, explicit_axes, reshard
    from jax.sharding import use_mesh

    with use_mesh(explicit):
        x = reshard(jnp.array(X), jax.P("x"))
        assert x.sharding.spec == jax.P("x", None)
        double = auto_axes(lambda x: x * 2)
        assert double(x, out_shardings=jax.P("x", None)).sharding == x.sharding
        inner = explicit_axes(lambda x: x + 1, in_shardings=jax.P("x"))
        np.testing.assert_array_equal(auto_axes(inner, out_shardings=jax.P("x"))(x), X + 1)
    assert jax.sharding.get_mesh().empty


def test_shard_alike_gives_one_sharding_and_passes_gradients(mesh: jax.sharding.Mesh) -> None:
    from jax.experimental.shard_alike import shard_alike

    x = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.P("x")))

    def fill(x: jax.Array, alike: bool) -> jax.Array:
        y = jnp.arange(16.0).reshape(8, 2) + x.sum()
        return shard_alike({"w": x}, {"w": y})[1]["w"] if alike else y

    placed, free = (jax.jit(fill, static_argnums=1)(x, alike) for alike in (True, False))
    assert placed.sharding.is_equivalent_to(x.sharding, 2)
    assert not free.sharding.is_equivalent_to(x.sharding, 2)
    gradient = jax.grad(lambda x: sum(map(jnp.sum, shard_alike(x * 2, x * 3))))(x)
    np.testing.assert_array_equal(gradient, np.full_like(X, 5))
    rows = jax.vmap(lambda row: shard_alike(row, jnp.ones(2))[1])(x)
    np.testing.assert_array_equal(rows, np.ones_like(X))


def test_sharded_jit_and_masking_can_be_imported() -> None:
    from jax.experimental import sharded_jit
    from jax.interpreters import masking

    assert sharded_jit.PartitionSpec is jax.sharding.PartitionSpec
    masking.defvectorized(jax.lax.sin_p)
    masking.defnaryop(jax.lax.add_p)
    assert {jax.lax.sin_p, jax.lax.add_p} <= masking.masking_rules.keys()
    for name in ("ad", "batching", "mlir", "partial_eval"):
        assert getattr(jax, name).__name__ == f"jax.interpreters.{name}"


@pytest.mark.parametrize(
    "axes", [(), ((),), (None,), ((), "x"), ("x",), (("x",),), ("x", None), (("x", "y"),)]
)
def test_mesh_axes_of_a_gda_are_as_given(mesh: jax.sharding.Mesh, axes: tuple) -> None:
    whole = np.zeros((8, 8))
    for given in (axes, PartitionSpec(*axes)):
        made = GlobalDeviceArray.from_callback((8, 8), mesh, given, lambda index: whole[index])
        assert tuple(made.mesh_axes) == axes
        assert f"mesh_axes={PartitionSpec(*axes)!r}" in repr(made)
