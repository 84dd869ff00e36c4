"""Programs of flax, equinox, optax and plain JAX run under this package by changing imports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from tests.core.pjit.helpers import f32, make_mesh, spec_of
from tests.core.pjit.libraries import (
    ALL_OF_XLASHARD,
    JAX,
    JIT_OF_XLASHARD,
    equinox_programs,
    linen_programs,
    nnx_programs,
    optax_programs,
)
from tests.core.pjit.random_programs.running import under
from tests.message_patterns import naming
from xlashard import (
    Array,
    NamedSharding,
    P,
    explain,
    pad_to_mesh,
    pjit,
    unpad,
    with_sharding_constraint,
)
from xlashard.errors import UnevenShardingError, UnevenShardingWarning

# The same program is compiled by `jax.jit` and by two ways of importing this package.
pytestmark = pytest.mark.usefixtures("shared_programs")

PROGRAMS = {
    **linen_programs.PROGRAMS,
    **equinox_programs.PROGRAMS,
    **optax_programs.PROGRAMS,
    **nnx_programs.PROGRAMS,
}


@pytest.fixture(scope="module")
def with_jax():
    """Results of each program with JAX's names, cached."""
    return functools.cache(lambda name: PROGRAMS[name](JAX, make_mesh((4, 2), ("data", "model"))))


