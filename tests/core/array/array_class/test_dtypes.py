"""Every dtype that devices hold, including those of fewer than eight bits and of 64."""

import copy
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.array import cases
from tests.core.array.cases import CONSTRUCTORS, DEVICES, SHARDINGS, named, same
from tests.grouped_cases import Together, sweep
from xlashard import Array, device_put, pjit

NAMES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("int2", "uint2", "int4", "uint4"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
WIDE = ("int64", "uint64", "float64", "complex128")


def value(name: str) -> np.ndarray:
    return (np.arange(128) % 2 + 1).astype(jnp.dtype(name)).reshape(cases.SHAPE)


def check_values(v: np.ndarray, step: int) -> None:
    """Make arrays in all ways, each with another kind of sharding; reshard and read them."""
    kinds = list(SHARDINGS)
    for number, make in enumerate(CONSTRUCTORS.values()):
        sharding = SHARDINGS[kinds[(number * 2 + step) % len(kinds)]]
        x = make(v, sharding)
        assert same(x, v)
        assert same(device_put(x, named()), v)
    x = device_put(v, named("x", "y"))
    assert x.tolist() == v.tolist() and x.tobytes() == v.tobytes()
    assert repr(x).endswith(f"dtype={v.dtype.name})")
    assert same(copy.deepcopy(x), v) and same(pickle.loads(pickle.dumps(x)), v)
    assert same(pjit(lambda a: a)(x), v)
    assert same(x[:4, :4], v[:4, :4])
    assert bool((x == x).all())
    handle = x.to_jax()
    assert (x.nbytes, x.itemsize) == (handle.nbytes, handle.itemsize)
    assert x.on_device_size_in_bytes() == handle.on_device_size_in_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sweep(NAMES, quick=["bool", "int8", "int2", "bfloat16", "float32", "complex64"]),
)
def test_every_dtype(name: str) -> None:
    check_values(value(name), NAMES.index(name))
    empty = np.zeros((0, 4), jnp.dtype(name))
    assert same(device_put(empty, named(None, "y")), empty)
    scalar = np.asarray(value(name)[0, 1])
    x = device_put(scalar, named())
    assert same(x, scalar) and x.item() == scalar.item()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("name", sweep(WIDE, quick=["float64"]))
def test_64_bits(name: str) -> None:
    v = value(name)
    with jax.enable_x64(True):
        check_values(v, WIDE.index(name))
        x = device_put(v, named("x", "y"))
        assert same(x + x, v + v) and same(x[3], v[3])
    narrow = v.astype(jax.dtypes.canonicalize_dtype(v.dtype))
    assert same(device_put(v, named("x")), narrow)
    # An array made under the setting keeps its dtype, and programs take it as JAX's do.
    assert same(x, v) and same(device_put(x, named()), v) and same(copy.copy(x), v)
    assert same(pickle.loads(pickle.dumps(x)), v)
    double = pjit(lambda a: a + a)
    doubled = jax.jit(lambda a: a + a)(x.to_jax())
    for _ in range(2):
        assert same(double(x), np.asarray(doubled))


NUMBERS = (0.0, -0.0, 1.0, -1.0, 2.5, 1e30, math.nan, math.inf, -math.inf)

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    **{use.__name__: use for use in (int, float, complex, bool, hex, oct, bin, chr, str, hash)},
    **{use.__name__: use for use in (math.floor, math.ceil, math.trunc, math.sqrt, math.isnan)},
    "index": operator.index,
    "range": range,
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    **{f"format {spec}": lambda x, spec=spec: format(x, spec) for spec in ("", ".2f", "d", "g")},
    "%d": lambda x: "%d" % x,  # noqa: UP031  # calls the methods of the number
}
ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "round": lambda x: np.asarray(round(x)).tolist(),
    "round to 1": lambda x: np.asarray(round(x, 1)).tolist(),
}


