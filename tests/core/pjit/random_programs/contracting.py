"""Operations across elements: products, reductions, sorting, convolutions, transforms, keys."""

from collections.abc import Mapping

from tests.core.pjit.random_programs.description import FLOATS, Value
from tests.core.pjit.random_programs.elementwise import Operation
from tests.core.pjit.random_programs.pool import Drawn, NoFit, Pool

LETTERS = "abcdefg"
FFT_DTYPES = ("float32", "complex64")


def matmul(pool: Pool) -> Drawn:
    x = pool.pick("f", least=1)
    y = pool.operand((x.shape[-1], pool.dice.pick(pool.frame.sizes)), x.dtype)
    limit = x.limit * y.limit * max(x.shape[-1], 1)
    return pool.drawn(f"{x.name} @ {y.name}", exact=False, limit=limit)


def einsum(pool: Pool) -> Drawn:
    """Draw an einsum of two values: dimensions are kept, summed, or shared."""
    x = pool.pick("fc", least=1)
    mine = LETTERS[: x.ndim]
    shared = "".join(pool.dice.sample(mine, pool.dice.between(1, min(2, x.ndim))))
    shape = [x.shape[mine.index(letter)] for letter in shared]
    other = shared + "z"
    y = pool.operand((*shape, pool.dice.pick(pool.frame.sizes)), x.dtype)
    kept = [letter for letter in mine + "z" if letter not in shared or pool.dice.chance(0.3)]
    out = "".join(pool.dice.sample(kept, len(kept)))
    limit = 2 * x.limit * y.limit * max(x.size, 1)
    text = f"jnp.einsum('{mine},{other}->{out}', {x.name}, {y.name})"
    return pool.drawn(text, exact=False, limit=limit)


def dot_general(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=2)
    batch, summed = pool.dice.sample(range(x.ndim), 2)
    y = pool.operand((x.shape[batch], pool.dice.between(1, 4), x.shape[summed]), x.dtype)
    dims = f"((({summed},), (2,)), (({batch},), (0,)))"
    wide = "float32" if x.kind == "f" else "int32"
    text = f"lax.dot_general({x.name}, {y.name}, {dims}, preferred_element_type='{wide}')"
    limit = x.limit * y.limit * max(x.shape[summed], 1)
    return pool.drawn(text, exact=x.kind == "i", limit=limit if x.kind == "f" else 1.0)


def _axes(pool: Pool, x: Value) -> tuple[str, int]:
    """Draw axes to reduce, as an argument, with the number of elements per result."""
    if not x.ndim:
        raise NoFit
    axes = tuple(sorted(pool.dice.sample(range(x.ndim), pool.dice.between(1, x.ndim))))
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    keep = ", keepdims=True" if pool.dice.chance(0.3) else ""
    return (f"{axes[0] if len(axes) == 1 else axes}{keep}", count)


def total(pool: Pool) -> Drawn:
    x = pool.pick("fic", least=1)
    axes, count = _axes(pool, x)
    return pool.drawn(
        f"jnp.sum({x.name}, {axes})", exact=x.kind == "i", limit=x.limit * max(count, 1)
    )


def mean(pool: Pool) -> Drawn:
    x = pool.pick("f", least=1, full=True)
    how = pool.dice.pick(["mean", "var"])
    axes, _ = _axes(pool, x)
    limit = x.limit if how == "mean" else x.limit**2
    return pool.drawn(f"jnp.{how}({x.name}, {axes})", exact=False, limit=limit)


def largest(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1, full=True, kink=True)
    axes, _ = _axes(pool, x)
    return pool.drawn(f"jnp.{pool.dice.pick(['max', 'min'])}({x.name}, {axes})", x)


def product(pool: Pool) -> Drawn:
    x = pool.pick("f", least=1, full=True)
    axes, _ = _axes(pool, x)
    return pool.drawn(f"jnp.prod(jnp.cos({x.name}), {axes})", exact=False, limit=1.0)


