"""`jax.interpreters.pxla`, `xla` and `sharded_jit`, and `jax.lib`: internals of compilation."""

from collections import OrderedDict
from typing import Any

import jax

import xlashard
from xlashard._jax import legacy_api
from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard.geometry import Chunked, NoSharding, Replicated, ShardedAxis, Unstacked
from xlashard.legacy.modes.config_flags import as_jax_arrays
from xlashard.legacy.modules.entry import Entry, differs, imports, refused, works_in
from xlashard.legacy.shardings.partition_spec import AutoAxisResource

type AvalDimSharding = Unstacked | Chunked | NoSharding
type MeshDimAssignment = ShardedAxis | Replicated
type MeshAxisName = Any
type ResourceAxisName = Any
type Index = int | slice | tuple[int | slice, ...]

ArrayMappingOrAutoOrUnspecified = OrderedDict | AutoAxisResource | UnspecifiedValue

# Names without an entry.
backends = legacy_api.xla_bridge.backends
core = legacy_api.core
host_count = jax.host_count
host_id = jax.host_id
host_ids = jax.host_ids
register_backend_factory = legacy_api.xla_bridge.register_backend_factory
xla_client = legacy_api.xla_client
READERS = {name: (jax, legacy_api.xla_bridge) for name in ("process_index", "process_count")}
"""The modules in which JAX reads a name that tests patch here with `mock.patch`."""


def device_put(x: Any, device: Any = None) -> tuple[jax.Array, ...]:
    """Return the buffers of a value on one device: a tuple of one array.

    Args:
        x: An array, a NumPy array or a number.
        device: The device; the default one if None.
    """
    return (as_jax_arrays(xlashard.device_put(x, device)),)


_PXLA = "jax.interpreters.pxla"
_XLA = "jax.interpreters.xla"
_SHARDED_JIT = "jax.interpreters.sharded_jit"
_BRIDGE = "jax.lib.xla_bridge"

_API = "xlashard._jax.legacy_api"
_SHARDINGS = "xlashard._jax.runtime.shardings"
_ARRAYS = "xlashard.legacy.arrays.device_arrays"
_MESHES = "xlashard.legacy.shardings.legacy_mesh"
_PARSED = "xlashard.legacy.shardings.parsed_specs"
_MARKERS = "xlashard.legacy.shardings.partition_spec"
_CLASSES = "xlashard.legacy.shardings.sharding_classes"
_SPECS = "xlashard.legacy.shardings.sharding_specs"
_OPS = "xlashard.legacy.shardings.op_shardings"

_ON_SEVERAL = (
    "`isinstance` is True for every fully addressable array on several devices, including today's."
)
_ADDRESSABLE = "`isinstance` is True for every fully addressable array, including today's."
_NAMED = "jax.sharding.NamedSharding(mesh, spec)"
_JIT = "jax.jit(f, in_shardings=..., out_shardings=...)"
_CONSTRAINT = "jax.lax.with_sharding_constraint(x, sharding)"
_ARGUMENTS = "jax.jit takes its arguments today"
_EQUIVALENT = "x.sharding.is_equivalent_to(sharding, x.ndim)"
_WAYS = "hlo_sharding.tile_assignment_dimensions()"
_PIECES = "[jax.device_put(x[index], device) for index, device in zip(indices, devices)]"
_BACKEND = "import jax.extend.backend"
_OPTIONS = "jax.extend.backend.get_compile_options"
_MAPPING = "xlashard.legacy.shardings.parsed_specs.get_array_mapping(spec)"
_MLIR = "jax.interpreters.mlir.register_lowering(primitive, rule)"
_RULES = "JAX's lowering rules emit MLIR instead of calling XLA builders"
_OF_JAXLIB = ("import jax.extend.xla", "it has the attributes of today's jaxlib")

