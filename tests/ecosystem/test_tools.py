"""Tools without knowledge of JAX, and tools that check types at run time."""

import io

import jax
import jaxtyping
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.core.array.cases import named, value
from xlashard import Array, device_put

V = value(np.float32)


@pytest.fixture
def x() -> Array:
    return device_put(V, named("x", "y"))


@pytest.mark.slow
def test_matplotlib_plots_arrays(x: Array) -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    (line,) = axes.plot(x[0], x[1])
    np.testing.assert_array_equal(line.get_ydata(), V[1])
    np.testing.assert_array_equal(axes.imshow(x).get_array(), V)
    axes.hist(x.ravel())
    axes.fill_between(x[0], x[1], x[2], where=x[0] > 3)
    figure.savefig(io.BytesIO())


def test_scipy_accepts_arrays(x: Array) -> None:
    np.testing.assert_allclose(scipy.linalg.svdvals(x), scipy.linalg.svdvals(V))
    assert (scipy.sparse.csr_matrix(x) != scipy.sparse.csr_matrix(V)).nnz == 0


def test_numpy_files(x: Array) -> None:
    for save in (np.save, jax.numpy.save):
        file = io.BytesIO()
        save(file, x)
        file.seek(0)
        np.testing.assert_array_equal(np.load(file), V)
    file = io.BytesIO()
    np.savez(file, x=x)
    file.seek(0)
    np.testing.assert_array_equal(np.load(file)["x"], V)


def test_jaxtyping_checks_arrays(x: Array) -> None:
    for kind in (Array, jax.Array):
        assert isinstance(x, jaxtyping.Float[kind, "rows columns"])
        assert isinstance(x, jaxtyping.Float32[kind, "8 16"])
        assert not isinstance(x, jaxtyping.Int[kind, "rows columns"])
        assert not isinstance(x, jaxtyping.Float[kind, "rows"])
    assert not isinstance(x.to_jax(), jaxtyping.Float[Array, "rows columns"])
