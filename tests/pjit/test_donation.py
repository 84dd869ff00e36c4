"""Donated arguments: results take over their buffers, and nobody uses them afterwards."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pjit.helpers import f32
from xlashard import NamedSharding, P, SingleDeviceSharding, device_put, pjit
from xlashard.errors import DeletedError, DonationError, DonationWarning


@pytest.fixture(params=["one device", "eight devices"])
def place(request, mesh):
    """Puts a value on one device or deals it out over all."""
    if request.param == "one device":
        return lambda x: device_put(x, SingleDeviceSharding(jax.devices()[0]))
    return lambda x: device_put(x, NamedSharding(mesh, P("x")))


def update(state, x):
    return jax.tree.map(lambda s: s + x, state), x.sum()


def test_the_results_are_right_and_the_arguments_gone(place):
    f = pjit(update, donate_argnums=0)
    total = {"a": f32(8, 8), "b": f32(8, 2)}
    state = {k: place(v) for k, v in total.items()}
    kept = place(np.full((8, 1), 2, np.float32))
    for _ in range(3):
        old = state
        state, _ = f(state, kept)
        assert all(x.is_deleted() for x in old.values())
        assert not kept.is_deleted()
        total = {k: v + 2 for k, v in total.items()}
    jax.tree.map(np.testing.assert_array_equal, state, total)


@pytest.mark.parametrize("keywords", [{"donate_argnums": -2}, {"donate_argnames": "state"}])
def test_every_way_to_say_it(place, keywords):
    f = pjit(update, **keywords)
    for call in (lambda s, x: f(s, x), lambda s, x: f(x=x, state=s)):
        x = place(f32(8))
        call(x, 1.0 * np.ones(8, np.float32))
        assert x.is_deleted()


def test_the_buffers_are_taken_over(place):
    f = pjit(lambda x: x + 1, donate_argnums=0)
    x = f(place(f32(8)))
    before = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    after = [s.data.unsafe_buffer_pointer() for s in f(x).addressable_shards]
    assert before == after


def test_the_aliasing_stands_in_the_module(place, partitioner):
    sharding = place(f32(8)).sharding
    f = pjit(lambda x, y: (y[:2], x + 1), donate_argnums=0, out_shardings=(None, sharding))
    lowered = f.lower(place(f32(8)), place(f32(8)))
    assert "tf.aliasing_output = 1 : i32" in lowered.as_text()
    assert "input_output_alias={ {1}: (0, {}" in lowered.compile().as_text()


def test_what_the_partitioner_chooses_may_still_reuse_buffers(mesh):
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    f = pjit(lambda x: x + 1, donate_argnums=0)
    assert "jax.buffer_donor = true" in f.lower(x).as_text()
    assert "input_output_alias" in f.lower(x).compile().as_text()
    f(x)
    assert x.is_deleted()


def test_a_deleted_argument_names_the_function(place):
    f = pjit(update, donate_argnums=0)
    x = place(f32(8))
    f(x, f32(8))
    for use in (
        lambda: f(x, f32(8)),
        lambda: pjit(jnp.sin)(x),
        lambda: np.asarray(x),
        lambda: x + 1,
        lambda: x.addressable_shards,
    ):
        with pytest.raises(DeletedError, match="donated to update"):
            use()


def test_arrays_of_jax(place):
    f = pjit(update, donate_argnums=0)
    x = place(f32(8)).to_jax()
    f(x, f32(8))
    assert x.is_deleted()
    with pytest.raises(DeletedError, match="state .*donated"):
        f(x, f32(8))


def test_host_values_are_copied(place):
    f = pjit(update, donate_argnums=0)
    x = f32(8)
    for _ in range(2):
        out, _ = f(x, f32(8))
        np.testing.assert_array_equal(x, f32(8))
        np.testing.assert_array_equal(out, f32(8) * 2)
    assert float(f(2.0, f32(1))[0][0]) == 2.0


def test_an_uncommitted_array_that_moves_is_gone_or_whole(mesh):
    f = pjit(lambda x: x + 1, donate_argnums=0, in_shardings=P("x"), out_shardings=P("x"))
    x = jnp.asarray(f32(8))
    with mesh:
        out = f(x)
    np.testing.assert_array_equal(out, f32(8) + 1)
    if not x.is_deleted():
        np.testing.assert_array_equal(x, f32(8))


@pytest.mark.parametrize("donated", [(0, 1), 0, 1])
def test_the_same_array_twice(place, donated):
    def add(x, y):
        return x + y, y * 2

    f = pjit(add, donate_argnums=donated)
    said = "add was given the same buffers as x and as y, and .* is donated.*jnp.copy"
    x = place(f32(8))
    with pytest.raises(DonationError, match=said):
        f(x, x)
    f(place(f32(8)), place(f32(8)))
    x = place(f32(8))
    with pytest.raises(DonationError, match=said):
        f(x, x)
    compiled = f.lower(x, x).compile()
    with pytest.raises(DonationError, match=said):
        compiled(x, x)
    np.testing.assert_array_equal(x, f32(8))


def test_a_donated_argument_that_no_result_can_take_over(place):
    def total(state):
        return state["w"].sum()

    f = pjit(total, donate_argnums=0)
    said = r"total was given a donated argument.*\n.*state\['w'\]: float32\[8,4\].*no result has"
    with pytest.warns(DonationWarning, match=said) as caught:
        f({"w": place(f32(8, 4))})
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f({"w": place(f32(8, 4))})
        f.lower({"w": place(f32(8, 4))}).compile()


def test_a_strict_function_raises_before_it_compiles(place, compilations):
    f = pjit(lambda x, y: (x[:2], y), donate_argnums=(0, 1), donation="strict")
    for _ in range(2):
        x, y = place(f32(8)), place(f32(16))
        with pytest.raises(DonationError, match="x: float32.*no result has its"):
            f(x, y)
        assert not x.is_deleted() and not y.is_deleted()
    with pytest.raises(DonationError):
        f.lower(x, y).compile()
    assert compilations.count == 0


def test_an_unused_donated_argument(place):
    f = pjit(lambda x, y: y * 2, donate_argnums=0)
    x = place(f32(8))
    out = f(x, f32(8))
    np.testing.assert_array_equal(out, f32(8) * 2)


def test_donation_inside_another_program_is_left_alone(place):
    f = pjit(lambda x: x + 1, donate_argnums=0)
    x = place(f32(8))
    np.testing.assert_array_equal(pjit(lambda x: f(x) + x)(x), f32(8) * 2 + 1)
    np.testing.assert_array_equal(jax.vmap(f)(x), f32(8) + 1)
    assert not x.is_deleted()


def test_donated_keys():
    f = pjit(lambda key: jax.random.split(key, 1)[0], donate_argnums=0)
    key = jax.random.key(0)
    out = f(key)
    assert (
        jax.random.key_data(out) == jax.random.key_data(jax.random.split(jax.random.key(0), 1)[0])
    ).all()
    assert key.is_deleted()


def test_the_fast_path_donates_too(place):
    f = pjit(lambda x: x + 1, donate_argnums=0)
    x = place(f32(8))
    for _ in range(4):
        old, x = x, f(x)
        assert old.is_deleted()
    with pytest.raises(DeletedError, match="x "):
        f(old)
    np.testing.assert_array_equal(x, f32(8) + 4)
