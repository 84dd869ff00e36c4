"""Operations that call functions: control flow, transformations, pjit and constraints inside."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.core.pjit.random_programs.description import Block, Step, Value
from tests.core.pjit.random_programs.elementwise import Operation
from tests.core.pjit.random_programs.pool import Drawn, NoFit, Pool
from tests.core.pjit.random_programs.specs import draw_spec

MOST_DEPTH = 2


def _params(pool: Pool, *values: Value) -> list[Value]:
    """Return parameters of a function for the given values."""
    return [replace(v, name=pool.fresh()) for v in values]


def _grown(pool: Pool, params: Sequence[Value], **changed: object) -> tuple[Pool, list[Step]]:
    """Draw a few statements of a function of the parameters."""
    if pool.depth >= MOST_DEPTH:
        raise NoFit
    inside = pool.inner(params, **changed)
    count = pool.dice.between(1, 3 if pool.depth == 0 else 2)
    return inside, list(pool.frame.grow(inside, count))


def _made(inside: Pool, steps: Sequence[Step], kinds: str) -> Value:
    """Return the newest value of these kinds that the statements made."""
    made = [t for step in steps for t in step.targets if t.kind in kinds]
    if not made:
        raise NoFit
    return inside.dice.pick(made[-2:])


def _merged(inside: Pool, steps: list[Step], carry: Value) -> str:
    """Return the next carry of a loop, of the same type and dependent on the statements."""
    if carry.kind == "i":
        made = [t for step in steps for t in step.targets if t.kind == "i"]
        other = f"jnp.sum({made[-1].name}).astype('{carry.dtype}')" if made else "1"
        return f"{carry.name} + {other}"
    made = _made(inside, steps, "fibc")
    # So weakly that rounding errors don't grow from round to round.
    share = f"scalar({made.name}) * {1 / max(made.limit, 1.0):.4f}"
    return f"jnp.sin({carry.name} + ({share}).astype('{carry.dtype}'))"


def _rough(value: Value) -> Value:
    """Return the value after an unknown number of iterations."""
    return replace(value, exact=value.kind != "f", limit=max(value.limit, 1.0))


def _carry(pool: Pool) -> Value:
    return pool.pick("fi", where=lambda v: v.size <= 1024)


def scan(pool: Pool) -> Drawn:
    start = _carry(pool)
    along = pool.pick("fibck", least=1)
    carry, piece = _params(pool, _rough(start), replace(along, shape=along.shape[1:]))
    inside, steps = _grown(pool, [carry, piece])
    out = _made(inside, steps, "fibc")
    results = (_merged(inside, steps, carry), out.name)
    block = Block(pool.fresh("f"), (carry, piece), tuple(steps), results)
    options = ", reverse=True" if pool.dice.chance(0.3) else ""
    options += ", unroll=2" if pool.dice.chance(0.2) else ""
    text = f"lax.scan({block.name}, {start.name}, {along.name}{options})"
    limit = max(carry.limit + 1, out.limit)
    return pool.drawn(text, exact=False, limit=limit, blocks=(block,))


def fori_loop(pool: Pool) -> Drawn:
    start = _carry(pool)
    index = Value(pool.fresh(), (), "int32", True, 3.0)
    (carry,) = _params(pool, _rough(start))
    inside, steps = _grown(pool, [index, carry])
    result = _merged(inside, steps, carry)
    block = Block(pool.fresh("f"), (index, carry), tuple(steps), (result,))
    text = f"lax.fori_loop(0, {pool.dice.between(1, 3)}, {block.name}, {start.name})"
    return pool.drawn(text, exact=False, limit=carry.limit + 1, blocks=(block,))


def while_loop(pool: Pool) -> Drawn:
    if pool.smooth:
        raise NoFit  # the number of rounds is not known before: no reverse derivative
    start = _carry(pool)
    index = Value(pool.fresh(), (), "int32", True, 3.0)
    (carry,) = _params(pool, _rough(start))
    inside, steps = _grown(pool, [index, carry])
    both = Value(pool.fresh(), (), "int32")
    body = Block(
        pool.fresh("f"),
        (index, carry),
        tuple(steps),
        (f"{index.name} + 1", _merged(inside, steps, carry)),
    )
    rounds = f"lambda {both.name}: {both.name}[0] < {pool.dice.between(0, 3)}"
    text = (
        f"lax.while_loop({rounds}, lambda {both.name}: {body.name}(*{both.name}), "
        f"(jnp.int32(0), {start.name}))[1]"
    )
    return pool.drawn(text, exact=False, limit=carry.limit + 1, blocks=(body,))


def _branches(pool: Pool, value: Value, count: int) -> list[Block]:
    """Draw functions of one value that return another of its shape and dtype."""
    blocks = []
    for _ in range(count):
        (param,) = _params(pool, value)
        inside, steps = _grown(pool, [param])
        result = _merged(inside, steps, param)
        blocks.append(Block(pool.fresh("f"), (param,), tuple(steps), (result,)))
    return blocks


def cond(pool: Pool) -> Drawn:
    x = _carry(pool)
    chosen = pool.pick("bi", where=lambda v: v.ndim == 0)
    first, second = _branches(pool, x, 2)
    test = chosen.name if chosen.kind == "b" else f"{chosen.name} % 2 == 0"
    text = f"lax.cond({test}, {first.name}, {second.name}, {x.name})"
    return pool.drawn(text, exact=False, limit=x.limit + 1, blocks=(first, second))


def switch(pool: Pool) -> Drawn:
    x = _carry(pool)
    chosen = pool.pick("i", where=lambda v: v.ndim == 0)
    blocks = _branches(pool, x, 3)
    names = ", ".join(b.name for b in blocks)
    text = f"lax.switch({chosen.name}, [{names}], {x.name})"
    return pool.drawn(text, exact=False, limit=x.limit + 1, blocks=tuple(blocks))


def _mapped(pool: Pool, around: str, taken: tuple[str, ...] = (), tiles: int = 1) -> Drawn:
    """Draw a function over the rows of a value, whose number is a multiple of `tiles`."""
    x = pool.pick("fibc", least=1, where=lambda v: v.shape[0] % tiles == 0)
    (row,) = _params(pool, replace(x, shape=x.shape[1:]))
    inside, steps = _grown(pool, [row], taken=(*pool.taken, *taken))
    made = _made(inside, steps, "fibck")
    block = Block(pool.fresh("f"), (row,), tuple(steps), (made.name,))
    text = f"{around.format(block.name)}{x.name})"
    return pool.drawn(text, exact=made.exact, limit=made.limit, blocks=(block,))


def loop_map(pool: Pool) -> Drawn:
    return _mapped(pool, "lax.map({}, ")


def vmap(pool: Pool) -> Drawn:
    return _mapped(pool, "jax.vmap({})(")


def spread(pool: Pool) -> Drawn:
    """Draw a `vmap` whose batch is sharded over an axis of the mesh, which is then in use.

    The batch divides: else `shard_map` inside loses elements, under jax.jit as well.
    """
    free = [axis for axis in pool.frame.axes if axis[0] not in pool.taken]
    if not free:
        raise NoFit
    name, size = pool.dice.pick(free)
    return _mapped(pool, f"spread({{}}, '{name}')(", (name,), size)


def _called(pool: Pool, around: str, *, decorator: str = "") -> Drawn:
    """Draw a function of one value, and the expression that calls it."""
    x = pool.pick("fibck")
    (param,) = _params(pool, x)
    inside, steps = _grown(pool, [param])
    made = _made(inside, steps, "fibck")
    block = Block(pool.fresh("f"), (param,), tuple(steps), (made.name,), decorator)
    text = f"{around.format(block.name)}({x.name})"
    return pool.drawn(text, exact=made.exact, limit=made.limit, blocks=(block,))


def _resource(pool: Pool, value: Value) -> str:
    """Draw the resource of an argument or result of an inner pjit."""
    if pool.dice.chance(0.4):
        return pool.dice.pick(["UNSPECIFIED", "None"])
    spec = draw_spec(pool.dice, value.shape, pool.frame.axes, without=pool.taken)
    return f"place({spec})"


def inner_pjit(pool: Pool) -> Drawn:
    drawn = _called(pool, "{}")
    (block,) = drawn.blocks
    result = next(t for step in block.steps for t in step.targets if t.name == block.results[0])
    ins, outs = _resource(pool, block.params[0]), _resource(pool, result)
    call = drawn.text.removeprefix(block.name)
    text = f"pjit({block.name}, in_shardings=({ins},), out_shardings={outs}){call}"
    return replace(drawn, text=text)


def twice(pool: Pool) -> Drawn:
    """Draw two calls of one pjit, which may share a compiled program."""
    drawn = _called(pool, "pjit({})")
    (block,) = drawn.blocks
    param = block.params[0]
    first = drawn.text.removeprefix(f"pjit({block.name})(").removesuffix(")")
    other = pool.operand(param.shape, param.dtype)
    return replace(drawn, text=f"twice(pjit({block.name}), {first}, {other.name})")


def close_over(pool: Pool) -> Drawn:
    """Draw closed-over numbers that are already sharded over the mesh."""
    x = pool.pick("fi")
    spec = draw_spec(pool.dice, x.shape, pool.frame.axes)
    text = f"{x.name} + table({x.shape}, '{x.dtype}', {spec})"
    return pool.drawn(text, x, exact=x.kind == "i", limit=x.limit + 1)


def by_hand(pool: Pool) -> Drawn:
    x = pool.pick("f")
    spec = draw_spec(pool.dice, x.shape, pool.frame.axes, without=pool.taken)
    text = f"by_hand(lambda x: jnp.sin(x) * 2, {spec})({x.name})"
    return pool.drawn(text, x, exact=False, limit=2.0)


def inner_jit(pool: Pool) -> Drawn:
    return _called(pool, "jax.jit({})")


def remat(pool: Pool) -> Drawn:
    policy = pool.dice.pick(["", ", policy=jax.checkpoint_policies.dots_saveable"])
    return _called(pool, f"jax.checkpoint({{}}{policy})")


def constrain(pool: Pool) -> Drawn:
    """Draw a constraint; dimensions may be unconstrained and, outside of functions, uneven.

    In the body of a loop XLA's partitioner adds up the padding of uneven tiles too, with jax.jit
    as well.
    """
    x = pool.pick("fibck")
    even = pool.depth > 0
    spec = draw_spec(
        pool.dice, x.shape, pool.frame.axes, without=pool.taken, even=even, opening=0.2
    )
    return pool.drawn(f"constrain({x.name}, place({spec}))", x)


def _derived(pool: Pool, **changed: object) -> tuple[Value, Block]:
    """Draw a value and a smooth function of it."""
    x = pool.pick("f")
    (param,) = _params(pool, x)
    inside, steps = _grown(pool, [param], smooth=True, **changed)
    made = _made(inside, steps, "f")
    return x, Block(pool.fresh("f"), (param,), tuple(steps), (made.name,))


def gradient(pool: Pool) -> Drawn:
    x, block = _derived(pool)
    block = replace(block, results=(f"scalar({block.results[0]})",))
    how = pool.dice.pick(["grad", "value_and_grad"])
    text = f"jax.{how}({block.name})({x.name})"
    return pool.drawn(text, exact=False, limit=max(10.0, x.limit), blocks=(block,))


def jvp(pool: Pool) -> Drawn:
    x, block = _derived(pool, forward=True)
    tangent = pool.operand(x.shape, x.dtype)
    if pool.dice.chance(0.5):
        text = f"jax.jvp({block.name}, ({x.name},), ({tangent.name},))"
    else:
        text = f"jax.linearize({block.name}, {x.name})[1]({tangent.name})"
    return pool.drawn(text, exact=False, limit=100.0, blocks=(block,))


def vjp(pool: Pool) -> Drawn:
    x, block = _derived(pool)
    text = f"jax.vjp({block.name}, {x.name})[1](jnp.ones_like({block.name}({x.name})))[0]"
    return pool.drawn(text, exact=False, limit=100.0, blocks=(block,))


def _derived_like_argument(pool: Pool) -> tuple[Value, Block]:
    """Draw a value and a smooth function of it without closed-over values that keeps its type."""
    x, block = _derived(pool, closed=True)
    (param,) = block.params
    scale = f"jnp.ones_like({param.name}) * scalar(jnp.sin({block.results[0]}))"
    return x, replace(block, results=(f"({scale}).astype({param.name}.dtype)",))


def custom_vjp(pool: Pool) -> Drawn:
    """Draw a function with a custom derivative, which may not close over values."""
    if pool.forward:
        raise NoFit
    x, block = _derived_like_argument(pool)
    block = replace(
        block,
        decorator="@jax.custom_vjp",
        rules=(
            f"{block.name}.defvjp(lambda x: ({block.name}(x), x), "
            f"lambda x, g: (jnp.cos(x) * g * 0.5,))",
        ),
    )
    text = f"jax.grad(lambda x: scalar({block.name}(x)))({x.name})"
    if pool.dice.chance(0.5):
        text = f"{block.name}({x.name})"
    return pool.drawn(text, exact=False, limit=max(2.0, x.limit), blocks=(block,))


def custom_jvp(pool: Pool) -> Drawn:
    x, block = _derived_like_argument(pool)
    block = replace(
        block,
        decorator="@jax.custom_jvp",
        rules=(f"{block.name}.defjvps(lambda t, out, x: (jnp.cos(x) * t).astype(out.dtype))",),
    )
    text = f"jax.grad(lambda x: scalar({block.name}(x)))({x.name})"
    if pool.dice.chance(0.5):
        text = f"{block.name}({x.name})"
    return pool.drawn(text, exact=False, limit=max(2.0, x.limit), blocks=(block,))


OPERATIONS: Mapping[str, Operation] = {
    operation.__name__: operation
    for operation in (
        scan,
        fori_loop,
        while_loop,
        cond,
        switch,
        loop_map,
        vmap,
        spread,
        inner_pjit,
        twice,
        close_over,
        by_hand,
        inner_jit,
        remat,
        constrain,
        gradient,
        jvp,
        vjp,
        custom_vjp,
        custom_jvp,
    )
}
