"""Donated arguments: results reuse their buffers, and later uses raise."""

import gc
import warnings

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import partial_eval

from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import (
    Array,
    Compiled,
    NamedSharding,
    P,
    device_put,
    make_array_from_single_device_arrays,
    pjit,
    with_sharding_constraint,
)
from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.transfer import aligned_empty
from xlashard.core.array.array_class import base, deletion
from xlashard.core.pjit import arguments
from xlashard.errors import (
    DeletedError,
    DonationError,
    DonationWarning,
    IgnoredShardingError,
    ReplicationError,
    UnevenShardingError,
    UnmetRequestError,
)


def update(state, x):
    return jax.tree.map(lambda s: s + x, state), x.sum()


def test_results_are_correct_and_donated_arguments_are_deleted(place):
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
def test_donate_argnums_and_donate_argnames_are_equivalent(place, keywords):
    f = pjit(update, **keywords)
    for call in (lambda s, x: f(s, x), lambda s, x: f(x=x, state=s)):
        x = place(f32(8))
        call(x, 1.0 * np.ones(8, np.float32))
        assert x.is_deleted()


def test_results_reuse_the_donated_buffers(place):
    f = pjit(lambda x: x + 1, donate_argnums=0)
    x = f(place(f32(8)))
    before = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    after = [s.data.unsafe_buffer_pointer() for s in f(x).addressable_shards]
    assert before == after


def test_module_contains_the_aliasing(place, partitioner):
    sharding = place(f32(8)).sharding
    f = pjit(lambda x, y: (y[:2], x + 1), donate_argnums=0, out_shardings=(None, sharding))
    lowered = f.lower(place(f32(8)), place(f32(8)))
    assert "tf.aliasing_output = 1 : i32" in lowered.as_text()
    assert "input_output_alias={ {1}: (0, {}" in lowered.compile().as_text()


@pytest.mark.devices(8)
def test_result_sharded_by_the_partitioner_may_reuse_a_buffer(mesh):
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    f = pjit(lambda x: x + 1, donate_argnums=0)
    assert "jax.buffer_donor = true" in f.lower(x).as_text()
    assert "input_output_alias" in f.lower(x).compile().as_text()
    f(x)
    assert x.is_deleted()


def test_use_after_donation_error_names_the_function(place):
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
        with pytest.raises(DeletedError, match="donated.* update"):
            use()


def test_jax_arrays_are_donated(place):
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


@pytest.mark.parametrize("make", [jnp.asarray, jnp.copy])
def test_moved_uncommitted_argument_is_deleted_as_in_jax(mesh, make):
    sharding = NamedSharding(mesh, P("x"))
    places = {"in_shardings": sharding, "out_shardings": sharding}
    gone = []
    for jit in (pjit, jax.jit):
        x = make(f32(8))
        out = jit(lambda x: x + 1, donate_argnums=0, **places)(x)
        np.testing.assert_array_equal(out, f32(8) + 1)
        gone.append(x.is_deleted())
        if not gone[-1]:
            np.testing.assert_array_equal(x, f32(8))
    assert gone[0] == gone[1]


@pytest.mark.parametrize("donated", [(0, 1), 0, 1])
def test_passing_a_donated_array_twice_raises(place, donated):
    def add(x, y):
        return x + y, y * 2

    f = pjit(add, donate_argnums=donated)
    facts = naming("add ", "buffers", " x ", " y", "jnp.copy(x)")
    x = place(f32(8))
    with pytest.raises(DonationError, match=facts):
        f(x, x)
    f(place(f32(8)), place(f32(8)))
    x = place(f32(8))
    with pytest.raises(DonationError, match=facts):
        f(x, x)
    compiled = f.lower(x, x).compile()
    with pytest.raises(DonationError, match=facts):
        compiled(x, x)
    np.testing.assert_array_equal(x, f32(8))


@pytest.mark.slow
def test_donation_of_a_nested_call_is_ignored(place):
    f = pjit(lambda x: x + 1, donate_argnums=0)
    x = place(f32(8))
    np.testing.assert_array_equal(pjit(lambda x: f(x) + x)(x), f32(8) * 2 + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: jax.vmap(f)(x) + x)(x), f32(8) * 2 + 1)
    np.testing.assert_array_equal(jax.lax.map(f, x), f32(8) + 1)
    assert not x.is_deleted()


