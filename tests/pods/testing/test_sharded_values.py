"""Shares of sharded bytes, of trees and of the arguments of programs."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xlashard import Mesh, NamedSharding, P, device_put, pjit
from xlashard.errors import ArgumentError, ExpectationError
from xlashard.testing import assert_sharded, sharding_summary


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2, 1), ("data", "model", "one"))


def place(mesh: Mesh, shape: tuple[int, ...], *spec: Any) -> Any:
    return device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(*spec)))


@pytest.fixture(scope="module")
def state(mesh: Mesh) -> dict[str, Any]:
    return {
        "both": place(mesh, (8, 8), ("data", "model")),
        "rows": place(mesh, (8, 8), "data"),
        "single": place(mesh, (8, 8), "one"),
        "whole": place(mesh, (8, 8)),
        "step": jnp.zeros((), jnp.int32),
    }


def test_shares_by_axis(state: dict[str, Any]) -> None:
    summary = sharding_summary(state)
    assert summary.share() == summary.share("data") == 0.5
    assert summary.share("model") == 0.25
    assert summary.share(("model", "data")) == 0.5
    assert summary.share("one") == 0
    assert [value.path for value in summary.find_unsharded("data")] == ["['single']", "['whole']"]
    assert dict(summary.mesh) == {"data": 4, "model": 2, "one": 1}


def test_summary_is_a_table(state: dict[str, Any]) -> None:
    text = str(sharding_summary(state))
    assert text.startswith("sharded: 50 % of the bytes, 50 % over data, 25 % over model\n")
    assert "['both']" in text and "P(('data', 'model'))" in text
    assert repr(sharding_summary(state)) == (
        "<ShardingSummary of 5 values, 612 B on each device; print it>"
    )


def test_values_of_the_host_and_shapes_without_a_sharding_are_whole(mesh: Mesh) -> None:
    rows = jax.ShapeDtypeStruct((4, 4), "float32", sharding=NamedSharding(mesh, P("data")))
    bare = jax.ShapeDtypeStruct((4, 4), "float32")
    tree = [rows, bare, np.ones((4, 4), np.float32), jax.device_put(np.ones((4, 4), np.float32))]
    summary = sharding_summary(tree)
    assert summary.share("data") == summary.share() == 0.25
    assert "host" in str(summary)


@pytest.mark.parametrize("make", [nnx.state, lambda model: model])
def test_models_of_flax(mesh: Mesh, make: Any) -> None:
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    model.kernel[...] = jax.device_put(model.kernel[...], jax.NamedSharding(mesh, P("data")))
    assert_sharded(make(model), axis="data", at_least=0.9)
    with pytest.raises(ExpectationError, match="94.11 % of the bytes of the tree") as caught:
        assert_sharded(make(model), axis="data")
    assert "bias" in str(caught.value) and "kernel" not in str(caught.value)


def test_models_of_equinox_with_functions_inside() -> None:
    model = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
    with pytest.raises(ExpectationError, match="^0 % of the bytes of the tree are sharded, at"):
        assert_sharded(model)


@pytest.mark.parametrize("wrap", [jax.jit, nnx.jit, eqx.filter_jit, pjit, lambda f: f])
def test_arguments_of_programs(state: dict[str, Any], wrap: Any) -> None:
    def total(state, factor):
        return state["both"].sum() * factor + state["whole"].sum()

    step = wrap(total)
    assert_sharded(step, (state, 2.0), axis="model", at_least=0.5)
    with pytest.raises(ExpectationError, match="^50 % of the bytes of the arguments of ") as caught:
        assert_sharded(step, (state, 2.0), axis="model")
    text = str(caught.value)
    # Arguments that the program drops are nowhere.
    assert "['whole']" in text and "rows" not in text


def test_a_stage_has_its_arguments(state: dict[str, Any]) -> None:
    compiled = jax.jit(lambda x, y: x + y).lower(state["both"], state["rows"]).compile()
    assert_sharded(compiled, axis="data")
    with pytest.raises(ExpectationError, match="^50 % of the bytes of the arguments of "):
        assert_sharded(compiled, axis="model")


def test_a_share_below_the_limit_is_never_rounded_up(mesh: Mesh) -> None:
    tree = [place(mesh, (4096, 8), "data"), place(mesh, (2,))]
    with pytest.raises(ExpectationError, match="^99.99 % of the bytes.*at least 100 % were"):
        assert_sharded(tree, axis="data")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: assert_sharded(s, axis="dat"), "axis is 'dat'.*did you mean 'data'?"),
        (lambda s: assert_sharded(s, axis=("data", "zzz")), "'zzz'.*the axes are data, model, one"),
        (lambda s: assert_sharded(s, at_least=98), "at_least is 98: .*at_least=0.98"),
        (lambda s: assert_sharded(s, at_least=True), "at_least is True"),
        (lambda s: assert_sharded(pjit(lambda x: x), s), "not dict: assert_sharded"),
        (lambda s: assert_sharded(pjit(lambda x: x)), "no arrays: .*for a call"),
        (lambda s: sharding_summary({"a": 1}), "tree of sharding_summary has no arrays"),
    ],
)
def test_invalid_arguments_are_refused(state: dict[str, Any], call: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        call(state)
