"""Both sides can make the main job's step; measuring it takes too long for a test."""

import jax
import pytest

from benchmarks.train_step import JAX, OURS, ROOT, Job, Side
from xlashard.train.config.settings import load_settings


@pytest.mark.slow
@pytest.mark.parametrize("side", [OURS, JAX], ids=["pjit", "jax.jit"])
def test_training_step_of_both_sides_can_be_lowered(side: Side) -> None:
    settings = load_settings(str(ROOT / "configs" / "tiny.toml"))
    job = Job(side, settings, jax.devices())
    assert "sharding" in job.lowered().as_text()