@pytest.mark.slow
def test_donation_is_kept_under_vmap_as_in_jax(place):
    def scale(x, y):
        return x * 2, y.sum()

    f = pjit(scale, donate_argnums=0)
    nested = jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(0, None))
    for batched, shape in ((jax.vmap(f, in_axes=(0, None)), (8, 4)), (nested, (8, 4, 2))):
        for _ in range(3):
            x, y = place(f32(*shape)), place(f32(8))
            doubled, _ = batched(x, y)
            np.testing.assert_array_equal(doubled, f32(*shape) * 2)
            assert x.is_deleted() and not y.is_deleted()
            with pytest.raises(DeletedError, match="donated to scale, as x; use what that"):
                x + 1
    theirs = jnp.ones((8, 4))
    jax.vmap(jax.jit(scale, donate_argnums=0), in_axes=(0, None))(theirs, f32(8))
    assert theirs.is_deleted()


@pytest.mark.slow
@pytest.mark.parametrize(
    "transformed",
    [
        jax.grad,
        lambda f: lambda x: jax.vjp(f, x)[1](1.0),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: jax.vmap(jax.grad(f)),
        lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
        lambda f: jax.hessian(f),
    ],
    ids=["grad", "vjp", "linearize", "checkpoint", "vmap grad", "grad vmap", "hessian"],
)
def test_arguments_needed_by_a_derivative_are_not_donated(place, transformed):
    x = place(f32(8, 2))
    f = pjit(lambda x: (x * jnp.sin(x)).sum(), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = transformed(f)(x)
    wanted = transformed(lambda x: (x * jnp.sin(x)).sum())(f32(8, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)
    assert not x.is_deleted()


def _total(f):
    return lambda x: f(x).sum()


_DERIVATIVES = {
    "grad": lambda f, x, t: jax.grad(_total(f))(x),
    "vjp": lambda f, x, t: jax.vjp(f, x)[1](t),
    "jvp": lambda f, x, t: jax.jvp(f, (x,), (t,)),
    "linearize": lambda f, x, t: jax.linearize(f, x)[0],
    "vmap grad": lambda f, x, t: jax.vmap(jax.grad(_total(f)))(x),
    "grad vmap": lambda f, x, t: jax.grad(_total(jax.vmap(f)))(x),
    "grad grad": lambda f, x, t: jax.grad(_total(jax.grad(_total(f))))(x),
    "jvp grad": lambda f, x, t: jax.jvp(jax.grad(_total(f)), (x,), (t,)),
    "jacfwd": lambda f, x, t: jax.jacfwd(f)(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _DERIVATIVES)
def test_derivatives_donate_as_in_jax(place, name):
    """JAX also donates arguments that the backward part needs, and then fails."""
    derivative, like = _DERIVATIVES[name], place(f32(8, 2))
    for fun in (lambda x: x * 2, jnp.sin, jnp.exp, lambda x: x * x):
        outcomes = []
        for jit, put in ((jax.jit, jax.device_put), (pjit, device_put)):
            x, t = (put(f32(8, 2), like.sharding) for _ in range(2))
            try:
                found = derivative(jit(fun, donate_argnums=0), x, t)
                found = jax.tree.map(np.asarray, found)
            except RuntimeError as error:
                assert jit is jax.jit and "deleted" in str(error)
                found = derivative(fun, f32(8, 2), f32(8, 2))
                outcomes.append((found, False, False))
            else:
                outcomes.append((found, x.is_deleted(), t.is_deleted()))
        (wanted, *theirs), (found, *ours) = outcomes
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)
        needed = fun(3.0) == 9 and name == "linearize"  # x * x needs x for a later call
        assert ours == ([False, False] if needed else theirs)


def test_one_array_as_donated_primal_and_tangent_is_refused(place):
    x, f = place(f32(8)), pjit(lambda x: x * 2, donate_argnums=0)
    with pytest.raises(DonationError, match=naming("argument 0", "argument 1")):
        jax.jvp(f, (x,), (x,))
    assert not x.is_deleted()


@pytest.mark.slow
def test_donated_keys():
    f = pjit(lambda key: jax.random.split(key, 1)[0], donate_argnums=0)
    key = jax.random.key(0)
    out = f(key)
    assert (
        jax.random.key_data(out) == jax.random.key_data(jax.random.split(jax.random.key(0), 1)[0])
    ).all()
    assert key.is_deleted()


def test_fast_path_donates(place):
    f = pjit(lambda x: x + 1, donate_argnums=0)
    x = place(f32(8))
    for _ in range(4):
        old, x = x, f(x)
        assert old.is_deleted()
    with pytest.raises(DeletedError, match="x "):
        f(old)
    np.testing.assert_array_equal(x, f32(8) + 4)


@pytest.mark.slow
def test_memory_analysis_counts_aliased_bytes(place):
    x, n = place(f32(8, 4)), place(f32(8)).sharding.num_devices
    for f in (
        pjit(lambda x: (x + 1, x.sum()), donate_argnums=0),
        pjit(lambda x: (x + 1, x.sum()), donate_argnums=0, out_shardings=(x.sharding, None)),
    ):
        assert f.lower(x).compile().memory_analysis().alias_size_in_bytes == x.nbytes // n * (
            1 if n == 1 else 2
        )


@pytest.mark.slow
def test_static_and_keyword_arguments_beside_donated_arguments(place):
    def f(n, state, *, scale, other):
        return jax.tree.map(lambda s: s * n * scale, state), other + 1

    g = pjit(f, static_argnums=0, donate_argnums=1, donate_argnames="other", donation="strict")
    for n in (2, 3):
        for _ in range(2):
            state, other = {"a": [place(f32(8))], "b": place(f32(8, 2))}, place(f32(16))
            scale = place(f32(8, 1))
            new, _ = g(n, state, scale=2.0, other=other)
            np.testing.assert_array_equal(new["b"], f32(8, 2) * n * 2)
            leaves = [*jax.tree.leaves(state), other]
            assert all(x.is_deleted() for x in leaves) and not scale.is_deleted()
    lowered = g.lower(2, state := {"a": [f32(8)], "b": f32(8, 2)}, scale=2.0, other=f32(16))
    assert lowered.donate_argnums == (0, 1, 2)
    assert [i.donated for i in jax.tree.leaves(lowered.args_info)] == [True, True, True, False]
    assert jax.tree.structure(lowered.in_avals[0]) == jax.tree.structure((state,))


def test_deleted_array_as_a_donated_argument_raises(place):
    f = pjit(lambda state: state["w"] + 1, donate_argnums=0)
    x = place(f32(8))
    x.delete()
    with pytest.raises(DeletedError, match=naming("state['w'] (float32[8])", "delete()")):
        f({"w": x})


@pytest.mark.slow
def test_use_after_donation_to_a_repeat_call_names_the_function(place):
    shape = (24, 5)

    def advance(state, x):
        return {"w": state["w"] + x}

    f = pjit(advance, donate_argnums=0)
    states = [{"w": place(f32(*shape))}]
    for _ in range(3):
        states.append(f(states[-1], 1.0))
    first, *_, repeated, _ = (state["w"] for state in states)
    with pytest.raises(DeletedError, match=naming("donated", "advance, as state['w']")):
        first + 1
    likely = naming("likely donated", "advance, as state['w']")
    with pytest.raises(DeletedError, match=likely):
        repeated + 1
    with pytest.raises(DeletedError, match=likely + naming("x (float32[24,5])")):
        pjit(lambda x: x * 2)(repeated)

    def retreat(w):
        return w - 1

    g = pjit(retreat, donate_argnums=0)
    x = place(f32(*shape))
    for _ in range(3):
        x, last = g(x), x
    one_of = naming("likely donated", "advance, as state['w']", "retreat, as w")
    with pytest.raises(DeletedError, match=one_of):
        last + 1
    # Donations of a deleted function are no longer reported.
    del f
    gc.collect()
    with pytest.raises(DeletedError, match=naming("likely donated", "retreat, as w")):
        last + 1


@pytest.mark.slow
def test_likely_donation_calls_are_listed_up_to_a_limit(place):
    functions = [pjit(lambda x, n=n: x + n, donate_argnums=0) for n in range(5)]
    x = place(f32(40, 3))
    for f in functions:
        x, last = f(x), x
        x, last = f(x), x
    with pytest.raises(DeletedError, match=naming("<lambda>, as x", "2 more")):
        last + 1


def test_deletions_without_a_known_cause():
    x = jax.numpy.ones((1, 2, 3, 4))
    x.delete()
    with pytest.raises(DeletedError, match=naming("float32[1,2,3,4]", "delete()", "donated")):
        device_put(f32(1)) + x


@pytest.mark.slow
def test_evaluated_jaxpr_donates_as_in_jax():
    def scale(x, y):
        return x * 2, y.sum()

    for jit in (jax.jit, pjit):
        jaxpr = jax.make_jaxpr(jit(scale, donate_argnums=0))(f32(8), f32(8))
        x, y = jnp.ones(8), jnp.ones(8)
        doubled, _ = jax.extend.core.jaxpr_as_fun(jaxpr)(x, y)
        np.testing.assert_array_equal(doubled, np.full(8, 2))
        assert x.is_deleted() and not y.is_deleted()


def test_partially_evaluated_call_donates_nothing():
    """The known and unknown parts of a call take residuals as well, which may be used again."""
    jaxpr = jax.make_jaxpr(pjit(lambda x, y: (jnp.sin(x), x * y), donate_argnums=(0, 1)))(1.0, 2.0)
    known, unknown, _, _ = partial_eval.partial_eval_jaxpr_nounits(jaxpr, [False, True], False)
    for part in (known, unknown):
        (call,) = [eqn for eqn in part.eqns if eqn.primitive.name == "pjit"]
        assert len(call.params["jaxpr"].invars) == len(call.invars)
        assert call.params["donated_invars"] == (False,) * len(call.invars)
    smaller, used = partial_eval.dce_jaxpr(jaxpr, [True, False])
    assert used == [True, False]
    assert smaller.eqns[0].params["donated_invars"] == (True,)


class TestSharedBuffers:
    """Refused before the launch: XLA would start on the devices without the shared buffer."""

    @staticmethod
    def spread(mesh):
        rows = NamedSharding(mesh, P(("x", "y")))

        def fun(a, b):
            return jax.lax.with_sharding_constraint(jnp.ones(8) * a, rows).sum() + b

        return pjit(fun, donate_argnums=1)

    def test_buffer_shared_on_one_of_eight_devices_is_refused(self, mesh):
        f = self.spread(mesh)
        compiled = f.lower(jnp.float32(3), jnp.float32(3)).compile()
        loaded = Compiled.deserialize(compiled.serialize())
        for call in (f, f, compiled, compiled, loaded, loaded):
            x = jnp.float32(3)
            with pytest.raises(
                DonationError, match=naming("buffers", "as a and as b", "b is donated")
            ):
                call(x, x)
            assert float(x) == 3 and float(call(jnp.float32(3), x)) == 27

    def test_buffer_passed_twice_to_a_repeat_call_on_one_device_is_refused(self, monkeypatch):
        f = pjit(lambda x, y: (x + 1, y * 2), donate_argnums=0)
        x, _ = f(f(jnp.ones(8), jnp.ones(8))[0], jnp.ones(8))
        with monkeypatch.context() as patch:
            patch.setattr(f._function, "parameters", None)  # XLA alone checks the arguments
            patch.setattr(deletion, "SHARDS", {})  # no shards of other tests are alive
            x, y = f(x, jnp.ones(8))
        for call in (f, f.lower(x, y).compile()):
            with pytest.raises(
                DonationError, match=naming("buffers", "as x and as y", "x is donated")
            ):
                call(x, x)
        step = pjit(lambda n, x, y: (n + 1, x + 1, y * 2), donate_argnums=(0, 1))
        step = step.lower(y, x, y).compile().bind(y + 0)
        step(x + 0, y)
        with pytest.raises(DonationError, match=naming("buffers", "as x and as y", "x is donated")):
            step(x, x)
        np.testing.assert_array_equal(x, np.full(8, 4))
        np.testing.assert_array_equal(step.state, np.full(8, 3))

    def test_buffer_shared_by_another_array_is_refused(self, place):
        f = pjit(lambda x, y: (x + 1, y * 2), donate_argnums=0)
        x, other = place(f32(8)), place(f32(8))
        shards = [x.addressable_shards[0], *other.addressable_shards[1:]]
        mixed = make_array_from_single_device_arrays(
            x.shape, x.sharding, [shard.data for shard in shards]
        )
        for _ in range(2):
            for first, second in ((x, mixed), (mixed, x), (x, x.to_jax()), (x, Array.from_jax(x))):
                with pytest.raises(
                    DonationError, match=naming("buffers", "as x and as y", "x is donated")
                ):
                    f(first, second)
            f(place(f32(8)), x)
        np.testing.assert_array_equal(mixed, f32(8))

    @pytest.mark.parametrize("way", ["Array", "array of JAX", "on one device"])
    def test_buffer_shared_with_the_state_of_a_bound_step_is_refused(self, mesh, way):
        rows, whole = (NamedSharding(mesh, spec) for spec in (P(("x", "y")), P()))

        def fun(state, x):
            spread = jax.lax.with_sharding_constraint(jnp.ones(8) * state, rows)
            return state + 1, x * spread.sum()

        f = pjit(fun, in_shardings=whole, out_shardings=whole, donate_argnums=1)
        x = device_put(f32(8), whole)
        step = f.lower(x, x).compile().bind(x)
        step(device_put(f32(8), whole))
        shared = step.state
        if way != "Array":
            shared = jax.device_put(shared, mesh.devices[1, 1] if way == "on one device" else whole)
        with pytest.raises(DonationError, match=naming("buffers", "as state and as x", "x is")):
            step(shared)
        step(device_put(f32(8), whole))
        np.testing.assert_array_equal(step.state, f32(8) + 2)

    @pytest.mark.devices(8)
    def test_buffer_shared_with_a_closed_over_array_is_refused(self, mesh):
        def place(x):
            return device_put(x, NamedSharding(mesh, P("x")))

        y = place(f32(8))
        f = pjit(lambda x: x + y, donate_argnums=0)
        for _ in range(2):
            with pytest.raises(DonationError, match=naming("buffers", "<lambda> clos", "as x")):
                f(y)
            np.testing.assert_array_equal(f(place(f32(8))), f32(8) * 2)
        np.testing.assert_array_equal(y, f32(8))

    @pytest.mark.slow
    def test_shared_keys_empty_and_batched_arrays_are_refused(self, place):
        f = pjit(lambda x, y: (x + 1, y * 2), donate_argnums=0)
        x, key, empty = place(f32(8)), jax.random.key(0), place(f32(0))
        roll = pjit(lambda key, other: (jax.random.split(key)[0], other), donate_argnums=0)
        for call in (
            lambda: jax.vmap(f)(x, x),
            lambda: roll(key, key),
            lambda: f(empty, empty),
        ):
            with pytest.raises(DonationError, match="buffers"):
                call()
        assert not (x.is_deleted() or key.is_deleted() or empty.is_deleted())

    def test_buffer_shared_with_a_donate_argnames_argument_is_refused(self, place):
        def f(n, x, *, y):
            return x * n, y + 1

        g, x = pjit(f, static_argnums=0, donate_argnames="y"), place(f32(8))
        for _ in range(2):
            with pytest.raises(
                DonationError, match=naming("buffers", "as x and as y", "y is donated")
            ):
                g(2, x, y=x)
            g(2, x, y=place(f32(8)))

    def test_buffer_of_an_unusable_donation_may_be_shared(self, place):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DonationWarning)
            total, unused = (
                pjit(fun, donate_argnums=0)
                for fun in (lambda x, y: x.sum() * y.sum(), lambda x, y: y * 2)
            )
            x = place(f32(8))
            for _ in range(2):
                total(x, x)
                np.testing.assert_array_equal(unused(x, x), f32(8) * 2)
        with jax.disable_jit():
            pjit(lambda x, y: x + y, donate_argnums=0)(x, x)
        np.testing.assert_array_equal(x, f32(8))

    def test_two_dlpack_views_of_one_memory_block_are_accepted(self):
        block = aligned_empty((1024,), np.float32)
        block[:] = 1
        x, y = jnp.from_dlpack(block), jnp.from_dlpack(block)
        assert x.unsafe_buffer_pointer() == y.unsafe_buffer_pointer()
        out, other = pjit(lambda x, y: (x + 1, y * 2), donate_argnums=0)(x, y)
        assert (np.asarray(out) == 2).all() and (np.asarray(other) == 2).all()
        assert (block == 1).all()

    def test_repeat_call_skips_the_shared_buffer_check(self, place, monkeypatch):
        f = pjit(lambda x, y: (x + 1, y * 2), donate_argnums=0)
        y, x = place(f32(8)), f(place(f32(8)), f32(8))[0]
        f(place(f32(8)), y)
        monkeypatch.setattr(arguments, "shared_pair", None)
        for _ in range(3):
            jax.block_until_ready(x)
            assert x.shape == (8,) and not x.is_deleted()
            x, _ = f(x, y)
        np.testing.assert_array_equal(x, f32(8) + 4)

    @pytest.mark.devices(8)
    def test_array_with_a_deleted_shard_is_refused(self, mesh):
        f = pjit(lambda x, y: (x + 1, y.sum()), donate_argnums=0)
        rows = NamedSharding(mesh, P(("x", "y")))
        x = device_put(f32(8), rows).to_jax()
        f(device_put(f32(8), rows), f32(8))
        x.addressable_shards[3].data.delete()
        with pytest.raises(DeletedError, match=naming("x ", "buffer")):
            f(x, f32(8))
        assert float(f(device_put(f32(8), rows), f32(8))[1]) == f32(8).sum()


