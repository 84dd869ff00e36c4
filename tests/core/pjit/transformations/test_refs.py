"""References (`jax.new_ref`): made inside a program, passed to it, and closed over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import f32, spec_of
from tests.message_patterns import naming
from xlashard import NamedSharding, P, pjit
from xlashard.errors import ArgumentError, DeviceMismatchError, ResourceError, SavedProgramError

X = f32(8)


def add_to(ref, x):
    ref[...] += x
    return ref[...].sum()


def sharded(mesh, x=X):
    return jax.new_ref(jax.device_put(x, NamedSharding(mesh, P("x")).jax_sharding(())))


def held(ref):
    """Return the value of a reference, without another program."""
    return np.asarray(jax.freeze(ref))


@pytest.mark.slow
def test_ref_created_inside_a_program_equals_the_plain_function(mesh):
    def fun(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.sin(ref[...]) * x
        ref[0] = 7.0
        return ref[...]

    f = pjit(fun, in_shardings=NamedSharding(mesh, P("x")), out_shardings=NamedSharding(mesh, P()))
    np.testing.assert_allclose(f(X), fun(X), rtol=1e-5)
    gradient = jax.grad(lambda x: f(x).sum())(X)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: fun(x).sum())(X), rtol=1e-5)
    assert spec_of(gradient) == ("x",)
    np.testing.assert_allclose(jax.vmap(f)(f32(2, 8)), jax.vmap(fun)(f32(2, 8)), rtol=1e-5)


@pytest.mark.slow
def test_ref_argument_is_written_in_place(mesh):
    f = pjit(add_to)
    ref = sharded(mesh)
    assert float(f(ref, X)) == 7.0
    assert float(f(ref, X)) == 10.5
    assert ref.sharding.is_equivalent_to(NamedSharding(mesh, P("x")).jax_sharding((8,)), 1)
    np.testing.assert_array_equal(held(ref), X * 3)
    alone = jax.new_ref(jnp.asarray(X))
    there = alone.unsafe_buffer_pointer()
    f(alone, X)
    assert alone.unsafe_buffer_pointer() == there


@pytest.mark.devices(8)
def test_the_module_marks_references_as_written_in_place(mesh):
    lowered = pjit(add_to).lower(sharded(mesh), X)
    assert "tf.aliasing_output = 1" in lowered.as_text()
    compiled = lowered.compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 8
    assert compiled.output_shardings.is_fully_replicated
    ref = sharded(mesh)
    compiled(ref, X)
    compiled(ref, X)
    np.testing.assert_array_equal(held(ref), X * 3)


@pytest.mark.slow
def test_closed_over_ref_is_updated_without_recompiling(mesh, compilations):
    for ref in (jax.new_ref(jnp.asarray(X)), sharded(mesh)):
        f = pjit(lambda x, ref=ref: add_to(ref, x))
        before = compilations.count
        assert [float(f(X)) for _ in range(3)] == [7.0, 10.5, 14.0]
        assert compilations.count == before + 1
        ref[...] = jnp.zeros(8)
        assert float(f(X)) == 3.5


def test_write_only_and_read_only_refs_are_supported():
    ref = jax.new_ref(jnp.zeros(8))
    pjit(lambda ref, x: ref.__setitem__(..., x))(ref, X)
    text = pjit(lambda ref, x: ref[...] * x).lower(ref, X).as_text()
    assert "aliasing_output" not in text
    np.testing.assert_array_equal(pjit(lambda ref, x: ref[...] * x)(ref, X), X * X)
    np.testing.assert_array_equal(pjit(lambda ref, x: x)(ref, X), X)
    np.testing.assert_array_equal(held(ref), X)


@pytest.mark.slow
def test_trees_and_keys_of_references():
    tree = {"key": jax.new_ref(jax.random.key(0)), "count": jax.new_ref(jnp.int32(0))}

    def step(tree, x):
        key, use = jax.random.split(tree["key"][...])
        tree["key"][...] = key
        tree["count"][...] += 1
        return jax.random.normal(use) + x

    f, key = pjit(step), jax.random.key(0)
    for _ in range(2):
        key, use = jax.random.split(key)
        np.testing.assert_allclose(f(tree, 1.0), jax.random.normal(use) + 1.0, rtol=1e-6)
    assert held(tree["count"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("outside", [jax.jit, pjit])
def test_nested_pjit_writes_to_references_of_the_outer_program(outside):
    add, set_first = pjit(add_to), pjit(lambda ref: ref.__setitem__(0, 9.0))

    def fun(x):
        ref = jax.new_ref(x)
        totals = jax.lax.scan(lambda c, _: (c * 2, add(ref, c)), x, length=3)
        set_first(ref)
        pjit(lambda: ref.__setitem__(1, 8.0))()
        return ref[...], totals

    (got, (_, totals)), wanted = outside(fun)(X), X * 8
    np.testing.assert_array_equal(got[2:], wanted[2:])
    np.testing.assert_array_equal(got[:2], [9.0, 8.0])
    np.testing.assert_array_equal(totals, [7.0, 14.0, 28.0])


def test_control_flow_writes(mesh):
    def fun(ref, x):
        jax.lax.cond(x[1] > 0, lambda: ref.__setitem__(0, 5.0), lambda: None)
        jax.lax.fori_loop(1, 3, lambda i, _: ref.__setitem__(i, x[i]), None)

    ref = sharded(mesh, np.zeros(8, np.float32))
    assert pjit(fun)(ref, X) is None
    np.testing.assert_array_equal(held(ref), [5.0, X[1], X[2], 0, 0, 0, 0, 0])


def test_ref_receives_values_from_inside_a_gradient():
    seen = jax.new_ref(jnp.zeros(()))

    def loss(x):
        y = jnp.sin(x)
        seen[...] = jax.lax.stop_gradient(y.sum())
        return y.sum()

    np.testing.assert_allclose(jax.grad(pjit(loss))(X), np.cos(X), rtol=1e-6)
    np.testing.assert_allclose(held(seen), np.sin(X).sum(), rtol=1e-6)


@pytest.mark.slow
def test_gradients_through_references():
    def loss(x):
        ref = jax.new_ref(jnp.zeros(8))
        pjit(lambda ref, x: ref.__setitem__(..., jnp.sin(x)))(ref, x)
        return (ref[...] ** 2).sum()

    wanted = 2 * np.sin(X) * np.cos(X)
    np.testing.assert_allclose(jax.grad(loss)(X), wanted, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), wanted, rtol=1e-5)


def test_vmap_over_references():
    ref = jax.new_ref(jnp.zeros((3, 8)))
    jax.vmap(pjit(lambda ref, x: ref.__setitem__(..., x)))(ref, f32(3, 8))
    np.testing.assert_array_equal(held(ref), f32(3, 8))


@pytest.mark.devices(8)
def test_refusals(mesh):
    named = NamedSharding(mesh, P("x"))
    here = jax.new_ref(jnp.asarray(X))
    with pytest.raises(DeviceMismatchError, match=r"argument ref .*device 0"):
        pjit(add_to, in_shardings=(None, named))(here, X)
    with pytest.raises(
        ResourceError,
        match=naming("in_shardings", "ref (Ref{float32[8]})", "P('y',)", "committed", "P('x',)"),
    ):
        pjit(add_to, in_shardings=(NamedSharding(mesh, P("y")), None))(sharded(mesh), X)
    with pytest.raises(ArgumentError, match=r"<lambda>.*jax\.new_ref"):
        pjit(lambda x: x + here[...]).lower(X).compile().bind(X)
    with pytest.raises(SavedProgramError, match=r"add_to.*jax\.new_ref"):
        pjit(add_to).lower(here, X).compile().serialize()
    with pytest.raises(ValueError, match="only one reference"):
        pjit(lambda a, b: a.__setitem__(..., b[...]))(here, here)
