"""Operations on each element, and casts."""

from collections.abc import Callable, Mapping

from tests.core.pjit.random_programs.description import FLOATS, Value
from tests.core.pjit.random_programs.pool import Drawn, NoFit, Pool

type Operation = Callable[[Pool], Drawn]

# Each with a bound of its results, given the same bound of its argument.
SMOOTH: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "sin": ("jnp.sin({})", lambda _: 1),
    "cos": ("jnp.cos({})", lambda _: 1),
    "tanh": ("jnp.tanh({})", lambda _: 1),
    "logistic": ("lax.logistic({})", lambda _: 1),
    "erf": ("lax.erf({})", lambda _: 1),
    "exp": ("jnp.exp(jnp.sin({}))", lambda _: 3),
    "log": ("jnp.log({0} * {0} + 1)", lambda a: a),
    "sqrt": ("jnp.sqrt({0} * {0} + 1)", lambda a: a + 1),
    "rsqrt": ("lax.rsqrt({0} * {0} + 1)", lambda _: 1),
    "square": ("jnp.square({})", lambda a: a * a),
    "power": ("{} ** 3", lambda a: a**3),
    "negate": ("-{}", lambda a: a),
    "gelu": ("jax.nn.gelu({})", lambda a: a),
    "silu": ("jax.nn.silu({})", lambda a: a),
}
KINKED: Mapping[str, str] = {
    "abs": "jnp.abs({})",
    "relu": "jax.nn.relu({})",
    "clip": "jnp.clip({}, -0.5, 0.75)",
    "clamp": "lax.clamp(jnp.zeros_like({0}), {0}, jnp.ones_like({0}))",
}
JUMPING: Mapping[str, str] = {
    "floor": "jnp.floor({} * 3)",
    "sign": "jnp.sign({})",
    "round": "jnp.round({} * 2)",
    "isfinite": "jnp.isfinite({})",
}
WHOLE: Mapping[str, str] = {
    "invert": "~{}",
    "xor": "{} ^ 5",
    "remainder": "{} % 5",
    "quotient": "{} // 3",
    "popcount": "lax.population_count({})",
    "shift": "{} >> 1",
}
COMPLEX: Mapping[str, str] = {
    "real": "jnp.real({})",
    "imag": "jnp.imag({})",
    "conj": "jnp.conj({})",
    "turn": "{} * 1j",
}
BINARY: Mapping[str, tuple[str, Callable[[float, float], float]]] = {
    "add": ("{} + {}", lambda a, b: a + b),
    "subtract": ("{} - {}", lambda a, b: a + b),
    "multiply": ("{} * {}", lambda a, b: a * b),
    "divide": ("{0} / ({1} * {1} + 1)", lambda a, b: a),
    "logaddexp": ("jnp.logaddexp({}, {})", lambda a, b: a + b + 1),
    "atan2": ("lax.atan2({}, {} ** 2 + 1)", lambda a, b: 2),
}
COMPARISONS = ("<", "<=", ">", "==", "!=")


def _smooth(text: str, limit: Callable[[float], float]) -> Operation:
    def draw(pool: Pool) -> Drawn:
        x = pool.pick("f")
        return pool.drawn(text.format(x.name), x, exact=False, limit=limit(x.limit))

    return draw


def _kinked(text: str) -> Operation:
    def draw(pool: Pool) -> Drawn:
        x = pool.pick("f", kink=True)
        return pool.drawn(text.format(x.name), x)

    return draw


def _jumping(text: str) -> Operation:
    def draw(pool: Pool) -> Drawn:
        x = pool.pick("f", exact=True)
        return pool.drawn(text.format(x.name), x, limit=3 * x.limit)

    return draw


def _of_kind(kinds: str, text: str) -> Operation:
    def draw(pool: Pool) -> Drawn:
        x = pool.pick(kinds)
        return pool.drawn(text.format(x.name), x)

    return draw


def _second(pool: Pool, x: Value, *, exact: bool = False) -> Value:
    """Draw a second operand: of the same shape, of one that broadcasts to it, or a number."""
    way = pool.dice.below(4)
    if way == 0:
        number = "2" if x.kind == "i" else "0.5"
        return Value(number, (), x.dtype, True, 2.0)
    if way == 1:
        shape = tuple(1 if pool.dice.chance(0.4) else length for length in x.shape)
        return pool.operand(shape[pool.dice.below(x.ndim + 1) :], x.dtype, exact=exact)
    return pool.operand(x.shape, x.dtype, exact=exact)


