"""One of two processes with two devices each: every function on arrays of the other's devices.

Process 1 has no shard of the arrays. What JAX computes there is computed; what JAX refuses is
computed too, or refused with an error of this package.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.core.processes import expect, join_the_others

join_the_others()

import xlashard as xs  # noqa: E402
from xlashard import NamedSharding, P  # noqa: E402
from xlashard.errors import DeadlockError, XlashardError  # noqa: E402

MESH = xs.Mesh(np.array(jax.local_devices(process_index=0)), ("x",))
V = np.arange(16, dtype=np.int32).reshape(4, 4)
KEYS = jax.random.split(jax.random.key(0), 4)

# Arguments of the methods that need some.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "addressable_data": (0,),
    "argpartition": (1,),
    "astype": (np.float32,),
    "compress": (np.array([True, False]),),
    "dot": (2.0,),
    "repeat": (2, 0),
    "reshape": ((16,),),
    "searchsorted": (1.0,),
    "swapaxes": (0, 1),
    "take": (np.array([0, 1]),),
    "to_device": (jax.local_devices()[0],),
    "view": (np.float32,),
    "__format__": ("",),
    "__getitem__": (0,),
    "__divmod__": (2,),
    "__rdivmod__": (2,),
    "__round__": (0,),
    "__pow__": (2,),
    "__rpow__": (2,),
}
# They end the array, need an array of integers, are traps on purpose, or are of Python's object.
SKIPPED = {"delete", "__array_priority__", "__hash__", "__setitem__", "__delitem__", "choose"}
SKIPPED |= {"__cuda_array_interface__", "__class__", "__init_subclass__", "__subclasshook__"}
SKIPPED |= {"__new__", "__init__", "__del__", "__setattr__", "__delattr__", "__getattribute__"}
SKIPPED |= {
    "__reduce_ex__",
    "__sizeof__",
    "__dir__",
    "__class_getitem__",
    "__dlpack_c_exchange_api__",
}
SKIPPED |= {"from_jax", "__reduce__", "__array_module__", "__getattr__", "__getstate__"}
OPERATORS = {"add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift"}
OPERATORS |= {"rshift", "matmul", "eq", "ne", "lt", "le", "gt", "ge"}


def member(name: str) -> Callable[[Any], Any]:
    """Return a use of a method or attribute."""
    arguments = ARGUMENTS.get(name)
    operator = name.strip("_")
    if operator in OPERATORS or operator.removeprefix("r") in OPERATORS:
        return lambda x: getattr(x, name)(x if "matmul" in name else 1)

    def use(x: Any) -> Any:
        found = getattr(x, name)
        return found(*(arguments or ())) if callable(found) else found

    return use


def outcome(use: Callable[[Any], Any], x: Any) -> tuple[Any, BaseException | None]:
    try:
        return use(x), None
    except Exception as error:
        return None, error


def kind(value: Any) -> Any:
    """Return what both libraries' results have in common: types of arrays in a tree."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, jax.Array))
    return [(x.shape, x.dtype) for x in leaves if isinstance(x, jax.Array)]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "device_get": lambda x: (xs if isinstance(x, xs.Array) else jax).device_get(x),
    "asarray": np.asarray,
    "array": np.array,
    "jnp.sum": jnp.sum,
    "sharded slice": lambda x: x[0:2, 1],
    "at": lambda x: x.at[0].set(1.0),
    "jit": lambda x: (xs.jit if isinstance(x, xs.Array) else jax.jit)(lambda x: x * 2)(x),
    "NumPy": lambda x: (
        xs.pjit(jnp.sum, in_shardings=x.sharding)(V)
        if isinstance(x, xs.Array)
        else jax.jit(jnp.sum)(x)
    ),
    "grad": lambda x: jax.grad(lambda x: (x * x).sum())(x * 1.0),
    "copy": lambda x: __import__("copy").copy(x),
    "tree": lambda x: jax.tree.map(lambda x: x + 1, [x]),
    "block": lambda x: jax.block_until_ready(x),
    "copy_to_host_async": lambda x: (
        jax.copy_to_host_async(x) if hasattr(jax, "copy_to_host_async") else 0
    ),
    "put on the same devices": lambda x: (xs if isinstance(x, xs.Array) else jax).device_put(
        x, NamedSharding(MESH, P(None, "x"))
    ),
    "typeof": lambda x: kind(jnp.zeros(jax.typeof(x).shape)),
}


def different_targets_are_refused() -> None:
    """Put an array of both processes to a device of the other, or an array of one elsewhere."""
    everywhere = xs.Mesh(np.array(jax.devices()), ("x",))
    whole = xs.device_put(V, NamedSharding(everywhere, P("x")))
    (other,) = jax.local_devices(process_index=1 - jax.process_index())[:1]
    error = expect(DeadlockError, "put x to different places", lambda: xs.device_put(whole, other))
    assert error.processes == (0, 1)
    first, second = jax.local_devices(process_index=1)
    one = xs.make_array_from_callback(
        V.shape, NamedSharding(MESH, P("x")), V.__getitem__, dtype=V.dtype
    )
    target = (first, second)[jax.process_index()]
    expect(DeadlockError, "put x to different places", lambda: xs.device_put(one, target))
    # Nothing is sent where each process has the value.
    copies = xs.device_put(V, NamedSharding(everywhere, P()))
    own = xs.device_put(copies, jax.local_devices()[0])
    assert np.array_equal(own, V)
    if jax.process_index():
        assert np.array_equal(xs.device_put(copies, second), V)
    assert xs.device_put(whole, first).shape == xs.device_put(one, first).shape == V.shape


def main() -> None:
    placed = {
        spec: (
            jax.make_array_from_callback(
                V.shape, jax.NamedSharding(MESH, spec), V.__getitem__, dtype=V.dtype
            ),
            xs.make_array_from_callback(
                V.shape, NamedSharding(MESH, spec), V.__getitem__, dtype=V.dtype
            ),
        )
        for spec in (P(), P("x"))
    }
    uses = {name: use for name, use in FUNCTIONS.items()}
    for name in dir(placed[P()][1]):
        special = name.startswith("__") and name not in SKIPPED
        if special or (not name.startswith("_") and name not in SKIPPED):
            uses[name] = member(name)
    faults = []
    for spec, (theirs, ours) in placed.items():
        for name, use in uses.items():
            (right, refused), (found, error) = outcome(use, theirs), outcome(use, ours)
            if error is None:
                agrees = refused is not None or kind(right) == kind(found)
            else:
                advises = isinstance(error, XlashardError) or re.search("write|bring", str(error))
                agrees = refused is not None and (advises or type(error) is type(refused))
            if not agrees:
                faults.append(
                    f"{name} under {spec}: {error or found!r:.90}; JAX: {refused or right!r:.90}"
                )
    for dtype in (KEYS.dtype, None):
        try:
            keys = xs.make_array_from_callback(
                KEYS.shape, NamedSharding(MESH, P("x")), KEYS.__getitem__, dtype=dtype
            )
            assert keys.shape == (4,) and keys.dtype == KEYS.dtype
            assert dtype is not None or jax.process_index() == 0
        except XlashardError:
            assert dtype is None and jax.process_index() == 1
    assert not faults, "\n".join(faults)
    assert len(uses) > 120
    different_targets_are_refused()
    print("all agree")


main()
