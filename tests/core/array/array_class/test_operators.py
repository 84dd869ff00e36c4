"""Operators: NumPy's results, on the devices, for any type of the other operand."""

import collections
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, MESH, named, same
from tests.grouped_cases import sweep
from tests.message_patterns import naming
from xlashard import Array, Mesh, NamedSharding, P, device_put
from xlashard.errors import DeletedError, DeviceMismatchError

ARITHMETIC = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]
BITS = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
UNARY = [operator.neg, operator.pos, abs, round]
INPLACE = [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow]

QUICK = [operator.add, operator.truediv, operator.pow, operator.eq, operator.lt]

V = np.arange(1, 9, dtype=np.float32)
X = device_put(V, named("x"))
BIT_V = np.arange(8, dtype=np.int32)
BIT_X = device_put(BIT_V, named("x"))


def others(v: Any) -> dict[str, Any]:
    return {
        "Array": device_put(v, named("y")),
        "uncommitted Array": device_put(v),
        "jax.Array": jax.device_put(v, jax.sharding.NamedSharding(MESH, P("y"))),
        "numpy": v,
        "number": v[1].item(),
        "numpy number": v[1],
    }


@pytest.mark.parametrize("other", list(others(V)))
@pytest.mark.parametrize("op", sweep(ARITHMETIC, quick=QUICK), ids=lambda op: op.__name__)
def test_arithmetic(op: Callable[..., Any], other: str) -> None:
    check(op, X, V, others(V)[other])


@pytest.mark.parametrize("other", list(others(BIT_V)))
@pytest.mark.parametrize("op", sweep(BITS, quick=[operator.and_]), ids=lambda op: op.__name__)
def test_bits(op: Callable[..., Any], other: str) -> None:
    check(op, BIT_X, BIT_V, others(BIT_V)[other])


