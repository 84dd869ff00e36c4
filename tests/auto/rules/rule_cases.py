"""Calls of JAX's primitives, by family: each with a function and its arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

type Case = tuple[str, Callable[..., Any], tuple[Any, ...]]

_random = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return _random.uniform(0.1, 0.9, shape).astype(np.float32)


def ints(*shape: int, high: int = 4) -> np.ndarray:
    return _random.integers(0, high, shape).astype(np.int32)


X, Y, Z = floats(4, 6, 8), floats(4, 6, 8), floats(4, 6, 8)
M, N = ints(4, 6), ints(4, 6)
TABLE = jnp.asarray(floats(6, 8))

UNARY = (
    *("abs", "acos", "asin", "asinh", "atan", "atanh", "cbrt", "ceil", "cos", "cosh", "erf"),
    *("erfc", "exp", "exp2", "expm1", "floor", "is_finite", "log", "log1p", "log2", "logistic"),
    *("neg", "one_minus_square", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square"),
    *("tan", "tanh"),
)
BINARY = (
    *("add", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne"),
    *("nextafter", "pow", "rem", "sub"),
)
INTEGER = (
    *("bitwise_and", "bitwise_or", "bitwise_xor", "mulhi", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical"),
)


def elementwise() -> list[Case]:
    x, y, z = X[..., 0], Y[..., 0], Z[..., 0]
    c = (x + 1j * y).astype(np.complex64)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    # Each release of JAX has some functions that the other one hasn't.
    cases: list[Case] = [
        (name, getattr(lax, name), args)
        for names, args in (
            *((UNARY, (x,)), (BINARY, (x, y)), (INTEGER, (M, N))),
            *((("bitwise_not", "clz", "population_count"), (M,)), (("real", "imag", "conj"), (c,))),
        )
        for name in names
        if hasattr(lax, name)
    ]
    cases += [
        (name, getattr(primitives, f"{name}_p").bind, (x, y))
        for name in ("eq_to", "le_to", "lt_to")
    ]
    return [
        *cases,
        ("complex", lax.complex, (x, y)),
        ("integer_pow", lambda x: lax.integer_pow(x, 3), (x,)),
        ("reduce_precision", lambda x: lax.reduce_precision(x, 5, 3), (x,)),
        ("convert", lambda x: lax.convert_element_type(x, jnp.bfloat16), (x,)),
        ("bitcast", lambda x: lax.bitcast_convert_type(x, jnp.int32), (x,)),
        ("clamp", lax.clamp, (x, y, z)),
        ("clamp scalars", lambda x: lax.clamp(0.2, x, 0.5), (x,)),
        ("select", lambda p, x, y: lax.select_n(p > 1, x, y), (M, x, y)),
        ("select scalar", lambda x, y: lax.select_n(jnp.bool_(True), x, y), (x, y)),
        ("scalar", lambda x: lax.add(x, 2.0), (x,)),
        ("copy", lambda x: jnp.array(x, copy=True), (x,)),
        ("name", lambda x: checkpoint_name(x, "x"), (x,)),
        ("put", jax.device_put, (x,)),
        ("put both", lambda x, y: jax.device_put((x, y)), (x, M)),
        ("barrier", lambda x: lax.optimization_barrier(x), (x,)),
        ("barriers", lambda x, y: lax.optimization_barrier((x, y)), (X, M)),
        ("constraint", lambda x: lax.with_sharding_constraint(x, here), (x,)),
        ("gradient", jax.grad(lambda x: (jnp.sin(x) * x + jax.nn.gelu(x)).sum()), (x,)),
    ]


def special() -> list[Case]:
    """Return special functions, which take long to compile."""
    x, y = floats(4), floats(4)
    unary = ("acosh", "bessel_i0e", "bessel_i1e", "digamma", "erf_inv", "lgamma")
    return [
        *((name, getattr(lax, name), (x,)) for name in unary),
        *(
            (name, getattr(lax, name), (x, y))
            for name in ("igamma", "igamma_grad_a", "igammac", "polygamma", "zeta")
        ),
        ("betainc", lax.betainc, (x, y, x)),
    ]


def moving() -> list[Case]:
    """Return calls that move, repeat or reorder whole dimensions."""
    shapes = (
        *((24, 8), (4, 48), (192,), (4, 2, 3, 8), (2, 2, 6, 8), (1, 4, 6, 1, 8), (3, 64)),
        *((12, 16), (6, 4, 8), (8, 6, 4), (4, 3, 16), (2, 96), (96, 2), (16, 12)),
    )
    octets = ints(4, 6, 4).astype(np.uint8)
    cases: list[Case] = [
        (f"reshape {shape}", lambda x, shape=shape: lax.reshape(x, shape), (X,)) for shape in shapes
    ]
    # Functions of newer releases of JAX.
    cases += [
        (name, function, args)
        for name, function, args in (
            ("stack", lambda x, y: lax.stack([x, y], 1), (X, Y)),
            ("unstack", lambda x: lax.unstack(x, 1), (X,)),
            ("tile", lambda x: lax.tile(x, (1, 2, 1)), (X,)),
            ("empty", lambda: lax.empty((4, 6), np.float32), ()),
        )
        if hasattr(lax, name)
    ]
    return [
        *cases,
        ("reshape order", lambda x: lax.reshape(x, (48, 4), (1, 2, 0)), (X,)),
        ("broadcast", lambda x: lax.broadcast_in_dim(x, (2, 4, 3, 6), (1, 3)), (X[..., 0],)),
        ("broadcast ones", lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), (X[:1, :, 0],)),
        ("broadcast scalar", lambda x: lax.broadcast_in_dim(x, (4, 6), ()), (X[0, 0, 0],)),
        ("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (X,)),
        ("squeeze", lambda x: lax.squeeze(x, (0, 2)), (X[:1, :, :1],)),
        ("expand", lambda x: lax.expand_dims(x, (0, 2)), (X,)),
        ("rev", lambda x: lax.rev(x, (1,)), (X,)),
        ("concatenate", lambda x, y: lax.concatenate([x, y], 1), (X, Y[:, :2])),
        ("concatenate halves", lambda x, y: lax.concatenate([x, y], 1), (X, Y)),
        ("edges", lambda x, y: lax.concatenate([y, x, y], 2), (X, Y[..., :1])),
        ("rolled", lambda x: jnp.roll(x, 1, 2), (X,)),
        ("shifted", lambda x: jnp.pad(x, ((0, 0), (0, 0), (2, 0)))[..., :-2], (X,)),
        ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (0, 0, 1))), (X,)),
        ("split", lambda x: lax.split(x, (2, 4), 1), (X,)),
        ("wider", lambda x: lax.bitcast_convert_type(x, jnp.uint8), (M,)),
        ("narrower", lambda x: lax.bitcast_convert_type(x, jnp.uint32), (octets,)),
        ("iota", lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), ()),
        ("slice", lambda x: lax.slice(x, (0, 1, 1), (4, 5, 8), (1, 1, 2)), (X,)),
        ("interleave", lambda x: lax.pad(x, 0.0, ((0, 1, 1), (2, 0, 2), (-1, 1, 0))), (X,)),
    ]


def reducing() -> list[Case]:
    """Return reductions, scans, windows and sorts."""
    apart = ((1, 2, 1), (1, 2, 1), "VALID")
    overlapping = ((1, 3, 2), (1, 1, 2), ((0, 0), (1, 1), (0, 0)))
    halved = ((1, 3, 3), (1, 2, 2), "SAME")

    def pooled(start: float, function: Any, *window: Any) -> Any:
        return lambda x: lax.reduce_window(x, start, function, *window)

    def both(left: Any, right: Any) -> Any:
        return left[0] + right[0], left[1] * right[1]

    def product(x: Any, y: Any) -> Any:
        return x * y + 0 * x

    largest = pooled(-jnp.inf, lax.max, *apart)
    smooth = pooled(-jnp.inf, lax.max, *overlapping)
    return [
        *(
            (name, lambda x, name=name: getattr(lax, f"reduce_{name}")(x, (0, 2)), (X,))
            for name in ("sum", "prod", "max", "min")
        ),
        *(
            (name, lambda x, name=name: getattr(lax, f"reduce_{name}")(x, (1,)), (M > 1,))
            for name in ("and", "or", "xor")
        ),
        ("argmax", lambda x: lax.argmax(x, 1, jnp.int32), (X,)),
        ("argmin", lambda x: lax.argmin(x, 2, jnp.int32), (X,)),
        ("reduce", lambda x, y: lax.reduce((x, y), (0.0, 1.0), both, (1,)), (X, Y)),
        *(
            (name, lambda x, name=name: getattr(lax, name)(x, 1), (X,))
            for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        ),
        ("reverse", lambda x: lax.cumsum(x, 1, reverse=True), (X,)),
        ("sort", lambda x, y: lax.sort((x, y), dimension=1), (X, Y)),
        ("top_k", lambda x: lax.top_k(x, 2), (X,)),
        ("top_k of logits", lambda x: lax.top_k(x, 2), (floats(4, 512),)),
        ("approx_max_k", lambda x: lax.approx_max_k(x, 2), (X,)),
        ("max pool", largest, (X,)),
        ("overlapping pool", smooth, (X,)),
        ("halving pool", pooled(-jnp.inf, lax.max, *halved), (X,)),
        ("gradient of mean", jax.grad(lambda x: pooled(0.0, lax.add, *halved)(x).sum()), (X,)),
        ("mean pool", pooled(0.0, lax.add, *apart), (X,)),
        ("product pool", pooled(1.0, product, *apart), (X,)),
        ("min pool", pooled(jnp.inf, lax.min, *apart), (X,)),
        ("empty pool", smooth, (X[:, :0],)),
        ("gradient of pool", jax.grad(lambda x: largest(x).sum()), (X,)),
        ("gradient of overlapping pool", jax.grad(lambda x: smooth(x).sum()), (X,)),
        ("tangent of pool", lambda x, t: jax.jvp(largest, (x,), (t,)), (X, Y)),
        ("fft", lambda x: lax.fft(x, lax.FftType.FFT, (8,)), (X.astype(np.complex64),)),
        ("rfft", lambda x: jnp.fft.rfft2(x), (X,)),
    ]


def products() -> list[Case]:
    """Return matrix products and convolutions, with their gradients."""

    def conv(window_strides: Any = (1, 1), padding: Any = "SAME", **options: Any) -> Any:
        return lambda x, k: lax.conv_general_dilated(
            x, k, window_strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        )

    def gradients(f: Any) -> Any:
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1))

    def ragged(left: int, *groups: int, contracted: int, batch: tuple[int, ...] = ()) -> Any:
        dims = (((contracted,), (contracted,)), (batch, batch))
        numbers = lax.RaggedDotDimensionNumbers(dims, [left], list(groups))
        return lambda a, b, sizes: lax.ragged_dot_general(a, b, sizes, numbers)

    image, kernel = floats(4, 8, 8, 6), floats(3, 3, 6, 10)
    patches, points = floats(4, 4, 6, 10), floats(1, 1, 6, 10)
    depthwise, grouped = floats(3, 3, 1, 6), floats(3, 3, 3, 8)
    rows, groups, sizes = floats(12, 6), floats(4, 6, 10), np.array([3, 0, 5, 3], np.int32)
    many = (floats(2, 12, 6), floats(2, 4, 6, 10), np.stack([sizes, sizes[::-1]]))
    return [
        ("dot", jnp.dot, (X[0], Y[0].T)),
        ("batched", lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,)))), (X, Y)),
        ("many", lambda x, y: lax.dot_general(x, y, (((0, 2), (0, 2)), ((), ()))), (X, Y)),
        ("inner batch", lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((2,), (2,)))), (X, Y)),
        ("vector", jnp.dot, (X, Y[0, 0])),
        ("gradients of dot", gradients(jnp.dot), (X[0], Y[0].T)),
        ("ragged rows", ragged(0, 0, contracted=1), (rows, groups, sizes)),
        ("batched ragged rows", ragged(1, 1, contracted=2, batch=(0,)), many),
        ("ragged contraction", ragged(0, contracted=0), (rows, floats(12, 10), sizes)),
        ("conv", conv(), (image, kernel)),
        ("patches", conv((4, 4), "VALID"), (image, patches)),
        ("strided points", conv((2, 2), "VALID"), (image, points)),
        ("whole window", conv((1, 1), "VALID"), (image, floats(8, 8, 6, 10))),
        ("narrower than its window", conv(), (floats(8, 1, 1, 6), kernel)),
        ("empty image", conv(), (image[:, :0], kernel)),
        ("dilated", conv(rhs_dilation=(2, 2)), (image, kernel)),
        ("transposed", conv(padding=((1, 2), (1, 2)), lhs_dilation=(2, 2)), (image, kernel)),
        ("multiplied", conv(feature_group_count=6), (image, floats(3, 3, 1, 12))),
        ("batch groups", conv(batch_group_count=2), (image, kernel)),
        ("wide window", conv((2, 2)), (image, floats(7, 7, 6, 10))),
        ("gradients of wide", gradients(conv((2, 2))), (floats(4, 16, 16, 6), floats(7, 7, 6, 10))),
        ("gradients of conv", gradients(conv((2, 2))), (image, kernel)),
        ("gradients of depthwise", gradients(conv(feature_group_count=6)), (image, depthwise)),
        (
            "gradients of multiplied",
            gradients(conv(feature_group_count=3)),
            (floats(4, 8, 8, 3), floats(3, 3, 1, 6)),
        ),
        ("gradients of grouped", gradients(conv(feature_group_count=2)), (image, grouped)),
        ("gradients of patches", gradients(conv((4, 4), "VALID")), (image, patches)),
    ]


def indexing() -> list[Case]:
    """Return gathers, scatters and dynamic slices."""
    tokens, at, places = ints(4, 10, high=6), ints(4, 10, high=6), ints(4, 2, 8, high=6)
    updates, narrow, edges = floats(4, 10, 8), Y[:, :2], floats(12, 8)
    of_nodes, place = ints(12, high=6), np.int32(3)

    def take(x: Any, i: Any) -> Any:
        return jnp.take_along_axis(x, i, 1)

    def window(x: Any, i: Any) -> Any:
        return lax.dynamic_slice(x, (i, 0), (2, 8))

    def update(x: Any, u: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(x, u, (0, i, 0))

    def scattered(name: str) -> Any:
        return lambda x, i, u: getattr(x.at[i], name)(u)

    return [
        ("lookup", lambda t, i: t[i], (TABLE, tokens)),
        ("filled", lambda t, i: t.at[i].get(mode="fill", fill_value=0), (TABLE, tokens)),
        ("columns", lambda t, i: t[:, i], (TABLE, tokens)),
        ("pairs", lambda t, i, j: t[i, j], (TABLE, tokens, at)),
        ("apart", lambda t, i, j: t[i, :, j], (floats(6, 4, 8), tokens, at)),
        ("gradient of lookup", jax.grad(lambda t, i: (t[i] ** 2).sum()), (TABLE, tokens)),
        ("gradient of along", jax.grad(lambda x, i: (take(x, i) ** 2).sum()), (X, places)),
        ("windows", jax.vmap(window, (None, 0)), (TABLE, ints(4))),
        ("batched windows", jax.vmap(window), (X, ints(4))),
        ("batched updates", jax.vmap(update), (X[:, None], narrow[:, None], ints(4))),
        ("scatter", lambda x, u: x.at[jnp.array([4, 1])].set(u), (TABLE, narrow[0])),
        ("segments", lambda x, i: jax.ops.segment_sum(x, i, 6), (edges, of_nodes)),
        *(
            (f"scatter {name}", scattered(name), (TABLE, tokens, updates))
            for name in ("multiply", "min", "max", "subtract")
        ),
        ("dynamic slice", lambda x, i: lax.dynamic_slice(x, (0, i, 0), (4, 2, 8)), (X, place)),
        ("one of", lambda x, i: lax.dynamic_index_in_dim(x, i, 1), (X, place)),
        ("update", update, (X, narrow, place)),
        ("cache", update, (X, Y[:, :1], place)),
    ]


def linear_algebra() -> list[Case]:
    """Return factorizations and solutions, of a batch each."""
    a = floats(2, 4, 4) + 4 * np.eye(4, dtype=np.float32)
    symmetric, b, diagonal = a + a.transpose(0, 2, 1), floats(2, 4, 6), floats(2, 4)
    linear, pivots = lax.linalg, np.array([[1, 3, 2, 3], [0, 1, 3, 3]], np.int32)
    return [
        *((name, getattr(linear, name), (a,)) for name in ("lu", "qr", "svd", "schur")),
        *((name, getattr(linear, name), (a,)) for name in ("eig", "hessenberg")),
        *((n, getattr(linear, n), (symmetric,)) for n in ("cholesky", "eigh", "tridiagonal")),
        ("left solve", lambda a, b: linear.triangular_solve(a, b, left_side=True), (a, b)),
        ("right solve", linear.triangular_solve, (a, b.transpose(0, 2, 1))),
        ("tridiagonal solve", linear.tridiagonal_solve, (diagonal, diagonal + 2, diagonal, b)),
        ("symmetric product", linear.symmetric_product, (a, symmetric)),
        ("permutation", lambda p: linear.lu_pivots_to_permutation(p, 4), (pivots,)),
        ("householder", linear.householder_product, (a, diagonal)),
    ]


def random() -> list[Case]:
    """Return calls of random number generators."""
    key, keys = jax.random.key(0), jax.random.split(jax.random.key(0), 4)
    raw = np.arange(8, dtype=np.uint32).reshape(4, 2)
    return [
        ("seeds", jax.vmap(jax.random.key), (ints(4),)),
        ("wrap", jax.random.wrap_key_data, (raw,)),
        ("unwrap", jax.random.key_data, (keys,)),
        ("clone", jax.random.clone, (keys,)),
        ("fold in", jax.vmap(jax.random.fold_in), (keys, ints(4))),
        ("splits", jax.vmap(lambda k: jax.random.split(k, 2)), (keys,)),
        ("bits of keys", jax.vmap(lambda k: jax.random.bits(k, (6,))), (keys,)),
        ("bits", lambda k: jax.random.bits(k, (4, 6)), (key,)),
        ("gamma", jax.random.gamma, (key, X[..., 0])),
        ("rbg", lambda k: lax.rng_bit_generator(k, (4, 6)), (np.arange(4, dtype=np.uint32),)),
        ("threefry", primitives.threefry2x32_p.bind, (raw[:, 0], raw[:, 1], raw[:, 0], raw[:, 1])),
        ("uniform", lambda: lax.rng_uniform(0.0, 1.0, (4, 6)), ()),
    ]


FAMILIES = (elementwise, moving, reducing, products, indexing, linear_algebra, random)
