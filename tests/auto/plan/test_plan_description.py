"""Logical axes of arguments, and their rules."""

import jax
import jax.numpy as jnp
import pytest

from xlashard import P
from xlashard.auto.plan.plan_description import axis_rules, logical_axes


def test_logical_axes_are_read_from_flax_boxes():
    linen = pytest.importorskip("flax.linen")
    params = {"mlp": {"up": linen.Partitioned(jnp.ones((4, 8)), names=("embed", "mlp"))}}
    state = {"params": params, "step": 0, "names": ("a", "b")}
    assert logical_axes((state,)) == ((), (), ("embed", "mlp"), ())
    assert logical_axes(jax.eval_shape(lambda: params)) == (("embed", "mlp"),)


def test_rules_of_logical_axes_follow_the_most_bytes():
    rules = axis_rules(
        [
            (("embed", "mlp"), P("data", "model"), 1000),
            (("mlp", "embed"), P("model"), 10),
            (("heads", None), P(("data", "model")), 10),
        ]
    )
    assert rules == (("embed", ("data",)), ("heads", ("data", "model")), ("mlp", ("model",)))
