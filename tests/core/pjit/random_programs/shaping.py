"""Operations that move elements: shapes, slices, gathers and scatters."""

from collections.abc import Mapping, Sequence

from tests.core.pjit.random_programs.description import Value
from tests.core.pjit.random_programs.elementwise import Operation
from tests.core.pjit.random_programs.pool import Drawn, NoFit, Pool

ANY = "fibc"


def reshape(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1)
    shape = list(x.shape)
    if len(shape) > 1 and pool.dice.chance(0.5):
        at = pool.dice.below(len(shape) - 1)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    else:
        at = pool.dice.below(len(shape))
        factors = [n for n in range(1, 9) if shape[at] % n == 0]
        factor = pool.dice.pick(factors)
        shape[at : at + 1] = [factor, shape[at] // factor]
    if pool.dice.chance(0.2):
        shape = [x.size]
    return pool.drawn(f"{x.name}.reshape({tuple(shape)})", x)


def transpose(pool: Pool) -> Drawn:
    x = pool.pick(ANY + "k", least=2)
    order = tuple(pool.dice.sample(range(x.ndim), x.ndim))
    return pool.drawn(f"{x.name}.transpose({order})", x)


def expand(pool: Pool) -> Drawn:
    x = pool.pick(ANY)
    if x.ndim and 1 in x.shape and pool.dice.chance(0.5):
        return pool.drawn(f"jnp.squeeze({x.name}, {x.shape.index(1)})", x)
    return pool.drawn(f"jnp.expand_dims({x.name}, {pool.dice.below(x.ndim + 1)})", x)


def broadcast(pool: Pool) -> Drawn:
    x = pool.pick(ANY)
    shape = tuple(pool.dice.pick(pool.frame.sizes) if n == 1 else n for n in x.shape)
    if pool.dice.chance(0.6):
        shape = (pool.dice.pick(pool.frame.sizes), *shape)
    return pool.drawn(f"jnp.broadcast_to({x.name}, {shape})", x)


def join(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1)
    y, axis = pool.operand(x.shape, x.dtype), pool.axis(x)
    how = pool.dice.pick(["concatenate", "stack"])
    return pool.drawn(f"jnp.{how}([{x.name}, {y.name}, {x.name}], {axis})", x, y)


def pad(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1)
    if pool.dice.chance(0.5):
        widths = [(pool.dice.below(3), pool.dice.below(3)) for _ in x.shape]
        mode = pool.dice.pick(["constant", "edge", "wrap"])
        return pool.drawn(f"jnp.pad({x.name}, {widths}, mode='{mode}')", x)
    # Interior widths over a sharded dimension make programs that XLA's verifier refuses after
    # partitioning, with jax.jit as well, and together with widths below zero end the process.
    widths = [(pool.dice.between(-1, 2), pool.dice.below(2), 0) for _ in x.shape]
    return pool.drawn(f"lax.pad({x.name}, jnp.zeros((), '{x.dtype}'), {widths})", x)


def cut(pool: Pool) -> Drawn:
    """Draw a static slice, forwards or backwards, with steps."""
    x = pool.pick(ANY + "k", least=1)
    parts = []
    for length in x.shape:
        start = pool.dice.below(max(length, 1))
        parts.append(
            pool.dice.pick([":", f"{start}:", f":{start + 1}", f"{start}::2", "::-1", f"-{start}:"])
        )
    if pool.dice.chance(0.2) and x.shape[0]:
        parts[0] = str(pool.dice.below(x.shape[0]))
    return pool.drawn(f"{x.name}[{', '.join(parts)}]", x)


def _start(pool: Pool, room: int) -> str:
    """Draw an index below `room`: an available integer, or a constant.

    An index past the end would be clamped, but if the partitioner shards that dimension, an
    update, or the gradient of a slice, is lost, with jax.jit as well.
    """
    whole = [v for v in pool.values if v.kind == "i" and not v.ndim]
    if whole and pool.dice.chance(0.7):
        return f"jnp.int32({pool.dice.pick(whole).name}) % {room}"
    return str(pool.dice.below(room))


def _starts(pool: Pool, x: Value, sizes: Sequence[int]) -> str:
    return ", ".join(_start(pool, n - m + 1) for n, m in zip(x.shape, sizes, strict=True))


def dynamic_slice(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1, full=True)
    sizes = tuple(pool.dice.between(1, n) for n in x.shape)
    return pool.drawn(f"lax.dynamic_slice({x.name}, ({_starts(pool, x, sizes)},), {sizes})", x)


def dynamic_update(pool: Pool) -> Drawn:
    if pool.taken:
        # Its batch along an axis of the mesh ends the process in the oldest JAX, with jax.jit too.
        raise NoFit
    x = pool.pick(ANY, least=1, full=True)
    update = pool.operand([pool.dice.between(1, n) for n in x.shape], x.dtype)
    starts = _starts(pool, x, update.shape)
    return pool.drawn(f"lax.dynamic_update_slice({x.name}, {update.name}, ({starts},))", x, update)


def dynamic_index(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1, full=True)
    axis = pool.axis(x)
    start = _start(pool, x.shape[axis])
    return pool.drawn(f"lax.dynamic_index_in_dim({x.name}, {start}, {axis})", x)


def reverse(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1)
    return pool.drawn(f"jnp.flip({x.name}, {pool.axis(x)})", x)


def roll(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1)
    return pool.drawn(f"jnp.roll({x.name}, {pool.dice.between(-5, 5)}, {pool.axis(x)})", x)


def repeat(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1)
    if pool.dice.chance(0.5):
        return pool.drawn(f"jnp.repeat({x.name}, 2, {pool.axis(x)})", x)
    return pool.drawn(f"jnp.tile({x.name}, {tuple(pool.dice.between(1, 2) for _ in x.shape)})", x)


def triangle(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=2)
    how = pool.dice.pick(["tril", "triu"])
    return pool.drawn(f"jnp.{how}({x.name}, {pool.dice.between(-1, 2)})", x)


def diagonal(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=2)
    return pool.drawn(f"jnp.diagonal({x.name}, {pool.dice.between(0, 1)})", x)


def _indices(pool: Pool, length: int) -> Value:
    """Draw integers to index a dimension with, possibly out of bounds.

    Their number divides over the mesh: if the partitioner shards the updates of a scatter, or of
    the gradient of a gather, unevenly, its padding is added to row 0, with jax.jit as well.
    """
    if not length:
        raise NoFit
    whole = [
        v
        for v in pool.values
        if v.dtype == "int32" and 0 < v.ndim <= 2 and all(n % pool.devices == 0 for n in v.shape)
    ]
    if whole and pool.dice.chance(0.6):
        return pool.dice.pick(whole)
    return pool.constant((pool.devices * pool.dice.between(1, 2),), "int32")


def gather(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1)
    axis = pool.axis(x)
    indices = _indices(pool, x.shape[axis])
    mode = pool.dice.pick(["clip", "wrap", "fill"])
    if mode == "fill" and x.kind == "f":
        # NaN, the default fill value, would spread over all the rest.
        return pool.drawn(
            f"jnp.take({x.name}, {indices.name}, {axis}, mode='fill', fill_value=0.5)", x
        )
    return pool.drawn(f"jnp.take({x.name}, {indices.name}, {axis}, mode='{mode}')", x)


def index_rows(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=2)
    rows, columns = _indices(pool, x.shape[0]), _indices(pool, x.shape[1])
    if pool.dice.chance(0.5):
        return pool.drawn(f"{x.name}[{rows.name} % {x.shape[0]}]", x)
    texts = [
        f"{i.name}.reshape(-1)[:3] % {n}" for i, n in zip((rows, columns), x.shape[:2], strict=True)
    ]
    return pool.drawn(f"{x.name}[{', '.join(texts)}]", x)


def take_along(pool: Pool) -> Drawn:
    x = pool.pick(ANY, least=1)
    axis = pool.axis(x)
    if not x.shape[axis]:
        raise NoFit
    indices = pool.operand(x.shape, "int32")
    text = f"jnp.take_along_axis({x.name}, {indices.name} % {x.shape[axis]}, {axis})"
    return pool.drawn(text, x)


def scatter(pool: Pool) -> Drawn:
    """Draw an addition, product or bound of rows; a row may occur twice."""
    x = pool.pick("fi", least=1)
    indices = _indices(pool, x.shape[0])
    how = pool.dice.pick(["add", "min", "max"] if not pool.smooth else ["add"])
    updates = pool.operand((*indices.shape, *x.shape[1:]), x.dtype)
    text = f"{x.name}.at[{indices.name}].{how}({updates.name}, mode='drop')"
    exact = x.exact and updates.exact and how != "add"
    limit = x.limit + updates.limit * max(indices.size, 1)
    return pool.drawn(text, exact=exact or x.kind == "i", limit=limit)


def scatter_rows(pool: Pool) -> Drawn:
    """Draw an assignment of rows, each at most once: the order of two is undefined."""
    x = pool.pick(ANY, least=1, full=True)
    count = pool.dice.between(1, x.shape[0])
    rows = sorted(pool.dice.sample(range(x.shape[0]), count))
    updates = pool.operand((count, *x.shape[1:]), x.dtype)
    text = f"{x.name}.at[np.array({rows})].set({updates.name})"
    return pool.drawn(text, x, updates)


def segment_sum(pool: Pool) -> Drawn:
    # Evenly, for the reason that `_indices` gives.
    x = pool.pick("fi", least=1, where=lambda v: v.shape[0] % pool.devices == 0)
    segments = pool.operand(x.shape[:1], "int32")
    text = f"jax.ops.segment_sum({x.name}, {segments.name} % 4, num_segments=4)"
    return pool.drawn(text, x, exact=x.kind == "i", limit=x.limit * max(x.shape[0], 1))


def iota(pool: Pool) -> Drawn:
    x = pool.pick("fi", least=1)
    dtype = pool.dice.pick(["int32", "float32"])
    text = f"lax.broadcasted_iota('{dtype}', {x.shape}, {pool.axis(x)})"
    return pool.drawn(text, exact=True, limit=float(max(x.shape)))


def one_hot(pool: Pool) -> Drawn:
    x = pool.pick("i")
    dtype = pool.dice.pick(["float32", "bfloat16", "int32"])
    return pool.drawn(
        f"jax.nn.one_hot({x.name} % 5, {pool.dice.between(3, 8)}, dtype='{dtype}')", exact=True
    )


OPERATIONS: Mapping[str, Operation] = {
    operation.__name__: operation
    for operation in (
        reshape,
        transpose,
        expand,
        broadcast,
        join,
        pad,
        cut,
        dynamic_slice,
        dynamic_update,
        dynamic_index,
        reverse,
        roll,
        repeat,
        triangle,
        diagonal,
        gather,
        index_rows,
        take_along,
        scatter,
        scatter_rows,
        segment_sum,
        iota,
        one_hot,
    )
}
