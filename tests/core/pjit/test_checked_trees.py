"""Classes that check their arrays as they are constructed, in every function that takes trees."""

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import numpy as np
import pytest

import xlashard as xs
from tests.core.pjit.helpers import f32
from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard import NamedSharding, P, device_put, pjit
from xlashard.errors import ArgumentError, ResourceError


def check(a, b):
    # Neither numbers nor shardings, paths or None have a shape.
    assert a.shape == b.shape, "the arrays must agree"


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    a: Any
    b: Any

    def __post_init__(self):
        check(self.a, self.b)


@flax.struct.dataclass
class Struct:
    a: Any
    b: Any

    def __post_init__(self):
        check(self.a, self.b)


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, a, b):
        check(a, b)
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a, self.b), "static"

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class WithKeys(Node):
    def tree_flatten_with_keys(self):
        names = map(jax.tree_util.GetAttrKey, "ab")
        return tuple(zip(names, (self.a, self.b), strict=True)), None


class _Named(NamedTuple):
    a: Any
    b: Any


class Tuple(_Named):
    """A named tuple, of whose classes JAX builds nodes by itself."""

    def __new__(cls, a, b):
        check(a, b)
        return super().__new__(cls, a, b)


class RegisteredTuple(Tuple):
    """A named tuple that is registered with children in another order."""


jax.tree_util.register_pytree_node(
    RegisteredTuple, lambda x: ((x.b, x.a), None), lambda _, bs: RegisteredTuple(*bs[::-1])
)


class Module(eqx.Module):
    a: Any
    b: Any

    def __check_init__(self):
        check(self.a, self.b)


KINDS = (Registered, Struct, Node, WithKeys, Tuple, RegisteredTuple, Module)


def entry_points(kind, sharding):
    """Return functions that call xlashard with a tree that has a node of a class."""
    state = kind(*device_put((f32(8, 4), f32(8, 4)), sharding))

    def step(s):
        return kind(s.a + s.b, s.b * 2)

    def loss(s):
        return (s.a * s.b).sum()

    def scanned(s):
        return jax.lax.scan(lambda s, _: (step(s), None), s, length=2)[0]

    tree, shardings = {"s": state}, {"s": sharding}
    double = pjit(lambda s: step(s["s"]), in_shardings=(shardings,), out_shardings=sharding)
    yield "jit", lambda: xs.jit(step)(state)
    yield "by keyword", lambda: xs.jit(step)(s=state)
    yield "in a list", lambda: xs.jit(lambda s: [step(s[0])])([state])
    yield "closed over", xs.jit(lambda: step(state))
    yield "result only", lambda: xs.jit(lambda a: kind(a, a))(state.a)
    yield "donated", lambda: xs.jit(step, donate_argnums=0)(kind(f32(8, 4), f32(8, 4)))
    yield "prefix", lambda: double(tree)
    yield "pickled", lambda: pickle.loads(pickle.dumps(double.lower(tree).compile().serialize()))
    yield "nested", lambda: xs.jit(lambda s: xs.jit(step)(s))(state)
    yield "scan", lambda: xs.jit(scanned)(state)
    yield "trace", lambda: xs.jit(step).trace(state).in_avals
    yield "lower", lambda: xs.jit(step).lower(state).compile()(state)
    yield "compiled", lambda: double.lower(tree).compile().input_shardings
    yield "out_info", lambda: double.lower(tree).compile().out_info
    yield "args_info", lambda: double.lower(tree).args_info
    yield "eval_shape", lambda: jax.eval_shape(xs.jit(step), state)
    yield "own eval_shape", lambda: xs.jit(step).eval_shape(state)
    yield "grad", lambda: jax.grad(xs.jit(loss))(state)
    yield "jvp", lambda: jax.jvp(xs.jit(loss), (state,), (state,))
    yield "vmap", lambda: jax.vmap(xs.jit(step))(state)
    yield "make_jaxpr", lambda: jax.make_jaxpr(xs.jit(step))(state)
    yield "constraint", lambda: xs.jit(lambda s: xs.with_sharding_constraint(s, sharding))(state)
    yield "bind", lambda: xs.jit(step).lower(state).compile().bind(state)
    yield "export", lambda: jax.export.export(double)(tree)
    yield "device_put", lambda: device_put(tree, shardings)
    yield "device_get", lambda: xs.device_get(state)
    yield "pad", lambda: xs.pad_to_mesh(tree, shardings)
    yield "gather", lambda: xs.multihost.process_allgather(state)


def slow_entry_points(kind, sharding):
    """Return those that read a program, or choose its layout."""
    mesh = sharding.mesh
    state = kind(f32(8, 4), f32(8, 4))

    def step(s):
        return kind(s.a + s.b, s.b * 2)

    yield "explain", lambda: str(xs.explain(xs.jit(step), state))
    yield "explain of jax.jit", lambda: str(xs.explain(jax.jit(step), state))
    yield "preflight", lambda: xs.preflight(xs.jit(step), state, topology="v5e-8", mesh=mesh)
    yield "auto_shard", lambda: xs.auto_shard(step, state, mesh=mesh).in_shardings


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_function_constructs_a_class_of_what_are_no_arrays(mesh, kind):
    sharding = NamedSharding(mesh, P("x"))
    with Together() as all_of:
        for entries in (entry_points, slow_entry_points):
            for name, call in entries(kind, sharding):
                with all_of.case(name):
                    call()


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_class_and_its_values(mesh, kind):
    sharding = NamedSharding(mesh, P("x"))
    out = pjit(lambda s: {"s": s}, in_shardings=(sharding,))(kind(f32(8, 2), f32(8, 2) + 1))
    assert type(out["s"]) is kind
    np.testing.assert_array_equal(out["s"].b, f32(8, 2) + 1)
    assert out["s"].a.sharding == sharding


def test_a_wrong_prefix_names_the_node(mesh):
    sharding, state = NamedSharding(mesh, P("x")), Registered(f32(8), f32(8))
    with pytest.raises(ResourceError, match=naming("in_shardings", "s['k']", "Registered")):
        pjit(lambda s: s["k"], in_shardings=({"k": (sharding,)},))({"k": state})
    with pytest.raises(ArgumentError, match=naming("device['k']", "x['k']", "Registered")):
        device_put({"k": state}, {"k": (sharding,)})
    with pytest.raises(ArgumentError, match=naming("device['k']", "['l']", "['m']")):
        device_put({"k": {"l": state}}, {"k": {"m": sharding}})


def test_shardings_of_a_node_that_refuses_them_are_a_tuple(mesh):
    sharding, state = NamedSharding(mesh, P("x")), Registered(f32(8), f32(8))
    compiled = pjit(lambda s: s["k"], in_shardings=sharding).lower({"k": state}).compile()
    assert compiled.input_shardings == (({"k": (sharding, sharding)},), {})
