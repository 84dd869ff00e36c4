"""Host-local arrays and host collectives in a single process."""

import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import multihost_utils
from jax.sharding import AxisType

from tests.fork_server import python_command
from tests.pods.multihost.specs import all_specs, host_local_part
from xlashard import Array, Mesh, NamedSharding, P, device_put, multihost, pjit
from xlashard.errors import ArgumentError, TransferGuardError
from xlashard.multihost import (
    assert_equal,
    broadcast_one_to_all,
    global_array_to_host_local_array,
    host_local_array_to_global_array,
    process_allgather,
)
from xlashard.pods.multihost.host_collectives import packed, unpacked

AXES = ("x", "y", "z")
V = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), AXES)


def test_public_names_include_those_of_multihost_utils() -> None:
    names = (
        *("assert_equal", "broadcast_one_to_all", "global_array_to_host_local_array"),
        *("host_local_array_to_global_array", "process_allgather", "sync_global_devices"),
    )
    assert set(names) <= set(multihost.__all__)
    assert all(callable(getattr(multihost_utils, name)) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_global_arrays_equal_those_of_multihost_utils(mesh: Mesh, ndim: int) -> None:
    value = V.flatten()[: 8**ndim].reshape((8,) * ndim)
    for spec in all_specs(AXES, ndim):
        ours = host_local_array_to_global_array(value, mesh, spec)
        of_jax = multihost_utils.host_local_array_to_global_array(value, mesh, spec)
        assert type(ours) is Array and ours.sharding.is_equivalent_to(of_jax.sharding, ndim)
        for mine, their in zip(ours.addressable_shards, of_jax.addressable_shards, strict=True):
            assert mine.device == their.device
            assert np.array_equal(mine.data, their.data)
        assert np.array_equal(global_array_to_host_local_array(ours, mesh, spec), value)


def test_host_local_part_of_one_process_is_the_whole_array(mesh: Mesh) -> None:
    for spec in all_specs(AXES, 2):
        assert np.array_equal(host_local_part(V, mesh, spec, 0), V)


def test_matching_sharding_keeps_the_buffers(mesh: Mesh) -> None:
    x = device_put(V, NamedSharding(mesh, P(("x", "y"))))
    for use in (host_local_array_to_global_array, global_array_to_host_local_array):
        same = use(x, mesh, P(("x", "y"), None))
        assert pointers(same) == pointers(x)
        assert use(x, mesh, P("z")).sharding.spec == P("z"), "any other is resharded"


def pointers(x: Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def test_explicit_axes_are_in_the_types(mesh: Mesh) -> None:
    kinds = (AxisType.Explicit, AxisType.Explicit, AxisType.Auto)
    explicit = Mesh(mesh.devices, AXES, axis_types=kinds)

    def doubled(x: Any) -> Any:
        return 2 * host_local_array_to_global_array(x, explicit, P("x", "z"))

    assert str(host_local_array_to_global_array(V, explicit, P("x")).aval) == "float32[8@x,8]"
    with jax.set_mesh(explicit):
        assert str(jax.jit(doubled)(V).aval) == "float32[8@x,8]"
        assert pjit(doubled)(V).sharding.spec == P("x", "z")
        slope = jax.jit(jax.grad(lambda x: (doubled(x) ** 2).sum()))(V)
    assert np.array_equal(slope, 8 * V)


@pytest.mark.slow
def test_conversions_support_transformations_and_jit(mesh: Mesh) -> None:
    def f(x: Any) -> Any:
        there = host_local_array_to_global_array(x, mesh, P("x"))
        return global_array_to_host_local_array(jnp.sin(there), mesh, P("y"))

    expected = jax.vmap(jax.grad(lambda x: jnp.sin(x).sum()))(V)
    slope = jax.vmap(jax.grad(lambda x: f(x).sum()))
    for use in (slope, jax.jit(slope), pjit(slope)):
        assert np.allclose(use(V), expected)
    remat = jax.grad(jax.checkpoint(lambda x: f(x).sum()))
    assert np.allclose(remat(V), jnp.cos(V))
    assert np.allclose(jax.jacrev(f)(V[0]), np.diag(np.cos(V[0])))
    _, steps = jax.lax.scan(lambda c, x: (c, f(x)), 0, V)
    assert np.allclose(steps, np.sin(V))
    text = str(jax.make_jaxpr(f)(V[0]))
    assert text.count("host_local_array_to_global_array[") == 1
    assert text.count("global_array_to_host_local_array[") == 1


def test_transfer_guards_apply(mesh: Mesh) -> None:
    x = device_put(V, jax.devices()[3])
    with jax.transfer_guard("disallow"):
        for value in (V, x):
            host_local_array_to_global_array(value, mesh, P("x"))
    lies_so = host_local_array_to_global_array(V, mesh, P("x"))
    with jax.transfer_guard("disallow_explicit"):
        host_local_array_to_global_array(lies_so, mesh, P("x"))
        for value, way in ((V, "host-to-device"), (x, "device-to-device")):
            with pytest.raises(TransferGuardError, match=rf"local_inputs\['v'\]: .*{way}"):
                host_local_array_to_global_array({"v": value}, mesh, P("x"))


def test_invalid_values_are_refused(mesh: Mesh) -> None:
    for value in ("text", np.ma.array([1], mask=[True]), np.array([None])):
        for use in (host_local_array_to_global_array, global_array_to_host_local_array):
            with pytest.raises(ArgumentError, match=r"_inputs\[1\]: it is"):
                use([1, value], mesh, P())
        for gather in (process_allgather, broadcast_one_to_all, assert_equal):
            with pytest.raises(ArgumentError, match=r"in_tree\[1\]: it is"):
                gather([1, value])


def test_results_of_one_process_have_the_form_of_several(mesh: Mesh) -> None:
    """Shapes and dtypes equal those in two processes, with one in place of two."""
    x = device_put(V, NamedSharding(mesh, P("x")))
    tree = {"x": x, "n": np.int64(2**40), "none": None, "key": jax.random.key(3)}
    stacked, tiled = process_allgather(tree), process_allgather(tree, tiled=True)
    assert stacked["x"].shape == (1, 8, 8) and tiled["x"].shape == (8, 8)
    assert stacked["n"].tolist() == tiled["n"].tolist() == [2**40]
    assert stacked["key"].shape == tiled["key"].shape == (1,)
    received = broadcast_one_to_all(tree, is_source=True)
    assert received["n"] == 2**40 and received["n"].dtype == np.int64 and received["none"] is None
    assert (jax.random.key_data(received["key"]) == jax.random.key_data(tree["key"])).all()
    host = np.ones(3)
    process_allgather(host, tiled=True)[0] = broadcast_one_to_all(host)[0] = 5
    assert host.tolist() == [1, 1, 1], "results own their memory"
    assert_equal(tree)


DTYPES = ("bool", "int8", "uint16", "int64", "float32", "complex128", "bfloat16", "int4")
values = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=5
)


@settings(max_examples=50)
@given(values, st.integers(1, 3))
def test_pack_and_unpack_round_trip(kinds: list[Any], processes: int) -> None:
    rng = np.random.default_rng(0)
    rows = [
        [rng.integers(0, 2, shape).astype(jnp.dtype(dtype)) for dtype, shape in kinds]
        for _ in range(processes)
    ]
    block = np.stack([packed(row) for row in rows])
    for number, out in enumerate(unpacked(block, rows[0])):
        expected = np.stack([row[number] for row in rows])
        assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
        assert out.tobytes() == expected.tobytes() and out.flags.writeable


_LEAVING = """
import os, sys
from xlashard import multihost
reader, writer = os.pipe()
os.close(reader)
sys.stdout = os.fdopen(writer, "w")
sys.stdout.write("text that no process reads")
multihost.leave(3, "no more data")
"""


@pytest.mark.slow
def test_exit_code_is_kept_with_closed_output() -> None:
    done = subprocess.run([*python_command(), "-c", _LEAVING], timeout=60, check=False)
    assert done.returncode == 3
