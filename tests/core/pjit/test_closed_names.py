"""Errors about a closed-over array name its variable."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests.message_patterns import naming
from xlashard import Array, Mesh, NamedSharding, P, device_put, pjit
from xlashard.core.array.array_class.closed_over import closure_variable_name
from xlashard.errors import DeletedError, DeviceMismatchError

MESH = Mesh(np.array(jax.devices()), ("d",))
OTHERS = Mesh(np.array(jax.devices()[4:]), ("e",))
V = np.ones((8, 8), np.float32)

GLOBAL = device_put(V, NamedSharding(MESH, P("d")))


def elsewhere() -> Array:
    return device_put(V, NamedSharding(OTHERS, P("e")))


class Layer:
    def __init__(self, weight: Any) -> None:
        self.weight = weight


class Model:
    def __init__(self, array: Array) -> None:
        self.params = {"w": [V, array]}
        self.layer = Layer(array)

    def by_tree(self, x: Any) -> Any:
        return x @ self.params["w"][1]

    def by_attribute(this, x: Any) -> Any:
        return x @ this.layer.weight


def functions_over(array: Array) -> dict[str, Callable[[Any], Any]]:
    """Return functions that close over the array, by its name in them."""

    def helper(x: Any) -> Any:
        return x @ array

    tree = {"a": (V, array)}
    model = Model(array)
    only_layer = Layer(array)
    return {
        "array": lambda x: x @ array,
        "tree['a'][1]": lambda x: x @ tree["a"][1],
        "self.params['w'][1]": model.by_tree,
        "only_layer.weight": lambda x: x @ only_layer.weight,
        "helper: array": lambda x: helper(x) + 1,
        "argument 0 of the partial": functools.partial(lambda w, x: x @ w, array),
    }


NAMES = list(functions_over(GLOBAL))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.devices(8)
def test_closed_over_variable_is_found(name: str) -> None:
    array = elsewhere()
    function = functions_over(array)[name]
    assert closure_variable_name(function, array) == name
    assert closure_variable_name(function, array.to_jax()) == name
    assert closure_variable_name(function, elsewhere()) is None


def test_global_and_self_attribute_names_are_found() -> None:
    assert closure_variable_name(lambda x: x @ GLOBAL, GLOBAL) == "GLOBAL"
    model = Model(GLOBAL)
    del model.params
    assert closure_variable_name(model.by_attribute, GLOBAL) == "this.layer.weight"


def test_search_ends_at_cycles_and_unbound_variables() -> None:
    circle: list[Any] = [V]
    circle.append(Layer(circle))

    def reads(x: Any) -> Any:
        return x, circle, later

    assert closure_variable_name(reads, GLOBAL) is None
    later = GLOBAL
    assert closure_variable_name(reads, GLOBAL) == "later"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.devices(8)
def test_closed_over_array_on_other_devices_is_named(name: str) -> None:
    function = functions_over(elsewhere())[name]

    with pytest.raises(DeviceMismatchError, match=naming(f" {name}, ", "[4, 5, 6, 7]")):
        pjit(function)(GLOBAL)


@pytest.mark.parametrize("compiled", [pjit, jax.jit], ids=["pjit", "jax.jit"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.devices(8)
def test_deleted_closed_over_array_is_named(name: str, compiled: Any) -> None:
    array = elsewhere()
    function = functions_over(array)[name]
    array.delete()
    with pytest.raises(DeletedError, match=f"^{re.escape(name)}, .*clos"):
        compiled(function)(V)


@pytest.mark.devices(8)
def test_deleted_closed_over_array_error_names_the_function() -> None:
    weights = elsewhere()

    def forward(x: Any) -> Any:
        return x @ weights

    weights.delete()
    for compiled in (pjit, jax.jit):
        with pytest.raises(DeletedError, match="^weights, .* forward clos"):
            compiled(forward)(V)


def test_valid_closed_over_arrays_become_constants() -> None:
    small = device_put(np.arange(3.0, dtype=np.float32))
    np.testing.assert_array_equal(jax.jit(lambda x: x + small)(1.0), [1, 2, 3])
    np.testing.assert_array_equal(jax.jit(lambda x: x + small.to_jax())(1.0), [1, 2, 3])


@pytest.fixture
def simplified_constants() -> Iterator[None]:
    """Let JAX write closed-over arrays into the equations that use them."""
    before = jax.config.jax_use_simplified_jaxpr_constants
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", before)


def uses_in(array: Any) -> dict[str, Any]:
    """Return functions of one array that use a closed-over one at several depths."""

    def plain(x: Any) -> Any:
        return x + array

    def looped(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: y + array, x)

    return {
        "plain": plain,
        "looped": looped,
        "pjit": lambda x: pjit(plain)(x) * 2,
        "jit": lambda x: jax.jit(looped)(x) * 2,
        "grad": jax.grad(lambda x: (plain(x) * array).sum()),
    }


@pytest.mark.usefixtures("simplified_constants")
@pytest.mark.parametrize("kind", ["host", "one device", "sharded"])
@pytest.mark.parametrize("name", uses_in(0))
def test_arrays_in_equations_become_arguments(name: str, kind: str) -> None:
    host = np.arange(1 << 15, dtype=np.float32)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    array = {"host": host, "one device": device_put(host), "sharded": device_put(host, sharding)}
    x = np.ones(host.shape, host.dtype)
    function = uses_in(array[kind])[name]
    compiled = pjit(function)
    assert len(compiled.lower(x).as_text()) < 10_000
    expected = uses_in(host)[name](x)
    for _ in range(2):
        np.testing.assert_allclose(compiled(x), expected)


@pytest.mark.usefixtures("simplified_constants")
@pytest.mark.devices(8)
def test_a_deleted_array_in_an_equation_is_named() -> None:
    weights = elsewhere()
    weights.delete()
    with pytest.raises(DeletedError, match="^weights, .*clos"):
        pjit(lambda x: x + weights)(V)
