"""Every function: JAX's values, as Arrays, on the devices of the arguments."""

import inspect
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
import xlashard.numpy as xnp
from tests.core.array.cases import DEVICES, MESH, SHARDINGS, named, same
from tests.grouped_cases import sweep
from tests.numpy.examples import FFT, LINALG, MAKERS, NOT_CALLED, NUMPY, Samples, samples
from xlashard import Array, GSPMDSharding, device_put
from xlashard.errors import DeletedError, DeviceMismatchError

MODULES = {
    "numpy": (jnp, xnp, NUMPY),
    "linalg": (jnp.linalg, xnp.linalg, LINALG),
    "fft": (jnp.fft, xnp.fft, FFT),
}
# Functions without array arguments, which create arrays on the default device.
FROM_SHAPES = {
    *(set(MAKERS) - {"zeros_like", "ones_like", "empty_like", "full_like", "diagflat"}),
    *("fftfreq", "rfftfreq", "diag_indices_from", "tril_indices_from", "triu_indices_from"),
} - {"frompyfunc", "vectorize"}


def placed(sharding: Any) -> Samples[Any]:
    """Return the samples by a sharding; replicated on its devices where the rank does not match."""
    place = xlashard.core.array.placement.target.parse_placement(sharding, "sharding").sharding
    copies = GSPMDSharding(place.devices, "{replicated}", memory_kind=place.memory_kind)

    def put(value: np.ndarray) -> Array:
        try:
            return device_put(value, place)
        except ValueError:
            return device_put(value, copies)

    return samples(put)


@pytest.fixture(scope="module")
def theirs() -> Samples[Any]:
    return samples(jnp.asarray)


@pytest.fixture(scope="module")
def ours() -> Samples[Any]:
    return placed(named("x", "y"))


def public_functions(module: Any) -> Iterator[str]:
    for name in dir(module):
        member = getattr(module, name)
        if not name.startswith("_") and callable(member) and not isinstance(member, type):
            yield name


@pytest.mark.parametrize("module", list(MODULES))
def test_every_function_has_an_example(module: str) -> None:
    jax_module, our_module, examples = MODULES[module]
    names = set(public_functions(jax_module))
    assert names - set(examples) - set(NOT_CALLED) == set()
    assert set(public_functions(our_module)) == names


