"""`jax.experimental.pjit`, with the internals that programs use."""

from xlashard import (
    FROM_GDA,
    NamedSharding,
    OpShardingSharding,
    Sharding,
)
from xlashard._jax import legacy_api
from xlashard._jax.runtime.shardings import UNSPECIFIED as _UNSPECIFIED
from xlashard._jax.runtime.shardings import UnspecifiedValue as _UnspecifiedValue
from xlashard.legacy.arrays.gda import GlobalDeviceArray as GDA
from xlashard.legacy.modes.pjit import pjit, with_sharding_constraint
from xlashard.legacy.modes.pjit_internals import check_aval_shardings as pjit_check_aval_sharding
from xlashard.legacy.modes.pjit_internals import (
    create_sharding_for_array as _create_sharding_for_array,
)
from xlashard.legacy.modes.pjit_internals import (
    flatten_axis_resources,
    global_to_local,
    hashable_pytree,
    local_to_global,
    to_op_sharding_sharding,
)
from xlashard.legacy.modules.entry import Entry, RemovedApi, imported_modules, imports, members
from xlashard.legacy.shardings.legacy_mesh import Mesh
from xlashard.legacy.shardings.parsed_specs import (
    REPLICATED,
    CanonicalizedParsedPartitionSpec,
    ParsedPartitionSpec,
    get_array_mapping,
    get_unconstrained_dims,
    parse_flatten_op_sharding,
)
from xlashard.legacy.shardings.parsed_specs import flatten_op_sharding as _get_op_sharding
from xlashard.legacy.shardings.parsed_specs import (
    get_op_sharding_from_executable as _get_op_sharding_from_executable,
)
from xlashard.legacy.shardings.parsed_specs import get_partition_spec as _get_partition_spec
from xlashard.legacy.shardings.parsed_specs import (
    get_ppspec_from_executable as _get_ppspec_from_executable,
)
from xlashard.legacy.shardings.parsed_specs import (
    get_pspec_from_executable as _get_pspec_from_executable,
)
from xlashard.legacy.shardings.parsed_specs import get_single_pspec as _get_single_pspec
from xlashard.legacy.shardings.parsed_specs import (
    mesh_sharding as _create_mesh_pspec_sharding_from_parsed_pspec,
)
from xlashard.legacy.shardings.parsed_specs import prepare_axis_resources as _prepare_axis_resources
from xlashard.legacy.shardings.partition_spec import AUTO_ON_MESH as AUTO
from xlashard.legacy.shardings.partition_spec import AutoAxisResource as _AUTOAxisResource
from xlashard.legacy.shardings.partition_spec import FromGdaSingleton as _FromGdaSingleton
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.legacy.shardings.partition_spec import is_auto as _is_auto
from xlashard.legacy.shardings.partition_spec import is_from_gda as _is_from_gda
from xlashard.legacy.shardings.partition_spec import is_unspecified as _is_unspecified
from xlashard.legacy.shardings.partition_spec import (
    is_unspecified_or_from_gda_or_auto as _is_unspecified_or_from_gda_or_auto,
)
from xlashard.legacy.shardings.sharding_classes import PmapSharding, XLACompatibleSharding
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
xc = legacy_api.xla_client

_pjit_call_impl = RemovedApi("jax.experimental.pjit._pjit_call_impl")
_pjit_jaxpr = RemovedApi("jax.experimental.pjit._pjit_jaxpr")
_pjit_lower = RemovedApi("jax.experimental.pjit._pjit_lower")

PjitSharding = OpShardingSharding | _UnspecifiedValue | _AUTOAxisResource
PjitShardingMinusUnspecified = OpShardingSharding | _AUTOAxisResource
MeshSharding = NamedSharding | _UnspecifiedValue | _AUTOAxisResource
MeshShardingMinusUnspecified = NamedSharding | _AUTOAxisResource

_HOME = "jax.experimental.pjit"
_PARSE = "xlashard.sharding.parse"

_SPECS = "sharding.spec"
_INNER = "xlashard has other compilation stages than JAX had then"

