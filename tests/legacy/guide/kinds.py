"""The guide on the three types: how legacy and current programs distinguish them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlashard import legacy


def kind_before(x: Any) -> str:
    from jax.experimental.global_device_array import GlobalDeviceArray
    from jax.interpreters import pxla

    if isinstance(x, GlobalDeviceArray):
        return "GDA"
    if isinstance(x, pxla.ShardedDeviceArray):
        return "SDA"
    return "DA" if isinstance(x, jnp.DeviceArray) else "none"


def kind_after(x: Any) -> str:
    if not isinstance(x, jax.Array):
        return "none"
    if not x.is_fully_addressable:
        return "GDA"
    return "SDA" if len(x.sharding.device_set) > 1 else "DA"


def isinstance_before(x: Any) -> list[bool]:
    """Return the variants of DeviceArray that programs checked for."""
    variants = (
        jnp.DeviceArray,
        jax.xla.DeviceArray,
        jax.interpreters.xla.DeviceArray,
        jax.interpreters.xla._DeviceArray,
    )
    return [isinstance(x, variant) for variant in variants]


def check_kinds(mesh: Any) -> None:
    """Distinguish a program's outputs in the old array mode and in the new one."""
    from jax.experimental.pjit import PartitionSpec as P
    from jax.experimental.pjit import pjit

    rows = np.arange(8.0, dtype=np.float32)

    def outputs():
        with mesh:
            return pjit(lambda: jnp.asarray(rows), None, P("x"))()

    with legacy.jax_array(False), legacy.parallel_functions_output_gda(True):
        gda = outputs()
        assert kind_before(gda) == "GDA"
        assert kind_before(gda.local_data(0)) == "DA"
    with legacy.jax_array(False):
        assert kind_before(outputs()) == "SDA"
    with legacy.jax_array(True):
        array = outputs()
        # In one process nothing distinguishes a GDA from a ShardedDeviceArray.
        assert kind_after(array) == ("SDA" if jax.process_count() == 1 else "GDA")
        assert kind_after(array.addressable_data(0)) == "DA"
        assert kind_after(gda) == kind_after(array)
    assert kind_after(rows) == kind_before(rows) == "none"


def check_host_local_error(mesh: Any) -> None:
    """Arrays smaller than the mesh were lifted to a global shape, and are an error now."""
    from jax.experimental import multihost_utils
    from jax.experimental.pjit import pjit
    from jax.sharding import PartitionSpec as P

    spec = P(("x", "y"))
    mine = np.ones(8 // jax.process_count(), np.float32)
    with mesh:
        with legacy.jax_array(False):
            out = pjit(lambda x: x + 1, in_axis_resources=spec, out_axis_resources=spec)(mine)
            assert out.shape == mine.shape
        with legacy.jax_array(True):
            f = pjit(lambda x: x + 1, in_shardings=spec, out_shardings=spec)
            with pytest.raises(ValueError) as caught:
                f(mine[:4])
            # An array of this process alone can't be put on global devices, whatever its shape.
            facts = ("x", "dimension 0", "8", "4")
            if jax.process_count() > 1:
                facts = ("x", "host_local_array_to_global_array")
            for fact in facts:
                assert fact in str(caught.value)
            global_inp = multihost_utils.host_local_array_to_global_array(mine, mesh, spec)
            assert f(global_inp).shape == (8,)


def check_switching(mesh: Any) -> None:
    """Arrays of each mode are accepted in the other, and programs of both are kept apart."""
    from jax.experimental.pjit import PartitionSpec as P
    from jax.experimental.pjit import pjit

    f = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for _ in range(2):
            with legacy.jax_array(False), legacy.parallel_functions_output_gda(True):
                old = f(f(np.ones(8 // jax.process_count(), np.float32)))
                assert kind_before(old) == "GDA"
            with legacy.jax_array(True):
                new = f(old)
                assert kind_before(new) != "GDA"
                assert new.shape == old.shape == (8,)
                np.testing.assert_array_equal(new.addressable_data(0), 8)