def truth(pool: Pool) -> Drawn:
    x = pool.pick("b", least=1)
    axes, _ = _axes(pool, x)
    return pool.drawn(f"jnp.{pool.dice.pick(['any', 'all'])}({x.name}, {axes})", x)


def position(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1, full=True, exact=True)
    return pool.drawn(
        f"jnp.{pool.dice.pick(['argmax', 'argmin'])}({x.name}, {pool.axis(x)})", exact=True
    )


def logsumexp(pool: Pool) -> Drawn:
    x = pool.pick("f", least=1, full=True)
    axes, count = _axes(pool, x)
    return pool.drawn(
        f"jax.nn.logsumexp({x.name}, {axes})", exact=False, limit=x.limit + count**0.5
    )


def softmax(pool: Pool) -> Drawn:
    x = pool.pick("f", least=1, full=True)
    how, axis = pool.dice.pick(["softmax", "log_softmax", "standardize"]), pool.axis(x)
    if how == "standardize":
        # The epsilon that it adds to a variance does not matter beside that of a constant row.
        text, limit = f"jax.nn.standardize({x.name}, axis={axis}, epsilon=0.1)", 10 * x.limit
    else:
        text, limit = f"jax.nn.{how}({x.name}, {axis})", 2 * x.limit + 5
    return pool.drawn(text, exact=False, limit=limit)


def cumulative(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1)
    axis = pool.axis(x)
    how = pool.dice.pick(["cumsum", "cumsum", "cumlogsumexp"] if x.kind == "f" else ["cumsum"])
    reverse = pool.dice.chance(0.3)
    return pool.drawn(
        f"lax.{how}({x.name}, {axis}, reverse={reverse})",
        exact=x.kind == "i",
        limit=x.limit * max(x.shape[axis], 1) + 4,
    )


def cumulative_extremum(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1, kink=True)
    return pool.drawn(f"lax.{pool.dice.pick(['cummax', 'cummin'])}({x.name}, {pool.axis(x)})", x)


def cumulative_product(pool: Pool) -> Drawn:
    x = pool.pick("f", least=1)
    return pool.drawn(f"jnp.cumprod(jnp.cos({x.name}), {pool.axis(x)})", exact=False, limit=1.0)


def window(pool: Pool) -> Drawn:
    if pool.smooth:
        # Both partitioners take wrong windows for the derivative (SelectAndScatter) of a sharded
        # dimension, with jax.jit as well.
        raise NoFit
    x = pool.pick("f", least=1)
    dims = tuple(pool.dice.between(1, 3) for _ in x.shape)
    steps = tuple(pool.dice.between(1, 2) for _ in x.shape)
    padding = pool.dice.pick(["VALID", "SAME"])
    low = f"np.array(-np.inf, jnp.{x.dtype})"
    text = f"lax.reduce_window({x.name}, {low}, lax.max, {dims}, {steps}, '{padding}')"
    return pool.drawn(text, x)


def sort(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1, kink=True)
    return pool.drawn(f"jnp.sort({x.name}, {pool.axis(x)})", x)


def argsort(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1, exact=True)
    return pool.drawn(f"jnp.argsort({x.name}, {pool.axis(x)})", exact=True, limit=x.shape[0])


def sort_pairs(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1, exact=True)
    y = pool.operand(x.shape, pool.dice.pick([x.dtype, "int32", "float32"]))
    return pool.drawn(f"lax.sort(({x.name}, {y.name}), dimension={pool.axis(x)})", x, y)


def top_k(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1, exact=True, where=lambda v: v.shape[-1] > 0)
    return pool.drawn(f"lax.top_k({x.name}, {pool.dice.between(1, x.shape[-1])})", x)


