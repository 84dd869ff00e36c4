"""`jax.experimental.pjit`, `jax.experimental.maps` and `jax.sharding`: meshes, specs, shardings.

They include the internals that programs use, and `PartitionSpec` in each of its modules.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from xlashard import GSPMDSharding, OpShardingSharding
from xlashard._jax.runtime.shardings import JaxNamedSharding as NamedSharding
from xlashard._jax.runtime.shardings import JaxSharding as Sharding
from xlashard._jax.runtime.shardings import JaxSingleDeviceSharding as SingleDeviceSharding
from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard.legacy.arrays.gda import GlobalDeviceArray as GDA
from xlashard.legacy.modules.entry import EntryTable, differs, imports, moved, refused, works
from xlashard.legacy.shardings.legacy_mesh import Mesh
from xlashard.legacy.shardings.partition_spec import AutoAxisResource, PartitionSpec
from xlashard.legacy.shardings.sharding_classes import (
    PmapSharding,
    PositionalSharding,
    XLACompatibleSharding,
)
from xlashard.sharding import NamedSharding as _OwnNamedSharding

type AxisName = Hashable
type ResourceAxisName = Hashable
type MeshAxisName = Any

MeshPspecSharding = NamedSharding
PjitSharding = OpShardingSharding | UnspecifiedValue | AutoAxisResource
PjitShardingMinusUnspecified = OpShardingSharding | AutoAxisResource
MeshSharding = _OwnNamedSharding | UnspecifiedValue | AutoAxisResource
MeshShardingMinusUnspecified = _OwnNamedSharding | AutoAxisResource


class FrozenDict(Mapping[Any, Any]):
    """Immutable, hashable dict.

    Example:
        >>> axes = FrozenDict({"x": 0}, y=1)
        >>> axes["y"], axes == {"x": 0, "y": 1}, hash(axes) == hash(FrozenDict(y=1, x=0))
        (1, True, True)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._items = dict(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._items})"


_PJIT = "jax.experimental.pjit"
_MAPS = "jax.experimental.maps"

_RUNTIME = "xlashard._jax.runtime.shardings"
_PARSED = "xlashard.legacy.shardings.parsed_specs"
_MARKERS = "xlashard.legacy.shardings.partition_spec"
_MESHES = "xlashard.legacy.shardings.legacy_mesh"
_CLASSES = "xlashard.legacy.shardings.sharding_classes"
_OPS = "xlashard.legacy.shardings.op_shardings"
_FLAGS = "xlashard.legacy.modes.config_flags"
_STAGES = "xlashard.legacy.modes.host_local"
_INTERNALS = "xlashard.legacy.modes.pjit_internals"

_NAMED = "jax.sharding.NamedSharding(mesh, spec)"
_POSITIONAL = "jax.sharding.NamedSharding(jax.make_mesh(shape, names), P(*names))"
_PROTO = "sharding._to_xla_hlo_sharding(ndim).to_proto()"
_FROM_LOCAL = "jax.make_array_from_process_local_data(sharding, local)"
_SHARD_SHAPE = "sharding.shard_shape(shape)"
_PRIMITIVE = "jaxpr.eqns[0].primitive"
_SHARD_MAP = "jax.shard_map(f, mesh=mesh, in_specs=P('x'), out_specs=P('x'))"
_NO_XMAP = "xmap and its loops have no replacement with the same interface"
_INNER = "xlashard has other compilation stages than JAX had then"
_SPEC = (
    "It is a tuple, and JAX accepts it as its own. It is equal to today's spec with the same "
    "entries, but has another hash; specs that JAX returns (`x.sharding.spec`) are today's."
)
_FITS = works("0.4.24", _SHARD_SHAPE, _CLASSES)
_TO_OP_SHARDING = works("0.4.14", _PROTO, f"{_CLASSES}:op_sharding_of")
_PMAP = works(
    "0.10.0",
    "jax.sharding.NamedSharding(mesh, P('devices'))",
    _CLASSES,
    "It is `xlashard.PmapSharding`, whose `devices` have the attributes of a NumPy array.",
)
_SHARDINGS = {
    "MeshPspecSharding": works(
        "0.4.9", _NAMED, __name__, "It is `NamedSharding`, its name since 0.4.1."
    ),
    "OpShardingSharding": works(
        "0.4.12", _NAMED, "xlashard", "It is `xlashard.OpShardingSharding`."
    ),
    "GSPMDSharding": works("0.7.0", _NAMED, "xlashard", "It is `xlashard.GSPMDSharding`."),
    "PmapSharding": _PMAP,
    "PositionalSharding": works(
        "0.7.0",
        _POSITIONAL,
        _CLASSES,
        "Results of `jax.jit` have the equivalent `GSPMDSharding`.",
    ),
    "XLACompatibleSharding": works(
        "0.4.34",
        "jax.sharding.Sharding",
        _CLASSES,
        "Every sharding with an XLA equivalent is an instance.",
    ),
}

