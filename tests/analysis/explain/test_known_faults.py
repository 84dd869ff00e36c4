"""Operations that a released jaxlib compiles to wrong values: each entry is reproduced."""

from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.core.pjit.helpers import make_mesh
from xlashard import explain
from xlashard.analysis.explain.known_faults import read_faults

pytestmark = [pytest.mark.partitioner, pytest.mark.usefixtures("partitioner")]

MESH = make_mesh((8,), ("x",))
(WINDOWS,) = read_faults()


def pooled(size: int, stride: int, spec: P | None = None) -> Any:
    def loss(x: Any) -> Any:
        if spec is not None:
            x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(MESH, spec))
        window, strides = (size, 1), (stride, 1)
        return (lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME") ** 2).sum()

    return jax.jit(jax.grad(loss))


def placed(*spec: Any) -> jax.Array:
    values = np.sin(7 * np.arange(1, 1 + 24 * 8, dtype=np.float32)).reshape(24, 8)
    return jax.device_put(values, jax.NamedSharding(MESH, P(*spec)))


def test_gradient_of_overlapping_windows_is_wrong_and_has_a_line() -> None:
    step, x = pooled(3, 1), placed("x")
    on_one_device = step(np.asarray(x))
    # If it is right, the range of releases in the table ends with an earlier one.
    assert WINDOWS.affects(metadata.version("jaxlib"))
    assert not np.allclose(step(x), on_one_device)
    (row,) = (u for u in explain(step, x).unmet if u.kind == "miscompilation")
    assert row.actual == WINDOWS.what and row.advice == WINDOWS.advice
    assert row.source is not None and row.source.file == __file__
    assert "0.10.2 to 0.12" in row.reason and row.path == "float32[24,8]"


@pytest.mark.parametrize(
    ("window", "spec"),
    # The last one follows the advice.
    [((2, 2), ("x",)), ((3, 1), (None, "x")), ((3, 1, P(None, "x")), ("x",))],
)
def test_windows_that_are_right_have_no_line(window: Any, spec: Any) -> None:
    step, x = pooled(*window), placed(*spec)
    np.testing.assert_allclose(step(x), step(np.asarray(x)), rtol=1e-5)
    assert not [u for u in explain(step, x).unmet if u.kind == "miscompilation"]


def test_releases_that_were_not_tried_have_no_line() -> None:
    releases = ("0.10.1", "0.10.2", "0.12.0", "0.12.0.1", "0.12.1", "0.13.0")
    assert [WINDOWS.affects(r) for r in releases] == [False, True, True, True, False, False]
