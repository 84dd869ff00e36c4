"""`eval_shape` with shardings: what is given, what is derived, and what is refused."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import spec_of
from tests.message_patterns import naming
from xlashard import AUTO, UNSPECIFIED, NamedSharding, P, SingleDeviceSharding, eval_shape
from xlashard.errors import ArgumentError, MeshError, ResourceError


class Adam(NamedTuple):
    count: jax.Array
    mu: dict
    nu: dict


def make_params(key):
    first, second = jax.random.split(key)
    return {
        "up": {"kernel": jax.random.normal(first, (8, 16)), "bias": jnp.zeros(16)},
        "down": {"kernel": jax.random.normal(second, (16, 8)), "bias": jnp.zeros(8)},
    }


def make_adam(params):
    half = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.bfloat16), params)
    return Adam(jnp.zeros((), jnp.int32), half, jax.tree.map(jnp.zeros_like, params))


def make_state(key):
    params = make_params(key)
    return {"params": params, "adam": make_adam(params)}


RULES = [(r"params.*up.*kernel", P("x", "y")), (r"params.*bias", P()), (r"params", P("y", "x"))]
KEY = jax.random.key(0)


def specs(tree):
    """Return the specs of a tree by path."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): spec_of(leaf) for path, leaf in flat}


def test_without_shardings_it_is_that_of_jax():
    with_weak_type = {"x": 1.0, "key": KEY}
    assert eval_shape(lambda x: x, with_weak_type) == jax.eval_shape(lambda x: x, with_weak_type)
    assert eval_shape(make_state, KEY) == jax.eval_shape(make_state, KEY)


def test_zeros_of_an_optimizer_get_the_shardings_of_parameters_uncompiled(mesh, compilations):
    with jax.set_mesh(mesh):
        state = eval_shape(make_state, KEY, shardings=RULES)
    assert compilations.count == 0
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), jax.eval_shape(make_state, KEY)
    )
    expected = {
        "['up']['kernel']": ("x", "y"),
        "['up']['bias']": (),
        "['down']['kernel']": ("y", "x"),
        "['down']['bias']": (),
    }
    found = specs(state)
    for part in ("['params']", "['adam'].mu", "['adam'].nu"):
        assert {path: found[part + path] for path in expected} == expected
    assert found["['adam'].count"] == ()
    assert {x.sharding.mesh for x in jax.tree.leaves(state)} == {mesh}


def test_an_optimizer_alone_follows_its_arguments_or_rules_for_them(mesh):
    shapes = jax.eval_shape(make_params, KEY)
    with jax.set_mesh(mesh):
        params = eval_shape(make_params, KEY, shardings=[(r"kernel", P("x"))])
    assert specs(params)["['up']['bias']"] == ()
    kernel = "['up']['kernel']"
    for state in (
        eval_shape(make_adam, params, shardings=[]),
        eval_shape(make_adam, shapes, shardings=[("^params.*kernel", NamedSharding(mesh, P("x")))]),
        eval_shape(make_adam, params, shardings=Adam(UNSPECIFIED, UNSPECIFIED, UNSPECIFIED)),
    ):
        assert specs(state)[f".mu{kernel}"] == specs(state)[f".nu{kernel}"] == ("x",)
    lone = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("y")))
    assert spec_of(eval_shape(jnp.zeros_like, lone, shardings=[])) == ("y",)


def test_a_layer_is_no_mirror_of_another_one(mesh):
    def make(key):
        dense = {"kernel": jax.random.normal(key, (8, 8)), "bias": jnp.zeros(8)}
        return {"dense": dense, "norm": {"bias": jnp.zeros(8)}, "shift": {"bias": jnp.zeros(8)}}

    with jax.set_mesh(mesh):
        found = specs(eval_shape(make, KEY, shardings=[("dense", P("x"))]))
    assert found["['dense']['bias']"] == ("x",)
    assert found["['norm']['bias']"] == found["['shift']['bias']"] == ()


def test_a_masked_optimizer_mirrors_the_parameters_that_it_has(mesh):
    def make(key):
        params = make_params(key)
        return params, Adam(jnp.zeros(()), {"up": jax.tree.map(jnp.zeros_like, params["up"])}, {})

    with jax.set_mesh(mesh):
        found = specs(eval_shape(make, KEY, shardings=[(r"\[0\].*kernel", P("x"))]))
    assert found["[1].mu['up']['kernel']"] == ("x",)


def test_copies_have_the_sharding_of_what_they_copy_uncompiled(mesh, compilations):
    def make(key):
        params = make_params(key)
        # Other keys, so that paths say nothing.
        average = [jnp.array(params["up"]["kernel"], jnp.bfloat16), params["down"]["kernel"] + 0]
        return params, average[:1]

    with jax.set_mesh(mesh):
        shapes = eval_shape(make, KEY, shardings=[(r"\[0\].*kernel", P("x", "y"))])
    assert compilations.count == 0
    assert spec_of(shapes[1][0]) == ("x", "y")


