"""`jax.interpreters.pxla`, also reachable as `jax.pxla`."""

from collections import OrderedDict
from typing import Any

from xlashard._jax.legacy_api import core, xla_client
from xlashard._jax.runtime.shardings import UNSPECIFIED as _UNSPECIFIED
from xlashard._jax.runtime.shardings import UnspecifiedValue as _UnspecifiedValue
from xlashard.geometry import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)
from xlashard.legacy.arrays.device_arrays import ShardedDeviceArray, make_sharded_device_array
from xlashard.legacy.arrays.device_arrays import ShardedDeviceArray as _ShardedDeviceArray
from xlashard.legacy.modes.pjit_internals import (
    check_gda_or_array_xla_sharding_match as _check_gda_or_array_xla_sharding_match,
)
from xlashard.legacy.modules.entry import Entry, RemovedApi, imported_modules, imports, members
from xlashard.legacy.shardings.legacy_mesh import EMPTY_ENV, Mesh, ResourceEnv, thread_resources
from xlashard.legacy.shardings.parsed_specs import (
    are_op_shardings_equal,
    array_mapping_to_axis_resources,
    get_num_ways_dim_sharded,
    is_op_sharding_replicated,
)
from xlashard.legacy.shardings.parsed_specs import array_mapping_of_resource as _get_array_mapping
from xlashard.legacy.shardings.parsed_specs import (
    get_num_ways_dim_sharded as _get_num_ways_dim_sharded,
)
from xlashard.legacy.shardings.partition_spec import AUTO_ON_MESH as AUTO
from xlashard.legacy.shardings.partition_spec import AutoAxisResource as _AUTOAxisResource
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.legacy.shardings.partition_spec import is_auto as _is_auto
from xlashard.legacy.shardings.partition_spec import is_unspecified as _is_unspecified
from xlashard.legacy.shardings.sharding_classes import on_mesh as _create_mesh_pspec_sharding
from xlashard.legacy.shardings.sharding_specs import (
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
from xlashard.legacy.shardings.sharding_specs import buffers_on as device_put
from xlashard.legacy.shardings.sharding_specs import hashable_index as _hashable_index
from xlashard.legacy.shardings.sharding_specs import (
    pmap_sharding_spec_of_parts as _pmap_sharding_spec,
)
from xlashard.legacy.shardings.sharding_specs import shard_arg as _shard_arg
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

ExecuteReplicated = RemovedApi("jax.interpreters.pxla.ExecuteReplicated")
MeshExecutable = RemovedApi("jax.interpreters.pxla.MeshExecutable")
OutputType = RemovedApi("jax.interpreters.pxla.OutputType")
custom_resource_typing_rules = RemovedApi("jax.interpreters.pxla.custom_resource_typing_rules")
global_result_handlers = RemovedApi("jax.interpreters.pxla.global_result_handlers")
lower_mesh_computation = RemovedApi("jax.interpreters.pxla.lower_mesh_computation")
lower_sharding_computation = RemovedApi("jax.interpreters.pxla.lower_sharding_computation")
parallel_callable = RemovedApi("jax.interpreters.pxla.parallel_callable")
resource_typecheck = RemovedApi("jax.interpreters.pxla.resource_typecheck")
shard_arg_handlers = RemovedApi("jax.interpreters.pxla.shard_arg_handlers")
spmd_primitive_batchers = RemovedApi("jax.interpreters.pxla.spmd_primitive_batchers")
xla_pmap_p = RemovedApi("jax.interpreters.pxla.xla_pmap_p")

_HOME = "jax.interpreters.pxla"
_PARSE = "xlashard.sharding.parse"

_INNER = "it was internal to JAX, and today's JAX does not use it"
_PROGRAM = "jax.jit(f, in_shardings=..., out_shardings=...).lower(*args).compile()"

_PIECES = "[jax.device_put(x[index], device) for index, device in zip(indices, devices)]"

_WORKS = (
    ("Mesh", "0.4.11", "jax.sharding.Mesh"),
    ("thread_resources", "0.8.2", "jax.sharding.get_mesh()"),
    ("ResourceEnv", "0.4.7", "with jax.set_mesh(mesh): ..."),
    ("EMPTY_ENV", "0.4.7", "jax.sharding.get_mesh()"),
    ("NamedSharding", "0.4.9", "jax.sharding.NamedSharding"),
    ("ShardingSpec", "0.10.0", "xlashard.ShardingSpec"),
    ("Chunked", "0.10.0", "xlashard.Chunked"),
    ("NoSharding", "0.10.0", "xlashard.NoSharding"),
    ("Unstacked", "0.10.0", "xlashard.Unstacked"),
    ("ShardedAxis", "0.10.0", "xlashard.ShardedAxis"),
    ("Replicated", "0.10.0", "xlashard.Replicated"),
    ("AUTO", "0.4.16", "xlashard.AUTO"),
    ("_AUTOAxisResource", "0.4.4", "type(xlashard.AUTO)"),
    ("_is_auto", "0.4.4", "x == xlashard.AUTO"),
    ("_UNSPECIFIED", "0.11.0", "xlashard.UNSPECIFIED"),
    ("_UnspecifiedValue", "0.4.4", "type(xlashard.UNSPECIFIED)"),
    ("_is_unspecified", "0.4.36", "x is xlashard.UNSPECIFIED"),
    ("ArrayMapping", "0.11.0", "collections.OrderedDict"),
    ("ArrayMappingOrAutoOrUnspecified", "0.4.16", "collections.OrderedDict"),
    ("mesh_sharding_specs", "0.4.24", "jax.sharding.NamedSharding(mesh, spec)"),
    ("partitioned_sharding_spec", "0.4.1", "jax.sharding.NamedSharding(mesh, spec)"),
    ("pmap_sharding_spec", "0.4.16", "jax.sharding.NamedSharding(mesh, spec)"),
    ("ShapedArray", "0.4.16", "jax.core.ShapedArray"),
    ("spec_to_indices", "0.10.0", "sharding.devices_indices_map(shape)"),
    ("array_mapping_to_axis_resources", "0.11.0", f"{_PARSE}.get_partition_spec(parsed)"),
    ("_get_array_mapping", "0.4.4", f"{_PARSE}.get_array_mapping(spec)"),
    ("get_num_ways_dim_sharded", "0.4.11", "hlo_sharding.tile_assignment_dimensions()"),
    ("_get_num_ways_dim_sharded", "0.4.4", "hlo_sharding.tile_assignment_dimensions()"),
    ("is_op_sharding_replicated", "0.7.2", "sharding.is_fully_replicated"),
    ("are_op_shardings_equal", "0.7.2", "sharding.is_equivalent_to(other, ndim)"),
    ("_create_mesh_pspec_sharding", "0.4.4", "jax.sharding.NamedSharding(mesh, spec)"),
    ("device_put", "0.4.14", "[jax.device_put(x, device) for device in devices]"),
    ("make_sharded_device_array", "0.4.14", "jax.make_array_from_single_device_arrays(...)"),
    ("tile_aval_nd", "0.4.16", "sharding.shard_shape(shape)"),
    ("untile_aval_nd", "0.4.16", "jax.ShapeDtypeStruct(shape, dtype)"),
    ("show_axes", "0.4.7", "', '.join(axes)"),
    ("_hashable_index", "0.4.4", "index"),
    ("InputsHandlerMode", "0.4.14", _PIECES),
    ("_shard_arg", "0.4.14", _PIECES),
    ("shard_args", "0.4.14", _PIECES),
    ("_pmap_sharding_spec", "0.4.1", "jax.sharding.NamedSharding(mesh, spec)"),
    (
        "_check_gda_or_array_xla_sharding_match",
        "0.4.7",
        "x.sharding.is_equivalent_to(sharding, x.ndim)",
    ),
    ("xc", "0.8.2", "import jax.extend.backend"),
)

_REFUSED = (
    *("ExecuteReplicated", "MeshExecutable", "OutputType"),
    *("custom_resource_typing_rules", "global_result_handlers", "lower_mesh_computation"),
    *("lower_sharding_computation", "parallel_callable", "resource_typecheck"),
    *("shard_arg_handlers", "spmd_primitive_batchers", "xla_pmap_p"),
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.8.2", "works", __name__, "jax.sharding, xlashard"),
    Entry("jax.pxla", "0.4.14", "works", __name__, "jax.sharding, xlashard"),
    *(
        Entry(
            f"{home}.{name}",
            "0.4.14",
            "differs",
            f"{__name__}:{name}",
            "jax.Array",
            "`isinstance` is True for every fully addressable array on several devices, including "
            "today's.",
        )
        for home in (_HOME, "jax.pxla")
        for name in ("ShardedDeviceArray", "_ShardedDeviceArray")
    ),
    *(
        Entry(f"{_HOME}.{name}", gone, "works", f"{__name__}:{name}", today)
        for name, gone, today in _WORKS
    ),
    *(
        Entry(f"{_HOME}.{name}", "0.4.14", "refused", f"{__name__}:{name}", _PROGRAM, _INNER)
        for name in _REFUSED
    ),
    *members(_HOME, "0.8.2", __name__, imports(_HOME)),
)