def check_conversions(name: str, conversions: dict[str, Callable[[Any], Any]]) -> None:
    """Convert scalars, and arrays of one element, as JAX does: same value or class of error."""

    def outcome(convert: Callable[[Any], Any], x: Any) -> Any:
        try:
            return repr(convert(x))
        except Exception as error:
            return error

    with jax.enable_x64(True), Together() as together:
        for number in NUMBERS:
            with np.errstate(all="ignore"):
                v = np.asarray(number).astype(jnp.dtype(name))
            for element in (v, v.reshape(1)):
                ours, theirs = device_put(element, DEVICES[0]), jax.device_put(element, DEVICES[0])
                for text, convert in conversions.items():
                    with together.case(f"{text} of {element!r}"):
                        wanted, got = outcome(convert, theirs), outcome(convert, ours)
                        refused = isinstance(wanted, Exception)
                        assert isinstance(got, type(wanted)) if refused else got == wanted, got


@pytest.mark.parametrize(
    "name", sweep((*NAMES, *WIDE), quick=["bfloat16", "float8_e4m3fn", "int32", "complex64"])
)
def test_numbers_of_python_are_those_that_jax_returns(name: str) -> None:
    check_conversions(name, CONVERSIONS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Casting from complex")
@pytest.mark.parametrize("name", (*NAMES, *WIDE))
def test_rounded_numbers_are_those_that_jax_returns(name: str) -> None:
    check_conversions(name, ROUNDINGS)


@pytest.mark.slow
def test_numbers_of_few_bits_are_packed_on_devices_only() -> None:
    v = value("int4")
    x = device_put(v, DEVICES[0])
    assert np.asarray(x).nbytes == v.nbytes == v.size
    assert x.on_device_size_in_bytes() == x.to_jax().on_device_size_in_bytes()
    assert same(x.astype(np.int8) * 3, v.astype(np.int8) * 3)
    assert same(pjit(lambda a: a.astype(jnp.float32))(x), v.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int2", "uint2"])
def test_two_bit_dtypes_survive_every_reshard(name: str) -> None:
    """XLA's own CPU collectives of these dtypes corrupt neighbouring memory."""
    v = value(name)
    for source in (named("y"), named("x", "y"), named(None, ("x", "y"))):
        x = device_put(v, source)
        for _ in range(20):
            x = device_put(device_put(x, named()), source)
        assert same(x, v)


@pytest.mark.slow
def test_tangents_of_integers_stay_with_numpy() -> None:
    v = np.zeros(8, jax.dtypes.float0)
    assert device_put({"n": v}, named("x"))["n"] is v
    n = device_put(np.arange(8), named("x"))
    f = pjit(lambda n, x: n * x)
    _, pull = jax.vjp(f, n, jnp.ones(8))
    of_n, of_x = pull(jnp.ones(8))
    assert of_n.dtype == jax.dtypes.float0 and same(of_x, np.arange(8, dtype=np.float32))
    assert pjit(lambda t: t)(v).dtype == jax.dtypes.float0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "level", "use"),
    [
        ("numpy_rank_promotion", "raise", lambda x: x + x[0]),
        ("numpy_dtype_promotion", "strict", lambda x: x + x.astype(np.int32)),
    ],
)
def test_promotion_is_refused_as_with_jax(setting: str, level: str, use: Any) -> None:
    x = device_put(value("float32"), named("x"))
    for y in (x, x.to_jax()):
        assert use(y).shape == x.shape
        with getattr(jax, setting)(level), pytest.raises((ValueError, TypeError)):
            use(y)


@pytest.mark.slow
def test_default_device_and_matmul_precision_take_effect() -> None:
    with jax.default_device(DEVICES[5]):
        assert device_put(value("int8")).devices() == {DEVICES[5]}
        assert pickle.loads(pickle.dumps(device_put(1.0))).devices() == {DEVICES[5]}
        assert pjit(lambda: jnp.zeros(3))().devices() == {DEVICES[5]}
    x = device_put(value("float32")[:, :8], named("x"))
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in pjit(lambda a: a @ a).lower(x).as_text()
        assert same(x @ x, np.asarray(x) @ np.asarray(x))
    with jax.disable_jit():
        seen: list[Any] = []
        assert type(pjit(lambda a: (seen.append(a), a + 1)[1])(x)) is Array
        assert same(seen[0], np.asarray(x))


@pytest.mark.slow
def test_leaked_tracers_are_found() -> None:
    leaked: list[Any] = []

    def fun(x: Any) -> Any:
        leaked.append(x)
        return x + 1

    with jax.checking_leaks(), pytest.raises(Exception, match="[Ll]eaked"):
        pjit(fun)(device_put(value("float32"), named("x")))
