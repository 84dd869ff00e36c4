"""One value's attributes on `@main`, for either partitioner."""

from dataclasses import replace

from xlashard._jax.modules import Parsed
from xlashard.program import gspmd, shardy
from xlashard.program.plan import Partitioner, ValuePlan
from xlashard.sharding import GSPMDSharding, NamedSharding, XLACompatibleSharding

type Attributes = dict[str, str | int | bool]


def sharding_text(
    sharding: XLACompatibleSharding, ndim: int, partitioner: Partitioner, trailing: int = 0
) -> str:
    """The text of a sharding annotation for a value of rank `ndim + trailing`."""
    if trailing and not isinstance(sharding, NamedSharding):
        sharding = _padded(sharding, ndim, trailing)
    write = shardy.sharding_text if partitioner is Partitioner.SHARDY else gspmd.sharding_text
    return write(sharding, ndim + trailing)


def _padded(sharding: XLACompatibleSharding, ndim: int, trailing: int) -> XLACompatibleSharding:
    """The same tiles for a value with more dimensions, which are not cut."""
    tiling = sharding.rank_tiling(ndim)
    padded = replace(tiling, counts=tiling.counts + (1,) * trailing)
    return GSPMDSharding(sharding.devices, padded.to_tile_assignment())


def is_open(sharding: XLACompatibleSharding | None) -> bool:
    """True if the partitioner has a say in any dimension."""
    if sharding is None:
        return True
    return isinstance(sharding, NamedSharding) and not sharding.normal_spec.is_constrained


def value_attributes(value: ValuePlan, partitioner: Partitioner, *, result: bool) -> Attributes:
    """The attributes of one argument or result, without donation.

    An annotation on a result binds all its dimensions, so one that leaves some to the partitioner
    is not written there (the body constrains the value instead).
    """
    attributes: Attributes = {}
    sharding = value.sharding
    if sharding is not None and len(sharding.devices) > 1 and not (result and is_open(sharding)):
        text = sharding_text(sharding, len(value.shape), partitioner, value.trailing)
        if partitioner is Partitioner.SHARDY:
            attributes[shardy.ATTRIBUTE] = Parsed(text)
        else:
            attributes[gspmd.ATTRIBUTE] = text
    if value.memory_kind is not None:
        attributes["mhlo.memory_kind"] = value.memory_kind
    if value.layout is not None:
        attributes["mhlo.layout_mode"] = value.layout
    if result and value.name:
        attributes["jax.result_info"] = value.name
    return attributes
