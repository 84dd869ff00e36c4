"""Meshes, resources and positional semantics of `jax.experimental.maps`."""

import dataclasses
import pickle
import threading
from collections import OrderedDict

import jax
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32, spec_of
from tests.legacy.removed import maps
from tests.message_patterns import naming
from xlashard import NamedSharding, pjit
from xlashard.errors import ArgumentError, BoxError, MeshError
from xlashard.legacy.modes.config_flags import POSITIONAL, positional_semantics
from xlashard.legacy.modules.maps import global_to_local, local_to_global
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P


def empty_mesh():
    return maps.Mesh(np.empty((), dtype=object), ())


@dataclasses.dataclass
class FakeDevice:
    """Device as tests of the era wrote it: compared by value, and so without a hash."""

    id: int
    process_index: int = 0
    platform: str = "tpu"


@dataclasses.dataclass(frozen=True)
class FrozenDevice:
    """Device that compares by value and has a hash."""

    id: int
    process_index: int = 0
    platform: str = "tpu"


def fake_devices(kind, processes=1):
    return np.array([kind(n, n * processes // 8) for n in range(8)]).reshape(4, 2)


def test_mesh_constructor_returns_a_current_mesh(mesh):
    again = maps.Mesh(mesh.devices, mesh.axis_names)
    assert again is mesh and isinstance(mesh, maps.Mesh) and issubclass(type(mesh), maps.Mesh)
    assert not isinstance("mesh", maps.Mesh)
    assert maps.Mesh(jax.devices(), "x").shape == OrderedDict(x=8)
    assert maps.Mesh([jax.devices()], ["x", "y"]).devices.shape == (1, 8)
    assert again.shape["x"] == 4 and list(again.shape.items()) == [("x", 4), ("y", 2)]
    assert isinstance(again.shape, OrderedDict) and again.size == 8 and not again.empty
    assert again.device_ids.tolist() == [[d.id for d in row] for row in mesh.devices]
    assert again.local_mesh == again and again.local_devices == list(mesh.devices.flat)
    assert not again.is_multi_process
    with pytest.raises(ValueError, match="ndim"):
        maps.Mesh(mesh.devices, ("x",))


def test_empty_mesh_is_distinguishable_from_a_mesh(mesh):
    nothing = empty_mesh()
    assert nothing.empty and nothing.devices.shape == () and nothing.axis_names == ()
    assert nothing.shape == {} and nothing.local_mesh.empty
    assert maps.thread_resources.env.physical_mesh == nothing == maps.EMPTY_ENV.physical_mesh
    assert maps.thread_resources.env == maps.EMPTY_ENV
    with mesh:
        env = maps.thread_resources.env
        assert env.physical_mesh.devices.shape != () and not env.physical_mesh.empty
        assert env.shape["x"] == 4 and env.local_shape["y"] == 2 and env.loops == ()
        assert env.resource_axes == {"x", "y"} and env.physical_resource_axes == {"x", "y"}
    assert maps.thread_resources.env.physical_mesh.empty


@pytest.mark.parametrize("kind", [FakeDevice, FrozenDevice])
def test_meshes_of_fake_devices(kind):
    devices = fake_devices(kind, processes=2)
    fake, again = maps.Mesh(devices, ("x", "y")), maps.Mesh(devices, ("x", "y"))
    other = maps.Mesh(devices.T, ("x", "y"))
    assert isinstance(fake, maps.Mesh) and isinstance(fake, jax.sharding.Mesh)
    assert fake == again and hash(fake) == hash(again) and fake != other
    assert fake.shape == {"x": 4, "y": 2} and fake.size == 8 and not fake.empty
    assert fake.device_ids.tolist() == np.arange(8).reshape(4, 2).tolist()
    assert fake.devices[1, 0] is devices[1, 0] and "axis_names=('x', 'y')" in repr(fake)
    assert fake.local_mesh.shape == {"x": 2, "y": 2}
    assert fake.local_mesh.devices.tolist() == devices[:2].tolist()
    with fake:
        assert maps.thread_resources.env.physical_mesh == fake
        assert maps.thread_resources.env.shape["x"] == 4
    sharding = NamedSharding(fake, P("x", "y"))
    assert sharding.shard_shape((8, 4)) == (2, 2)
    copied = pickle.loads(pickle.dumps(fake))
    assert copied.axis_names == ("x", "y") and copied.devices.tolist() == devices.tolist()


def test_computation_on_fake_devices_is_refused():
    with maps.Mesh(fake_devices(FrozenDevice), ("x", "y")):
        double = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=None)
        for use in (double, double.lower, lambda x: xlashard.device_put(x, P("x"))):
            with pytest.raises(MeshError, match=naming("FrozenDevices", "jax.devices()")):
                use(f32(8, 4))


def test_local_parts_of_meshes_of_devices_without_a_hash():
    fake = maps.Mesh(fake_devices(FakeDevice, processes=2), ("x", "y"))
    assert fake.is_multi_process
    assert fake.local_devices == list(fake.devices[:2].flat)
    scattered = fake_devices(FakeDevice)
    scattered[0, 0], scattered[1, 1] = FakeDevice(0, 1), FakeDevice(3, 1)
    with pytest.raises(BoxError, match=naming("6 devices", "8", "'x'=0, 'y'=0")):
        maps.Mesh(scattered, ("x", "y")).local_mesh  # noqa: B018
    elsewhere = np.array([FakeDevice(n, 3) for n in range(8)])
    with pytest.raises(MeshError, match=naming("process 0", "process 3")):
        maps.Mesh(elsewhere, ("x",)).local_mesh  # noqa: B018


def test_mesh_is_a_context_and_a_decorator(mesh):
    with maps.mesh(mesh.devices.tolist(), ("x", "y")) as made:
        assert made is mesh
        doubled = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("y"))(
            f32(8, 4)
        )
    assert spec_of(doubled) == ("y",)

    @maps.Mesh(mesh.devices, ("x", "y"))
    def under_it():
        return maps.thread_resources.env.shape["y"]

    assert under_it() == 2 == under_it() and maps.thread_resources.env.physical_mesh.empty


@pytest.mark.slow
def test_assigned_mesh_applies_to_pjit_and_jax(mesh):
    double = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("y"))
    before = maps.thread_resources.env
    try:
        maps.thread_resources.env = maps.ResourceEnv(mesh, ())
        assert maps.thread_resources.env.physical_mesh is mesh
        assert spec_of(double(f32(8, 4))) == ("y",)
        constrain = jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, P("x")))
        assert constrain(f32(8, 4)).sharding.shard_shape((8, 4)) == (2, 4)
        with maps.Mesh(mesh.devices.T, ("x", "y")):
            assert maps.thread_resources.env.shape["x"] == 2
            assert len(maps.thread_resources.stack) == 2
        assert maps.thread_resources.env.shape["x"] == 4
    finally:
        maps.thread_resources.env = before
    assert maps.thread_resources.env.physical_mesh.empty
    with pytest.raises(MeshError):
        double(f32(8, 4))


