"""The NumPy-style methods: all of them exist, and each returns an Array with NumPy's value."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.array.cases import named, same
from tests.grouped_cases import Together, sweep
from tests.message_patterns import naming
from xlashard import Array, device_put
from xlashard.core.array.array_class.array import _Method
from xlashard.errors import DeletedError

V = np.array([[3.0, 1.0, 2.0, 0.0], [5.0, 7.0, 6.0, 4.0]], np.float32)
X = device_put(V, named("x", "y"))

CALLS: dict[str, Callable[[Any], Any]] = {
    "all": lambda x: x.all(axis=1),
    "any": lambda x: x.any(),
    "argmax": lambda x: x.argmax(axis=1),
    "argmin": lambda x: x.argmin(),
    "argpartition": lambda x: x.argpartition(1)[:, 0],
    "argsort": lambda x: x.argsort(axis=-1),
    "astype": lambda x: x.astype(np.int32),
    "byteswap": lambda x: x.byteswap().byteswap(),
    "clip": lambda x: x.clip(1, 5),
    "compress": lambda x: x.compress(np.array([True, False]), axis=0),
    "conj": lambda x: x.conj(),
    "conjugate": lambda x: x.conjugate(),
    "copy": lambda x: x.copy(),
    "cumprod": lambda x: x.cumprod(axis=0),
    "cumsum": lambda x: x.cumsum(axis=1),
    "diagonal": lambda x: x.diagonal(),
    "dot": lambda x: x.dot(V.T),
    "flatten": lambda x: x.flatten(),
    "max": lambda x: x.max(axis=0),
    "mean": lambda x: x.mean(axis=0, keepdims=True),
    "min": lambda x: x.min(),
    "nonzero": lambda x: x.nonzero(),
    "prod": lambda x: x.prod(axis=1),
    "ptp": lambda x: x.max(axis=0) - x.min(axis=0),
    "ravel": lambda x: x.ravel(),
    "repeat": lambda x: x.repeat(2, axis=0),
    "reshape": lambda x: x.reshape(2, 2, 2),
    "round": lambda x: (x / 3).round(1),
    "searchsorted": lambda x: x[0, 1:3].searchsorted(np.float32(1.5)),
    "sort": lambda x: (x.copy().sort(axis=1), x)[0] if isinstance(x, jax.Array) else np.sort(x, 1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "std": lambda x: x.std(axis=1),
    "sum": lambda x: x.sum(axis=1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "take": lambda x: x.take(np.array([1, 0]), axis=0),
    "trace": lambda x: x.trace(),
    "transpose": lambda x: x.transpose(1, 0),
    "var": lambda x: x.var(),
    "view": lambda x: x.view(np.int32),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
}
# Their results have no counterpart in NumPy; they have tests of their own.
OTHERS = {"at", "choose", "flat", "item", "to_device"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(CALLS, quick=list(CALLS)[::4]))
def test_methods_return_arrays_with_numpy_values(name: str) -> None:
    got, wanted = CALLS[name](X), CALLS[name](V)
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for one, other in pairs:
        assert type(one) is Array
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert one.devices() == X.devices()


def test_every_method_of_jax_arrays_has_a_case() -> None:
    handle = X.to_jax()
    computed = {
        name
        for name in dir(jax.Array)
        if not name.startswith("_") and name not in ATTRIBUTES and hasattr(type(handle), name)
    }
    assert computed - set(CALLS) - OTHERS == set()


ATTRIBUTES = {
    "addressable_data",
    "addressable_shards",
    "committed",
    "copy_to_host_async",
    "device",
    "dtype",
    "global_shards",
    "is_fully_addressable",
    "is_fully_replicated",
    "itemsize",
    "nbytes",
    "ndim",
    "shape",
    "sharding",
    "size",
}


def test_every_member_of_jax_arrays_is_defined() -> None:
    """`Array` defines every public name and protocol of JAX's class and of its objects."""
    ours = {name for kind in Array.__mro__ if kind is not jax.Array for name in vars(kind)}
    theirs = {*dir(jax.Array), *dir(X.to_jax())}
    # Attributes that a class has by its construction.
    built = {
        *("__annotations__", "__del__", "__dict__", "__firstlineno__", "__slots__"),
        *("__static_attributes__", "__weakref__", "__release_buffer__", "__annotate_func__"),
        *("__annotations_cache__", "__abstractmethods__"),
    }
    private = {name for name in theirs if name.startswith("_") and not name.startswith("__")}
    assert theirs - ours - built - private == set()
    # An abstract method of the base class would hide the handle's.
    abstract = {name for name in private if name in vars(jax.Array)} - {"_abc_impl"}
    assert abstract <= ours
    # All other private attributes are the handle's.
    for name in sorted(private - abstract):
        if name not in ("_abc_impl", "_arrays", "_npy_value", "_value"):
            assert hasattr(X, name) == hasattr(X.to_jax(), name), name