_OF_PXLA = {
    _MESHES: (
        ("Mesh", "0.4.11", "jax.sharding.Mesh"),
        ("thread_resources", "0.8.2", "jax.sharding.get_mesh()"),
        ("ResourceEnv", "0.4.7", "with jax.set_mesh(mesh): ..."),
        ("EMPTY_ENV", "0.4.7", "jax.sharding.get_mesh()"),
    ),
    "xlashard": (
        ("NamedSharding", "0.4.9", "jax.sharding.NamedSharding"),
        ("ShardingSpec", "0.10.0", "xlashard.ShardingSpec"),
        ("Chunked", "0.10.0", "xlashard.Chunked"),
        ("NoSharding", "0.10.0", "xlashard.NoSharding"),
        ("Unstacked", "0.10.0", "xlashard.Unstacked"),
        ("ShardedAxis", "0.10.0", "xlashard.ShardedAxis"),
        ("Replicated", "0.10.0", "xlashard.Replicated"),
    ),
    _MARKERS: (
        ("AUTO", "0.4.16", "xlashard.AUTO", "AUTO_ON_MESH"),
        ("_AUTOAxisResource", "0.4.4", "type(xlashard.AUTO)", "AutoAxisResource"),
        ("_is_auto", "0.4.4", "x == xlashard.AUTO"),
        ("_is_unspecified", "0.4.36", "x is xlashard.UNSPECIFIED"),
    ),
    _SHARDINGS: (
        ("_UNSPECIFIED", "0.11.0", "xlashard.UNSPECIFIED"),
        ("_UnspecifiedValue", "0.4.4", "type(xlashard.UNSPECIFIED)"),
    ),
    __name__: (("ArrayMappingOrAutoOrUnspecified", "0.4.16", "collections.OrderedDict"),),
    _SPECS: (
        ("mesh_sharding_specs", "0.4.24", _NAMED),
        ("partitioned_sharding_spec", "0.4.1", _NAMED),
        ("pmap_sharding_spec", "0.4.16", _NAMED),
        ("spec_to_indices", "0.10.0", "sharding.devices_indices_map(shape)"),
        ("tile_aval_nd", "0.4.16", "sharding.shard_shape(shape)"),
        ("untile_aval_nd", "0.4.16", "jax.ShapeDtypeStruct(shape, dtype)"),
        ("show_axes", "0.4.7", "', '.join(axes)"),
        ("_hashable_index", "0.4.4", "index"),
        ("InputsHandlerMode", "0.4.14", _PIECES),
        ("_shard_arg", "0.4.14", _PIECES),
        ("shard_args", "0.4.14", _PIECES),
        ("device_put", "0.4.14", "[jax.device_put(x, device) for device in devices]", "buffers_on"),
        ("_pmap_sharding_spec", "0.4.1", _NAMED, "pmap_sharding_spec_of_parts"),
    ),
    "collections": (("ArrayMapping", "0.11.0", "collections.OrderedDict", "OrderedDict"),),
    _CLASSES: (("_create_mesh_pspec_sharding", "0.4.4", _NAMED, "on_mesh"),),
    _API: (("xc", "0.8.2", _BACKEND, "xla_client"),),
    "jax.core": (("ShapedArray", "0.4.16", "jax.core.ShapedArray"),),
    _PARSED: (
        ("_get_array_mapping", "0.4.4", _MAPPING, "array_mapping_of_resource"),
        ("array_mapping_to_axis_resources", "0.11.0", f"{_PARSED}.get_single_pspec(parsed)"),
    ),
    _OPS: (
        ("get_num_ways_dim_sharded", "0.4.11", _WAYS),
        ("_get_num_ways_dim_sharded", "0.4.4", _WAYS),
        ("is_op_sharding_replicated", "0.7.2", "sharding.is_fully_replicated"),
        ("are_op_shardings_equal", "0.7.2", "sharding.is_equivalent_to(other, ndim)"),
    ),
    _ARRAYS: (
        ("make_sharded_device_array", "0.4.14", "jax.make_array_from_single_device_arrays(...)"),
    ),
    "xlashard.legacy.modes.pjit_internals": (
        ("_check_gda_or_array_xla_sharding_match", "0.4.7", _EQUIVALENT),
    ),
}
_OF_XLA = {
    _ARRAYS: (("make_device_array", "0.4.9", "buffer"),),
    "jax": (("Device", "0.4.14", "jax.Device"),),
    "jax.core": (("ShapedArray", "0.4.14", "jax.core.ShapedArray"),),
    f"{_API}:core": (
        ("abstractify", "0.8.2", "jax.typeof(x)", "shaped_abstractify"),
        ("pytype_aval_mappings", "0.8.2", "jax.typeof(x)"),
    ),
    __name__: (("device_put", "0.4.14", "(jax.device_put(x, device),)"),),
    _API: (("xc", "0.4.14", _BACKEND, "xla_client"),),
}
_OF_BRIDGE = {
    "jax": (
        ("default_backend", "0.5.0", "jax.default_backend()"),
        ("device_count", "0.4.4", "jax.device_count()"),
        ("devices", "0.4.4", "jax.devices()"),
        ("local_device_count", "0.4.4", "jax.local_device_count()"),
        ("local_devices", "0.4.4", "jax.local_devices()"),
        ("process_count", "0.4.4", "jax.process_count()"),
        ("process_index", "0.4.4", "jax.process_index()"),
    ),
    f"{_API}:xla_bridge": (("get_backend", "0.8.0", "jax.extend.backend.get_backend"),),
    _API: (("get_compile_options", "0.8.0", _OPTIONS, "compile_options"),),
}

