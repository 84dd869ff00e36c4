"""Shardings: which slice of an array each device holds."""

from jax.sharding import AbstractMesh as AbstractMesh
from jax.sharding import Mesh as Mesh
from jax.sharding import PartitionSpec as PartitionSpec

from xlashard._jax.registration import install_shardings
from xlashard.core.sharding.base import Sharding as Sharding
from xlashard.core.sharding.base import XLACompatibleSharding as XLACompatibleSharding
from xlashard.core.sharding.gspmd import GSPMDSharding as GSPMDSharding
from xlashard.core.sharding.gspmd import as_tiles as as_tiles
from xlashard.core.sharding.gspmd import from_hlo as from_hlo
from xlashard.core.sharding.gspmd import from_jax as from_jax
from xlashard.core.sharding.gspmd import is_of_jax as is_of_jax
from xlashard.core.sharding.gspmd import move_to as move_to
from xlashard.core.sharding.gspmd import on_mesh as on_mesh
from xlashard.core.sharding.gspmd import to_jax as to_jax
from xlashard.core.sharding.named import NamedSharding as NamedSharding
from xlashard.core.sharding.named import SingleDeviceSharding as SingleDeviceSharding
from xlashard.core.sharding.named import grid_of as grid_of
from xlashard.core.sharding.named import partition_spec as partition_spec
from xlashard.core.sharding.named import spec_of as spec_of

install_shardings((NamedSharding, SingleDeviceSharding))
