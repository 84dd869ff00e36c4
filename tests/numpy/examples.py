"""One call of every function of `jax.numpy`, `jax.numpy.linalg` and `jax.numpy.fft`.

A call takes the module (JAX's or ours) and samples, which are arrays of that module.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

type Example = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Samples[T]:
    """Arrays to compute with.

    Attributes:
        x: Numbers from 0.25 to 16, none twice.
        u: Numbers between 0 and 1.
        v: The first row of `x`.
        i: Whole numbers from 1 to 64.
        k: The numbers from 0 to 7 in another order.
        m: About half of it is true.
        b: A row of `m`.
        c: Complex numbers.
        s: A symmetric matrix with positive eigenvalues, well apart.
    """

    x: T
    u: T
    v: T
    i: T
    k: T
    m: T
    b: T
    c: T
    s: T


def samples(place: Callable[[np.ndarray], Any]) -> Samples[Any]:
    """Return the samples, each put somewhere by `place`."""
    order = np.random.default_rng(0).permutation(64).reshape(8, 8)
    x = ((order + 1) / 4).astype(np.float32)
    spread = np.diag(np.arange(1, 9)) * 10
    values = Samples(
        x=x,
        u=(x / 20).astype(np.float32),
        v=x[0],
        i=(order + 1).astype(np.int32),
        k=np.array([3, 0, 6, 1, 7, 5, 2, 4], np.int32),
        m=order % 2 == 0,
        b=order[0] % 2 == 0,
        c=(x + 1j * x.T).astype(np.complex64),
        s=(spread + (x + x.T) / 64).astype(np.float32),
    )
    return Samples(**{name: place(value) for name, value in vars(values).items()})


def _each(names: str, call: Callable[[Any, Any, Callable[..., Any]], Any]) -> dict[str, Example]:
    """Return the same call of several functions."""

    def example(name: str) -> Example:
        return lambda m, a: call(m, a, getattr(m, name))

    return {name: example(name) for name in names.split()}


def _after(done: Any, value: Any) -> Any:
    """Return the value after a call whose own result differs between versions of NumPy."""
    return value


def _on_bytes(write: Callable[[Any], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _plus_one(x: Any) -> Any:
    return x + 1


ELEMENTWISE = {
    **_each(
        "abs absolute acos angle arccos arcsin arcsinh arctan arctanh around asin asinh atan atanh"
        " cbrt ceil cos cosh deg2rad degrees exp exp2 expm1 fabs floor frexp i0 imag isfinite"
        " isinf isnan isneginf isposinf isreal iscomplex log log10 log1p log2 logical_not modf"
        " nan_to_num negative positive rad2deg radians real reciprocal rint round sign signbit sin"
        " sinc sinh spacing sqrt square tan tanh trunc unwrap sort_complex conj conjugate",
        lambda m, a, f: f(a.u),
    ),
    **_each("acosh arccosh", lambda m, a, f: f(a.u + 1)),
    **_each(
        "add arctan2 atan2 copysign divide divmod float_power floor_divide fmax fmin fmod heaviside"
        " hypot isclose logaddexp logaddexp2 maximum minimum mod multiply nextafter pow power"
        " remainder subtract true_divide equal not_equal greater greater_equal less less_equal"
        " logical_and logical_or logical_xor allclose array_equal array_equiv",
        lambda m, a, f: f(a.x, a.u),
    ),
    **_each(
        "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm"
        " left_shift right_shift",
        lambda m, a, f: f(a.i, a.k % 4),
    ),
    **_each("bitwise_count bitwise_invert bitwise_not invert", lambda m, a, f: f(a.i)),
    "ldexp": lambda m, a: m.ldexp(a.x, a.k),
    "clip": lambda m, a: m.clip(a.x, 2, a.v),
    "where": lambda m, a: (m.where(a.m, a.x, 0), m.where(a.m)),
    "select": lambda m, a: m.select([a.m, a.x > 4], [a.x, a.u], 7.0),
    "choose": lambda m, a: m.choose(a.k % 2, [a.x, a.u]),
    "piecewise": lambda m, a: m.piecewise(a.x, [a.x < 2, a.x > 8], [m.sin, 3.0, m.negative]),
    "interp": lambda m, a: m.interp(a.u, m.arange(8) / 8, a.v),
    "polyval": lambda m, a: m.polyval(a.v, a.u),
    "astype": lambda m, a: m.astype(a.x, m.int32),
    "copy": lambda m, a: m.copy(a.x),
}

REDUCTIONS = {
    **_each(
        "all amax amin any argmax argmin average count_nonzero cumprod cumsum cumulative_prod"
        " cumulative_sum max mean median min minmax nanargmax nanargmin nancumprod nancumsum nanmax"
        " nanmean nanmedian nanmin nanprod nanstd nansum nanvar prod ptp std sum var trapezoid"
        " argsort sort diff flip gradient",
        lambda m, a, f: f(a.u, axis=1),
    ),
    **_each("percentile nanpercentile", lambda m, a, f: f(a.x, m.array([10, 60]), axis=0)),
    **_each("quantile nanquantile", lambda m, a, f: f(a.x, 0.25, axis=1)),
    "argpartition": lambda m, a: m.argpartition(a.x, 3)[..., 3],
    "partition": lambda m, a: m.partition(a.x, 3)[..., 3],
    "top_k": lambda m, a: m.top_k(a.x, 3),
    "lexsort": lambda m, a: m.lexsort((a.x, a.i % 3)),
    "searchsorted": lambda m, a: m.searchsorted(m.sort(a.v), a.x),
    "digitize": lambda m, a: m.digitize(a.x, m.sort(a.v)),
    "bincount": lambda m, a: (m.bincount(a.k), m.bincount(a.k, a.v, length=8)),
    "histogram": lambda m, a: m.histogram(a.x, bins=4),
    "histogram_bin_edges": lambda m, a: m.histogram_bin_edges(a.x, bins=4),
    "histogram2d": lambda m, a: m.histogram2d(a.v, a.x[1], bins=3),
    "histogramdd": lambda m, a: m.histogramdd(a.x[:, :2], bins=3),
    "cov": lambda m, a: m.cov(a.x),
    "corrcoef": lambda m, a: m.corrcoef(a.x),
    "trace": lambda m, a: m.trace(a.x),
    "ediff1d": lambda m, a: m.ediff1d(a.x, to_end=1.0),
    "apply_along_axis": lambda m, a: m.apply_along_axis(m.cumsum, 0, a.x),
    "apply_over_axes": lambda m, a: m.apply_over_axes(m.sum, a.x, (0, 1)),
}

PRODUCTS = {
    **_each("dot inner matmul outer vdot vecdot kron tensordot", lambda m, a, f: f(a.x, a.u)),
    "einsum": lambda m, a: m.einsum("ij,jk,k->ik", a.x, a.u, a.v),
    "einsum_path": lambda m, a: m.einsum_path("ij,jk,k->ik", a.x, a.u, a.v)[0],
    "matvec": lambda m, a: m.matvec(a.x, a.v),
    "vecmat": lambda m, a: m.vecmat(a.v, a.x),
    "cross": lambda m, a: m.cross(a.x[:, :3], a.u[:, :3]),
    "convolve": lambda m, a: m.convolve(a.v, a.u[0], mode="same"),
    "correlate": lambda m, a: m.correlate(a.v, a.u[0], mode="full"),
    "vander": lambda m, a: m.vander(a.u[0], 4),
    "poly": lambda m, a: m.poly(a.u[0, :3]),
    "polyadd": lambda m, a: m.polyadd(a.v, a.u[0, :5]),
    "polysub": lambda m, a: m.polysub(a.v, a.u[0, :5]),
    "polymul": lambda m, a: m.polymul(a.v, a.u[0, :5]),
    "polydiv": lambda m, a: m.polydiv(a.v, a.u[0, :3]),
    "polyder": lambda m, a: m.polyder(a.v, 2),
    "polyint": lambda m, a: m.polyint(a.v),
    "polyfit": lambda m, a: m.polyfit(m.arange(8.0), a.v, 2),
    # Two real roots, whose order is the solver's.
    "roots": lambda m, a: m.sort(m.roots(a.v[:3] * m.array([1.0, 9.0, 1.0])).real),
}

SHAPES = {
    **_each(
        "atleast_1d atleast_2d atleast_3d fliplr flipud ravel matrix_transpose transpose diagonal"
        " diag rot90 squeeze unstack tril triu argwhere nonzero flatnonzero shape ndim size"
        " iterable isscalar iscomplexobj isrealobj array asarray trim_zeros",
        lambda m, a, f: f(a.v) if f.__name__ == "trim_zeros" else f(a.x),
    ),
    **_each(
        "concatenate concat stack block hstack vstack dstack column_stack",
        lambda m, a, f: f([a.x, a.u]),
    ),
    **_each("array_split split hsplit vsplit", lambda m, a, f: f(a.x, 4)),
    "dsplit": lambda m, a: m.dsplit(a.x.reshape(4, 4, 4), 2),
    "append": lambda m, a: m.append(a.x, a.u, axis=0),
    "broadcast_arrays": lambda m, a: m.broadcast_arrays(a.x, a.v, 1.0),
    "broadcast_shapes": lambda m, a: m.broadcast_shapes((8, 1), a.v.shape),
    "broadcast_to": lambda m, a: m.broadcast_to(a.v, (4, 8)),
    "expand_dims": lambda m, a: m.expand_dims(a.x, 1),
    "meshgrid": lambda m, a: m.meshgrid(a.v, a.u[0]),
    "moveaxis": lambda m, a: m.moveaxis(a.x, 0, 1),
    "permute_dims": lambda m, a: m.permute_dims(a.x, (1, 0)),
    "rollaxis": lambda m, a: m.rollaxis(a.x, 1),
    "swapaxes": lambda m, a: m.swapaxes(a.x, 0, 1),
    "reshape": lambda m, a: m.reshape(a.x, (4, 16)),
    "resize": lambda m, a: m.resize(a.x, (3, 7)),
    "repeat": lambda m, a: (m.repeat(a.x, 2, axis=0), m.repeat(a.v, a.k, total_repeat_length=28)),
    "roll": lambda m, a: m.roll(a.x, 3, axis=1),
    "tile": lambda m, a: m.tile(a.x, (2, 1)),
    "pad": lambda m, a: (m.pad(a.x, 2), m.pad(a.x, 1, mode="reflect")),
    "delete": lambda m, a: m.delete(a.x, 3, axis=0),
    "insert": lambda m, a: m.insert(a.x, 3, a.v, axis=0),
    "packbits": lambda m, a: m.packbits(a.m),
    "unpackbits": lambda m, a: m.unpackbits(a.i.astype(m.uint8)),
}

INDEXING = {
    "take": lambda m, a: m.take(a.x, a.k, axis=0),
    "take_along_axis": lambda m, a: m.take_along_axis(a.x, a.k[:, None], axis=1),
    "put": lambda m, a: m.put(a.x, a.k, 0.0, inplace=False),
    "put_along_axis": lambda m, a: m.put_along_axis(a.x, a.k[:, None], 0.0, 1, inplace=False),
    "place": lambda m, a: m.place(a.x, a.m, a.v, inplace=False),
    "fill_diagonal": lambda m, a: m.fill_diagonal(a.x, 0.0, inplace=False),
    "compress": lambda m, a: m.compress(a.b, a.x, axis=0),
    "extract": lambda m, a: m.extract(a.m, a.x),
    "diag_indices_from": lambda m, a: m.diag_indices_from(a.x),
    "tril_indices_from": lambda m, a: m.tril_indices_from(a.x),
    "triu_indices_from": lambda m, a: m.triu_indices_from(a.x),
    "ix_": lambda m, a: m.ix_(a.k, a.k),
    "ravel_multi_index": lambda m, a: m.ravel_multi_index((a.k, a.k), (8, 8)),
    "unravel_index": lambda m, a: m.unravel_index(a.i - 1, (8, 8)),
}

SETS = {
    **_each(
        "unique unique_all unique_counts unique_inverse unique_values", lambda m, a, f: f(a.i % 5)
    ),
    **_each("intersect1d setdiff1d setxor1d union1d", lambda m, a, f: f(a.i % 5, a.k)),
    "isin": lambda m, a: m.isin(a.i, a.k),
}

MAKERS = {
    **_each("bartlett blackman hamming hanning", lambda m, a, f: f(8)),
    **_each("zeros ones empty", lambda m, a, f: f((8, 2), m.int32)),
    **_each("zeros_like ones_like empty_like", lambda m, a, f: f(a.x)),
    **_each("linspace logspace geomspace", lambda m, a, f: f(1, 2, 8)),
    **_each("tril_indices triu_indices diag_indices", lambda m, a, f: f(3)),
    "kaiser": lambda m, a: m.kaiser(8, 14.0),
    "arange": lambda m, a: m.arange(2, 10, 3),
    "eye": lambda m, a: m.eye(4, k=1),
    "identity": lambda m, a: m.identity(4),
    "full": lambda m, a: m.full((4, 2), 3),
    "full_like": lambda m, a: m.full_like(a.x, 3),
    "indices": lambda m, a: m.indices((2, 3)),
    "mask_indices": lambda m, a: m.mask_indices(3, m.triu),
    "tri": lambda m, a: m.tri(3, 4),
    "diagflat": lambda m, a: m.diagflat(a.v),
    "fromfunction": lambda m, a: m.fromfunction(lambda i, j: i + 2 * j, (4, 3)),
    "frombuffer": lambda m, a: m.frombuffer(b"abcd", m.uint8),
    "fromstring": lambda m, a: m.fromstring("1 2 3", m.int32, sep=" "),
    "from_dlpack": lambda m, a: m.from_dlpack(np.arange(4.0, dtype=np.float32)),
    "frompyfunc": lambda m, a: m.frompyfunc(lambda p, q: p * q + 1, 2, 1)(a.x, a.u),
    "vectorize": lambda m, a: m.vectorize(m.dot, signature="(n),(n)->()")(a.x, a.u),
    "load": lambda m, a: m.load(io.BytesIO(_on_bytes(lambda file: m.save(file, a.x)))),
}

OTHERS = {
    "array_repr": lambda m, a: m.array_repr(a.v),
    "array_str": lambda m, a: m.array_str(a.v),
    "can_cast": lambda m, a: m.can_cast(a.i.dtype, m.float32),
    "isdtype": lambda m, a: m.isdtype(a.x.dtype, "real floating"),
    "issubdtype": lambda m, a: m.issubdtype(a.x.dtype, m.floating),
    "promote_types": lambda m, a: m.promote_types(m.int32, m.bfloat16),
    "result_type": lambda m, a: m.result_type(a.i, a.x),
    "get_printoptions": lambda m, a: m.get_printoptions(),
    "printoptions": lambda m, a: m.printoptions(precision=3).__enter__(),
    "set_printoptions": lambda m, a: _after(
        m.set_printoptions(**np.get_printoptions()), m.get_printoptions()
    ),
    "save": lambda m, a: _on_bytes(lambda file: m.save(file, a.x)),
    "savez": lambda m, a: len(_on_bytes(lambda file: m.savez(file, x=a.x, c=a.c))),
}

NUMPY: dict[str, Example] = {
    **ELEMENTWISE,
    **REDUCTIONS,
    **PRODUCTS,
    **SHAPES,
    **INDEXING,
    **SETS,
    **MAKERS,
    **OTHERS,
}

LINALG: dict[str, Example] = {
    **_each(
        "cholesky cond det diagonal eigh eigvalsh inv matrix_norm matrix_rank matrix_transpose norm"
        " pinv slogdet svdvals trace vector_norm",
        lambda m, a, f: f(a.s),
    ),
    **_each(
        "matmul outer tensordot vecdot",
        lambda m, a, f: f(a.s, a.x) if f.__name__ != "outer" else f(a.v, a.v),
    ),
    "cross": lambda m, a: m.cross(a.x[:, :3], a.u[:, :3]),
    # The sign of eigenvectors is arbitrary.
    "eig": lambda m, a: m.eig(a.s)[0],
    "eigvals": lambda m, a: m.eigvals(a.s),
    "lstsq": lambda m, a: m.lstsq(a.s, a.v)[0],
    "matrix_power": lambda m, a: m.matrix_power(a.u, 3),
    "multi_dot": lambda m, a: m.multi_dot([a.x, a.u, a.x]),
    "qr": lambda m, a: m.qr(a.s),
    "solve": lambda m, a: m.solve(a.s, a.x),
    "svd": lambda m, a: m.svd(a.s, compute_uv=False),
    "tensorinv": lambda m, a: m.tensorinv(a.s, 1),
    "tensorsolve": lambda m, a: m.tensorsolve(a.s, a.v),
}

FFT: dict[str, Example] = {
    **_each(
        "fft fft2 fftn fftshift hfft ifft ifft2 ifftn ifftshift irfft irfft2 irfftn",
        lambda m, a, f: f(a.c),
    ),
    **_each("ihfft rfft rfft2 rfftn", lambda m, a, f: f(a.x)),
    **_each("fftfreq rfftfreq", lambda m, a, f: f(8, 0.5)),
}

# Functions that are not called above, with the reason.
NOT_CALLED = {
    "fromfile": "JAX refuses it: a file may change",
    "fromiter": "JAX refuses it: an iterator changes",
}