ENTRIES: tuple[Entry, ...] = (
    Entry(_PXLA, "0.8.2", "works", __name__, "jax.sharding, xlashard"),
    Entry("jax.pxla", "0.4.14", "works", __name__, "jax.sharding, xlashard"),
    *(
        Entry(name, "0.4.14", "differs", f"{_ARRAYS}:ShardedDeviceArray", "jax.Array", _ON_SEVERAL)
        for home in (_PXLA, "jax.pxla")
        for name in (f"{home}.ShardedDeviceArray", f"{home}._ShardedDeviceArray")
    ),
    *works_in(_PXLA, _OF_PXLA),
    *refused(
        _PXLA,
        "0.4.14",
        "jax.jit(f, in_shardings=..., out_shardings=...).lower(*args).compile()",
        "it was internal to JAX, and today's JAX does not use it",
        *("ExecuteReplicated", "MeshExecutable", "OutputType"),
        *("custom_resource_typing_rules", "global_result_handlers", "lower_mesh_computation"),
        *("lower_sharding_computation", "parallel_callable", "resource_typecheck"),
        *("shard_arg_handlers", "spmd_primitive_batchers", "xla_pmap_p"),
    ),
    *imports(_PXLA, "0.8.2"),
    Entry(
        _SHARDED_JIT,
        "0.3.16",
        "differs",
        __name__,
        "jax.jit",
        "`PartitionSpec` works; the functions are refused.",
    ),
    *refused(_SHARDED_JIT, "0.3.16", _JIT, _ARGUMENTS, "sharded_jit"),
    *refused(_SHARDED_JIT, "0.3.16", _CONSTRAINT, _ARGUMENTS, "with_sharding_constraint"),
    Entry(_XLA, "0.4.7", "works", __name__, "jax.core, jax.interpreters.mlir"),
    Entry("jax.xla", "0.4.14", "works", __name__, "jax.core, jax.interpreters.mlir"),
    *(
        Entry(name, gone, "differs", f"{_ARRAYS}:DeviceArray", "jax.Array", _ADDRESSABLE)
        for name, gone in (
            (f"{_XLA}.DeviceArray", "0.4.12"),
            ("jax.xla.DeviceArray", "0.4.14"),
            (f"{_XLA}._DeviceArray", "0.4.9"),
        )
    ),
    *works_in(_XLA, _OF_XLA),
    *works_in("jax.xla", {_API: _OF_XLA[_API]}),
    *refused(
        _XLA,
        "0.4.14",
        _MLIR,
        _RULES,
        *("backend_specific_translations", "register_translation", "translations"),
    ),
    *refused(
        _XLA,
        "0.4.14",
        "jaxpr.eqns[0].primitive.name == 'jit'",
        "jit and pjit are one primitive",
        "xla_call_p",
    ),
    *imports(_XLA, "0.8.2"),
    Entry(_BRIDGE, "0.9.0", "works", __name__, _BACKEND),
    *works_in(_BRIDGE, _OF_BRIDGE),
    Entry("jax._src.lib.xla_bridge", "0.4.6", "works", __name__, _BACKEND),
    *differs("jax.lib", "0.9.0", _API, xla_client=_OF_JAXLIB, xla_extension=_OF_JAXLIB),
)
