"""`jax.sharding` and `jax.experimental.sharding`, and `PartitionSpec` in each of its modules."""

from collections.abc import Iterator

from xlashard import GSPMDSharding, OpShardingSharding
from xlashard._jax.runtime.shardings import JaxNamedSharding as MeshPspecSharding
from xlashard._jax.runtime.shardings import JaxNamedSharding as NamedSharding
from xlashard._jax.runtime.shardings import JaxSharding as Sharding
from xlashard._jax.runtime.shardings import JaxSingleDeviceSharding as SingleDeviceSharding
from xlashard.legacy.modules.entry import Entry, moved, works, works_in
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
_OF_PMAP = (
    "jax.sharding.NamedSharding(mesh, P('devices'))",
    "It is `xlashard.PmapSharding`, whose `devices` have the attributes of a NumPy array.",
)
_POSITIONAL = "jax.sharding.NamedSharding(jax.make_mesh(shape, names), P(*names))"
_OF_MESH = (_NAMED, "It is `NamedSharding`, its name since 0.4.1.")
_OF_OP_SHARDING = (_NAMED, "It is `xlashard.OpShardingSharding`.")
_OF_POSITIONAL = (_POSITIONAL, "Results of `jax.jit` have the equivalent `GSPMDSharding`.")
_COMPATIBLE = ("jax.sharding.Sharding", "Every sharding with an XLA equivalent is an instance.")
_IMPLS = "jax._src.sharding_impls"
_OF_NAMED = "jax._src.named_sharding.NamedSharding"
_MARKERS = "xlashard.legacy.shardings.partition_spec"
_CLASSES = "xlashard.legacy.shardings.sharding_classes"
_PROTO = "sharding._to_xla_hlo_sharding(ndim).to_proto()"
# Methods of JAX's shardings.
_FITS = ("is_compatible_aval", "0.4.24", "sharding.shard_shape(shape)")
_TO_OP = ("_to_xla_op_sharding", "0.4.14", _PROTO, "op_sharding_of")
_OP = ("_op_sharding", "0.4.14", _PROTO)
_PARSED = ("_parsed_pspec", "0.7.1", "sharding.spec")


def _classes(parent: str) -> Iterator[Entry]:
    for home, name, gone, today in (
        (__name__, "MeshPspecSharding", "0.4.9", _OF_MESH),
        ("xlashard", "OpShardingSharding", "0.4.12", _OF_OP_SHARDING),
        ("xlashard", "GSPMDSharding", "0.7.0", (_NAMED, "It is `xlashard.GSPMDSharding`.")),
        (_CLASSES, "PmapSharding", "0.10.0", _OF_PMAP),
        (_CLASSES, "PositionalSharding", "0.7.0", _OF_POSITIONAL),
        (_CLASSES, "XLACompatibleSharding", "0.4.34", _COMPATIBLE),
    ):
        yield from works(parent, gone, home, **{name: today})


ENTRIES: tuple[Entry, ...] = (
    *(
        Entry(f"{home}.PartitionSpec", gone, "differs", f"{_MARKERS}:PartitionSpec", "jax.P", _SPEC)
        for home, gone in (
            ("jax.experimental", "0.4.12"),
            ("jax.experimental.pjit", "0.4.11"),
            ("jax.interpreters.pxla", "0.4.11"),
            ("jax.interpreters.sharded_jit", "0.3.16"),
            ("jax.sharding", "0.7.1"),
        )
    ),
    *works(
        "jax.sharding",
        "0.7.1",
        "xlashard.legacy.shardings.legacy_mesh",
        Mesh=("jax.sharding.Mesh", "It makes today's meshes, also of unhashable devices."),
    ),
    *_classes("jax.sharding"),
    *_classes("jax._src.sharding"),
    *moved("jax._src.sharding", "0.4.9", "jax.sharding", "NamedSharding", "SingleDeviceSharding"),
    Entry("jax.experimental.sharding", "0.3.25", "works", __name__, "jax.sharding"),
    *works("jax.experimental.sharding", "0.3.25", __name__, MeshPspecSharding=_NAMED),
    Entry(
        f"{_IMPLS}.AUTO",
        "0.9.0",
        "differs",
        f"{_MARKERS}:AUTO_ON_MESH",
        "xlashard.AUTO",
        "It is not a class: `AUTO` and `AUTO(mesh)` are equal, on the mesh in force at the call.",
    ),
    *works(_IMPLS, "0.10.0", _CLASSES, PmapSharding=_OF_PMAP),
    *works(_IMPLS, "0.7.0", _CLASSES, PositionalSharding=_POSITIONAL),
    *works_in(_OF_NAMED, {_CLASSES: (_FITS, _TO_OP, _PARSED)}),
    *works_in(f"{_IMPLS}.GSPMDSharding", {_CLASSES: (_FITS, _TO_OP, _OP)}),
    *works_in(f"{_IMPLS}.SingleDeviceSharding", {_CLASSES: (_FITS,)}),
)
