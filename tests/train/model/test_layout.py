import jax
import numpy as np
import pytest

import xlashard
from tests.train.examples import MESHES, devices, settings
from xlashard.train.errors import SettingsError
from xlashard.train.model.layout import (
    Declaration,
    Layout,
    build_mesh,
    declare,
    initial_parameters,
    path_name,
    unplaced,
)
from xlashard.train.model.programs import make_recipe, state_shardings

P = xlashard.PartitionSpec


def layout(name: str = "mixed") -> Layout:
    run = settings(**MESHES[name])
    return Layout(build_mesh(run.mesh, devices(run.devices.emulate)), run.sharding.rules)


def test_rules_map_axis_names_to_specs() -> None:
    mixed = layout()
    assert mixed.spec(("layers", "embed", "heads", None)) == P(None, "fsdp", "tensor", None)
    assert mixed.spec((None, "batch", None)) == P(None, ("data", "fsdp"), None)
    assert mixed.spec(()) == P()
    assert layout("data").spec(("vocab", "embed")) == P(None, None)


def test_layout_returns_the_device_count_of_a_logical_axis() -> None:
    mixed = layout()
    assert [mixed.ways(axis) for axis in ("batch", "embed", "length")] == [4, 2, 1]
    assert unplaced.ways("batch") == 1


def test_layout_returns_xlashard_shardings_on_its_mesh() -> None:
    mixed = layout()
    sharding = mixed.sharding(("embed", "mlp"))
    assert isinstance(sharding, xlashard.NamedSharding)
    assert dict(sharding.mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert sharding.shard_shape((8, 6)) == (4, 3)


@pytest.mark.devices(8)
def test_mesh_must_include_all_devices() -> None:
    with pytest.raises(SettingsError) as caught:
        build_mesh({"data": 2, "tensor": 3}, devices(8))
    text = str(caught.value)
    assert "data=2 × tensor=3 takes 6 devices, and there are 8" in text
    assert "data = 8\n  tensor = 1" in text


@pytest.mark.slow
def test_declaration_draws_its_initial_values() -> None:
    drawn = Declaration((400, 50), ("embed", None), 0.5).initial(jax.random.key(0))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(np.std(drawn), 0.5, rtol=0.05)
    ones = Declaration((3,), (None,), None).initial(jax.random.key(0))
    np.testing.assert_array_equal(ones, [1, 1, 1])


@pytest.mark.slow
def test_initial_values_do_not_depend_on_the_mesh() -> None:
    declared = declare(settings().model)
    plain = initial_parameters(declared, jax.random.key(0))
    for name in ("fsdp", "tensor", "mixed"):
        shardings = layout(name).shardings(declared)
        spread = xlashard.pjit(
            lambda: initial_parameters(declared, jax.random.key(0)), out_shardings=shardings
        )()
        jax.tree.map(
            lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(), spread, shardings
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), spread, plain)


def test_optimizer_moments_are_sharded_like_parameters() -> None:
    recipe = make_recipe(settings())
    shardings = state_shardings(recipe, layout())
    shapes = jax.eval_shape(recipe.initial_state, 0)
    assert jax.tree.structure(shapes) == jax.tree.structure(shardings)
    parameter = shardings["parameters"]["layers"]["mlp"]["up"]
    shape = shapes["parameters"]["layers"]["mlp"]["up"].shape
    alike = [
        sharding
        for leaf, sharding in zip(
            jax.tree.leaves(shapes["optimizer"]),
            jax.tree.leaves(shardings["optimizer"]),
            strict=True,
        )
        if leaf.shape == shape and sharding == parameter
    ]
    # Two moments for each of the two arrays of this shape, `gate` and `up`.
    assert len(alike) == 4


def test_paths_are_joined_with_dots() -> None:
    ((path, _),) = jax.tree_util.tree_leaves_with_path({"layers": {"up": 1}})
    assert path_name(path) == "layers.up"
