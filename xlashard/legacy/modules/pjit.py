"""`jax.experimental.pjit`, with the internals that programs use."""

from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard.core.sharding import NamedSharding
from xlashard.legacy.arrays.gda import GlobalDeviceArray as GDA
from xlashard.legacy.shardings.op_shardings import OpShardingSharding
from xlashard.legacy.shardings.partition_spec import AutoAxisResource

PjitSharding = OpShardingSharding | UnspecifiedValue | AutoAxisResource
PjitShardingMinusUnspecified = OpShardingSharding | AutoAxisResource
MeshSharding = NamedSharding | UnspecifiedValue | AutoAxisResource
MeshShardingMinusUnspecified = NamedSharding | AutoAxisResource