def _binary(text: str, limit: Callable[[float, float], float]) -> Operation:
    def draw(pool: Pool) -> Drawn:
        x = pool.pick("f")
        y = _second(pool, x)
        first, second = (x, y) if pool.dice.chance(0.7) or y.ndim == 0 else (y, x)
        bound = limit(first.limit, second.limit)
        return pool.drawn(text.format(first.name, second.name), x, y, exact=False, limit=bound)

    return draw


def whole_binary(pool: Pool) -> Drawn:
    x = pool.pick("i")
    y = _second(pool, x)
    return pool.drawn(f"{x.name} {pool.dice.pick('+-*&|')} {y.name}", x, y)


def logical(pool: Pool) -> Drawn:
    x = pool.pick("b")
    y = pool.operand(x.shape, "bool")
    return pool.drawn(f"{x.name} {pool.dice.pick('&|^')} {y.name}", x, y)


def complex_multiply(pool: Pool) -> Drawn:
    x = pool.pick("c")
    y = pool.operand(x.shape, x.dtype)
    return pool.drawn(f"{x.name} * {y.name}", x, y, exact=False, limit=2 * x.limit * y.limit)


def make_complex(pool: Pool) -> Drawn:
    x = pool.pick("f", where=lambda v: v.dtype == "float32")
    y = pool.operand(x.shape, x.dtype)
    return pool.drawn(f"lax.complex({x.name}, {y.name})", x, y)


def extremum(pool: Pool) -> Drawn:
    x = pool.pick("fi", kink=True)
    y = _second(pool, x, exact=pool.smooth)
    return pool.drawn(f"jnp.{pool.dice.pick(['maximum', 'minimum'])}({x.name}, {y.name})", x, y)


def compare(pool: Pool) -> Drawn:
    x = pool.pick("fi", exact=True)
    y = _second(pool, x, exact=True)
    return pool.drawn(f"{x.name} {pool.dice.pick(COMPARISONS)} {y.name}", x, y)


def select(pool: Pool) -> Drawn:
    chosen = pool.pick("b")
    dtype = pool.dice.pick([v.dtype for v in pool.values if v.kind in "fibc"])
    x, y = pool.operand(chosen.shape, dtype), pool.operand(chosen.shape, dtype)
    if pool.dice.chance(0.5):
        return pool.drawn(f"lax.select({chosen.name}, {y.name}, {x.name})", x, y)
    other = "0" if pool.dice.chance(0.5) else y.name
    return pool.drawn(f"jnp.where({chosen.name}, {x.name}, {other})", x, y)


def cast(pool: Pool) -> Drawn:
    """Draw a cast to another dtype whose result the standard defines."""
    x = pool.pick("fib")
    if (x.kind == "f" and not x.exact) or pool.dice.chance(0.4):
        return pool.drawn(f"{x.name}.astype('{pool.dice.pick(FLOATS)}')", x, exact=False)
    if x.kind == "f":
        if x.limit > 100:
            raise NoFit
        return pool.drawn(f"({x.name} * 8).astype('int32')", x)
    if x.kind == "b":
        return pool.drawn(f"{x.name}.astype('{pool.dice.pick(['int32', 'uint8', *FLOATS])}')", x)
    if pool.dice.chance(0.5):
        return pool.drawn(f"({x.name} % 7).astype('{pool.dice.pick(FLOATS)}')", x, limit=7.0)
    return pool.drawn(f"{x.name}.astype('{pool.dice.pick(['int32', 'uint8', 'int8', 'bool'])}')", x)


def bitcast(pool: Pool) -> Drawn:
    x = pool.pick("f", exact=True, where=lambda v: v.dtype == "float32")
    return pool.drawn(f"lax.bitcast_convert_type({x.name}, 'int32')", x)


OPERATIONS: Mapping[str, Operation] = {
    **{name: _smooth(text, limit) for name, (text, limit) in SMOOTH.items()},
    **{name: _kinked(text) for name, text in KINKED.items()},
    **{name: _jumping(text) for name, text in JUMPING.items()},
    **{name: _of_kind("i", text) for name, text in WHOLE.items()},
    **{name: _of_kind("c", text) for name, text in COMPLEX.items()},
    **{name: _binary(text, limit) for name, (text, limit) in BINARY.items()},
    "logical_not": _of_kind("b", "~{}"),
    "whole_binary": whole_binary,
    "logical": logical,
    "complex_multiply": complex_multiply,
    "make_complex": make_complex,
    "extremum": extremum,
    "compare": compare,
    "select": select,
    "cast": cast,
    "bitcast": bitcast,
}
