"""What `jax.experimental.sharding` held, and `jax.sharding` lacks or has otherwise today."""

from xlashard import (
    GSPMDSharding,
    OpShardingSharding,
)
from xlashard._jax.shardings import JaxNamedSharding as MeshPspecSharding
from xlashard._jax.shardings import JaxNamedSharding as NamedSharding
from xlashard._jax.shardings import JaxSharding as Sharding
from xlashard._jax.shardings import JaxSingleDeviceSharding as SingleDeviceSharding
from xlashard.legacy.meshes import Mesh
from xlashard.legacy.positional_sharding import PositionalSharding
from xlashard.legacy.shardings import PmapSharding, XLACompatibleSharding
from xlashard.legacy.specs import PartitionSpec

__all__ = [
    "GSPMDSharding",
    "Mesh",
    "MeshPspecSharding",
    "NamedSharding",
    "OpShardingSharding",
    "PartitionSpec",
    "PmapSharding",
    "PositionalSharding",
    "Sharding",
    "SingleDeviceSharding",
    "XLACompatibleSharding",
]
