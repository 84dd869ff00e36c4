"""What `jax.interpreters.pxla` held."""

from collections import OrderedDict
from typing import Any

from xlashard._jax.era import core, xla_client
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
from xlashard.legacy.device_arrays import ShardedDeviceArray
from xlashard.legacy.device_arrays import ShardedDeviceArray as _ShardedDeviceArray
from xlashard.legacy.device_makers import make_sharded_device_array
from xlashard.legacy.era.modules import imported_modules
from xlashard.legacy.markers import AUTO_ON_MESH as AUTO
from xlashard.legacy.markers import AutoAxisResource as _AUTOAxisResource
from xlashard.legacy.markers import is_auto as _is_auto
from xlashard.legacy.markers import is_unspecified as _is_unspecified
from xlashard.legacy.meshes import Mesh
from xlashard.legacy.parsed import (
    are_op_shardings_equal,
    array_mapping_to_axis_resources,
    get_num_ways_dim_sharded,
    is_op_sharding_replicated,
)
from xlashard.legacy.parsed import array_mapping_of_resource as _get_array_mapping
from xlashard.legacy.parsed import get_num_ways_dim_sharded as _get_num_ways_dim_sharded
from xlashard.legacy.pjit_internals import (
    check_gda_or_array_xla_sharding_match as _check_gda_or_array_xla_sharding_match,
)
from xlashard.legacy.refusals import Refusal
from xlashard.legacy.sharding_specs import (
    InputsHandlerMode,
    mesh_sharding_specs,
    partitioned_sharding_spec,
    pmap_sharding_spec,
    shard_args,
    show_axes,
    spec_to_indices,
    tile_aval_nd,
    untile_aval_nd,
)
from xlashard.legacy.sharding_specs import buffers_on as device_put
from xlashard.legacy.sharding_specs import hashable_index as _hashable_index
from xlashard.legacy.sharding_specs import pmap_sharding_spec_of_parts as _pmap_sharding_spec
from xlashard.legacy.sharding_specs import shard_arg as _shard_arg
from xlashard.legacy.shardings import on_mesh as _create_mesh_pspec_sharding
from xlashard.legacy.specs import PartitionSpec
from xlashard.legacy.thread_resources import EMPTY_ENV, ResourceEnv, thread_resources
from xlashard.sharding import NamedSharding

type AvalDimSharding = Unstacked | Chunked | NoSharding
type MeshDimAssignment = ShardedAxis | Replicated
type MeshAxisName = Any
type ResourceAxisName = Any
type Index = int | slice | tuple[int | slice, ...]

ShapedArray = core.ShapedArray
ArrayMapping = OrderedDict
ArrayMappingOrAutoOrUnspecified = OrderedDict | _AUTOAxisResource | _UnspecifiedValue

__getattr__ = imported_modules("jax.interpreters.pxla")
xc = xla_client

ExecuteReplicated = Refusal("jax.interpreters.pxla.ExecuteReplicated")
MeshExecutable = Refusal("jax.interpreters.pxla.MeshExecutable")
OutputType = Refusal("jax.interpreters.pxla.OutputType")
custom_resource_typing_rules = Refusal("jax.interpreters.pxla.custom_resource_typing_rules")
global_result_handlers = Refusal("jax.interpreters.pxla.global_result_handlers")
lower_mesh_computation = Refusal("jax.interpreters.pxla.lower_mesh_computation")
lower_sharding_computation = Refusal("jax.interpreters.pxla.lower_sharding_computation")
parallel_callable = Refusal("jax.interpreters.pxla.parallel_callable")
resource_typecheck = Refusal("jax.interpreters.pxla.resource_typecheck")
shard_arg_handlers = Refusal("jax.interpreters.pxla.shard_arg_handlers")
spmd_primitive_batchers = Refusal("jax.interpreters.pxla.spmd_primitive_batchers")
xla_pmap_p = Refusal("jax.interpreters.pxla.xla_pmap_p")

__all__ = [
    "AUTO",
    "EMPTY_ENV",
    "_UNSPECIFIED",
    "ArrayMapping",
    "ArrayMappingOrAutoOrUnspecified",
    "AvalDimSharding",
    "Chunked",
    "ExecuteReplicated",
    "Index",
    "InputsHandlerMode",
    "Mesh",
    "MeshAxisName",
    "MeshDimAssignment",
    "MeshExecutable",
    "NamedSharding",
    "NoSharding",
    "OutputType",
    "PartitionSpec",
    "Replicated",
    "ResourceAxisName",
    "ResourceEnv",
    "ShapedArray",
    "ShardedAxis",
    "ShardedDeviceArray",
    "ShardingSpec",
    "Unstacked",
    "_AUTOAxisResource",
    "_ShardedDeviceArray",
    "_UnspecifiedValue",
    "_check_gda_or_array_xla_sharding_match",
    "_create_mesh_pspec_sharding",
    "_get_array_mapping",
    "_get_num_ways_dim_sharded",
    "_hashable_index",
    "_is_auto",
    "_is_unspecified",
    "_pmap_sharding_spec",
    "_shard_arg",
    "are_op_shardings_equal",
    "array_mapping_to_axis_resources",
    "core",
    "custom_resource_typing_rules",
    "device_put",
    "get_num_ways_dim_sharded",
    "global_result_handlers",
    "is_op_sharding_replicated",
    "lower_mesh_computation",
    "lower_sharding_computation",
    "make_sharded_device_array",
    "mesh_sharding_specs",
    "parallel_callable",
    "partitioned_sharding_spec",
    "pmap_sharding_spec",
    "resource_typecheck",
    "shard_arg_handlers",
    "shard_args",
    "show_axes",
    "spec_to_indices",
    "spmd_primitive_batchers",
    "thread_resources",
    "tile_aval_nd",
    "untile_aval_nd",
    "xc",
    "xla_pmap_p",
]