_WORKS = (
    ("with_sharding_constraint", "0.4.24", "jax.lax.with_sharding_constraint(x, sharding)"),
    ("FROM_GDA", "0.4.9", "xlashard.UNSPECIFIED"),
    ("_FromGdaSingleton", "0.4.2", "type(xlashard.FROM_GDA)"),
    ("_is_from_gda", "0.4.2", "x == xlashard.FROM_GDA"),
    ("_AUTOAxisResource", "0.4.2", "type(xlashard.AUTO)"),
    ("_is_auto", "0.4.2", "x == xlashard.AUTO"),
    ("_UNSPECIFIED", "0.8.0", "xlashard.UNSPECIFIED"),
    ("_UnspecifiedValue", "0.4.2", "type(xlashard.UNSPECIFIED)"),
    ("_is_unspecified", "0.4.2", "x is xlashard.UNSPECIFIED"),
    ("_is_unspecified_or_from_gda_or_auto", "0.4.2", "x in (AUTO, FROM_GDA, UNSPECIFIED)"),
    ("Mesh", "0.4.7", "jax.sharding.Mesh"),
    ("NamedSharding", "0.4.11", "jax.sharding.NamedSharding"),
    ("OpShardingSharding", "0.4.2", "xlashard.OpShardingSharding"),
    ("PmapSharding", "0.4.2", "xlashard.PmapSharding"),
    ("Sharding", "0.4.2", "jax.sharding.Sharding"),
    ("XLACompatibleSharding", "0.4.2", "jax.sharding.Sharding"),
    ("PjitSharding", "0.4.2", "jax.sharding.Sharding"),
    ("PjitShardingMinusUnspecified", "0.4.2", "jax.sharding.Sharding"),
    ("MeshSharding", "0.4.2", "jax.sharding.NamedSharding"),
    ("MeshShardingMinusUnspecified", "0.4.2", "jax.sharding.NamedSharding"),
    ("SpecSync", "0.4.2", f"{_PARSE}.SpecSync"),
    ("REPLICATED", "0.4.2", "jax.P()"),
    ("ParsedPartitionSpec", "0.4.16", f"{_PARSE}.ParsedPartitionSpec"),
    ("CanonicalizedParsedPartitionSpec", "0.4.2", f"{_PARSE}.CanonicalizedParsedPartitionSpec"),
    ("_prepare_axis_resources", "0.4.16", "jax.tree.leaves(specs)"),
    ("flatten_axis_resources", "0.4.2", "jax.tree.broadcast(specs, args)"),
    ("get_array_mapping", "0.4.16", f"{_PARSE}.get_array_mapping(spec)"),
    ("get_unconstrained_dims", "0.4.2", f"{_PARSE}.get_unconstrained_dims(sharding)"),
    ("to_op_sharding_sharding", "0.4.2", f"{_PARSE}.to_op_sharding_sharding(sharding, ndim)"),
    ("parse_flatten_op_sharding", "0.4.16", f"{_PARSE}.parse_flatten_op_sharding(op, mesh)"),
    ("unflatten_array", "0.4.2", f"{_PARSE}.unflatten_array(sizes, devices)"),
    ("unflatten_superdims", "0.4.2", f"{_PARSE}.unflatten_superdims(devices)"),
    ("explode_superdims", "0.4.2", f"{_PARSE}.explode_superdims(sizes, dims)"),
    ("strides_for_sizes", "0.4.2", f"{_PARSE}.strides_for_sizes(sizes)"),
    ("hashable_pytree", "0.4.16", "jax.tree.flatten(tree)"),
    ("pjit_check_aval_sharding", "0.4.2", "sharding.shard_shape(shape)"),
    ("pjit_p", "0.7.0", "jaxpr.eqns[0].primitive"),
    ("sharding_constraint_p", "0.4.2", "jaxpr.eqns[0].primitive"),
    ("_create_sharding_for_array", "0.4.2", "jax.sharding.NamedSharding(mesh, spec)"),
    (
        "_create_mesh_pspec_sharding_from_parsed_pspec",
        "0.4.9",
        "jax.sharding.NamedSharding(mesh, spec)",
    ),
    ("_get_op_sharding", "0.4.9", "op_sharding.tuple_shardings"),
    ("_get_op_sharding_from_executable", "0.4.16", "compiled.input_shardings"),
    ("_get_partition_spec", "0.4.2", _SPECS),
    ("_get_single_pspec", "0.4.2", _SPECS),
    ("_get_ppspec_from_executable", "0.4.2", f"{_PARSE}.get_pspec_from_executable(c, mesh)"),
    ("_get_pspec_from_executable", "0.4.16", f"{_PARSE}.get_pspec_from_executable(c, mesh)"),
)

_REFUSED = (
    ("_pjit_call_impl", "pjit(f)(x)"),
    ("_pjit_jaxpr", "pjit(f).trace(x).jaxpr"),
    ("_pjit_lower", "pjit(f).lower(x)"),
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_HOME, "0.8.0", "works", __name__, "jax.jit, jax.P, jax.sharding"),
    Entry(
        f"{_HOME}.pjit",
        "0.8.0",
        "works",
        f"{__name__}:pjit",
        "jax.jit(f, in_shardings=..., out_shardings=...)",
        "It also takes `in_axis_resources` and `out_axis_resources`, removed in 0.4.14.",
    ),
    Entry(
        f"{_HOME}.AUTO",
        "0.4.7",
        "differs",
        f"{__name__}:AUTO",
        "xlashard.AUTO",
        "`AUTO(mesh)`, the form since 0.4.9, is `AUTO`: the mesh is the one in force.",
    ),
    *(
        Entry(f"{_HOME}.{name}", "0.4.7", "works", f"{__name__}:{name}", today)
        for name, today in (
            ("global_to_local", "x.sharding.shard_shape(x.shape)"),
            ("local_to_global", "jax.make_array_from_process_local_data(sharding, local).shape"),
        )
    ),
    *(
        Entry(f"{_HOME}.{name}", gone, "works", f"{__name__}:{name}", today)
        for name, gone, today in _WORKS
    ),
    *(
        Entry(f"{_HOME}.{name}", "0.4.14", "refused", f"{__name__}:{name}", today, _INNER)
        for name, today in _REFUSED
    ),
    *members(_HOME, "0.8.0", __name__, imports(_HOME)),
    *(
        Entry(
            f"jax.stages.{name}",
            gone,
            "works",
            f"xlashard.legacy.modes.mode_stages:{source}",
            today,
        )
        for name, gone, source, today in (
            ("Lowered.as_text", "0.4.31", "lowered_text", "lowered.as_text('stablehlo')"),
            ("Lowered.compiler_ir", "0.4.31", "lowered_ir", "lowered.compiler_ir('stablehlo')"),
            ("Compiled.compiler_ir", "0.3.25", "compiled_ir", "compiled.as_text()"),
        )
    ),
    Entry(f"{_HOME}.xc", "0.8.0", "works", f"{__name__}:xc", "import jax.extend.backend"),
)
