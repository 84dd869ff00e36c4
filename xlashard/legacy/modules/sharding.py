"""`jax.sharding` and `jax.experimental.sharding`, and `PartitionSpec` in each of its modules."""

from xlashard import (
    GSPMDSharding,
    OpShardingSharding,
)
from xlashard._jax.runtime.shardings import JaxNamedSharding as MeshPspecSharding
from xlashard._jax.runtime.shardings import JaxNamedSharding as NamedSharding
from xlashard._jax.runtime.shardings import JaxSharding as Sharding
from xlashard._jax.runtime.shardings import JaxSingleDeviceSharding as SingleDeviceSharding
from xlashard.legacy.modules.entry import Entry
from xlashard.legacy.shardings.legacy_mesh import Mesh
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.legacy.shardings.sharding_classes import (
    PmapSharding,
    PositionalSharding,
    XLACompatibleSharding,
)

_SPECS = "xlashard.legacy.shardings.partition_spec:PartitionSpec"

_SPEC_NOTE = (
    "It is a tuple, and JAX accepts it as its own. It is equal to today's spec with the same "
    "entries, but has another hash; specs that JAX returns (`x.sharding.spec`) are today's."
)

_HOMES = (
    ("jax.experimental", "0.4.12"),
    ("jax.experimental.pjit", "0.4.11"),
    ("jax.interpreters.pxla", "0.4.11"),
    ("jax.interpreters.sharded_jit", "0.3.16"),
    ("jax.sharding", "0.7.1"),
)

_CLASSES = (
    (
        "MeshPspecSharding",
        "0.4.9",
        "jax.sharding.NamedSharding(mesh, spec)",
        "It is `NamedSharding`, its name since 0.4.1.",
    ),
    (
        "OpShardingSharding",
        "0.4.12",
        "jax.sharding.NamedSharding(mesh, spec)",
        "It is `xlashard.OpShardingSharding`.",
    ),
    (
        "GSPMDSharding",
        "0.7.0",
        "jax.sharding.NamedSharding(mesh, spec)",
        "It is `xlashard.GSPMDSharding`.",
    ),
    (
        "PmapSharding",
        "0.10.0",
        "jax.sharding.NamedSharding(mesh, P('devices'))",
        "It is `xlashard.PmapSharding`, whose `devices` have the attributes of a NumPy array.",
    ),
    (
        "PositionalSharding",
        "0.7.0",
        "jax.sharding.NamedSharding(jax.make_mesh(shape, names), P(*names))",
        "Results of `jax.jit` have the equivalent `GSPMDSharding`.",
    ),
    (
        "XLACompatibleSharding",
        "0.4.34",
        "jax.sharding.Sharding",
        "Every sharding with an XLA equivalent is an instance.",
    ),
)

ENTRIES: tuple[Entry, ...] = (
    *(
        Entry(f"{home}.PartitionSpec", gone, "differs", _SPECS, "jax.P", _SPEC_NOTE)
        for home, gone in _HOMES
    ),
    Entry(
        "jax.sharding.Mesh",
        "0.7.1",
        "works",
        f"{__name__}:Mesh",
        "jax.sharding.Mesh",
        "It makes today's meshes, also of unhashable devices.",
    ),
    *(
        Entry(f"jax.sharding.{name}", gone, "works", f"{__name__}:{name}", today, note)
        for name, gone, today, note in _CLASSES
    ),
    *(
        Entry(f"jax._src.sharding.{name}", gone, "works", f"{__name__}:{name}", today, note)
        for name, gone, today, note in _CLASSES
    ),
    Entry(
        "jax._src.sharding.NamedSharding",
        "0.4.9",
        "works",
        f"{__name__}:NamedSharding",
        "jax.sharding.NamedSharding",
    ),
    Entry(
        "jax._src.sharding.SingleDeviceSharding",
        "0.4.9",
        "works",
        f"{__name__}:SingleDeviceSharding",
        "jax.sharding.SingleDeviceSharding",
    ),
    Entry("jax.experimental.sharding", "0.3.25", "works", __name__, "jax.sharding"),
    Entry(
        "jax.experimental.sharding.MeshPspecSharding",
        "0.3.25",
        "works",
        f"{__name__}:MeshPspecSharding",
        "jax.sharding.NamedSharding(mesh, spec)",
    ),
    Entry(
        "jax._src.sharding_impls.AUTO",
        "0.9.0",
        "differs",
        "xlashard.legacy.shardings.partition_spec:AUTO_ON_MESH",
        "xlashard.AUTO",
        "It is not a class: `AUTO` and `AUTO(mesh)` are equal, on the mesh in force at the call.",
    ),
    Entry(
        "jax._src.sharding_impls.PmapSharding",
        "0.10.0",
        "works",
        f"{__name__}:PmapSharding",
        "jax.sharding.NamedSharding(mesh, P('devices'))",
        "It is `xlashard.PmapSharding`, whose `devices` have the attributes of a NumPy array.",
    ),
    Entry(
        "jax._src.sharding_impls.PositionalSharding",
        "0.7.0",
        "works",
        f"{__name__}:PositionalSharding",
        "jax.sharding.NamedSharding(jax.make_mesh(shape, names), P(*names))",
    ),
    *(
        Entry(
            f"jax._src.{kind}.is_compatible_aval",
            "0.4.24",
            "works",
            "xlashard.legacy.shardings.sharding_classes:is_compatible_aval",
            "sharding.shard_shape(shape)",
        )
        for kind in (
            "named_sharding.NamedSharding",
            "sharding_impls.GSPMDSharding",
            "sharding_impls.SingleDeviceSharding",
        )
    ),
    Entry(
        "jax._src.sharding_impls.GSPMDSharding._op_sharding",
        "0.4.14",
        "works",
        "xlashard.legacy.shardings.sharding_classes:op_sharding",
        "sharding._to_xla_hlo_sharding(ndim).to_proto()",
    ),
    Entry(
        "jax._src.sharding_impls.GSPMDSharding._to_xla_op_sharding",
        "0.4.14",
        "works",
        "xlashard.legacy.shardings.sharding_classes:op_sharding_of",
        "sharding._to_xla_hlo_sharding(ndim).to_proto()",
    ),
    Entry(
        "jax._src.named_sharding.NamedSharding._to_xla_op_sharding",
        "0.4.14",
        "works",
        "xlashard.legacy.shardings.sharding_classes:op_sharding_of",
        "sharding._to_xla_hlo_sharding(ndim).to_proto()",
    ),
    Entry(
        "jax._src.named_sharding.NamedSharding._parsed_pspec",
        "0.7.1",
        "works",
        "xlashard.legacy.shardings.sharding_classes:parsed_pspec",
        "sharding.spec",
    ),
)