def convolution(pool: Pool) -> Drawn:
    x = pool.pick("f", least=3, full=True)
    window = pool.dice.between(1, 3)
    spatial = x.ndim - 2
    y = pool.operand((*[window] * spatial, x.shape[-1], pool.dice.pick(pool.frame.sizes)), x.dtype)
    dims = {1: "('NWC', 'WIO', 'NWC')", 2: "('NHWC', 'HWIO', 'NHWC')"}[spatial]
    # Both partitioners take the derivative of a convolution with steps, along a sharded dimension,
    # from the wrong neighbours; with jax.jit as well.
    steps = tuple(1 if pool.smooth else pool.dice.between(1, 2) for _ in range(spatial))
    padding = pool.dice.pick(["VALID", "SAME"])
    text = (
        f"lax.conv_general_dilated({x.name}, {y.name}, {steps}, '{padding}', "
        f"dimension_numbers={dims})"
    )
    limit = x.limit * y.limit * window**spatial * x.shape[-1]
    return pool.drawn(text, exact=False, limit=limit)


def fft(pool: Pool) -> Drawn:
    """Draw a transform of one dimension: for more, XLA's CPU backend may refuse its own layout."""
    x = pool.pick("fc", where=lambda v: v.dtype in FFT_DTYPES and v.ndim == 1 and v.size > 1)
    how = pool.dice.pick(["fft", "ifft"] if x.kind == "c" else ["fft", "rfft", "ifft"])
    return pool.drawn(f"jnp.fft.{how}({x.name})", exact=False, limit=2 * x.limit * x.size)


def new_keys(pool: Pool) -> Drawn:
    key = pool.pick("k", where=lambda v: v.ndim == 0)
    if pool.dice.chance(0.3):
        return pool.drawn(f"jax.random.fold_in({key.name}, {pool.dice.below(9)})", exact=True)
    return pool.drawn(f"jax.random.split({key.name}, {pool.dice.pick(pool.frame.sizes)})", key)


def random_floats(pool: Pool) -> Drawn:
    key = pool.pick("k", where=lambda v: v.ndim == 0)
    dtype = pool.dice.pick(FLOATS)
    shape = tuple(pool.dice.sample(pool.frame.sizes, pool.dice.between(0, 2)))
    how, limit = pool.dice.pick([("normal", 6.0), ("uniform", 1.0), ("truncated_normal", 2.0)])
    bounds = ", -2.0, 2.0" if how == "truncated_normal" else ""
    text = f"jax.random.{how}({key.name}{bounds}, shape={shape}, dtype='{dtype}')"
    return pool.drawn(text, exact=how == "uniform", limit=limit)


def random_others(pool: Pool) -> Drawn:
    key = pool.pick("k", where=lambda v: v.ndim == 0)
    shape = tuple(pool.dice.sample(pool.frame.sizes, pool.dice.between(0, 2)))
    text = pool.dice.pick(
        [
            f"jax.random.bits({key.name}, {shape}, 'uint8')",
            f"jax.random.randint({key.name}, {shape}, 0, 10)",
            f"jax.random.bernoulli({key.name}, 0.25, {shape})",
            f"jax.random.permutation({key.name}, {pool.dice.pick(pool.frame.sizes)})",
        ]
    )
    return pool.drawn(text, exact=True, limit=10.0)


def many_random(pool: Pool) -> Drawn:
    key = pool.pick("k", where=lambda v: v.ndim == 1)
    text = f"jax.vmap(lambda k: jax.random.uniform(k, (3,)))({key.name})"
    return pool.drawn(text, exact=True)


OPERATIONS: Mapping[str, Operation] = {
    operation.__name__: operation
    for operation in (
        matmul,
        einsum,
        dot_general,
        total,
        mean,
        largest,
        product,
        truth,
        position,
        logsumexp,
        softmax,
        cumulative,
        cumulative_extremum,
        cumulative_product,
        window,
        sort,
        argsort,
        sort_pairs,
        top_k,
        convolution,
        fft,
        new_keys,
        random_floats,
        random_others,
        many_random,
    )
}