def test_methods_have_the_signatures_of_jax() -> None:
    import inspect

    signature = inspect.signature(Array.sum)
    assert "axis" in signature.parameters
    assert signature == inspect.signature(type(X.to_jax()).sum)


@pytest.mark.slow
def test_methods_take_arrays_of_any_kind_as_arguments() -> None:
    indices = np.array([1, 0])
    for given in (indices, jnp.asarray(indices), device_put(indices, named())):
        assert same(X.take(given, axis=0), V[indices])
        assert same(X[given], V[indices])
        assert same(X[:, given], V[:, indices])
    mask = device_put(V > 2, named("x", "y"))
    assert float(X.sum(where=mask)) == V[V > 2].sum()
    assert same(X.clip(max=device_put(np.float32(3))), V.clip(max=3))
    assert same(X[mask.addressable_data(0).devices() and 0], V[0])


@pytest.mark.slow
def test_choose_and_to_device() -> None:
    picks = device_put(np.array([0, 1, 0, 1]), named("y"))
    assert same(picks.choose([V[0], V[1]]), np.choose(np.array([0, 1, 0, 1]), [V[0], V[1]]))
    moved = X.to_device(jax.devices()[2])
    assert type(moved) is Array and moved.devices() == {jax.devices()[2]}
    assert X.__array_namespace__() is jnp
    assert X.clone().to_jax() is not X.to_jax()
    with pytest.raises(NotImplementedError, match=r"x\.ravel\(\)"):
        _ = X.flat


