"""`jax.sharding` and `jax.experimental.sharding`, and `PartitionSpec` in each of its modules."""

from collections.abc import Iterator

from xlashard import GSPMDSharding, OpShardingSharding
from xlashard._jax.runtime.shardings import JaxNamedSharding as MeshPspecSharding
from xlashard._jax.runtime.shardings import JaxNamedSharding as NamedSharding
from xlashard._jax.runtime.shardings import JaxSharding as Sharding
from xlashard._jax.runtime.shardings import JaxSingleDeviceSharding as SingleDeviceSharding
from xlashard.legacy.modules.entry import EntryTable, differs, moved, works
from xlashard.legacy.shardings.legacy_mesh import Mesh
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.legacy.shardings.sharding_classes import (
    PmapSharding,
    PositionalSharding,
    XLACompatibleSharding,
)

_SPEC = (
    "It is a tuple, and JAX accepts it as its own. It is equal to today's spec with the same "
    "entries, but has another hash; specs that JAX returns (`x.sharding.spec`) are today's."
)
_NAMED = "jax.sharding.NamedSharding(mesh, spec)"
_POSITIONAL = "jax.sharding.NamedSharding(jax.make_mesh(shape, names), P(*names))"
_MARKERS = "xlashard.legacy.shardings.partition_spec"
_CLASSES = "xlashard.legacy.shardings.sharding_classes"
_PROTO = "sharding._to_xla_hlo_sharding(ndim).to_proto()"

_FITS = works("0.4.24", "sharding.shard_shape(shape)", _CLASSES)
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
            "xlashard.legacy.shardings.legacy_mesh",
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
