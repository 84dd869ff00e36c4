"""`jax.sharding` and `jax.experimental.sharding`, and `PartitionSpec` in each of its modules."""

from collections.abc import Iterator

from xlashard import (
    GSPMDSharding,
    OpShardingSharding,
)
from xlashard._jax.runtime.shardings import JaxNamedSharding as MeshPspecSharding
from xlashard._jax.runtime.shardings import JaxNamedSharding as NamedSharding
from xlashard._jax.runtime.shardings import JaxSharding as Sharding
from xlashard._jax.runtime.shardings import JaxSingleDeviceSharding as SingleDeviceSharding
from xlashard.legacy.modules.entry import Entry, differs, moved, works
from xlashard.legacy.shardings.legacy_mesh import Mesh
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.legacy.shardings.sharding_classes import (
    PmapSharding,
    PositionalSharding,
    XLACompatibleSharding,
)

_SPEC_NOTE = (
    "It is a tuple, and JAX accepts it as its own. It is equal to today's spec with the same "
    "entries, but has another hash; specs that JAX returns (`x.sharding.spec`) are today's."
)
_NAMED = "jax.sharding.NamedSharding(mesh, spec)"
_OF_PMAP = (
    "jax.sharding.NamedSharding(mesh, P('devices'))",
    "It is `xlashard.PmapSharding`, whose `devices` have the attributes of a NumPy array.",
)
_POSITIONAL = "jax.sharding.NamedSharding(jax.make_mesh(shape, names), P(*names))"
_IMPLS = "jax._src.sharding_impls"
_OF_NAMED = "jax._src.named_sharding.NamedSharding"
_CLASSES = "xlashard.legacy.shardings.sharding_classes"
_PROTO = "sharding._to_xla_hlo_sharding(ndim).to_proto()"


def _classes(parent: str) -> Iterator[Entry]:
    yield from works(
        parent,
        "0.4.9",
        __name__,
        MeshPspecSharding=(_NAMED, "It is `NamedSharding`, its name since 0.4.1."),
    )
    yield from works(
        parent,
        "0.4.12",
        "xlashard",
        OpShardingSharding=(_NAMED, "It is `xlashard.OpShardingSharding`."),
    )
    yield from works(
        parent, "0.7.0", "xlashard", GSPMDSharding=(_NAMED, "It is `xlashard.GSPMDSharding`.")
    )
    yield from works(parent, "0.10.0", _CLASSES, PmapSharding=_OF_PMAP)
    yield from works(
        parent,
        "0.7.0",
        _CLASSES,
        PositionalSharding=(
            _POSITIONAL,
            "Results of `jax.jit` have the equivalent `GSPMDSharding`.",
        ),
    )
    yield from works(
        parent,
        "0.4.34",
        _CLASSES,
        XLACompatibleSharding=(
            "jax.sharding.Sharding",
            "Every sharding with an XLA equivalent is an instance.",
        ),
    )


ENTRIES: tuple[Entry, ...] = (
    *(
        entry
        for home, gone in (
            ("jax.experimental", "0.4.12"),
            ("jax.experimental.pjit", "0.4.11"),
            ("jax.interpreters.pxla", "0.4.11"),
            ("jax.interpreters.sharded_jit", "0.3.16"),
            ("jax.sharding", "0.7.1"),
        )
        for entry in differs(
            home,
            gone,
            "xlashard.legacy.shardings.partition_spec",
            PartitionSpec=("jax.P", _SPEC_NOTE),
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
        "xlashard.legacy.shardings.partition_spec:AUTO_ON_MESH",
        "xlashard.AUTO",
        "It is not a class: `AUTO` and `AUTO(mesh)` are equal, on the mesh in force at the call.",
    ),
    *works(_IMPLS, "0.10.0", _CLASSES, PmapSharding=_OF_PMAP),
    *works(_IMPLS, "0.7.0", _CLASSES, PositionalSharding=_POSITIONAL),
    *(
        entry
        for kind in (
            _OF_NAMED,
            f"{_IMPLS}.GSPMDSharding",
            f"{_IMPLS}.SingleDeviceSharding",
        )
        for entry in works(
            kind, "0.4.24", _CLASSES, is_compatible_aval="sharding.shard_shape(shape)"
        )
    ),
    *(
        Entry(f"{kind}.{name}", gone, "works", f"{_CLASSES}:{source}", today)
        for kind, name, gone, source, today in (
            (f"{_IMPLS}.GSPMDSharding", "_op_sharding", "0.4.14", "op_sharding", _PROTO),
            (f"{_IMPLS}.GSPMDSharding", "_to_xla_op_sharding", "0.4.14", "op_sharding_of", _PROTO),
            (_OF_NAMED, "_to_xla_op_sharding", "0.4.14", "op_sharding_of", _PROTO),
            (_OF_NAMED, "_parsed_pspec", "0.7.1", "parsed_pspec", "sharding.spec"),
        )
    ),
)
