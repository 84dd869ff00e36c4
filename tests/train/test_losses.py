"""The same run gives the same losses, however it is spread."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.train.examples import MESHES, devices, settings
from xlashard.train.data import put_batch, read_corpus, training_windows
from xlashard.train.layout import Layout, build_mesh
from xlashard.train.programs import build_programs
from xlashard.train.settings import Settings
from xlashard.train.step import make_recipe

STEPS = 50
CLOSE = 1e-4
RUN = f"training.steps={STEPS}"


def losses(
    run: Settings, state: Any, step: Callable[..., Any], place: Callable[[Any], Any]
) -> np.ndarray:
    """The loss of every step."""
    corpus = read_corpus(run.data, run.model.length)
    found = []
    for number in range(run.training.steps):
        windows = training_windows(
            corpus.train, number, run.training.batch, run.model.length, run.run.seed
        )
        state, measured = step(state, place(windows))
        found.append(measured["loss"])
    return np.asarray([float(x) for x in found])


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    """Losses of the step under `jax.jit`, on one device."""
    run = settings(RUN, **MESHES["one device"])
    recipe = make_recipe(run)
    state = jax.jit(recipe.initial_state)(0)
    step = jax.jit(recipe.train_step, donate_argnums=0)
    return losses(run, state, step, lambda windows: windows[None])


def spread_losses(run: Settings) -> np.ndarray:
    """Losses of the step over the mesh of the settings."""
    layout = Layout(build_mesh(run.mesh, devices(math.prod(run.mesh.values()))), run.sharding.rules)
    programs = build_programs(make_recipe(run), layout, run)
    state = programs.initial_state(np.uint32(run.run.seed))
    parts = run.training.accumulate
    return losses(run, state, programs.train_step, lambda x: put_batch(x, parts, programs.batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_losses_do_not_depend_on_the_mesh(name: str, plain: np.ndarray) -> None:
    spread = spread_losses(settings(RUN, **MESHES[name]))
    np.testing.assert_allclose(spread, plain, rtol=CLOSE)
    # Equal losses prove little where nothing is learned.
    assert plain[-1] < plain[0] - 1


@pytest.mark.slow
def test_the_bound_step_has_the_same_losses(plain: np.ndarray) -> None:
    run = settings(RUN)
    layout = Layout(build_mesh(run.mesh, devices(8)), run.sharding.rules)
    programs = build_programs(make_recipe(run), layout, run)
    bound = programs.train_step.bind(programs.initial_state(np.uint32(run.run.seed)))

    def step(state: None, batch: Any) -> tuple[None, Any]:
        return state, bound(batch)

    spread = losses(run, None, step, lambda x: put_batch(x, 1, programs.batch))
    np.testing.assert_allclose(spread, plain, rtol=CLOSE)
    assert int(bound.state["step"]) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("words", [["training.accumulate=2"], ["model.remat=true"]])
def test_losses_do_not_depend_on_how_memory_is_saved(words: list[str], plain: np.ndarray) -> None:
    np.testing.assert_allclose(spread_losses(settings(RUN, *words)), plain, rtol=CLOSE)