@pytest.mark.own_partitioner  # Three of them train under the other one below.
@pytest.mark.integration
@pytest.mark.parametrize("imports", [ALL_OF_XLASHARD, JIT_OF_XLASHARD], ids=["all", "jit alone"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_with_changed_imports_equals_jax(name, imports, with_jax):
    """Equal losses, step by step, and the state on its specs."""
    right = with_jax(name)
    got = PROGRAMS[name](imports, make_mesh((4, 2), ("data", "model")))
    assert len(set(right.losses)) == len(right.losses) > 2
    np.testing.assert_allclose(got.losses, right.losses, rtol=1e-4)
    assert jax.tree.structure(got.state) == jax.tree.structure(right.state)
    for ours, theirs in zip(*map(jax.tree.leaves, (got.state, right.state)), strict=True):
        assert isinstance(ours, Array) and ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-5)
    for array, spec in got.specs:
        assert spec_of(array) == tuple(spec)
        assert len(array.devices()) == 8


@pytest.mark.own_partitioner
@pytest.mark.integration
@pytest.mark.parametrize("name", ["train_state", "stacked_layers", "loop_inside_by_scan"])
def test_training_under_the_other_partitioner_equals_jax(name, with_jax):
    with under("gspmd" if jax.config.jax_use_shardy_partitioner else "shardy"):
        got = PROGRAMS[name](ALL_OF_XLASHARD, make_mesh((4, 2), ("data", "model")))
    np.testing.assert_allclose(got.losses, with_jax(name).losses, rtol=1e-4)


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(16)(x)
        x = with_sharding_constraint(x, P("x", "y"))
        return linen.Dense(4)(linen.relu(x))


def kernels_along_y(tree):
    """Shard kernels along `y`, and replicate the rest."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: P(None, "y") if "kernel" in jax.tree_util.keystr(path) else P(), tree
    )


@pytest.mark.integration
def test_a_linen_model_trains_with_optax(mesh, partitioner):
    model, optimizer = Mlp(), optax.adam(1e-2)
    x, y = f32(8, 4), jnp.sin(f32(8, 4))

    def init(key):
        with mesh:
            params = model.init(key, x)
        return params, optimizer.init(params)

    def step(params, opt_state, x, y):
        def loss_of(params):
            return ((model.apply(params, x) - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with mesh:
        shapes = pjit(init).eval_shape(jax.random.key(0))
        specs = kernels_along_y(shapes)
        state = pjit(init, out_shardings=specs)(jax.random.key(0))
        train = pjit(
            step,
            in_shardings=(*specs, P("x"), P("x")),
            out_shardings=(*specs, None),
            donate_argnums=(0, 1),
        )
        params, opt_state = state
        losses = []
        for _ in range(5):
            params, opt_state, loss = train(params, opt_state, x, y)
            losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    kernel = params["params"]["Dense_0"]["kernel"]
    assert isinstance(kernel, Array) and spec_of(kernel) == (None, "y")
    assert spec_of(opt_state[0].mu["params"]["Dense_1"]["kernel"]) == (None, "y")

    plain = jax.jit(step)
    with mesh:
        params, opt_state = init(jax.random.key(0))
        for wanted in losses:
            params, opt_state, loss = plain(params, opt_state, x, y)
            np.testing.assert_allclose(loss, wanted, rtol=1e-4)


@pytest.mark.integration
def test_an_nnx_model(mesh):
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    def apply(state, x):
        return nnx.merge(graph, state)(x)

    def loss(state, x):
        return (apply(state, x) ** 2).sum()

    x = f32(8, 4)
    with mesh:
        out = pjit(apply, in_shardings=(None, P("x")), out_shardings=P("x"))(state, x)
        grads = pjit(jax.grad(loss), in_shardings=(None, P("x")))(state, x)
    wanted = jax.grad(loss)(state, x)
    # Sums near zero differ by more of their size: processors sum products in different orders.
    check = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    check(out, model(x))
    jax.tree.map(check, grads, wanted)
    assert spec_of(out) == ("x",)


@pytest.mark.integration
def test_a_bound_step_over_an_optimiser(mesh):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    named = NamedSharding(mesh, P("x"))

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda p: ((p["w"] - x) ** 2).sum())(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jnp.linalg.norm(grads["w"])

    params = {"w": f32(8, 4)}
    state = params, optimizer.init(params)
    program = pjit(step, in_shardings=(named, named), out_shardings=(named, None), donate_argnums=0)
    bound = program.lower(state, f32(8, 4) * 2).compile().bind(state)
    for _ in range(4):
        bound(f32(8, 4) * 2)
        state, _ = step(state, f32(8, 4) * 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), bound.state, state)
    assert spec_of(bound.state[0]["w"]) == ("x",)


class Words(linen.Module):
    """Vocabulary of 50257 over eight devices, and a batch of ten over four."""

    words: int = 50257

    @linen.compact
    def __call__(self, tokens):
        table = linen.Embed(self.words, 8)
        x = linen.with_logical_constraint(table(tokens), ("batch", None, None))
        logits = table.attend(x)
        return linen.with_logical_constraint(logits, (None, None, "vocabulary"))


@pytest.mark.integration
def test_indivisible_dimensions_are_reported_and_can_be_padded():
    mesh = make_mesh((4, 2), ("data", "model"))
    rules = (("batch", "data"), ("vocabulary", ("data", "model")))
    model, tokens = Words(), np.arange(20, dtype=np.int32).reshape(10, 2)
    params = {"params": {"Embed_0": {"embedding": f32(50257, 8)}}}

    def loss(params, tokens):
        with linen.logical_axis_rules(rules):
            return jax.nn.logsumexp(model.apply(params, tokens), axis=-1).mean()

    with jax.set_mesh(mesh):
        step = pjit(jax.value_and_grad(loss), in_shardings=P())
        with pytest.warns(UnevenShardingWarning) as issued:
            report = explain(step, params, tokens)
            right = jax.jit(jax.value_and_grad(loss))(params, tokens)
            np.testing.assert_allclose(step(params, tokens)[0], right[0], rtol=1e-5)
        with pytest.raises(UnevenShardingError, match=naming("50257", __file__)) as caught:
            pjit(loss, strict=True)(params, f32(8, 2).astype(int))
    uneven = [u for u in report.unmet if u.kind == "uneven constraint"]
    assert {u.reason for u in uneven} == {
        "dimension 0 of 10 does not divide by 4",
        "dimension 2 of 50257 does not divide by 8",
    }
    assert {u.source.file for u in uneven} == {w.filename for w in issued} == {__file__}
    assert caught.value.size == 50257 and caught.value.axes == (("data", 4), ("model", 2))
    # The padding comes first, and its logits are not in the vocabulary.
    specs = {"params": {"Embed_0": {"embedding": P(("data", "model"))}}}
    wide, rows = pad_to_mesh((params, tokens), (specs, P("data")), mesh=mesh)
    known = np.arange(50264) < 50257

    def masked(params, tokens):
        with linen.logical_axis_rules(rules):
            logits = jnp.where(known, Words(50264).apply(params, tokens), -jnp.inf)
            return jax.nn.logsumexp(logits, axis=-1)

    with jax.set_mesh(mesh):
        out = pjit(masked, in_shardings=(specs, P("data")), strict=True)(wide, rows)
    np.testing.assert_allclose(unpad(out, (10, 2)).mean(), right[0], rtol=1e-5)
