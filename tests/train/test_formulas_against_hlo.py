"""The closed formulas of a training step, held against the program that TPU's compiler makes."""

import math

import jax
import pytest

from tests.tpu.preflight.scheduled import scheduled
from xlashard.tpu import topology
from xlashard.tpu.preflight.work import count_work
from xlashard.train import formulas
from xlashard.train.preflight import training_step
from xlashard.train.settings import (
    ModelSettings,
    Rules,
    Settings,
    ShardingSettings,
    TrainingSettings,
)

PLACE = topology("v5e:2x4")
BASE = {"layers": 2, "width": 512, "heads": 4, "vocab": 1024, "compute": "bfloat16"}
SHAPES = {
    "dense": ModelSettings(**BASE, kv_heads=4, mlp=1024, length=256),
    "grouped": ModelSettings(**BASE, kv_heads=2, mlp=1536, length=256, remat=True),
    "blocks": ModelSettings(
        **BASE, kv_heads=2, mlp=1024, length=512, remat=True, attention_block=128, vocab_parts=2
    ),
    "experts": ModelSettings(**BASE, kv_heads=2, mlp=512, length=256, experts=8, active_experts=2),
}
TENSOR = {name: ("tensor",) for name in ("heads", "kv_heads", "mlp", "vocab")}
MESHES = {
    "data": ({"data": 8}, Rules(batch=("data",))),
    "fsdp": ({"fsdp": 8}, Rules(batch=("fsdp",), embed=("fsdp",))),
    "data_tensor": ({"data": 4, "tensor": 2}, Rules(batch=("data",), **TENSOR)),
    "data_fsdp": ({"data": 2, "fsdp": 4}, Rules(batch=("data", "fsdp"), embed=("fsdp",))),
    "fsdp_tensor": (
        {"fsdp": 4, "tensor": 2},
        Rules(batch=("fsdp",), embed=("fsdp",), **TENSOR),
    ),
    "three": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        Rules(batch=("data", "fsdp"), embed=("fsdp",), **TENSOR),
    ),
}
CASES = [
    ("dense", "data"),
    ("grouped", "fsdp"),
    ("blocks", "data_tensor"),
    ("experts", "data_fsdp"),
    ("grouped", "fsdp_tensor"),
    ("blocks", "three"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "mesh_name"), CASES)
def test_flops_and_parameter_bytes_are_those_of_the_formulas(shape, mesh_name):
    axes, rules = MESHES[mesh_name]
    settings = Settings(
        mesh=axes,
        model=SHAPES[shape],
        sharding=ShardingSettings(rules=rules),
        training=TrainingSettings(batch=16),
    )
    target = training_step(settings, PLACE.mesh(axes))
    work = count_work(scheduled(target.function, *target.args).module)
    assert (work.unknown_loops, work.unknown_calls) == (0, {})
    counted = sum(work.multiplied.values()) * PLACE.num_devices
    assert counted == pytest.approx(formulas.step_flops(settings).total, rel=0.01)
    leaves = jax.tree.leaves(target.args[0]["parameters"])
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    assert held == pytest.approx(formulas.parameter_bytes(settings), rel=0.01)