def _exposed(way, rows):
    """Return an Array whose buffers code outside can delete, and one of its shards."""
    match way:
        case "to_jax" | "donated":
            x = device_put(f32(8), rows)
            return x, x.to_jax().addressable_shards[3].data
        case "a piece":
            pieces = [jax.device_put(f32(8)[i : i + 1], d) for i, d in enumerate(rows.devices)]
            return make_array_from_single_device_arrays((8,), rows, pieces), pieces[3]
        case "a shard":
            x = device_put(f32(8), rows)
            return x, x.addressable_data(3).to_jax()
    handle = jax.device_put(f32(8), rows)
    x = Array.from_jax(handle) if way == "from_jax" else device_put(handle, rows)
    return x, handle.addressable_shards[3].data


class TestMissingShards:
    """Arrays of which one shard was deleted or donated separately."""

    @pytest.fixture
    def rows(self, mesh):
        return NamedSharding(mesh, P(("x", "y")))

    @pytest.mark.devices(8)
    @pytest.mark.parametrize("path", ["pjit", "compiled", "loaded", "bound step", "keys"])
    def test_jax_array_with_a_deleted_shard_is_refused(self, rows, path):
        def total(state, x):
            return state, (jax.random.key_data(x) if path == "keys" else x).sum()

        def array():
            value = jax.random.split(jax.random.key(0), 8) if path == "keys" else f32(8)
            return jax.device_put(value, rows)

        f = pjit(total)
        compiled = f.lower(0.0, array()).compile()
        bound = compiled.bind(0.0) if path == "bound step" else None
        loaded = Compiled.deserialize(compiled.serialize()) if path == "loaded" else None
        call = {
            "pjit": lambda x: f(0.0, x)[1],
            "keys": lambda x: f(0.0, x)[1],
            "compiled": lambda x: compiled(0.0, x)[1],
            "loaded": lambda x: loaded(0.0, x)[1],
            "bound step": lambda x: bound(x),
        }[path]
        before = call(array())
        x = array()
        call(x)
        x.addressable_shards[3].data.delete()
        for _ in range(2):
            with pytest.raises(DeletedError, match=naming("x ", "one of its devices")):
                call(x)
        np.testing.assert_array_equal(call(array()), before)

    @pytest.mark.devices(8)
    @pytest.mark.slow
    def test_array_with_a_donated_shard_is_refused(self, rows):
        total = pjit(lambda x: x.sum())
        add = pjit(lambda x: x + 1, donate_argnums=0)
        shard = device_put(f32(8), rows).addressable_shards[2].data
        add_compiled = add.lower(shard).compile()

        def bound(shard):
            add_state = pjit(lambda x: (x + 1, None), donate_argnums=0).lower(shard).compile()
            return add_state.bind(shard)()

        for donate in (add, add, add_compiled, jax.vmap(add), bound):
            x = device_put(f32(8), rows)
            assert float(total(x)) == f32(8).sum()
            shards = x.addressable_shards
            donate(shards[2].data)
            with pytest.raises(DeletedError, match=naming("x ", "one of its shards", "donated")):
                total(x)
            np.testing.assert_array_equal(shards[3].data, f32(8)[3:4])
        assert float(total(device_put(f32(8), rows))) == f32(8).sum()

    @pytest.mark.devices(8)
    def test_donated_piece_of_an_assembled_array_raises(self, rows):
        total = pjit(lambda x: x.sum())
        pieces = [device_put(f32(1), device) for device in rows.mesh.devices.flat]
        x = make_array_from_single_device_arrays((8,), rows, pieces)
        assert float(total(x)) == 0
        pjit(lambda x: x + 1, donate_argnums=0)(pieces[5])
        with pytest.raises(DeletedError, match=naming("x ", "one of its shards", "<lambda>")):
            total(x)

    @pytest.mark.devices(8)
    @pytest.mark.parametrize("path", ["pjit", "compiled", "loaded", "bound step"])
    @pytest.mark.parametrize(
        "way", ["to_jax", "from_jax", "device_put", "donated", "a piece", "a shard"]
    )
    def test_array_with_a_shard_deleted_by_other_code_is_refused(self, rows, way, path):
        """A repeat call is refused before the launch, and other programs still finish."""
        x, shard = _exposed(way, rows)
        f = pjit(lambda state, x: (state, x.sum()))
        compiled = f.lower(0.0, x).compile()
        bound = compiled.bind(0.0)
        loaded = Compiled.deserialize(compiled.serialize())
        call = {
            "pjit": lambda x: f(0.0, x)[1],
            "compiled": lambda x: compiled(0.0, x)[1],
            "loaded": lambda x: loaded(0.0, x)[1],
            "bound step": bound,
        }[path]
        for _ in range(3):
            assert float(call(x)) == f32(8).sum()
        if way == "donated":
            pjit(lambda x: x + 1, donate_argnums=0)(shard)
        else:
            shard.delete()
        for _ in range(2):
            with pytest.raises(DeletedError, match=naming("x ", "one of its shards", "by itself")):
                call(x)
        assert float(call(device_put(f32(8), rows))) == f32(8).sum()
        assert x.is_deleted() and x.shape == (8,) and x.sharding == rows
        with pytest.raises(DeletedError, match=naming("float32[8]", "one of its shards")):
            np.asarray(x)

    def test_array_deleted_through_its_jax_handle_raises(self, rows):
        x = device_put(f32(8), rows)
        handle, add = x.to_jax(), pjit(lambda x: x + 1)
        assert x.to_jax() is handle and Array.from_jax(handle).to_jax() is handle
        for _ in range(3):
            np.testing.assert_array_equal(add(x), f32(8) + 1)
        assert add._cache_size() == 1
        handle.delete()
        for _ in range(2):
            with pytest.raises(DeletedError, match=naming("x ", "has been deleted")):
                add(x)
        np.testing.assert_array_equal(add(device_put(f32(8), rows)), f32(8) + 1)

    def test_array_without_exposed_handles_is_not_checked(self, rows, monkeypatch):
        add, x = pjit(lambda x: x + 1), device_put(f32(8), rows)
        y = add(add(x))
        monkeypatch.setattr(base, "lacks_buffer", None)
        np.testing.assert_array_equal(add(x) + add(y), 2 * f32(8) + 4)

    @pytest.mark.devices(8)
    def test_bound_step_state_with_a_deleted_shard_is_refused(self, rows):
        f = pjit(lambda s: (s + s.sum(), None))
        step = f.lower(device_put(f32(8), rows)).compile().bind(device_put(f32(8), rows))
        step()
        step.state.addressable_shards[3].data.delete()
        with pytest.raises(DeletedError, match=naming("s ", "one of its devices")):
            step()

    @pytest.mark.slow
    def test_arrays_of_jax_have_one_cache_entry(self, rows):
        f, traced = pjit(lambda x: traced.append(1) or x + 1), []
        x = jax.device_put(f32(8), rows)
        for _ in range(3):
            np.testing.assert_array_equal(f(x), f32(8) + 1)
        assert (traced, f._cache_size()) == ([1], 1)
        f.clear_cache()
        np.testing.assert_array_equal(f(x), f32(8) + 1)
        assert traced == [1, 1]


