"""A run has equal losses on every mesh."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.examples import MESHES, choose_layout, devices, over, settings
from xlashard import device_put
from xlashard.train.config.settings import Settings
from xlashard.train.data import Text, plan_batch, read_corpus, training_starts
from xlashard.train.model.layout import Layout, build_mesh
from xlashard.train.model.programs import Programs, build_programs, initial_state, make_recipe

STEPS = 20
CLOSE = 1e-4
RUN = f"training.steps={STEPS}"


def losses(
    run: Settings, state: Any, step: Callable[..., Any], place: Callable[[Text, np.ndarray], Any]
) -> np.ndarray:
    """Return the loss of every step."""
    corpus = read_corpus(run.data, run.model.length)
    curve = []
    for number in range(run.training.steps):
        starts = training_starts(
            len(corpus.train), number, run.training.batch, run.model.length, run.run.seed
        )
        state, measured = step(state, place(corpus.train, starts))
        curve.append(measured["loss"])
    return np.asarray([float(x) for x in curve])


@functools.cache
def first_state(*words: str) -> Any:
    """Return the initial state, which is the same on every mesh, as NumPy arrays.

    Args:
        *words: Settings on which the shapes of the parameters depend.
    """
    return jax.tree.map(np.asarray, jax.jit(make_recipe(settings(*words)).initial_state)(0))


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    """Return the losses of the step under `jax.jit`, on one device."""
    run = settings(RUN, **MESHES["one device"])
    recipe = make_recipe(run)
    state = jax.tree.map(jnp.asarray, first_state())
    step = jax.jit(recipe.train_step, donate_argnums=0)
    window = run.model.length + 1
    return losses(run, state, step, lambda text, starts: text.windows(starts, window)[None])


def spread_losses(run: Settings, *words: str) -> np.ndarray:
    """Return the losses over the mesh of the settings; `words` are those of `first_state`."""
    layout = Layout.of(run, build_mesh(run.mesh, devices(math.prod(run.mesh.values()))))
    programs = build_programs(make_recipe(run), layout, run)
    state = device_put(first_state(*words), programs.state)
    return losses(run, state, programs.train_step, planned(run, programs))


def planned(run: Settings, programs: Programs) -> Callable[[Text, np.ndarray], Any]:
    """Return the job's function that puts a batch."""
    training, length = run.training, run.model.length
    return plan_batch(programs.batch, training.batch, training.accumulate, length).put


@pytest.mark.integration
@pytest.mark.parametrize("name", MESHES)
def test_losses_do_not_depend_on_the_mesh(name: str, plain: np.ndarray) -> None:
    spread = spread_losses(settings(RUN, **MESHES[name]))
    np.testing.assert_allclose(spread, plain, rtol=CLOSE)
    # Equal losses prove little if nothing is learned.
    assert plain[-1] < plain[0] - 1


@pytest.mark.integration
@pytest.mark.parametrize("name", ["fsdp", "data: fsdp, fsdp: fsdp, tensor: tensor"])
def test_losses_do_not_depend_on_an_automatic_layout(
    name: str, plain: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_layout(monkeypatch, name)
    run = settings(RUN, "sharding=auto", "model.remat=true")
    spread = spread_losses(run)
    np.testing.assert_allclose(spread, plain, rtol=CLOSE)


@pytest.mark.integration
def test_bound_step_has_the_losses_of_plain_jit(plain: np.ndarray) -> None:
    run = settings(RUN)
    layout = Layout(build_mesh(run.mesh, devices(8)), run.sharding.rules)
    programs = build_programs(make_recipe(run), layout, run)
    state = initial_state(make_recipe(run), programs.state)(np.uint32(run.run.seed))
    bound = programs.train_step.bind(state)

    def step(state: None, batch: Any) -> tuple[None, Any]:
        return state, bound(batch)

    spread = losses(run, None, step, planned(run, programs))
    np.testing.assert_allclose(spread, plain, rtol=CLOSE)
    assert int(bound.state["step"]) == STEPS


@pytest.mark.integration
@pytest.mark.parametrize(
    "words",
    [
        ["training.accumulate=2"],
        ["model.remat=true"],
        [
            "model.remat=true",
            "model.kept=['query', 'attention', 'stream', 'up']",
            "model.attention_block=8",
            "model.vocab_parts=4",
            "sharding.rules.length=tensor",
            "sharding.rules.vocab=[]",
        ],
    ],
)
def test_losses_do_not_depend_on_memory_saving_settings(
    words: list[str], plain: np.ndarray
) -> None:
    np.testing.assert_allclose(spread_losses(settings(RUN, *words)), plain, rtol=CLOSE)


@pytest.mark.integration
def test_mixture_of_experts_has_equal_losses_on_every_mesh() -> None:
    model = ("model.experts=4", "model.mlp=32")
    words = ["training.steps=12", *model]
    spread = over(
        {"fsdp": 2, "expert": 4}, batch=("fsdp", "expert"), embed="fsdp", experts="expert"
    )
    curve = spread_losses(settings(*words, "model.remat=true", **spread), *model)
    np.testing.assert_allclose(
        curve, spread_losses(settings(*words, **MESHES["one device"]), *model), rtol=CLOSE
    )
    assert curve[-1] < curve[0] - 1
