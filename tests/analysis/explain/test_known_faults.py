"""Operations that a released jaxlib compiles to wrong values: each entry is reproduced."""

import functools
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
GRID = make_mesh((4, 2), ("data", "model"))
WINDOWS, KERNELS = read_faults()


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


# Specs of the images, with the kinds of convolutions whose kernels get wrong gradients.
SUMMED = {
    ("data",): ("depthwise", "multiplied", "grouped"),
    ("model",): ("depthwise", "multiplied", "grouped"),
    (None, "model"): ("depthwise", "multiplied", "grouped", "plain", "wide"),
    (None, None, "data"): ("depthwise", "multiplied", "grouped", "plain", "wide"),
    (("data", "model"),): (),
    ("data", "model"): (),
    (None, None, None, "model"): (),
    ("data", None, None, "model"): (),
    (None, ("data", "model")): (),
}
CONVOLUTIONS = {
    "depthwise": ((3, 3, 1, 8), 8),
    "multiplied": ((3, 3, 1, 16), 8),
    "grouped": ((3, 3, 4, 8), 2),
    "plain": ((3, 3, 8, 16), 1),
    "wide": ((9, 9, 8, 8), 1),
}


def make_gradients(groups: int) -> Any:
    """Return the gradients of a convolution by images, kernel, and the gradient of its result."""

    def convolve(x: Any, kernel: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    return lambda x, kernel, g: jax.vjp(convolve, x, kernel)[1](g)


@functools.cache
def differentiate_alone(name: str) -> tuple[Any, Any]:
    """Return arguments and gradients of a convolution on one device."""
    kernel, groups = CONVOLUTIONS[name]
    shapes = (8, 16, 16, 8), kernel, (8, 16, 16, kernel[3])
    args = [np.random.default_rng(0).random(shape, np.float32) for shape in shapes]
    return args, jax.jit(make_gradients(groups))(*args)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SUMMED)
def test_gradients_of_kernels_that_count_copies_have_a_line(spec: Any) -> None:
    places = [jax.NamedSharding(GRID, P(*each)) for each in (spec, (), spec)]
    for name, (_, groups) in CONVOLUTIONS.items():
        args, right = differentiate_alone(name)
        step = jax.jit(make_gradients(groups), in_shardings=places)
        pairs = zip(step(*args), right, strict=True)
        is_wrong = not all(np.allclose(one, other, rtol=1e-3) for one, other in pairs)
        assert is_wrong == (name in SUMMED[spec]), name
        rows = [u for u in explain(step, *args).unmet if u.kind == "miscompilation"]
        assert [row.actual for row in rows] == [KERNELS.what] * is_wrong, name


def differentiate_levels(params: Any, x: Any) -> Any:
    """Return the gradient of convolutions at two levels, all of which stand on one line."""

    def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
        numbers, strides = ("NHWC", "HWIO", "NHWC"), (stride, stride)
        return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=numbers)

    def loss(params: Any) -> Any:
        first = jnp.tanh(convolve(x, params["first"]))
        second = jnp.tanh(convolve(convolve(first, params["down"], 2), params["second"]))
        wide = jnp.repeat(jnp.repeat(second, 2, 1), 2, 2)
        return (convolve(jnp.concatenate([wide, first], -1), params["last"]) ** 2).mean()

    return jax.grad(loss)(params)


@pytest.mark.slow
def test_sums_belong_to_their_convolutions() -> None:
    shapes = {"first": (3, 3, 1, 4), "down": (2, 2, 4, 8), "second": (3, 3, 8, 8)}
    draw = np.random.default_rng(0).random
    shapes |= {"last": (3, 3, 12, 4)}
    params = {name: draw(shape, np.float32) - 0.5 for name, shape in shapes.items()}
    x = draw((8, 32, 32, 1), np.float32)
    right, wrong_under = jax.jit(differentiate_levels)(params, x), []
    specs = [("data",), (("data", "model"),), ("model", "data"), (None, "data", "model")]
    for spec in (*specs, (None, ("data", "model")), (None, "model"), (None, None, "data")):
        places = [jax.NamedSharding(GRID, P(*each)) for each in ((), spec)]
        step = jax.jit(differentiate_levels, in_shardings=places)
        is_wrong = any(
            not np.allclose(one, right[name], rtol=1e-2, atol=1e-6)
            for name, one in step(params, x).items()
        )
        rows = [u for u in explain(step, params, x).unmet if u.kind == "miscompilation"]
        assert bool(rows) == is_wrong, spec
        wrong_under += [spec] * is_wrong
    assert wrong_under == [(None, "model"), (None, None, "data")]