ENTRIES: EntryTable = {
    _PJIT: {
        "": works("0.8.0", "jax.jit, jax.P, jax.sharding", __name__),
        "pjit": works(
            "0.8.0",
            "jax.jit(f, in_shardings=..., out_shardings=...)",
            "xlashard.legacy.modes.pjit",
            "It also takes `in_axis_resources` and `out_axis_resources`, removed in 0.4.14.",
        ),
        "AUTO": differs(
            "0.4.7",
            "xlashard.AUTO",
            f"{_MARKERS}:AUTO_ON_MESH",
            "`AUTO(mesh)`, the form since 0.4.9, is `AUTO`: the mesh is the one in force.",
        ),
        "with_sharding_constraint": works(
            "0.4.24", "jax.lax.with_sharding_constraint(x, sharding)", "xlashard.legacy.modes.pjit"
        ),
        "FROM_GDA": works("0.4.9", "xlashard.UNSPECIFIED", "xlashard"),
        "NamedSharding": works("0.4.11", "jax.sharding.NamedSharding", "xlashard"),
        "OpShardingSharding": works("0.4.2", "xlashard.OpShardingSharding"),
        "Sharding": works("0.4.2", "jax.sharding.Sharding", "xlashard"),
        "_AUTOAxisResource": works("0.4.2", "type(xlashard.AUTO)", f"{_MARKERS}:AutoAxisResource"),
        "_FromGdaSingleton": works("0.4.2", "type(xlashard.FROM_GDA)", _MARKERS),
        "_is_from_gda": works("0.4.2", "x == xlashard.FROM_GDA", _MARKERS),
        "_is_auto": works("0.4.2", "x == xlashard.AUTO", _MARKERS),
        "_is_unspecified": works("0.4.2", "x is xlashard.UNSPECIFIED", _MARKERS),
        "_is_unspecified_or_from_gda_or_auto": works(
            "0.4.2", "x in (AUTO, FROM_GDA, UNSPECIFIED)", _MARKERS
        ),
        "_UNSPECIFIED": works("0.8.0", "xlashard.UNSPECIFIED", _RUNTIME),
        "_UnspecifiedValue": works("0.4.2", "type(xlashard.UNSPECIFIED)", _RUNTIME),
        "Mesh": works("0.4.7", "jax.sharding.Mesh", _MESHES),
        "PmapSharding": works("0.4.2", "xlashard.PmapSharding", _CLASSES),
        "XLACompatibleSharding": works("0.4.2", "jax.sharding.Sharding", _CLASSES),
        "PjitSharding": works("0.4.2", "jax.sharding.Sharding", __name__),
        "PjitShardingMinusUnspecified": works("0.4.2", "jax.sharding.Sharding", __name__),
        "MeshSharding": works("0.4.2", "jax.sharding.NamedSharding", __name__),
        "MeshShardingMinusUnspecified": works("0.4.2", "jax.sharding.NamedSharding", __name__),
        "unflatten_array": works("0.4.2", "xlashard.geometry.unflatten_array(sizes, devices)"),
        "unflatten_superdims": works("0.4.2", "xlashard.geometry.unflatten_superdims(devices)"),
        "explode_superdims": works("0.4.2", "xlashard.geometry.explode_superdims(sizes, dims)"),
        "strides_for_sizes": works("0.4.2", "xlashard.geometry.strides_for_sizes(sizes)"),
        "SpecSync": works("0.4.2", f"{_PARSED}.SpecSync"),
        "REPLICATED": works("0.4.2", "jax.P()", _PARSED),
        "ParsedPartitionSpec": works("0.4.16", f"{_PARSED}.ParsedPartitionSpec"),
        "CanonicalizedParsedPartitionSpec": works(
            "0.4.2", f"{_PARSED}.CanonicalizedParsedPartitionSpec"
        ),
        "_prepare_axis_resources": works("0.4.16", "jax.tree.leaves(specs)", _PARSED),
        "get_array_mapping": works("0.4.16", f"{_PARSED}.get_array_mapping(spec)"),
        "get_unconstrained_dims": works("0.4.2", f"{_PARSED}.get_unconstrained_dims(sharding)"),
        "_get_partition_spec": works("0.4.2", "sharding.spec", _PARSED),
        "_get_single_pspec": works("0.4.2", "sharding.spec", _PARSED),
        "_create_mesh_pspec_sharding_from_parsed_pspec": works(
            "0.4.9", _NAMED, f"{_PARSED}:mesh_sharding"
        ),
        "parse_flatten_op_sharding": works("0.4.16", f"{_OPS}.parse_flatten_op_sharding(op, mesh)"),
        "_get_op_sharding_from_executable": works("0.4.16", "compiled.input_shardings", _OPS),
        "_get_ppspec_from_executable": works(
            "0.4.2", f"{_OPS}.get_pspec_from_executable(c, mesh)", _OPS
        ),
        "_get_pspec_from_executable": works("0.4.16", f"{_OPS}.get_pspec_from_executable(c, mesh)"),
        "_get_op_sharding": works(
            "0.4.9", "op_sharding.tuple_shardings", f"{_OPS}:flatten_op_sharding"
        ),
        "flatten_axis_resources": works("0.4.2", "jax.tree.broadcast(specs, args)", _INTERNALS),
        "to_op_sharding_sharding": works(
            "0.4.2", f"{_INTERNALS}.to_op_sharding_sharding(sharding, ndim)"
        ),
        "hashable_pytree": works("0.4.16", "jax.tree.flatten(tree)", _INTERNALS),
        "global_to_local": works("0.4.7", "x.sharding.shard_shape(x.shape)", _INTERNALS),
        "local_to_global": works("0.4.7", f"{_FROM_LOCAL}.shape", _INTERNALS),
        "pjit_check_aval_sharding": works(
            "0.4.2", _SHARD_SHAPE, f"{_INTERNALS}:check_aval_shardings"
        ),
        "_create_sharding_for_array": works("0.4.2", _NAMED, _INTERNALS),
        "pjit_p": works("0.7.0", _PRIMITIVE, "xlashard.pjit.primitive"),
        "sharding_constraint_p": works(
            "0.4.2", _PRIMITIVE, "xlashard.pjit.constraint:constraint_p"
        ),
        "xc": works("0.8.0", "import jax.extend.backend", "xlashard._jax.legacy_api:xla_client"),
        "_pjit_call_impl": refused("0.4.14", "pjit(f)(x)", _INNER),
        "_pjit_jaxpr": refused("0.4.14", "pjit(f).trace(x).jaxpr", _INNER),
        "_pjit_lower": refused("0.4.14", "pjit(f).lower(x)", _INNER),
        **imports(_PJIT, "0.8.0"),
    },
    "jax.stages": {
        "Lowered.as_text": works(
            "0.4.31", "lowered.as_text('stablehlo')", f"{_STAGES}:lowered_text"
        ),
        "Lowered.compiler_ir": works(
            "0.4.31", "lowered.compiler_ir('stablehlo')", f"{_STAGES}:lowered_ir"
        ),
        "Compiled.compiler_ir": works("0.3.25", "compiled.as_text()", f"{_STAGES}:compiled_ir"),
    },
    _MAPS: {
        "": works("0.4.31", "jax.sharding", __name__),
        "Mesh": works(
            "0.4.11",
            "jax.sharding.Mesh",
            _MESHES,
            "It makes today's meshes, and meshes of fake devices, hashable or not.",
        ),
        "thread_resources": works(
            "0.4.31",
            "jax.sharding.get_mesh()",
            _MESHES,
            "It has the attributes `env`, which can be assigned, and `stack`.",
        ),
        "Loop": differs("0.4.31", "jax.lax.map(f, xs)", _MESHES, _NO_XMAP),
        "ResourceEnv": differs(
            "0.4.31",
            "with jax.set_mesh(mesh): ...",
            _MESHES,
            "Its `loops` are `()`, because `xmap` was removed; others cannot be assigned.",
        ),
        "_positional_semantics": works(
            "0.4.7",
            _FROM_LOCAL,
            f"{_FLAGS}:POSITIONAL",
            "Its `val` has an effect while `jax_array` is off.",
        ),
        "mesh": works(
            "0.3.15", "with jax.set_mesh(jax.sharding.Mesh(devices, axis_names)): ...", _MESHES
        ),
        "EMPTY_ENV": works("0.4.31", "jax.sharding.get_mesh()", _MESHES),
        "_PositionalSemantics": works("0.4.7", _FROM_LOCAL, _FLAGS),
        "FrozenDict": works("0.4.31", "types.MappingProxyType", __name__),
        "SerialLoop": refused("0.4.31", "jax.lax.map(f, xs)", _NO_XMAP),
        "serial_loop": refused("0.4.31", "jax.lax.map(f, xs)", _NO_XMAP),
        **dict.fromkeys(
            ("make_xmap_callable", "xmap", "xmap_p"), refused("0.4.31", _SHARD_MAP, _NO_XMAP)
        ),
        **imports(_MAPS, "0.4.31"),
    },
    "jax._src.mesh.Mesh": {
        "_local_to_global": works("0.4.31", f"{_FROM_LOCAL}.shape", _MESHES),
        "_global_to_local": works("0.4.31", "x.sharding.shard_shape(x.shape)", _MESHES),
    },
    "jax": {
        "experimental.PartitionSpec": differs("0.4.12", "jax.P", _MARKERS, _SPEC),
        "experimental.pjit.PartitionSpec": differs("0.4.11", "jax.P", _MARKERS, _SPEC),
        "interpreters.pxla.PartitionSpec": differs("0.4.11", "jax.P", _MARKERS, _SPEC),
        "interpreters.sharded_jit.PartitionSpec": differs("0.3.16", "jax.P", _MARKERS, _SPEC),
    },
    "jax.sharding": {
        **_SHARDINGS,
        "PartitionSpec": differs("0.7.1", "jax.P", _MARKERS, _SPEC),
        "Mesh": works(
            "0.7.1",
            "jax.sharding.Mesh",
            _MESHES,
            "It makes today's meshes, also of unhashable devices.",
        ),
    },
    "jax._src.sharding": {
        **_SHARDINGS,
        **moved("0.4.9", "jax.sharding", "NamedSharding", "SingleDeviceSharding"),
    },
    "jax.experimental.sharding": {
        "": works("0.3.25", "jax.sharding", __name__),
        "MeshPspecSharding": works("0.3.25", _NAMED, __name__),
    },
    "jax._src.sharding_impls": {
        "AUTO": differs(
            "0.9.0",
            "xlashard.AUTO",
            f"{_MARKERS}:AUTO_ON_MESH",
            "It is not a class: `AUTO` and `AUTO(mesh)` are equal, on the mesh in force at the "
            "call.",
        ),
        "PmapSharding": _PMAP,
        "PositionalSharding": works("0.7.0", _POSITIONAL, _CLASSES),
        "GSPMDSharding.is_compatible_aval": _FITS,
        "GSPMDSharding._to_xla_op_sharding": _TO_OP_SHARDING,
        "GSPMDSharding._op_sharding": works("0.4.14", _PROTO, _CLASSES),
        "SingleDeviceSharding.is_compatible_aval": _FITS,
    },
    "jax._src.named_sharding.NamedSharding": {
        "is_compatible_aval": _FITS,
        "_to_xla_op_sharding": _TO_OP_SHARDING,
        "_parsed_pspec": works("0.7.1", "sharding.spec", _CLASSES),
    },
}
