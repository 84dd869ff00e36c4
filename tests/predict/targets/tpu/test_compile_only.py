"""Arrays and programs on the devices of a topology: text, shapes and compilation work.

Operations that need a device raise one error, with the topology and the alternative.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard.numpy as xnp
from tests.core.sharding.suite import ShardingSuite
from xlashard import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    P,
    Sharding,
    SingleDeviceSharding,
    compile_stablehlo,
    device_put,
    device_put_replicated,
    device_put_sharded,
    explain,
    from_dlpack,
    make_array_from_callback,
    make_array_from_process_local_data,
    pjit,
    reshard_plan,
    visualize,
    with_sharding_constraint,
)
from xlashard.core.sharding import from_jax
from xlashard.errors import CompileOnlyError
from xlashard.multihost import host_local_array_to_global_array
from xlashard.tpu import topology

pytestmark = pytest.mark.partitioner

ALL = slice(None)
ABSENT = r"can.t be placed on v5e:2x4.*jax.ShapeDtypeStruct\("
NEVER_RUNS = r"is compiled for v5e:2x4, a topology without chips.*serialize\(\)"


def mesh() -> Mesh:
    return topology("v5e-8").mesh({"data": 4, "model": 2})


class OnATopology(ShardingSuite):
    """The suite of every sharding, with the error of operations that need devices."""

    def refused(self, sharding: Sharding, shape: tuple[int, ...]) -> None:
        with pytest.raises(CompileOnlyError, match=ABSENT) as caught:
            device_put(np.zeros(shape, np.float32), sharding)
        assert caught.value.topology == "v5e:2x4"
        with pytest.raises(CompileOnlyError, match=ABSENT):
            make_array_from_callback(shape, sharding, lambda index: np.zeros(shape)[index])

    def test_zero_sized_arrays(self, sharding: Sharding) -> None:
        for dim in range(len(self.shape)):
            shape = (*self.shape[:dim], 0, *self.shape[dim + 1 :])
            assert sharding.shard_shape(shape)[dim] == 0
            self.refused(sharding, shape)

    def test_sharding_equals_itself_and_its_copies(self, sharding: Sharding) -> None:
        assert sharding == sharding
        assert sharding != "a sharding"

    def test_memories(self, sharding: Sharding) -> None:
        for kind in ("device", "pinned_host"):
            moved = sharding.with_memory_kind(kind)
            assert (type(moved), moved.memory_kind) == (type(sharding), kind)
            assert moved.devices == sharding.devices

    def test_jax_sharding_converts_back(self, sharding: Sharding) -> None:
        back = from_jax_sharding(sharding, self.shape)
        assert back.devices == sharding.devices
        assert back.is_equivalent_to(sharding, len(self.shape))

    def test_jax_accepts_the_sharding(self, sharding: Sharding) -> None:
        rows = jax.ShapeDtypeStruct(self.shape, jnp.int32, sharding=sharding)
        compiled = jax.jit(lambda x: x + 1).lower(rows).compile()
        (taken,), _ = compiled.input_shardings
        assert sharding.is_equivalent_to(taken, len(self.shape))

    def test_pjit_places_arguments_and_results(self, sharding: Sharding) -> None:
        fun = pjit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)
        compiled = fun.lower(jax.ShapeDtypeStruct(self.shape, jnp.int32)).compile()
        (taken,), _ = compiled.input_shardings
        for found in (taken, compiled.output_shardings):
            assert found.is_equivalent_to(sharding, len(self.shape))
        with pytest.raises(CompileOnlyError, match=NEVER_RUNS):
            fun(np.zeros(self.shape, np.int32))
        with pytest.raises(CompileOnlyError, match=NEVER_RUNS):
            compiled(np.zeros(self.shape, np.int32))

    @pytest.mark.parametrize("compiled", [pjit])
    def test_programs_accept_arrays_on_the_sharding(
        self, sharding: Sharding, compiled: Any
    ) -> None:
        rows = jax.ShapeDtypeStruct(self.shape, jnp.int32, sharding=sharding)
        (taken,), _ = compiled(lambda x: x + 1).lower(rows).compile().input_shardings
        assert taken.is_equivalent_to(sharding, len(self.shape))

    def test_constructors_put_each_piece_on_its_device(self, sharding: Sharding) -> None:
        self.refused(sharding, self.shape)


def from_jax_sharding(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    return from_jax(sharding.jax_sharding(shape))


class TestNamedOnATopology(OnATopology):
    shape: ClassVar = (8, 6)
    cuts: ClassVar = {
        2 * i + j: (slice(2 * i, 2 * i + 2), slice(3 * j, 3 * j + 3))
        for i in range(4)
        for j in range(2)
    }
    uneven: ClassVar = (6, 6)
    low_rank: ClassVar = (8,)

    @pytest.fixture
    def sharding(self) -> Sharding:
        return NamedSharding(mesh(), P("data", "model"))


class TestReplicatedOnATopology(OnATopology):
    shape: ClassVar = (3, 5)
    cuts: ClassVar = dict.fromkeys(range(8), (ALL, ALL))

    @pytest.fixture
    def sharding(self) -> Sharding:
        return GSPMDSharding.get_replicated(topology("v5e-8").devices)


class TestOneDeviceOfATopology(OnATopology):
    shape: ClassVar = (3, 5)
    cuts: ClassVar = {0: (ALL, ALL)}

    @pytest.fixture
    def sharding(self) -> Sharding:
        return SingleDeviceSharding(topology("v5e-8").devices[3])


def rows() -> NamedSharding:
    return NamedSharding(mesh(), P("data"))


def here() -> jax.Array:
    return device_put(np.ones((8, 4), np.float32), jax.devices()[0])


NEEDS_A_PLACE: dict[str, Callable[[], object]] = {
    "a sharding": lambda: device_put(np.ones((8, 4)), rows()),
    "a device": lambda: device_put(1.0, topology("v5e-8").devices[0]),
    "an array": lambda: device_put(here(), rows()),
    "an array on one device": lambda: device_put(here(), topology("v5e-8").devices[0]),
    "a tree": lambda: device_put({"w": np.ones(4)}, {"w": NamedSharding(mesh(), P())}),
    "donated": lambda: device_put(here(), rows(), donate=True),
    "a wide dtype": lambda: device_put(np.ones((8, 4), np.int64), rows()),
    "a key": lambda: device_put(jax.random.key(0), NamedSharding(mesh(), P())),
    "a constraint": lambda: with_sharding_constraint(np.ones((8, 4)), rows()),
    "local data": lambda: make_array_from_process_local_data(rows(), np.ones((8, 4))),
    "host-local": lambda: host_local_array_to_global_array(np.ones((8, 4)), mesh(), P("data")),
    "dlpack": lambda: from_dlpack(np.ones((8, 4)), device=topology("v5e-8").devices[0]),
    "copies": lambda: device_put_replicated(1.0, list(topology("v5e-8").devices)),
    "pieces": lambda: device_put_sharded([1.0] * 8, list(topology("v5e-8").devices)),
}


@pytest.mark.parametrize("call", NEEDS_A_PLACE.values(), ids=NEEDS_A_PLACE)
def test_array_creation_on_a_topology_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(CompileOnlyError, match=ABSENT):
        call()


def doubled(x: Any) -> Any:
    return x * 2


def printed(x: Any) -> Any:
    jax.debug.print("{}", x[0, 0])
    return x


NEEDS_A_RUN: dict[str, Callable[[], object]] = {
    "its own shardings": lambda: pjit(doubled, in_shardings=rows())(np.ones((8, 4), np.float32)),
    "its results'": lambda: pjit(doubled, out_shardings=rows())(np.ones((8, 4), np.float32)),
    "a callback": lambda: pjit(printed, in_shardings=rows())(np.ones((8, 4), np.float32)),
    "nothing given": lambda: pjit(lambda: jnp.ones(8), out_shardings=rows())(),
    "eager": lambda: xnp.zeros((8, 4), device=rows()),
    "stablehlo": lambda: compile_stablehlo(
        pjit(doubled, in_shardings=rows()).lower(shape()).as_text(),
        devices=list(mesh().devices.flat),
    )(np.ones((8, 4), np.float32)),
}


def shape() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=rows())


@pytest.mark.parametrize("call", NEEDS_A_RUN.values(), ids=NEEDS_A_RUN)
def test_execution_on_a_topology_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(CompileOnlyError, match=NEVER_RUNS):
        call()


def test_lowering_and_analyses_require_no_execution() -> None:
    fun = pjit(lambda x, w: (x @ w).sum(0))
    weights = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh(), P("model")))
    assert fun.eval_shape(shape(), weights).shape == (4,)
    lowered = fun.lower(shape(), weights)
    compiled = lowered.compile()
    assert "sharding" in lowered.as_text()
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert compiled.cost_analysis()["flops"] > 0
    report = explain(compiled)
    assert report.collectives
    assert "v5 lite" in str(report)
    assert "P('data')" in str(visualize(shape()))
    plan = reshard_plan(shape(), NamedSharding(mesh(), P()))
    assert plan.bytes_moved > 0
    assert compiled.serialize()


@pytest.mark.slow
def test_explain_reports_collectives_between_slices() -> None:
    mesh = topology("v5e-4", slices=2).mesh({"replica": 2, "data": 4})
    rows = NamedSharding(mesh, P(("replica", "data")))
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    step = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    totals = explain(pjit(step, out_shardings=w.sharding), w, x).totals
    assert {total.along for total in totals} == {"data", "replica"}
    (between,) = (total for total in totals if total.along == "replica")
    assert between.kind == "all-reduce"


def test_error_names_the_number_of_slices() -> None:
    found = topology("v5e-4", slices=2)
    sharding = NamedSharding(found.mesh({"data": 8}), P("data"))
    with pytest.raises(CompileOnlyError, match="placed on 2 slices of v5e:2x2,") as caught:
        device_put(np.ones(8), sharding)
    assert caught.value.topology == str(found)


@pytest.mark.parametrize("name", ["v4-8", "v5p-8", "v6e-4", "tpu7x-8", "v2-8"])
def test_error_names_the_topology_of_each_generation(name: str) -> None:
    found = topology(name)
    with pytest.raises(CompileOnlyError, match=f"placed on {found.name},"):
        device_put(1.0, found.devices[0])


@pytest.mark.slow
def test_topology_prints_nothing_about_missing_chips(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(
        "import os, xlashard\n"
        "mesh = xlashard.tpu.topology('v5e-8').mesh({'data': 8})\n"
        "print(mesh.devices.flat[0].platform, os.environ.get('TPU_ACCELERATOR_TYPE'))\n"
    )
    inherited = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "TPU_NAME")}
    environment = {**inherited, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == ["tpu", "None"]
    assert not any(word in done.stderr for word in ("libtpu", "TPU_", "cuDNN"))