def test_empty_mesh_can_be_assigned_within_a_with_block(mesh):
    with mesh:
        maps.thread_resources.env = maps.ResourceEnv(empty_mesh(), ())
        assert maps.thread_resources.env.physical_mesh.empty
        with pytest.raises(MeshError):
            pjit(lambda x: x, in_axis_resources=P("x"), out_axis_resources=None)(f32(8))
    assert maps.thread_resources.env.physical_mesh.empty
    with mesh:
        assert maps.thread_resources.env.physical_mesh is mesh


@pytest.mark.slow
def test_cache_key_of_jit_includes_the_assigned_mesh(mesh):
    constrain = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 3, P("x")))
    before = maps.thread_resources.env
    shapes = []
    try:
        for made in (mesh, maps.Mesh(mesh.devices.T, ("x", "y"))):
            maps.thread_resources.env = maps.ResourceEnv(made, ())
            shapes.append(constrain(f32(8, 4)).sharding.shard_shape((8, 4)))
    finally:
        maps.thread_resources.env = before
    assert shapes == [(2, 4), (4, 4)]


def test_thread_resources_return_the_mesh_of_set_mesh(mesh):
    with jax.set_mesh(mesh):
        assert maps.thread_resources.env.physical_mesh is mesh


def test_each_thread_has_its_own_resource_env(mesh):
    seen = {}

    def look():
        seen["before"] = maps.thread_resources.env.physical_mesh.empty
        seen["semantics"] = maps._positional_semantics.val
        maps.thread_resources.env = maps.ResourceEnv(maps.Mesh(mesh.devices.T, ("a", "b")), ())
        seen["after"] = maps.thread_resources.env.shape

    with mesh, positional_semantics(maps._PositionalSemantics.GLOBAL):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert maps.thread_resources.env.physical_mesh is mesh
    assert seen == {
        "before": True,
        "semantics": maps._PositionalSemantics.LOCAL,
        "after": {"a": 2, "b": 4},
    }


def test_invalid_resource_env_is_refused(mesh):
    with pytest.raises(
        ArgumentError,
        match=naming("thread_resources.env", "Mesh", "ResourceEnv(Mesh(devices, axis_names), ())"),
    ):
        maps.thread_resources.env = mesh
    with pytest.raises(
        ArgumentError, match=naming("thread_resources.env", "Loop(name='l'", "xmap")
    ):
        maps.thread_resources.env = maps.ResourceEnv(mesh, (maps.Loop("l", 2),))
    with pytest.raises(MeshError, match="'x'"):
        maps.ResourceEnv(empty_mesh(), (maps.Loop("x", 2),)).with_mesh(mesh)
    env = maps.EMPTY_ENV.with_mesh(mesh)
    assert env == maps.ResourceEnv(mesh, ()) and "Mesh(" in repr(env) and hash(env) == hash(env)
    looped = maps.ResourceEnv(mesh, (maps.Loop("l", 3),))
    assert looped.shape == {"x": 4, "y": 2, "l": 3} and looped.loop_resource_axes == {"l"}


def test_positional_semantics_can_be_assigned_and_restored():
    local, everywhere = maps._PositionalSemantics.LOCAL, maps._PositionalSemantics.GLOBAL
    assert maps._positional_semantics.val is local and POSITIONAL.val is local
    before = maps._positional_semantics.val
    maps._positional_semantics.val = everywhere
    try:
        assert POSITIONAL.val is everywhere
    finally:
        maps._positional_semantics.val = before
    with positional_semantics(everywhere):
        assert maps._positional_semantics.val is everywhere
    assert maps._positional_semantics.val is local
    with pytest.raises(ArgumentError, match="_PositionalSemantics.GLOBAL"):
        maps._positional_semantics.val = 1


def test_local_and_global_avals_of_a_single_process(mesh):
    aval = jax.core.ShapedArray((8, 4), np.dtype(np.float32))
    axes = OrderedDict(x=0, y=1)
    # One process has the whole mesh; tests with several are in test_pjit_pods.py.
    assert local_to_global(mesh, axes, aval).shape == (8, 4)
    assert global_to_local(mesh, axes, aval) == aval
    with pytest.raises(ValueError, match="divide"):
        global_to_local(mesh, axes, jax.ShapeDtypeStruct((6, 4), np.float32))
    assert xlashard.Mesh is jax.sharding.Mesh