def check(op: Callable[..., Any], x: Array, v: np.ndarray, other: Any) -> None:
    plain = np.asarray(other) if isinstance(other, jax.Array) else other
    out = op(x, other)
    assert type(out) is Array
    assert out.devices() == x.devices()
    np.testing.assert_allclose(out, op(jnp.asarray(v), plain), rtol=1e-6)
    out = op(other, x)
    # A jax.Array on the left evaluates the operator itself.
    from_jax = isinstance(other, jax.Array) and type(other) is not Array
    assert type(out) is (type(x.to_jax()) if from_jax else Array)
    np.testing.assert_allclose(out, op(plain, jnp.asarray(v)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.__name__)
def test_unary(op: Callable[..., Any]) -> None:
    out = op(X)
    assert type(out) is Array
    np.testing.assert_allclose(out, op(jnp.asarray(V)))
    assert (~BIT_X).tolist() == (~BIT_V).tolist()
    np.testing.assert_allclose(round(X / 3, 1), np.round(V / 3, 1), rtol=1e-6)


@pytest.mark.parametrize("op", INPLACE, ids=lambda op: op.__name__)
def test_inplace_forms_make_new_arrays(op: Callable[..., Any]) -> None:
    x = X
    x = op(x, 2)
    assert type(x) is Array
    assert same(X, V)
    np.testing.assert_allclose(x, op(jnp.asarray(V), 2))


@pytest.mark.slow
def test_matrix_products_and_divmod() -> None:
    a = np.arange(12, dtype=np.float32).reshape(4, 3)
    x = device_put(a, named("x"))
    for out in (x @ a.T, x @ device_put(a.T, named(None, "x")), x @ jnp.asarray(a.T)):
        assert type(out) is Array
        np.testing.assert_allclose(out, a @ a.T)
    np.testing.assert_allclose(a.T @ x, a.T @ a)
    quotient, rest = divmod(X, 3)
    assert type(quotient) is type(rest) is Array
    np.testing.assert_allclose(quotient * 3 + rest, V)
    quotient, rest = divmod(20, X)
    np.testing.assert_allclose(quotient * X + rest, np.full(8, 20))


@pytest.mark.devices(8)
def test_operators_keep_results_sharded() -> None:
    x = device_put(np.ones((8, 8), np.float32), named("x", "y"))
    out = (x * 2 + x) / 3
    assert [s.data.shape for s in out.addressable_shards] == [(4, 2)] * 8


@pytest.mark.slow
def test_tracers_pass_through_on_either_side() -> None:
    @jax.jit
    def both(t: Any) -> Any:
        left, right = X + t, t * X
        assert isinstance(left, jax.core.Tracer) and isinstance(right, jax.core.Tracer)
        return left + right

    np.testing.assert_allclose(both(jnp.float32(2)), (V + 2) + 2 * V)
    np.testing.assert_allclose(jax.grad(lambda t: (X * t).sum())(2.0), V.sum())


def test_reflected_operators_of_other_types_are_called() -> None:
    class Odd:
        def __radd__(self, other: Any) -> str:
            return "odd"

    assert X + Odd() == "odd"
    with pytest.raises(TypeError):
        X + "text"
    with pytest.raises(TypeError):
        X + [1, 2]  # noqa: RUF005


def test_committed_arrays_on_other_devices_raise_and_name_both() -> None:
    left, right = device_put(V, DEVICES[0]), device_put(V, DEVICES[1])
    with pytest.raises(DeviceMismatchError) as caught:
        left + right
    assert "float32[8]" in str(caught.value) and "device 0" in str(caught.value)
    assert "device 1" in str(caught.value)
    assert "device_put(right, left.sharding)" in str(caught.value)
    backwards = NamedSharding(Mesh(MESH.devices[::-1], ("x", "y")), P("x"))
    with pytest.raises(
        DeviceMismatchError,
        match=naming("__mul__", "order", "left, float32[8]", "right, float32[8]"),
    ):
        X * device_put(V, backwards)


def test_uncommitted_arrays_move() -> None:
    out = device_put(V) + device_put(V, DEVICES[3])
    assert out.devices() == {DEVICES[3]}


def test_weak_types_adopt_the_dtype_of_the_other_operand() -> None:
    assert (device_put(2.0) * X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_deleted_operands_are_named() -> None:
    gone = device_put(V, named("x"))
    gone.delete()
    for use in (lambda: gone + 1, lambda: X + gone, lambda: -gone, lambda: gone @ X):
        with pytest.raises(DeletedError, match=naming("float32[8]", "delete()")):
            use()


def test_arrays_outside_the_devices_memory_are_pointed_at() -> None:
    x = device_put(np.ones((8, 8), np.float32), named("x", memory_kind="pinned_host"))
    with pytest.raises(ValueError) as caught:
        x.argmax(axis=1)
    (note,) = [note for note in caught.value.__notes__ if "pinned_host" in note]
    assert "float32[8,8], is in pinned_host memory" in note
    assert ".sharding.with_memory_kind('device'))" in note


class Pair(tuple):
    """Operand with operators of its own, which cannot be rebuilt from its elements."""

    def __new__(cls, x: Any, y: Any) -> "Pair":
        return super().__new__(cls, (x, y))

    def __rmul__(self, other: Any) -> str:
        return "multiplied by the pair"


def test_operators_defer_to_operands_unknown_to_jax() -> None:
    a = device_put(np.arange(4))
    assert a * Pair(a, a) == "multiplied by the pair"
    assert operator.eq(a, Pair(a, a)) is False
    assert operator.eq(a, collections.defaultdict(list, k=a)) is False


def test_a_bound_operator_can_be_pickled() -> None:
    a = device_put(np.arange(4))
    for name in ("__add__", "__rsub__", "sum"):
        bound = getattr(a, name)
        copied = pickle.loads(pickle.dumps(bound))
        args = () if name == "sum" else (a,)
        np.testing.assert_array_equal(copied(*args), bound(*args))