def _run_closed_over(path, x, rows):
    """Return a call of a program that closes over an array, and its result."""
    f = pjit(lambda state, v: (state, (v * x).sum()))
    y = device_put(f32(8), rows)
    if path == "pjit":
        return lambda: f(0.0, y)[1]
    if path == "gradient":
        return lambda: jax.grad(lambda v: f(0.0, v)[1])(y).sum()
    compiled = f.lower(0.0, y).compile()
    if path == "compiled":
        return lambda: compiled(0.0, y)[1]
    bound = compiled.bind(0.0)
    return lambda: bound(y)


def _lose(way, x):
    """Delete or donate an array or one of its shards."""
    match way:
        case "deleted":
            x.delete()
        case "donated":
            pjit(lambda x: x + 1, donate_argnums=0)(x)
        case "first shard" | "shard":
            x.addressable_shards[0 if way == "first shard" else 3].data.delete()


class TestClosedOver:
    """Arrays that a program closes over, and that are gone at a later call of it."""

    @pytest.fixture
    def rows(self, mesh):
        return NamedSharding(mesh, P(("x", "y")))

    @pytest.mark.devices(8)
    @pytest.mark.parametrize(
        "path", ["pjit", "compiled", "bound step", pytest.param("gradient", marks=pytest.mark.slow)]
    )
    @pytest.mark.parametrize("put", [device_put, jax.device_put], ids=["xlashard", "jax"])
    @pytest.mark.parametrize("way", ["deleted", "donated", "shard", "first shard"])
    def test_lost_array_is_refused_at_a_repeat_call(self, rows, path, put, way):
        """The call is refused before the launch, and other programs still finish."""
        x = put(f32(8), rows)
        call = _run_closed_over(path, x, rows)
        before = [float(call()) for _ in range(3)]
        _lose(way, x)
        for _ in range(2):
            with pytest.raises(DeletedError, match=naming("float32[8]")):
                call()
        again = _run_closed_over(path, put(f32(8), rows), rows)
        assert [float(again())] * 3 == before

    def test_lost_array_on_one_device_is_refused_at_a_repeat_call(self):
        x = device_put(np.ones((200, 200), np.float32))
        f = pjit(lambda v: x.sum() + v)
        assert [float(f(1.0)) for _ in range(3)] == [40001] * 3
        x.delete()
        for _ in range(2):
            with pytest.raises(DeletedError, match=naming("x, ", "float32[200,200]")):
                f(1.0)

    @pytest.mark.devices(8)
    def test_other_programs_of_the_function_run_on(self, rows):
        arrays = {name: device_put(f32(8) + i, rows) for i, name in enumerate("ab")}
        f = pjit(lambda v, name: (v + arrays[name]).sum(), static_argnames="name")
        for name in "abab":
            f(1.0, name)
        arrays["a"].delete()
        for _ in range(3):
            assert float(f(1.0, "b")) == 8 * 2 + f32(8).sum()
            with pytest.raises(DeletedError, match="float32"):
                f(1.0, "a")

    def test_programs_without_closed_over_arrays_are_not_checked(self, rows, monkeypatch):
        f, x = pjit(lambda v: v + 1), device_put(f32(8), rows)
        for _ in range(2):
            f(x)
        monkeypatch.setattr(dispatch, "any_lacks_buffer", None)
        monkeypatch.setattr(dispatch._Checked, "__call__", None)
        np.testing.assert_array_equal(f(x), f32(8) + 1)


@pytest.mark.devices(8)
def test_strict_mode_raises_one_kind_of_error_for_unmet_requests(mesh):
    rows = NamedSharding(mesh, P("x"))
    unmet = {
        DonationError: pjit(lambda x: x[:2].astype(int), donate_argnums=0, strict=True),
        UnevenShardingError: pjit(lambda x: with_sharding_constraint(x[:6], rows), strict=True),
        IgnoredShardingError: pjit(lambda x: device_put(x * 2, rows), strict=True),
    }
    for kind, f in unmet.items():
        with pytest.raises(UnmetRequestError) as caught:
            f(f32(8, 4))
        assert type(caught.value) is kind
    assert issubclass(ReplicationError, UnmetRequestError)
