"""What `@main` says of one value, for either partitioner."""

from dataclasses import replace

from xlashard._jax.lower.annotations import Constraint
from xlashard._jax.lower.modules import Parsed
from xlashard.errors import GeometryError, PlanError, UnreducedError
from xlashard.program import gspmd, shardy
from xlashard.program.plan import Partitioner, ProgramPlan, ValuePlan, open_dims
from xlashard.sharding import NamedSharding, XLACompatibleSharding

type Attributes = dict[str, str | int | bool]


def sharding_text(
    sharding: XLACompatibleSharding, ndim: int, partitioner: Partitioner, trailing: int = 0
) -> str:
    """Return the text of a sharding annotation for a value of rank `ndim + trailing`.

    Raises:
        GeometryError: If the sharding has no tiles, or not for this rank.
    """
    if isinstance(sharding, NamedSharding) and partitioner is Partitioner.SHARDY:
        return shardy.spec_text(sharding, ndim + trailing)
    tiling = sharding.rank_tiling(ndim)
    # Counts of a tiling include those of the dimensions that a PRNG key's buffer has more.
    tiling = replace(tiling, counts=tiling.counts + (1,) * trailing)
    write = shardy if partitioner is Partitioner.SHARDY else gspmd
    return write.tiling_text(tiling)


def is_open(sharding: XLACompatibleSharding | None) -> bool:
    """True if the partitioner has a say in any dimension."""
    return sharding is None or bool(open_dims(sharding))


def value_attributes(value: ValuePlan, plan: ProgramPlan, *, result: bool) -> Attributes:
    """The attributes of one argument or result, without donation.

    Raises:
        PlanError: If its sharding can't be said for its rank.
    """
    attributes: Attributes = {}
    if _is_annotated(value, plan) and plan.partitioner is Partitioner.SHARDY:
        attributes[shardy.ATTRIBUTE] = Parsed(_shardy_text(value, plan))
    elif _is_annotated(value, plan) and not _gspmd_open_dims(value):
        attributes[gspmd.ATTRIBUTE] = _gspmd_text(value)
    if value.memory_kind is not None:
        attributes["mhlo.memory_kind"] = value.memory_kind
    if value.layout is not None:
        attributes["mhlo.layout_mode"] = value.layout
    if result and value.name:
        attributes["jax.result_info"] = value.name
    return attributes


def body_constraint(value: ValuePlan, plan: ProgramPlan) -> Constraint | None:
    """What must be said of a value inside the body, because an attribute can't say it.

    An HLO sharding on an argument or result binds all its dimensions. One that leaves some to the
    partitioner is an operation on the value.
    """
    if plan.partitioner is Partitioner.SHARDY or not _is_annotated(value, plan):
        return None
    dims = _gspmd_open_dims(value)
    return Constraint(_gspmd_text(value), dims) if dims else None


def result_constraints(value: ValuePlan, plan: ProgramPlan) -> list[Constraint]:
    """Return the sharding operation that a result needs at the end of the body.

    Where a value of a program is unreduced, Shardy reduces, or makes partial results, only at an
    operation, never between the last one and the result's attribute.
    """
    if plan.partitioner is not Partitioner.SHARDY or not plan.has_unreduced:
        constraint = body_constraint(value, plan)
        return [] if constraint is None else [constraint]
    if not _is_annotated(value, plan):
        return []
    pinned = [Constraint(_shardy_text(value, plan), shardy=True)]
    if value.is_whole and isinstance(value.sharding, NamedSharding):
        # Of a constant that nothing pins XLA would make every partial result the whole.
        whole = _checked_text(value, value.sharding.reduced_sharding, Partitioner.SHARDY)
        pinned.insert(0, Constraint(whole, shardy=True))
    return pinned


def _is_annotated(value: ValuePlan, plan: ProgramPlan) -> bool:
    """True if there is something to say of how a value is dealt out.

    There is where nobody said anything of keys: the dimensions of their buffers are not cut.
    """
    if value.annotated or len(plan.devices) == 1:
        return False
    return value.sharding is not None or value.trailing > 0


def _shardy_text(value: ValuePlan, plan: ProgramPlan) -> str:
    if value.sharding is None:
        return shardy.open_text(len(value.shape), value.trailing, plan.mesh, len(plan.devices))
    return _checked_text(value, value.sharding, Partitioner.SHARDY)


def _gspmd_text(value: ValuePlan) -> str:
    if value.sharding is None:
        return gspmd.UNCUT
    if value.sharding.is_unreduced:
        raise UnreducedError(  # no-catalogue: needs the GSPMD partitioner
            f"{value.name or 'a value'} is placed by {value.sharding}, but the GSPMD partitioner "
            "reduces no partial results: use Shardy, by XLASHARD_PARTITIONER=shardy or "
            "jax.config.update('jax_use_shardy_partitioner', True)"
        )
    return _checked_text(value, value.sharding, Partitioner.GSPMD)


def _gspmd_open_dims(value: ValuePlan) -> tuple[int, ...]:
    if value.sharding is None:
        return tuple(range(len(value.shape)))
    return open_dims(value.sharding)


def _checked_text(
    value: ValuePlan, sharding: XLACompatibleSharding, partitioner: Partitioner
) -> str:
    try:
        return sharding_text(sharding, len(value.shape), partitioner, value.trailing)
    except GeometryError as error:
        raise PlanError(  # no-catalogue: pjit and compile_stablehlo never make such a plan
            f"{value.name or 'a value'} of shape {value.shape} can't be dealt out as {sharding}: "
            f"{error}"
        ) from None
