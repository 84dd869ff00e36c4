"""Resources as prefixes of the trees of arguments and results."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.core.pjit.helpers import f32, spec_of
from tests.message_patterns import naming
from xlashard import UNSPECIFIED, P, pjit
from xlashard.errors import ResourceError


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    kernel: Any
    bias: Any


def identity(x):
    return x


def specs(tree):
    return jax.tree.map(spec_of, tree)


def test_one_spec_applies_to_a_whole_tree(mesh):
    with mesh:
        out = pjit(identity, out_shardings=P("x"))({"a": f32(8), "b": [f32(4), f32(8, 2)]})
    assert specs(out) == {"a": ("x",), "b": [("x",), ("x",)]}


def test_a_prefix_of_a_dict(mesh):
    f = pjit(identity, in_shardings=({"a": P("x"), "b": None},), out_shardings=None)
    with mesh:
        compiled = f.lower({"a": f32(8), "b": {"c": f32(3), "d": f32(5)}}).compile()
    ((given,), _) = compiled.input_shardings
    assert given["a"].spec == P("x")
    assert given["b"]["c"].is_fully_replicated and given["b"]["d"].is_fully_replicated


def test_named_tuples_and_dataclasses(mesh):
    x = Pair(f32(8), Weights(f32(8, 4), f32(4)))
    tree = Pair(P("y"), Weights(P("x", "y"), None))
    with mesh:
        out = pjit(identity, in_shardings=(tree,), out_shardings=tree)(x)
    assert isinstance(out, Pair) and isinstance(out.right, Weights)
    assert specs(out) == Pair(("y",), Weights(("x", "y"), ()))


def test_none_subtrees_are_not_leaves(mesh):
    x = {"a": f32(8), "b": None, "c": (None, f32(4))}
    with mesh:
        out = pjit(
            identity,
            in_shardings=({"a": P("x"), "b": None, "c": P("y")},),
            out_shardings={"a": P("x"), "b": P("y"), "c": (None, P("y"))},
        )(x)
    assert out["b"] is None and out["c"][0] is None
    assert spec_of(out["a"]) == ("x",) and spec_of(out["c"][1]) == ("y",)


def test_empty_containers(mesh):
    x = {"a": f32(8), "b": (), "c": []}
    with mesh:
        out = pjit(identity, in_shardings=({"a": P("x"), "b": (), "c": None},))(x)
    assert out["b"] == () and out["c"] == []


@pytest.mark.slow
def test_states_of_optax(mesh):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = {"w": f32(8, 4), "b": f32(4)}
    state = optimizer.init(params)
    by_param = {"w": P("x", "y"), "b": P("y")}
    tree = optax.tree_utils.tree_map_params(
        optimizer, lambda _, spec: spec, state, by_param, transform_non_params=lambda _: None
    )

    def update(params, state):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = pjit(update, in_shardings=(by_param, tree), out_shardings=(by_param, tree))
    with mesh:
        new, new_state = step(params, state)
        again, _ = step(new, new_state)
    adam = next(
        s
        for s in jax.tree.leaves(new_state, is_leaf=lambda s: isinstance(s, optax.ScaleByAdamState))
        if isinstance(s, optax.ScaleByAdamState)
    )
    assert specs(adam.mu) == {"w": ("x", "y"), "b": ("y",)}
    assert spec_of(again["w"]) == ("x", "y")
    expected, _ = update(*update(params, state))
    np.testing.assert_allclose(again["w"], expected["w"], rtol=1e-5)


def test_top_level_lists_are_treated_as_tuples(mesh):
    def swap(a, b):
        return b, a

    f = pjit(swap, in_shardings=[P("x"), P("y")], out_shardings=[P("x"), None])
    with mesh:
        out = f(f32(8), f32(4))
    assert specs(out) == (("x",), ())


def test_list_result_accepts_a_list_or_a_tuple_prefix(mesh):
    with mesh:
        for tree in ([P("x"), P("y")], (P("x"), P("y"))):
            out = pjit(lambda x: [x, x], out_shardings=tree)(f32(8))
            assert specs(out) == [("x",), ("y",)]


def test_unspecified_leaf_beside_a_spec(mesh):
    with mesh:
        out = pjit(lambda x: {"a": x, "b": x}, out_shardings={"a": P("x"), "b": UNSPECIFIED})(
            f32(8)
        )
    assert spec_of(out["a"]) == ("x",)


def test_tuple_argument_requires_a_tuple_around_its_prefix(mesh):
    def f(pair):
        return pair

    with mesh, pytest.raises(ResourceError) as caught:
        pjit(f, in_shardings=(P("x"), P("y")))((f32(8), f32(8)))
    assert re.search(
        naming("in_shardings", "2 entries", "f ", "1 argument (pair)"), str(caught.value)
    )
    assert f"write in_shardings=({(P('x'), P('y'))!r},)" in str(caught.value)


def test_single_dict_argument_requires_a_tuple_around_its_prefix(mesh):
    def f(state):
        return state

    with mesh, pytest.raises(ResourceError, match=naming("in_shardings=({'a': P('x',)},)")):
        pjit(f, in_shardings={"a": P("x")})({"a": f32(8)})


@pytest.mark.parametrize("number", [1, 3])
def test_wrong_number_of_in_shardings_is_refused(mesh, number):
    def f(left, right):
        return left + right

    facts = naming("in_shardings", f"{number} entr", "2 arguments (left, right)")
    with mesh, pytest.raises(ResourceError, match=facts):
        pjit(f, in_shardings=(P("x"),) * number)(f32(8), f32(8))


def test_missing_and_extra_dict_keys_are_named(mesh):
    def f(state):
        return state

    with mesh, pytest.raises(ResourceError) as caught:
        pjit(f, in_shardings=({"a": {"w": None, "z": P("x")}},))({"a": {"w": f32(8), "b": f32(2)}})
    assert "state['a']" in str(caught.value)
    assert "['b']" in str(caught.value) and "['z']" in str(caught.value)
    assert caught.value.path == "state['a']"


def test_prefix_node_of_another_type_is_refused(mesh):
    def f(state):
        return state

    with mesh, pytest.raises(ResourceError, match=naming("list", "state['a']", "dict")):
        pjit(f, in_shardings=({"a": [P("x")]},))({"a": {"w": f32(8)}})


def test_prefix_deeper_than_its_argument_is_refused(mesh):
    def f(state):
        return state

    with mesh, pytest.raises(ResourceError, match=naming("dict", "state['a']", "array")):
        pjit(f, in_shardings=({"a": {"w": None}},))({"a": f32(8)})


def test_prefix_sequence_of_another_length_is_refused(mesh):
    def f(state):
        return state

    with mesh, pytest.raises(ResourceError, match=naming("3 entries", "state['a']", "2")):
        pjit(f, in_shardings=({"a": (None,) * 3},))({"a": (f32(8), f32(8))})


def test_out_shardings_with_another_structure_are_refused(mesh):
    def f(x):
        return {"a": x, "b": (x, x)}

    with mesh:
        with pytest.raises(ResourceError, match=r"out_shardings.*result.*lacks.*'b'"):
            pjit(f, out_shardings={"a": None})(f32(8))
        with pytest.raises(ResourceError, match=r"out_shardings.*3 entries.*result\['b'\]"):
            pjit(f, out_shardings={"a": None, "b": (None, None, None)})(f32(8))
        with pytest.raises(ResourceError, match=naming("out_shardings", "tuple", "result", "dict")):
            pjit(f, out_shardings=(P("x"), P("y")))(f32(8))
        with pytest.raises(
            ResourceError, match=naming("out_shardings", "tuple", "result", "array")
        ):
            pjit(lambda x: x, out_shardings=(P("x"),))(f32(8))
