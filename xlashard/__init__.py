"""xlashard: arrays over many devices, their shardings, and pjit, on today's JAX."""

from xlashard._jax.versions import check_supported

check_supported()

from xlashard._jax import install as _install  # noqa: E402
from xlashard.array import Array, wrap, wrap_tree  # noqa: E402
from xlashard.pjit import (  # noqa: E402
    AUTO,
    UNSPECIFIED,
    BoundStep,
    Compiled,
    Lowered,
    Traced,
    jit,
    pjit,
    with_sharding_constraint,
)
from xlashard.sharding import (  # noqa: E402
    AbstractMesh,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    OpShardingSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
)

_install.install(Array, wrap, wrap_tree)

P = PartitionSpec