UPDATES: dict[str, Callable[[Any], Any]] = {
    "set": lambda at: at.set(9.0),
    "add": lambda at: at.add(2.0),
    "subtract": lambda at: at.subtract(2.0),
    "multiply": lambda at: at.multiply(2.0),
    "mul": lambda at: at.mul(2.0),
    "divide": lambda at: at.divide(2.0),
    "power": lambda at: at.power(2.0),
    "min": lambda at: at.min(2.0),
    "max": lambda at: at.max(2.0),
    "apply": lambda at: at.apply(jnp.sin),
    "get": lambda at: at.get(mode="fill", fill_value=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(UPDATES, quick=list(UPDATES)[:3]))
def test_updates(name: str) -> None:
    for index in ((0, 1), (slice(None), device_put(np.array([1, 3]))), device_put(np.array(1))):
        bare = tuple(map(np.asarray, index)) if isinstance(index, tuple) else np.asarray(index)
        if isinstance(index, tuple) and isinstance(index[0], slice):
            bare = (index[0], np.asarray(index[1]))
        out = UPDATES[name](X.at[index])
        assert type(out) is Array
        np.testing.assert_allclose(out, UPDATES[name](jnp.asarray(V).at[bare]), rtol=1e-6)
    assert same(X, V)
    assert repr(X.at[0]).endswith(".at[0]")


def test_every_at_update_of_jax_is_defined() -> None:
    theirs = {name for name in dir(X.to_jax().at[0]) if not name.startswith("_")}
    assert theirs - {"array", "index"} == set(UPDATES)


def test_a_value_given_to_an_update_may_be_an_array_or_a_tracer() -> None:
    out = X.at[0].set(device_put(np.ones(4, np.float32), named("y")))
    assert out[0].tolist() == [1.0] * 4
    traced = jax.jit(lambda t: X.at[0, 0].set(t))(5.0)
    assert float(traced[0, 0]) == 5.0


@pytest.mark.slow
def test_deleted_arrays_are_named() -> None:
    gone = device_put(V, named("x"))
    gone.delete()
    for use in (
        lambda: gone.sum(),
        lambda: X.clip(max=gone),
        lambda: gone.at[0].set(1.0),
        lambda: gone.T,
        lambda: gone[0],
        lambda: gone[0:1],
        lambda: list(gone),
        lambda: gone.addressable_shards,
        lambda: gone.global_shards,
        lambda: gone.addressable_data(0),
        lambda: gone.devices(),
        lambda: gone.device,
        lambda: gone.layout,
        lambda: gone.block_until_ready(),
        lambda: gone.is_ready(),
        lambda: gone.copy_to_host_async(),
        lambda: gone.on_device_size_in_bytes(),
        lambda: gone.unsafe_buffer_pointer(),
        lambda: np.asarray(gone),
        lambda: float(gone[0, 0]),
        lambda: gone.__dlpack__(),
        lambda: gone.clone(),
        lambda: gone.tolist(),
        lambda: device_put(gone, jax.devices()[0]),
    ):
        with pytest.raises(DeletedError, match=naming("float32[2,4]", "delete()")):
            use()
    assert gone.is_deleted()
    assert gone.shape == (2, 4)
    assert (gone.format.layout, gone.format.sharding) == (None, gone.sharding)


def test_an_override_calls_a_method_that_is_not_generated_yet_by_super() -> None:
    class Generated(Array):
        """Class with a method of its own to generate."""

    class Override(Generated):
        """Class that overrides the method."""

        def cumsum(self) -> Any:
            calls.append("cumsum")
            return super().cumsum()

    calls: list[str] = []
    Generated.cumsum = _Method(Generated, "cumsum")
    x = Override()
    x._handle = device_put(np.arange(4))._handle
    np.testing.assert_array_equal(x.cumsum(), [0, 1, 3, 6])
    assert calls == ["cumsum"]


BAD_ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("text",), {}),
    ((object(),), {}),
    (({},), {}),
    ((10**30,), {}),
    ((V, V, V, V, V, V, V, V, V), {}),
    ((), {"axis": 7}),
    ((), {"axis": "x"}),
    ((), {"dtype": "float99"}),
    ((), {"mode": "no mode"}),
    ((), {"copy": "text"}),
    ((), {"no_argument": 1}),
]
# The interpreter calls them, with arguments of its own.
UNCHECKED = {"__buffer__", "__class__", "__del__", "__init__", "__new__", "__release_buffer__"}
UNARY = {"__abs__", "__invert__", "__neg__", "__pos__"}


def methods_of_jax() -> list[str]:
    x = X.to_jax()
    public = {name for name in dir(x) if not name.startswith("_")}
    special = {name for name in dir(x) if name.endswith("__")} - set(dir(object))
    names = (public | special) - UNCHECKED - UNARY - {"delete", "flat", "__weakref__", "__dict__"}
    return sorted(name for name in names if callable(getattr(type(x), name)))


def raised_by(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def compare_errors(call: Callable[[Any], Any], cases: Together, name: str) -> bool:
    """Return whether a call raises for JAX's array, and compare the class of ours with its."""
    expected = raised_by(lambda: call(X.to_jax()))
    if expected is not None:
        with cases.case(name):
            error = raised_by(lambda: call(X))
            assert isinstance(error, type(expected)), (expected, error)
    return expected is not None


@pytest.mark.slow
def test_bad_arguments_raise_the_classes_of_jax() -> None:
    raised = 0
    with Together() as cases:
        for name, (args, kwargs) in itertools.product(methods_of_jax(), BAD_ARGUMENTS):
            call = operator.methodcaller(name, *args, **kwargs)
            raised += compare_errors(call, cases, f"{name}, {args}, {kwargs}")
    assert raised > 500


@pytest.mark.slow
def test_bad_updates_raise_the_classes_of_jax() -> None:
    indices = (9, "a", (0, 0, 0), 2.5, slice("a"), np.array([1.5]), (..., ...))
    with Together() as cases:
        for name, index in itertools.product(UPDATES, indices):
            for value, kwargs in (("text", {}), (object(), {}), (1, {"mode": "no mode"})):
                args = () if name == "get" else (value,)
                update = operator.methodcaller(name, *args, **kwargs)
                compare_errors(lambda x: update(x.at[index]), cases, f"{name}, {index}, {value}")  # noqa: B023
