"""Invalid arguments of shardings, besides the catalogue of mistakes (tests/errors)."""

import re
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from xlashard import GSPMDSharding, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from xlashard.core.sharding import from_jax
from xlashard.errors import ShardingError, UnknownAxisError


def mesh(axis_type=jax.sharding.AxisType.Auto):
    devices = np.array(jax.devices()).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)


BAD = {
    "one device": (
        lambda: GSPMDSharding(jax.devices()[0], "{replicated}"),
        "GSPMDSharding .*CpuDevice",
    ),
    "other things": (lambda: GSPMDSharding([0, 1], "{replicated}"), r"not \[0, 1\]"),
    "memory of a device": (
        lambda: SingleDeviceSharding(jax.devices()[0], memory_kind="hbm"),
        "SingleDeviceSharding: memory_kind='hbm'",
    ),
    "memory of tiles": (
        lambda: GSPMDSharding(jax.devices(), "{replicated}", memory_kind=3),
        "GSPMDSharding: memory_kind=3",
    ),
}


@pytest.mark.parametrize(("make", "text"), BAD.values(), ids=BAD.keys())
def test_errors_of_invalid_parts(make, text):
    with pytest.raises(ShardingError, match=text):
        make()


def test_only_explicit_axes_are_unreduced_or_reduced():
    for name in ("unreduced", "reduced"):
        spec = P("data", **{name: {"model"}})
        own = NamedSharding(mesh(jax.sharding.AxisType.Explicit), spec)
        theirs = jax.sharding.NamedSharding(own.mesh, spec)
        assert own == theirs == from_jax(theirs)
        with pytest.raises(ShardingError, match=f"^{name}=.*'model' .*Auto.*Explicit"):
            NamedSharding(mesh(jax.sharding.AxisType.Auto), spec)
        with pytest.raises(UnknownAxisError, match=f"{name} names the axis 'modle'.*'model'"):
            NamedSharding(own.mesh, P("data", **{name: {"modle"}}))


@pytest.mark.devices(8)
def test_user_defined_sharding_needs_devices_only():
    class Own(Sharding):
        devices = tuple(jax.devices()[:2])

    own = Own()
    assert not own.is_fully_replicated
    assert own.memory_kind is None
    assert own.is_equivalent_to(own, 1)
    assert not own.is_equivalent_to(Own(), 1)


def test_mocked_memory_kind_of_a_mocked_device_is_accepted():
    grid = np.empty(8, dtype=object)
    for i in range(8):
        grid[i] = mock.MagicMock(jax.Device, id=i, process_index=0, platform="tpu")
    theirs = jax.sharding.NamedSharding(Mesh(grid, ("data",)), P("data"))
    kind = theirs.memory_kind
    assert kind is grid[0].default_memory().kind
    own = from_jax(theirs)
    assert isinstance(own, NamedSharding)
    assert own == NamedSharding(own.mesh, own.spec, memory_kind=kind)
    assert own.with_memory_kind(kind).with_spec(P()).memory_kind is kind
    single = from_jax(jax.sharding.SingleDeviceSharding(grid[0]))
    assert (single.memory_kind, single.with_memory_kind(kind)) == (kind, single)
    assert GSPMDSharding(list(grid), "{replicated}", memory_kind=kind).memory_kind is kind
    with pytest.raises(ShardingError, match="memory_kind=<MagicMock"):
        NamedSharding(own.mesh, own.spec, memory_kind=mock.MagicMock())
    with pytest.raises(ShardingError, match="memory_kind=<MagicMock"):
        NamedSharding(mesh(), own.spec, memory_kind=kind)


def test_known_arguments_do_not_hide_invalid_ones():
    known, spec = mesh(), P("data")
    for _ in range(2):
        assert NamedSharding(known, spec).normal_spec.dims == (("data",),)
        for arguments, text in (
            ((known, ("data",)), "P('data')"),
            ((known, None), "P()"),
            ((known.devices, spec), "ndarray"),
            (([], spec), "list"),
            ((known, P("other")), "other"),
            ((known, P("data", "data")), "data"),
        ):
            with pytest.raises(ValueError, match=re.escape(text)):
                NamedSharding(*arguments)
