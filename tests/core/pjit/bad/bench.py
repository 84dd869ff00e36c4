"""Parts of bad calls: the function, the shared objects, and invalid values."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tests.core.pjit.helpers import make_mesh
from xlashard import Mesh, NamedSharding, P, pjit

type Bad = tuple[Callable[[], Any], tuple[str, ...]]

NAMES = ("w", "b", "scale", "kernel", "bias", "mu")
GARBAGE = (
    "text",
    b"bytes",
    object(),
    {1, 2},
    frozenset(),
    lambda: 0,
    range(3),
    slice(1),
    ...,
    NotImplemented,
    int,
    np.float32,
    complex,
    len,
    np.array([{}, 1], dtype=object),
    np.array(["a", "bc"]),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.str_("a"),
    np.dtype("f4"),
    2**70,
    -(2**40),
    jax.ShapeDtypeStruct,
)


def run(state, batch, n=2, *, scale=1.0):
    """The function of every call here."""
    return jax.tree.map(lambda x: x * n, state), batch * scale


@dataclass(frozen=True)
class Bench:
    """Objects that all calls share.

    Attributes:
        mesh: Four by two devices, axes `x` and `y`.
        other: The same devices in another order.
        compiled: A program for `({"w": [8, 4]}, [8])` over the mesh, without donation.
        step: A step bound to it.
    """

    mesh: Mesh
    other: Mesh
    compiled: Any
    step: Any


def make_bench() -> Bench:
    mesh = make_mesh((4, 2), ("x", "y"))
    other = make_mesh((4, 2), ("x", "y"), jax.devices()[::-1])
    shardings = {"w": NamedSharding(mesh, P("x"))}, NamedSharding(mesh, P("x"))
    state = {"w": np.zeros((8, 4), np.float32)}
    program = pjit(run, in_shardings=shardings, out_shardings=shardings)
    compiled = program.lower(state, np.zeros(8, np.float32)).compile()
    return Bench(mesh, other, compiled, compiled.bind(state))


def array(rng: random.Random, *shape: int) -> Any:
    dtype = rng.choice([np.float32, np.int32, np.float16])
    return np.zeros(shape, dtype)


def entered(mesh: Mesh, call: Callable[[], Any]) -> Callable[[], Any]:
    def thunk():
        with mesh:
            return call()

    return thunk
