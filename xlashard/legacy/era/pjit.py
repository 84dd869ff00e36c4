"""What `jax.experimental.pjit` held."""

from xlashard import (
    FROM_GDA,
    NamedSharding,
    OpShardingSharding,
    Sharding,
)
from xlashard._jax import era
from xlashard._jax.shardings import UNSPECIFIED as _UNSPECIFIED
from xlashard._jax.shardings import UnspecifiedValue as _UnspecifiedValue
from xlashard.legacy.constraint import with_sharding_constraint
from xlashard.legacy.era.modules import imported_modules
from xlashard.legacy.gda import GlobalDeviceArray as GDA
from xlashard.legacy.markers import AUTO_ON_MESH as AUTO
from xlashard.legacy.markers import AutoAxisResource as _AUTOAxisResource
from xlashard.legacy.markers import FromGdaSingleton as _FromGdaSingleton
from xlashard.legacy.markers import is_auto as _is_auto
from xlashard.legacy.markers import is_from_gda as _is_from_gda
from xlashard.legacy.markers import is_unspecified as _is_unspecified
from xlashard.legacy.markers import (
    is_unspecified_or_from_gda_or_auto as _is_unspecified_or_from_gda_or_auto,
)
from xlashard.legacy.meshes import Mesh
from xlashard.legacy.parsed import (
    REPLICATED,
    CanonicalizedParsedPartitionSpec,
    ParsedPartitionSpec,
    get_array_mapping,
    get_unconstrained_dims,
    parse_flatten_op_sharding,
)
from xlashard.legacy.parsed import flatten_op_sharding as _get_op_sharding
from xlashard.legacy.parsed import (
    get_op_sharding_from_executable as _get_op_sharding_from_executable,
)
from xlashard.legacy.parsed import get_partition_spec as _get_partition_spec
from xlashard.legacy.parsed import get_ppspec_from_executable as _get_ppspec_from_executable
from xlashard.legacy.parsed import get_pspec_from_executable as _get_pspec_from_executable
from xlashard.legacy.parsed import get_single_pspec as _get_single_pspec
from xlashard.legacy.parsed import (
    mesh_sharding as _create_mesh_pspec_sharding_from_parsed_pspec,
)
from xlashard.legacy.parsed import prepare_axis_resources as _prepare_axis_resources
from xlashard.legacy.pjit import pjit
from xlashard.legacy.pjit_internals import check_aval_shardings as pjit_check_aval_sharding
from xlashard.legacy.pjit_internals import create_sharding_for_array as _create_sharding_for_array
from xlashard.legacy.pjit_internals import (
    flatten_axis_resources,
    global_to_local,
    hashable_pytree,
    local_to_global,
    to_op_sharding_sharding,
)
from xlashard.legacy.refusals import Refusal
from xlashard.legacy.shardings import PmapSharding, XLACompatibleSharding
from xlashard.legacy.specs import PartitionSpec
from xlashard.pjit.constraint import constraint_p as sharding_constraint_p
from xlashard.pjit.primitive import pjit_p
from xlashard.sharding.parse import (
    SpecSync,
    explode_superdims,
    strides_for_sizes,
    unflatten_array,
    unflatten_superdims,
)

__getattr__ = imported_modules("jax.experimental.pjit")
xc = era.xla_client

_pjit_call_impl = Refusal("jax.experimental.pjit._pjit_call_impl")
_pjit_jaxpr = Refusal("jax.experimental.pjit._pjit_jaxpr")
_pjit_lower = Refusal("jax.experimental.pjit._pjit_lower")

PjitSharding = OpShardingSharding | _UnspecifiedValue | _AUTOAxisResource
PjitShardingMinusUnspecified = OpShardingSharding | _AUTOAxisResource
MeshSharding = NamedSharding | _UnspecifiedValue | _AUTOAxisResource
MeshShardingMinusUnspecified = NamedSharding | _AUTOAxisResource

__all__ = [
    "AUTO",
    "FROM_GDA",
    "GDA",
    "REPLICATED",
    "_UNSPECIFIED",
    "CanonicalizedParsedPartitionSpec",
    "Mesh",
    "MeshSharding",
    "MeshShardingMinusUnspecified",
    "NamedSharding",
    "OpShardingSharding",
    "ParsedPartitionSpec",
    "PartitionSpec",
    "PjitSharding",
    "PjitShardingMinusUnspecified",
    "PmapSharding",
    "Sharding",
    "SpecSync",
    "XLACompatibleSharding",
    "_AUTOAxisResource",
    "_FromGdaSingleton",
    "_UnspecifiedValue",
    "_create_mesh_pspec_sharding_from_parsed_pspec",
    "_create_sharding_for_array",
    "_get_op_sharding",
    "_get_op_sharding_from_executable",
    "_get_partition_spec",
    "_get_ppspec_from_executable",
    "_get_pspec_from_executable",
    "_get_single_pspec",
    "_is_auto",
    "_is_from_gda",
    "_is_unspecified",
    "_is_unspecified_or_from_gda_or_auto",
    "_pjit_call_impl",
    "_pjit_jaxpr",
    "_pjit_lower",
    "_prepare_axis_resources",
    "explode_superdims",
    "flatten_axis_resources",
    "get_array_mapping",
    "get_unconstrained_dims",
    "global_to_local",
    "hashable_pytree",
    "local_to_global",
    "parse_flatten_op_sharding",
    "pjit",
    "pjit_check_aval_sharding",
    "pjit_p",
    "sharding_constraint_p",
    "strides_for_sizes",
    "to_op_sharding_sharding",
    "unflatten_array",
    "unflatten_superdims",
    "with_sharding_constraint",
    "xc",
]