@pytest.mark.slow
def test_what_is_computed_gets_what_the_partitioner_chooses_and_nothing_runs(mesh, compilations):
    def make(w):
        return {"w": w * 2, "rows": w.sum(1), "gram": w @ w.T, "step": jnp.zeros(())}

    w = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=NamedSharding(mesh, P("x", None)))
    before = {id(x) for x in jax.live_arrays()}
    state = eval_shape(make, w, shardings=[("result.*w'", P("x"))])
    assert compilations.count == 1
    assert {id(x) for x in jax.live_arrays()} <= before
    placed = xlashard.pjit(
        make,
        out_shardings={
            **dict.fromkeys(("rows", "gram"), UNSPECIFIED),
            "w": NamedSharding(mesh, P("x")),
            "step": NamedSharding(mesh, P()),
        },
    )(jax.device_put(np.ones((16, 8), np.float32), w.sharding))
    for name, leaf in state.items():
        assert leaf.sharding.is_equivalent_to(placed[name].sharding, leaf.ndim), name


def test_a_prefix_names_shardings_as_of_pjit(mesh):
    device = SingleDeviceSharding(jax.devices()[0])
    with jax.set_mesh(mesh):
        prefix = {"params": {"up": P("x"), "down": None}, "adam": UNSPECIFIED}
        found = eval_shape(make_state, KEY, shardings=prefix)
    assert (
        spec_of(found["params"]["up"]["bias"]) == spec_of(found["adam"].mu["up"]["bias"]) == ("x",)
    )
    assert specs(found["params"])["['down']['kernel']"] == ()
    on_one = eval_shape(make_params, KEY, shardings=device)
    assert {leaf.sharding for leaf in jax.tree.leaves(on_one)} == {device}


def test_compiled_functions_keep_their_static_arguments(mesh):
    def make(key, width):
        return {"w": jax.random.normal(key, (8, width)), "m": jnp.zeros((8, width))}

    with jax.set_mesh(mesh):
        ours = xlashard.pjit(make, static_argnums=1)
        assert eval_shape(ours, KEY, 4, shardings=P("x"))["m"].shape == (8, 4)
        theirs = jax.jit(make_state)
        assert specs(eval_shape(theirs, KEY, shardings=RULES)) == specs(
            eval_shape(make_state, KEY, shardings=RULES)
        )


@pytest.mark.devices(8)
def test_the_result_makes_arrays_and_goes_through_preflight(mesh):
    with jax.set_mesh(mesh):
        state = eval_shape(make_state, KEY, shardings=RULES)
    values = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    put = xlashard.device_put(values, shardings)
    made = jax.tree.map(
        lambda x: xlashard.make_array_from_callback(
            x.shape, x.sharding, lambda index: np.ones(x.shape, x.dtype)[index]
        ),
        state,
    )
    local = xlashard.make_array_from_process_local_data(shardings, values)
    for tree in (put, made, local):
        assert jax.tree.map(lambda x: x.sharding, tree) == shardings
    compiled = xlashard.pjit(lambda s: jax.tree.map(lambda x: x * 2, s)).lower(state).compile()
    assert spec_of(compiled(put)["params"]["up"]["kernel"]) == ("x", "y")


@pytest.mark.slow
@pytest.mark.devices(8)
def test_preflight_takes_the_result(mesh):
    def step(state, batch):
        hidden = batch @ state["params"]["up"]["kernel"]
        return state, (hidden @ state["params"]["down"]["kernel"]).sum()

    with jax.set_mesh(mesh):
        state = eval_shape(make_state, KEY, shardings=RULES)
    batch = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, P("x")))
    report = xlashard.preflight(step, state, batch, topology="v5e-8")
    by_path = {value.path: value.spec for value in report.inputs}
    assert by_path["state['params']['up']['kernel']"] == "P('x', 'y')"


@pytest.mark.parametrize(
    ("shardings", "error", "facts"),
    [
        ([("kernl", P("x"))], ArgumentError, ("shardings[0]", "'kernl'", "kernel")),
        ([("up", P("x")), ("[", P())], ArgumentError, ("shardings[1]", "'['", "\\[")),
        ([("up", P("z"))], ResourceError, ("shardings[0]", "['up']", "'z'", "'x'=")),
        (
            [("params.*bias", P("x", "y"))],
            ResourceError,
            ("result['params']['down']['bias']", "float32[8]", "before it"),
        ),
        ([("up", [P("x")])], ResourceError, ("shardings[0][1]", "one sharding")),
        ([("up", "x")], ResourceError, ("shardings[0][1]", "P('x')")),
        ({"params": P("x")}, ResourceError, ("shardings", "lacks ['adam']")),
        (AUTO, ResourceError, ("AUTO", "auto_shard")),
    ],
)
def test_invalid_shardings_are_refused(mesh, shardings, error, facts):
    with jax.set_mesh(mesh), pytest.raises(error, match=naming(*facts)):
        eval_shape(make_state, KEY, shardings=shardings)


def test_without_a_mesh_nothing_is_derived():
    for shardings in (P("x"), None, [], [("up", P("x"))]):
        with pytest.raises(MeshError, match=naming("result", "jax.set_mesh")):
            eval_shape(make_state, KEY, shardings=shardings)
