"""Pytree structures as JSON: round trips, and the parts that the caller provides."""

import collections
import dataclasses
import enum
import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.pjit.helpers import f32
from tests.core.pjit.saved.cases import Layer, Pair
from tests.message_patterns import naming
from xlashard import Compiled, P, pjit
from xlashard.core.pjit.stages.serialization import (
    fits,
    tree_from_json,
    tree_to_json,
    unknown_nodes,
)
from xlashard.errors import ArgumentError, SavedProgramError

structure = jax.tree.structure


class Color(enum.Enum):
    RED = 1


class Sentinel:
    """Class of one object that stands for None."""


MISSING = Sentinel()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params"],
    meta_fields=["apply_fn", "optimizer"],
)
@dataclasses.dataclass
class TrainState:
    """Train state as in flax: functions that may be closures, next to the arrays."""

    step: int
    params: dict
    apply_fn: object
    optimizer: object


@jax.tree_util.register_pytree_node_class
class Box:
    """Node with any static data."""

    def __init__(self, value, data):
        self.value, self.data = value, data

    def tree_flatten(self):
        return (self.value,), self.data

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children, data)


def there_and_back(tree):
    encoded = json.loads(json.dumps(tree_to_json(tree)))
    assert unknown_nodes(encoded) == []
    return tree_from_json(encoded)


TREES = {
    "a leaf": 0,
    "nothing": None,
    "containers": [(), (1, [2, {}]), {"b": 1, "a": (None, 2)}],
    "keys": {3: 0, 1: 0},
    "pairs of keys": {("a", 1): 0, ("a", 2): 0},
    "ordered": collections.OrderedDict(b=1, a=2),
    "default": collections.defaultdict(list, a=1),
    "a namedtuple": Pair(1, {"x": 2}),
    "a dataclass": Layer(1, 2),
    "a partial": jax.tree_util.Partial(jnp.sin, 1, x=2),
    "optax": optax.adamw(1e-3).init({"w": jnp.ones(2)}),
    "static data": Box(
        0,
        (
            *(True, 1.5, float("inf"), 2 - 1j, b"\0\xff", "text", None, -(10**30)),
            [1, {"a": (2,)}, frozenset({3})],
            *(
                MISSING,
                Color.RED,
                np.dtype("float32"),
                P("x", None, ("y", "z")),
                jax.nn.relu,
                dict,
                f32,
            ),
        ),
    ),
}


@pytest.mark.parametrize("value", TREES.values(), ids=TREES)
def test_saved_trees_round_trip(value):
    assert there_and_back(structure(value)) == structure(value)


nested = st.recursive(
    st.none() | st.just(0),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
        | st.tuples(inner, inner).map(lambda pair: Layer(*pair))
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(nested)
def test_arbitrary_trees_round_trip(value):
    tree = structure(value)
    assert there_and_back(tree) == tree
    assert fits(tree_to_json(tree), tree_to_json(tree))


@pytest.mark.slow
@given(nested, nested)
def test_only_equal_trees_match(one, other):
    encoded, given = tree_to_json(structure(one)), tree_to_json(structure(other))
    assert fits(encoded, given) == (structure(one) == structure(other))


def test_reading_a_tree_imports_no_module(monkeypatch):
    encoded = tree_to_json(structure(Pair(1, 2)))
    monkeypatch.delitem(sys.modules, Pair.__module__)
    with pytest.raises(
        SavedProgramError, match=r"Pair of tests\.core\.pjit\.saved\.cases.*import tests.*in_tree="
    ):
        tree_from_json(encoded)
    assert Pair.__module__ not in sys.modules


def test_reading_a_tree_calls_no_named_object(monkeypatch):
    trap = types.ModuleType("trap")
    trap.__getattr__ = lambda name: pytest.fail(f"{name} was asked for")
    monkeypatch.setitem(sys.modules, "trap", trap)
    with pytest.raises(SavedProgramError, match=naming("Thing of trap", "in_tree=")):
        tree_from_json({"class": "trap:Thing", "data": None, "children": []})
    for place in ("os:system", "builtins:int"):
        with pytest.raises(SavedProgramError, match=naming(place, "1 children")):
            tree_from_json({"class": place, "data": None, "children": ["*"]})


def test_changed_namedtuple_fields_are_refused(monkeypatch):
    encoded = tree_to_json(structure(Pair(1, 2)))
    wider = collections.namedtuple("Pair", ["first", "second", "third"])
    monkeypatch.setattr("tests.core.pjit.saved.cases.Pair", wider)
    with pytest.raises(SavedProgramError, match=naming("Pair ", "2 children")):
        tree_from_json(encoded)


def unwritable():
    """Return nodes whose static part is a closure, a bound method, or a unique object."""
    here = object()
    return {
        "closure": jax.tree_util.Partial(lambda x: x + len("here"), 1),
        "object": Box(1, here),
        "hidden class": functools.reduce(lambda x, _: Box(x, here), range(3), 1),
    }


@pytest.mark.parametrize("name", unwritable())
def test_unsupported_static_data_is_written_as_unknown(name):
    value = unwritable()[name]
    encoded = tree_to_json(structure({"a": value}))
    assert unknown_nodes(encoded)
    assert fits(encoded, tree_to_json(structure({"a": value})))
    assert not fits(encoded, tree_to_json(structure({"b": value})))
    assert not fits(encoded, tree_to_json(structure({"a": 1})))


def train():
    state = TrainState(0, {"w": f32(3, 2)}, lambda p, x: x @ p["w"], optax.sgd(0.1))

    def update(state, x, *, scale):
        def loss(params):
            return state.apply_fn(params, x).sum() * scale

        grads, rest = jax.grad(loss)(state.params), state.optimizer.init(state.params)
        updates, _ = state.optimizer.update(grads, rest)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, step=state.step + 1, params=params), scale

    return pjit(update, donate_argnums=0), state


def test_trees_with_functions_are_passed_by_the_caller():
    f, state = train()
    data = f.lower(state, f32(4, 3), scale=2.0).compile().serialize()
    with pytest.raises(SavedProgramError) as caught:
        Compiled.deserialize(data)
    advice = str(caught.value)
    assert "tests.core.pjit.stages.test_saved_trees.TrainState" in advice
    ins = "in_tree=jax.tree.structure(((state, x), {'scale': scale}))"
    assert f"deserialize(data, {ins}, out_tree=jax.tree.structure(result))" in advice
    scale, x = 2.0, f32(4, 3)
    program = Compiled.deserialize(
        data,
        in_tree=jax.tree.structure(((state, x), {"scale": scale})),
        out_tree=jax.tree.structure((state, 0)),
    )
    new, _ = program(state, x, scale=scale)
    wanted, _ = f(state, x, scale=scale)
    assert isinstance(new, TrainState) and new.apply_fn is state.apply_fn
    np.testing.assert_array_equal(new.params["w"], wanted.params["w"])


def test_trees_that_differ_from_the_saved_trees_are_refused():
    f, state = train()
    data = f.lower(state, f32(4, 3), scale=2.0).compile().serialize()
    with pytest.raises(SavedProgramError, match=naming("in_tree is ", "structure")):
        Compiled.deserialize(data, in_tree=structure(((state,), {})), out_tree=structure(0))
    with pytest.raises(SavedProgramError, match=naming("out_tree is ", "structure", "result")):
        Compiled.deserialize(data, out_tree=structure(0))
    with pytest.raises(
        ArgumentError, match=naming("in_tree ", "PyTreeDef", "tuple", "jax.tree.structure(")
    ):
        Compiled.deserialize(data, in_tree=((state, f32(4, 3)), {}))
