"""Removed arguments of functions: each old call gives the result of today's."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlashard import legacy
from xlashard.errors import RefusedError
from xlashard.legacy.entries.keywords import SIGNATURES, keyword_entries
from xlashard.legacy.modules.keywords import EarlierFunction

X = np.array([[0.5, -1.5, 2.5, 1.0], [3.0, 0.25, -2.0, 4.0]], np.float32)
SQUARE = X @ X.T + 3 * np.eye(2, dtype=np.float32)
MASK = X > 0
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
TYPE = jax.ShapeDtypeStruct((2,), np.float32)
REPLICATED = jax.sharding.NamedSharding(MESH, jax.P())


def call_back(vectorized: bool | None, **options: Any) -> Any:
    if vectorized is not None:
        options["vectorized"] = vectorized
    result = jax.ShapeDtypeStruct((), jnp.float32)

    def add(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda x: np.asarray(x) + 1, result, x, **options)

    return jax.vmap(add)(X[0])


def square_in_jit(x: Any, **options: Any) -> jax.Array:
    return jax.jit(lambda x: x.clip(**options))(x)


# The old call, and today's.
CALLS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "jax.numpy.clip a": (lambda: jnp.clip(a=X, min=0, max=1), lambda: jnp.clip(X, 0, 1)),
    "jax.numpy.clip a_min": (lambda: jnp.clip(X, a_min=0), lambda: jnp.clip(X, min=0)),
    "jax.numpy.clip a_max": (lambda: jnp.clip(X, 0, a_max=1), lambda: jnp.clip(X, 0, 1)),
    "jax.numpy.clip out": (lambda: jnp.clip(X, 0, 1, out=None), lambda: jnp.clip(X, 0, 1)),
    "jax.Array.clip a_min": (lambda: square_in_jit(X, a_min=0), lambda: jnp.clip(X, 0)),
    "jax.Array.clip a_max": (lambda: jnp.array(X).clip(a_max=1), lambda: jnp.clip(X, max=1)),
    "jax.Array.clip out": (lambda: jnp.array(X).clip(0, 1, out=None), lambda: jnp.clip(X, 0, 1)),
    "jax.numpy.sort kind": (lambda: jnp.sort(X, 0, "quicksort"), lambda: np.sort(X, 0)),
    "jax.numpy.argsort kind": (lambda: jnp.argsort(X, kind="stable"), lambda: np.argsort(X)),
    "jax.Array.sort kind": (lambda: jnp.array(X).sort(0, "mergesort"), lambda: np.sort(X, 0)),
    "jax.Array.argsort kind": (
        lambda: jax.jit(lambda x: x.argsort(kind="stable"))(X),
        lambda: np.argsort(X),
    ),
    **{
        f"jax.numpy.{name} interpolation": (
            lambda name=name: getattr(jnp, name)(X, 0.4, interpolation="lower"),
            lambda name=name: getattr(np, name)(X, 0.4, method="lower"),
        )
        for name in ("quantile", "percentile", "nanquantile", "nanpercentile")
    },
    **dict.fromkeys(
        [f"jax.numpy.where {name}" for name in ("condition", "x", "y")],
        (lambda: jnp.where(y=0, condition=MASK, x=X), lambda: np.where(MASK, X, 0)),
    ),
    "jax.numpy.reshape newshape": (
        lambda: jnp.reshape(X, newshape=(4, 2)),
        lambda: np.reshape(X, (4, 2)),
    ),
    **dict.fromkeys(
        [f"jax.numpy.array {name}" for name in ("copy", "order", "ndmin")],
        (lambda: jnp.array([1], jnp.int32, True, "K", 2), lambda: np.array([[1]])),
    ),
    "jax.numpy.from_dlpack x": (lambda: jnp.from_dlpack(x=jnp.array(X)), lambda: X),
    **{
        f"{function} {name}": (
            lambda function=function, names=tuple(signature.keywords): getattr(
                jnp, function.rpartition(".")[2]
            )(**{name: X[:1] + 2 for name in names}),
            lambda function=function, names=tuple(signature.keywords): getattr(
                jnp, function.rpartition(".")[2]
            )(*[X[:1] + 2 for _ in names]),
        )
        for function, signature in SIGNATURES.items()
        for name in signature.keywords
        if name in ("x", "x1", "x2", "val") and function.startswith("jax.numpy.")
        if function not in ("jax.numpy.where", "jax.numpy.from_dlpack")
        if not function.endswith((".ldexp", ".right_shift"))
    },
    **dict.fromkeys(
        [f"jax.numpy.{name} {x}" for name in ("ldexp", "right_shift") for x in ("x1", "x2")],
        (
            lambda: (jnp.ldexp(x1=X, x2=np.int32(2)), jnp.right_shift(x1=8, x2=2)),
            lambda: (X * 4, 2),
        ),
    ),
    "jax.nn.softmax initial": (
        lambda: jax.nn.softmax(X, -1, MASK, -jnp.inf),
        lambda: jax.nn.softmax(X, where=MASK),
    ),
    "jax.nn.log_softmax initial": (
        lambda: jax.nn.log_softmax(X, where=MASK, initial=-1.0),
        lambda: jax.nn.log_softmax(X, where=MASK),
    ),
    **{
        f"jax.{name} concrete": (
            lambda name=name: jax.grad(getattr(jax, name)(jnp.sum, concrete=False))(X),
            lambda: np.ones_like(X),
        )
        for name in ("checkpoint", "remat")
    },
    "jax.pmap global_arg_shapes": (
        lambda: jax.pmap(lambda x: x + 1, global_arg_shapes=None)(X[:1]),
        lambda: X[:1] + 1,
    ),
    "jax.scipy.linalg.solve sym_pos": (
        lambda: jax.scipy.linalg.solve(SQUARE, X, sym_pos=True),
        lambda: jax.scipy.linalg.solve(SQUARE, X, assume_a="pos"),
    ),
    **dict.fromkeys(
        ["jax.scipy.special.betaln x", "jax.scipy.special.betaln y"],
        (
            lambda: jax.scipy.special.betaln(y=3.0, x=2.0),
            lambda: jax.scipy.special.betaln(2.0, 3.0),
        ),
    ),
    "jax.scipy.special.exp1 module": (
        lambda: jax.scipy.special.exp1(2.0, module=None),
        lambda: jax.scipy.special.exp1(2.0),
    ),
    **{
        f"jax.scipy.stats.gennorm.{name} p": (
            lambda name=name: getattr(jax.scipy.stats.gennorm, name)(0.5, p=2.0),
            lambda name=name: getattr(jax.scipy.stats.gennorm, name)(0.5, 2.0),
        )
        for name in ("cdf", "logpdf", "pdf")
    },
    **dict.fromkeys(
        ["jax.lax.dot precision", "jax.lax.dot preferred_element_type"],
        (lambda: jax.lax.dot(X, X.T, None, jnp.float32), lambda: X @ X.T),
    ),
    **dict.fromkeys(
        ["jax.lax.random_gamma_grad a", "jax.lax.random_gamma_grad x"],
        (
            lambda: jax.lax.random_gamma_grad(a=X[0], x=X[0]),
            lambda: jax.lax.random_gamma_grad(X[0], X[0]),
        ),
    ),
    "jax.lax.with_sharding_constraint axis_resources": (
        lambda: jax.lax.with_sharding_constraint(jnp.array(X), axis_resources=REPLICATED),
        lambda: X,
    ),
    **{
        f"jax.lax.{name} sharding": (old, today)
        for name, old, today in (
            ("reshape", lambda: jax.lax.reshape(X, (8,), sharding=None), lambda: X.ravel()),
            ("broadcast", lambda: jax.lax.broadcast(X, (1,), sharding=None), lambda: X[None]),
            (
                "broadcast_in_dim",
                lambda: jax.lax.broadcast_in_dim(X, (1, 2, 4), (1, 2), sharding=None),
                lambda: X[None],
            ),
            (
                "broadcasted_iota",
                lambda: jax.lax.broadcasted_iota(jnp.int32, (2, 2), 0, sharding=None),
                lambda: np.array([[0, 0], [1, 1]]),
            ),
        )
    },
    "jax.make_mesh axis_shapes": (
        lambda: jax.make_mesh(axis_shapes=(1,), axis_names=("x",), devices=jax.devices()[:1]).size,
        lambda: 1,
    ),
    "jax.pure_callback vectorized": (
        lambda: (call_back(True), call_back(False)),
        lambda: (X[0] + 1, X[0] + 1),
    ),
    "jax.ffi.ffi_call vectorized": (
        lambda: callable(jax.ffi.ffi_call("f", TYPE, vectorized=True)),
        lambda: True,
    ),
    "jax.dtypes.canonicalize_dtype allow_opaque_dtype": (
        lambda: jax.dtypes.canonicalize_dtype("float64", allow_opaque_dtype=True).itemsize,
        lambda: 4,
    ),
    "jax.experimental.checkify.checkify fun": (
        lambda: __import__("jax.experimental.checkify").experimental.checkify.checkify(
            fun=lambda x: x + 1
        )(X)[1],
        lambda: X + 1,
    ),
    "jax.ShapeDtypeStruct.__init__ named_shape": (
        lambda: jax.ShapeDtypeStruct((2,), np.float32, named_shape={}).shape,
        lambda: (2,),
    ),
    "jax.ShapeDtypeStruct.__init__ sharding": (
        lambda: jax.ShapeDtypeStruct((2,), np.float32, None, REPLICATED).sharding == REPLICATED,
        lambda: True,
    ),
    "jax.core.ShapedArray.__new__ named_shape": (
        lambda: jax.core.ShapedArray((2,), np.dtype("float32"), named_shape={}).shape,
        lambda: (2,),
    ),
}


@pytest.fixture(autouse=True, scope="module")
def installed():
    with legacy.installed():
        yield


@pytest.mark.parametrize("name", CALLS)
def test_old_call_gives_the_result_of_today(name: str) -> None:
    old, today = CALLS[name]
    for result, expected in zip(jax.tree.leaves(old()), jax.tree.leaves(today()), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_every_removed_argument_has_a_call() -> None:
    arguments = {
        f"{function} {name}" for function, names in keyword_entries().items() for name in names
    }
    assert CALLS.keys() == arguments


REFUSED = {
    "jax.checkpoint(concrete=)": lambda: jax.checkpoint(jnp.sum, concrete=True),
    "jax.numpy.clip(out=)": lambda: jnp.clip(X, 0, 1, out=X),
    "jax.pmap(global_arg_shapes=)": lambda: jax.pmap(abs, global_arg_shapes=((2,),)),
    "jax.ShapeDtypeStruct(named_shape=)": lambda: jax.ShapeDtypeStruct(
        (2,), np.float32, named_shape={"i": 2}
    ),
    "jax.core.ShapedArray(named_shape=)": lambda: jax.core.ShapedArray(
        (2,), np.dtype("float32"), named_shape={"i": 2}
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_value_without_an_equivalent_is_refused_with_advice(name: str) -> None:
    by_name = {
        entry.name: entry for entries in keyword_entries().values() for entry in entries.values()
    }
    with pytest.raises(RefusedError) as caught:
        REFUSED[name]()
    assert name in str(caught.value)
    assert by_name[name].note in str(caught.value)
    assert by_name[name].today in str(caught.value)


def test_functions_keep_their_attributes_types_and_errors() -> None:
    assert isinstance(jnp.clip, EarlierFunction)
    assert jnp.clip.__name__ == "clip"
    assert "hlo" in str(jnp.clip.lower(X, 0, 1).compiler_ir()).lower()
    assert jnp.logaddexp.reduce(X[0]).shape == ()
    assert pickle.loads(pickle.dumps(jnp.clip)) is jnp.clip
    np.testing.assert_allclose(jax.vmap(jnp.where)(MASK, X, X), X)
    with pytest.raises(TypeError, match="a_mim"):
        jnp.clip(X, a_mim=0)
    assert isinstance(jax.ShapeDtypeStruct((2,), np.float32), jax.ShapeDtypeStruct)