# A few functions of each kind.
SWEPT = {
    "numpy": (
        *("add", "where", "sum", "einsum", "reshape", "concatenate", "split", "sort", "cumsum"),
        *("take", "imag", "setdiff1d"),
    ),
    "linalg": ("qr", "solve"),
    "fft": ("fft",),
}
CALLS = [
    f"{module}.{name}"
    for module, (jax_module, _, examples) in MODULES.items()
    for name in examples
    # The older of the two JAX versions lacks some.
    if name in public_functions(jax_module)
]
QUICK = [f"{module}.{name}" for module, names in SWEPT.items() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("call", sweep(CALLS, quick=QUICK))
def test_functions_return_arrays_with_jax_values(
    call: str, theirs: Samples[Any], ours: Samples[Any]
) -> None:
    module, _, name = call.partition(".")
    jax_module, our_module, examples = MODULES[module]
    with warnings.catch_warnings():
        # Functions computed in 32 bits, or on too few numbers.
        warnings.simplefilter("ignore")
        wanted, got = examples[name](jax_module, theirs), examples[name](our_module, ours)
    agree(got, wanted)
    if name not in FROM_SHAPES:
        for leaf in jax.tree.leaves(got):
            if isinstance(leaf, Array):
                assert leaf.committed
                assert leaf.devices() == set(DEVICES)


def agree(got: Any, wanted: Any) -> None:
    """Check equal structure, Arrays where JAX has its own, and values that agree."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if not isinstance(other, jax.Array):
            assert type(one) is type(other)
            assert np.array_equal(one, other)
            continue
        assert type(one) is Array
        assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-4)


@pytest.mark.partitioner
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["single", "half the devices", "permuted mesh", "bare tiles", "listed tiles", "own"]
)
def test_results_stay_where_the_arguments_are(kind: str, theirs: Samples[Any]) -> None:
    ours = placed(SHARDINGS[kind])
    for module, names in SWEPT.items():
        jax_module, our_module, examples = MODULES[module]
        for name in names:
            got = examples[name](our_module, ours)
            agree(got, examples[name](jax_module, theirs))
            for leaf in jax.tree.leaves(got):
                assert leaf.committed, name
                assert leaf.devices() == ours.x.devices(), name


@pytest.mark.devices(8)
@pytest.mark.slow
def test_elementwise_results_are_cut_like_the_operand(ours: Samples[Any]) -> None:
    for out in (xnp.exp(ours.x), xnp.add(ours.x, 1.0), xnp.where(ours.m, ours.x, 0)):
        assert [s.data.shape for s in out.addressable_shards] == [(4, 2)] * 8
    assert xnp.sum(ours.x, axis=1).sharding.shard_shape((8,)) == (4,)
    assert xnp.concatenate([ours.x, ours.u], axis=1).sharding.shard_shape((8, 16)) == (4, 4)


@pytest.mark.partitioner
@pytest.mark.slow
def test_results_independent_of_elements_stay_on_the_devices(ours: Samples[Any]) -> None:
    x = ours.x
    for out in (
        *(x[0:0], x[x > 99], x[np.array([], int)], x[0:0] + 1, x.imag, xnp.imag(x)),
        *(xnp.isreal(x), xnp.isinf(ours.i), xnp.ones_like(x, shape=(3,)), xnp.nonzero(x > 99)[0]),
        *(xnp.array_equal(x, x[0]), xnp.linalg.matrix_power(x, 0), xnp.setdiff1d(x, x)),
    ):
        assert type(out) is Array
        assert out.committed and out.devices() == set(DEVICES)
    assert xnp.imag(x).sharding.is_equivalent_to(x.sharding, 2)


def test_uncommitted_arguments_give_uncommitted_results() -> None:
    x = device_put(np.arange(4.0))
    assert not xnp.exp(x).committed
    assert not x[0:0].committed
    assert not xnp.zeros(3).committed
    assert xnp.add(x, device_put(np.ones(4), DEVICES[3])).devices() == {DEVICES[3]}


@pytest.mark.slow
def test_arrays_are_found_inside_of_arguments(ours: Samples[Any]) -> None:
    x = ours.x
    assert same(xnp.block([[x, x], [x, x]]), np.block([[np.asarray(x)] * 2] * 2))
    assert same(xnp.concatenate((x, np.asarray(x))), np.concatenate([x, x]))
    assert same(xnp.r_[x[0], 1.0], np.r_[np.asarray(x[0]), np.float32(1)])
    assert same(xnp.c_[x[0], x[1]], np.c_[np.asarray(x[0]), np.asarray(x[1])])
    assert same(xnp.clip(x, max=device_put(np.float32(3))), np.clip(x, None, np.float32(3)))
    assert type(xnp.mgrid[0:3]) is type(xnp.ogrid[0:3]) is Array
    result = xnp.linalg.svd(x)
    assert type(result).__name__ == "SVDResult"
    assert {type(part) for part in result} == {Array}


@pytest.mark.devices(8)
@pytest.mark.slow
def test_functions_compute_with_tracers() -> None:
    x = device_put(np.arange(8, dtype=np.float32), named("x"))

    def f(t: Any) -> Any:
        return xnp.sum(xnp.sin(t) * xnp.arange(8) + xnp.where(x > 2, t, 0) + xnp.zeros(8))

    wanted = jax.grad(lambda t: (jnp.sin(t) * jnp.arange(8) + jnp.where(t > 2, t, 0)).sum())
    for transformed in (jax.grad(f), jax.jit(jax.grad(f)), xlashard.pjit(jax.grad(f))):
        np.testing.assert_allclose(transformed(x), wanted(x.to_jax()), rtol=1e-5)
    rows = device_put(np.ones((4, 8), np.float32), named("x"))
    assert jax.vmap(xnp.linalg.norm)(rows).shape == (4,)
    assert jax.jit(lambda t: xnp.add.reduce(xnp.asarray(t)))(x) == 28
    assert type(jax.tree.map(xnp.add, {"a": x}, {"a": x})["a"]) is Array
    made = jax.jit(lambda: xnp.zeros((8, 2), device=named("x")))()
    assert made.sharding.shard_shape((8, 2)) == (4, 2)


def test_asarray_of_an_array_is_that_array(ours: Samples[Any]) -> None:
    assert xnp.asarray(ours.x) is ours.x
    copy = xnp.array(ours.x)
    assert copy is not ours.x and same(copy, np.asarray(ours.x))


@pytest.mark.slow
def test_ufuncs_have_their_methods() -> None:
    v = np.arange(8, dtype=np.float32)
    x = device_put(v, named("x"))
    assert isinstance(xnp.add, xnp.ufunc)
    assert (xnp.add.nin, xnp.add.nout, xnp.add.nargs, xnp.add.identity) == (2, 1, 2, 0)
    for got, wanted in (
        (xnp.add(x, 1), v + 1),
        (xnp.add.reduce(x), np.add.reduce(v)),
        (xnp.multiply.accumulate(x + 1), np.multiply.accumulate(v + 1)),
        (xnp.maximum.outer(x, x[:3]), np.maximum.outer(v, v[:3])),
        (xnp.add.reduceat(x, np.array([0, 4])), np.add.reduceat(v, [0, 4])),
        (xnp.add.at(x, np.array([0, 0]), 5.0, inplace=False), v + np.float32([10, *[0] * 7])),
    ):
        assert type(got) is Array
        assert got.devices() == x.devices()
        np.testing.assert_allclose(got, wanted)
    own = xnp.frompyfunc(lambda a, b: a + 2 * b, 2, 1)
    assert type(own) is xnp.ufunc and type(own.outer(x, x)) is Array
    assert type(xnp.ufunc(lambda a: a + 1, 1, 1)(x)) is Array
    assert xnp.add == xnp.add != xnp.multiply
    assert "add" in repr(xnp.add)


@xnp.vectorize
def halved(x: Any) -> Any:
    """Half of it."""
    return x / 2


def test_vectorize_decorates() -> None:
    x = device_put(np.arange(8, dtype=np.float32), named("x"))
    assert type(halved(x)) is Array
    assert halved.__doc__ == "Half of it."
    assert pickle.loads(pickle.dumps(halved)) is halved


@pytest.mark.parametrize("name", ["exp", "where", "add", "zeros", "vectorize"])
def test_functions_are_cached_and_picklable_by_name(name: str) -> None:
    function = getattr(xnp, name)
    assert getattr(xnp, name) is function
    assert pickle.loads(pickle.dumps(function)) is function
    if name != "vectorize":
        assert inspect.signature(function) == inspect.signature(getattr(jnp, name))
        assert function.__doc__ == getattr(jnp, name).__doc__
    assert function.__name__ == name


def test_threads_share_one_function_object() -> None:
    found: list[Any] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        found.append(xnp.nanpercentile)

    vars(xnp).pop("nanpercentile", None)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_public_names_equal_jax_numpy() -> None:
    assert set(dir(xnp)) == {name for name in dir(jnp) if not name.startswith("_")}
    assert xnp.ndarray is Array
    assert xnp.linalg is xlashard.numpy.linalg
    for name in ("pi", "newaxis", "inf", "finfo", "dtype", "s_", "integer"):
        assert getattr(xnp, name) is getattr(jnp, name)
    with pytest.raises(AttributeError, match="'arrange'.* arange[?]"):
        _ = xnp.arrange
    with pytest.raises(AttributeError, match="xlashard.numpy.fft.* 'ftt'"):
        _ = xnp.fft.ftt
    names: dict[str, Any] = {}
    exec("from xlashard.numpy.fft import *", names)
    assert names["rfft"] is xnp.fft.rfft


PLACES = {
    "named": lambda: (named("x", "y"), (4, 2)),
    "tiles": lambda: (GSPMDSharding(DEVICES, "{devices=[4,2]3,1,0,2,7,5,6,4}"), (2, 4)),
    "user's own": lambda: (SHARDINGS["own"], (2, 8)),
    "jax's": lambda: (jax.sharding.NamedSharding(MESH, jax.P("y")), (2, 8)),
    "device": lambda: (DEVICES[5], (8, 8)),
}


@pytest.mark.partitioner
@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PLACES))
def test_arrays_are_made_on_the_requested_device(kind: str) -> None:
    place, shard_shape = PLACES[kind]()
    like = device_put(np.zeros((8, 8), np.int32), DEVICES[1])
    host = np.arange(64).reshape(8, 8)
    for out, wanted in (
        (xnp.zeros((8, 8), device=place), np.zeros((8, 8), np.float32)),
        (xnp.full((8, 8), -0.0, device=place), np.full((8, 8), -0.0, np.float32)),
        (xnp.full((8, 8), 0.0, device=place), np.full((8, 8), 0.0, np.float32)),
        (xnp.eye(8, dtype=bool, device=place), np.eye(8, dtype=bool)),
        (xnp.ones_like(like, device=place), np.ones((8, 8), np.int32)),
        (xnp.full_like(like, 3, device=place), np.full((8, 8), 3, np.int32)),
        (xnp.asarray(host, device=place), host.astype(np.int32)),
        (xnp.asarray(host, dtype=xnp.float32, device=place), host.astype(np.float32)),
        (xnp.array(like, device=place), np.zeros((8, 8), np.int32)),
        (xnp.asarray(host.tolist(), device=place), host.astype(np.int32)),
        (xnp.astype(like, bool, device=place), np.zeros((8, 8), bool)),
    ):
        assert type(out) is Array
        assert out.committed
        assert {s.data.shape for s in out.addressable_shards} == {shard_shape}
        assert same(out, wanted)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_ranges_are_made_on_the_requested_device() -> None:
    row = named("x")
    assert same(xnp.arange(1, 9, device=row), np.arange(1, 9, dtype=np.int32))
    assert xnp.arange(8.0, device=row).sharding == row
    np.testing.assert_allclose(xnp.linspace(0, 1, 8, device=row), np.linspace(0, 1, 8), rtol=1e-6)
    np.testing.assert_allclose(xnp.linspace(0, 2, 8, device=row), np.linspace(0, 2, 8), rtol=1e-6)
    assert same(xnp.fft.fftfreq(8, 0.5, device=row), np.fft.fftfreq(8, 0.5).astype(np.float32))
    with jax.set_mesh(MESH):
        assert xnp.arange(8, device=xlashard.P("y")).sharding.shard_shape((8,)) == (2,)


def test_devices_that_differ_are_named_by_argument() -> None:
    x, y = (device_put(np.ones(8, np.float32), device) for device in DEVICES[:2])
    for call, texts in (
        (
            lambda: xnp.add(x, y),
            ("add needs", "x, float32[8], is on device 0", "y, float32[8], on device 1"),
        ),
        (lambda: xnp.dot(x, b=y), ("dot needs", "a, float32[8], is on device 0", "b.sharding")),
        (lambda: xnp.concatenate([x, y]), ("concatenate", "arrays[0], ", "arrays[1], ")),
        (lambda: xnp.add.outer(x, y), ("add.outer needs", "on device 0", "on device 1")),
        (lambda: x.dot(y), ("dot needs", "on device 0", "on device 1")),
    ):
        with pytest.raises(DeviceMismatchError) as caught:
            call()
        for text in texts:
            assert text.replace("b.sharding", "device_put(b, a.sharding)") in str(caught.value)


def test_deleted_arguments_are_named() -> None:
    gone = device_put(np.ones(8, np.float32), named("x"))
    gone.delete()
    for call in (lambda: xnp.exp(gone), lambda: xnp.stack([gone]), lambda: xnp.add(1, gone)):
        with pytest.raises(DeletedError, match=r"float32\[8\].*delete\(\)"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "dot", "stack"])
def test_error_of_a_missing_argument_names_the_function(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing"):
        getattr(xnp, name)()


def test_constructors_of_dtypes_return_arrays() -> None:
    x = device_put(np.ones(8, np.float16), SHARDINGS["single"])
    for name in ("float32", "complex64", "int8", "bfloat16", "bool_"):
        jax_type, our_type = getattr(jnp, name), getattr(xnp, name)
        agree(our_type(x), jax_type(np.ones(8, np.float16)))
        agree(our_type(3), jax_type(3))
        assert our_type(x).sharding == x.sharding
        # It stays the dtype that JAX and NumPy know.
        assert our_type == jax_type
        assert hash(our_type) == hash(jax_type)
        assert np.dtype(our_type) == np.dtype(jax_type)
        assert pickle.loads(pickle.dumps(our_type)) is our_type
    assert xnp.single is xnp.float32
    assert xnp.float16(x) is x
    assert jax.eval_shape(xnp.float32, x).dtype == np.float32
