"""What `jax.interpreters.pxla` held."""

from collections import OrderedDict
from typing import Any

from xlashard._jax.shardings import UNSPECIFIED as _UNSPECIFIED
from xlashard._jax.shardings import UnspecifiedValue as _UnspecifiedValue
from xlashard.geometry import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)
from xlashard.legacy.markers import AUTO_ON_MESH as AUTO
from xlashard.legacy.markers import AutoAxisResource as _AUTOAxisResource
from xlashard.legacy.markers import is_auto as _is_auto
from xlashard.legacy.markers import is_unspecified as _is_unspecified
from xlashard.legacy.meshes import Mesh
from xlashard.legacy.parsed import (
    are_op_shardings_equal,
    array_mapping_to_axis_resources,
    is_op_sharding_replicated,
)
from xlashard.legacy.parsed import get_array_mapping as _get_array_mapping
from xlashard.legacy.parsed import get_num_ways_dim_sharded as _get_num_ways_dim_sharded
from xlashard.legacy.parsed import get_num_ways_dim_sharded
from xlashard.legacy.refusals import Refusal
from xlashard.legacy.resources import EMPTY_ENV, ResourceEnv, thread_resources
from xlashard.legacy.sharding_specs import buffers_on as device_put
from xlashard.legacy.sharding_specs import hashable_index as _hashable_index
from xlashard.legacy.sharding_specs import (
    mesh_sharding_specs,
    show_axes,
    spec_to_indices,
    tile_aval_nd,
    untile_aval_nd,
)
from xlashard.legacy.specs import PartitionSpec
from xlashard.sharding import NamedSharding

type AvalDimSharding = Unstacked | Chunked | NoSharding
type MeshDimAssignment = ShardedAxis | Replicated
type MeshAxisName = Any
type ResourceAxisName = Any
type Index = int | slice | tuple[int | slice, ...]

ArrayMapping = OrderedDict

_MACHINERY = (
    "ExecuteReplicated",
    "InputsHandlerMode",
    "MeshExecutable",
    "OutputType",
    "PmapExecutable",
    "custom_resource_typing_rules",
    "global_result_handlers",
    "local_result_handlers",
    "lower_mesh_computation",
    "lower_parallel_callable",
    "lower_sharding_computation",
    "parallel_callable",
    "resource_typecheck",
    "shard_arg_handlers",
    "shard_args",
    "sharded_result_handlers",
    "spmd_primitive_batchers",
    "xla_pmap_p",
)


def __getattr__(name: str) -> Any:
    if name in _MACHINERY:
        return Refusal(f"jax.interpreters.pxla.{name}")
    raise AttributeError(f"module 'jax.interpreters.pxla' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MACHINERY})
