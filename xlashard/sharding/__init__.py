"""Shardings: which slice of an array each device holds."""

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlashard.geometry import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)
from xlashard.sharding.base import Sharding, XLACompatibleSharding
from xlashard.sharding.convert import from_hlo, from_jax, on_mesh, to_jax
from xlashard.sharding.gspmd import GSPMDSharding, OpShardingSharding
from xlashard.sharding.named import (
    NamedSharding,
    SingleDeviceSharding,
    grid_of,
    partition_spec,
    spec_of,
)
from xlashard.sharding.pmap import PmapSharding

__all__ = [
    "AbstractMesh",
    "Chunked",
    "GSPMDSharding",
    "Mesh",
    "NamedSharding",
    "NoSharding",
    "OpShardingSharding",
    "PartitionSpec",
    "PmapSharding",
    "Replicated",
    "ShardedAxis",
    "Sharding",
    "ShardingSpec",
    "SingleDeviceSharding",
    "Unstacked",
    "XLACompatibleSharding",
    "from_hlo",
    "from_jax",
    "grid_of",
    "on_mesh",
    "partition_spec",
    "spec_of",
    "to_jax",
]
