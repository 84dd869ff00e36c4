"""Names that optax removed after 0.1.4, and that have no equal there today."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax


class ScaleByFromageState(NamedTuple):
    """State with the number of steps.

    Attributes:
        count: The number, int32 of no dimensions.
    """

    count: jax.Array


class FactoredParameterStats(NamedTuple):
    """Second moments of a parameter, of which Adafactor keeps sums over rows and columns.

    Attributes:
        v_row: The sums over columns.
        v_col: The sums over rows.
        v: The moments of a parameter that is not factored.
        m: The momentum.
    """

    v_row: Any
    v_col: Any
    v: Any
    m: Any


def maybe_update(
    inner: optax.GradientTransformation, should_update_fn: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """Return a transformation that is applied at some steps; at others updates pass unchanged.

    Args:
        inner: The transformation.
        should_update_fn: Returns for a step's number whether `inner` is applied.
    """
    return optax.conditionally_transform(inner, lambda step, **_: should_update_fn(step))
