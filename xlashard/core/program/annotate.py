"""Annotations of one value of `@main`, for either partitioner.

Shardy takes `sdy.sharding` over a mesh of named axes
(https://openxla.org/shardy/sharding_representation), GSPMD takes `mhlo.sharding` with the text of
an HLO sharding (https://openxla.org/xla/sharding).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.lowering import lift_meshes
from xlashard._jax.stablehlo_modules import GSPMD_ATTRIBUTE, SHARDY_ATTRIBUTE, Constraint, Parsed
from xlashard.core.program.donation import NO_DONATION, Donation, plan_donation
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan, open_dims
from xlashard.core.sharding import NamedSharding, XLACompatibleSharding, grid_of
from xlashard.core.sharding.axes import axes_of, made_up_grid
from xlashard.errors import GeometryError, ModuleError, PlanError, UnreducedError, counted
from xlashard.geometry import MeshGrid, Spec

type Attributes = dict[str, str | int | bool]


@lru_cache(maxsize=4096)
def sharding_text(
    sharding: XLACompatibleSharding, ndim: int, partitioner: Partitioner, trailing: int = 0
) -> str:
    """Return the text of a sharding annotation for a value of rank `ndim + trailing`.

    Raises:
        GeometryError: The sharding has no tiles for this rank, or no mesh has these tiles.
    """
    if isinstance(sharding, NamedSharding) and partitioner is Partitioner.SHARDY:
        # Dimensions past the spec are closed and replicated.
        return _text(grid_of(sharding.mesh), sharding.normal_spec, ndim + trailing)
    tiling = sharding.rank_tiling(ndim)
    # Counts of a tiling include the trailing dimensions of a PRNG key's buffer.
    tiling = replace(tiling, counts=tiling.counts + (1,) * trailing)
    if partitioner is Partitioner.SHARDY:
        axes = axes_of(tiling)
        return _text(axes.grid, axes.spec, tiling.ndim, axes.device_ids)
    return tiling.to_tile_assignment().to_text()


def is_open(sharding: XLACompatibleSharding | None) -> bool:
    """Return True if the partitioner chooses any dimension."""
    return sharding is None or bool(open_dims(sharding))


def value_attributes(value: ValuePlan, plan: ProgramPlan, *, result: bool) -> Attributes:
    """Return the attributes of one argument or result, without donation.

    Raises:
        PlanError: Its sharding does not fit its rank.
    """
    attributes: Attributes = {}
    if _is_annotated(value, plan):
        if plan.partitioner is Partitioner.SHARDY:
            attributes[SHARDY_ATTRIBUTE] = Parsed(_shardy_text(value, plan))
        elif not _gspmd_open_dims(value):
            attributes[GSPMD_ATTRIBUTE] = _gspmd_text(value)
    if value.memory_kind is not None:
        attributes["mhlo.memory_kind"] = value.memory_kind
    if value.layout is not None:
        attributes["mhlo.layout_mode"] = value.layout
    if result and value.name:
        attributes["jax.result_info"] = value.name
    return attributes


def body_constraint(value: ValuePlan, plan: ProgramPlan) -> Constraint | None:
    """Return the sharding operation of a value whose attribute can't express its sharding.

    An HLO sharding in an attribute fixes all dimensions. A sharding with open dimensions is an
    operation on the value.
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
    if plan.partitioner is not Partitioner.SHARDY:
        constraint = body_constraint(value, plan)
        return [] if constraint is None else [constraint]
    if not _is_annotated(value, plan):
        return []
    pinned = [Constraint(_shardy_text(value, plan), shardy=True)]
    if value.is_whole and isinstance(value.sharding, NamedSharding):
        # XLA would use the full value of an unpinned constant as every partial result.
        whole = _checked_text(value, value.sharding.reduced_sharding, Partitioner.SHARDY)
        pinned.insert(0, Constraint(whole, shardy=True))
    return pinned


def _is_annotated(value: ValuePlan, plan: ProgramPlan) -> bool:
    """Return True if the value has a sharding to annotate, or is a key of any sharding.

    Keys are annotated in any case: the trailing dimensions of their buffers are never sharded.
    """
    if value.annotated or len(plan.devices) == 1:
        return False
    return value.sharding is not None or value.trailing > 0


def _shardy_text(value: ValuePlan, plan: ProgramPlan) -> str:
    if value.sharding is None:
        grid = grid_of(plan.mesh) if plan.mesh is not None else made_up_grid([len(plan.devices)])
        return _text(grid, Spec((None,) * len(value.shape)), value.physical_ndim)
    return _checked_text(value, value.sharding, Partitioner.SHARDY)


def _gspmd_text(value: ValuePlan) -> str:
    if value.sharding is None:
        return "{replicated}"
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
            f"{value.name or 'a value'} of shape {value.shape} can't be sharded as {sharding}: "
            f"{error}"
        ) from None


def _text(grid: MeshGrid, spec: Spec, ndim: int, device_ids: Sequence[int] = ()) -> str:
    dims = ", ".join(map(_dim, spec.for_rank(ndim)))
    mesh = _mesh(grid, device_ids)
    return f"#sdy.sharding<mesh<{mesh}>, [{dims}]{_unreduced(grid, spec)}>"


def _unreduced(grid: MeshGrid, spec: Spec) -> str:
    axes = [axis for axis in grid.axis_names if axis in spec.unreduced]
    if not axes:
        return ""
    kind = "" if spec.reduction == "sum" else spec.reduction
    return f", unreduced={kind}{{{', '.join(map(_quoted, axes))}}}"


def _dim(axes: tuple[str, ...] | None) -> str:
    if axes is None:
        return "{?}"
    return "{" + ", ".join(map(_quoted, axes)) + "}"


def _mesh(grid: MeshGrid, device_ids: Sequence[int] = ()) -> str:
    axes = (f"{_quoted(n)}={s}" for n, s in zip(grid.axis_names, grid.axis_sizes, strict=True))
    order = f", device_ids=[{', '.join(map(str, device_ids))}]" if device_ids else ""
    return f"[{', '.join(axes)}]{order}"


def _quoted(name: str) -> str:
    """Return a name as an MLIR string; characters past ASCII are escaped bytes of UTF-8."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:02X}"
        for byte in name.encode()
    )
    return f'"{plain}"'


def _mark_donated(args: list[Attributes], donation: Donation, tokens: int) -> None:
    for i, j in donation.pairs.items():
        if i in donation.certain:
            args[i + tokens]["tf.aliasing_output"] = j + tokens
        else:
            args[i + tokens]["jax.buffer_donor"] = True


def write_main(module: modules.Module, plan: ProgramPlan, *, tokens: int = 0) -> Donation:
    """Annotate a module in place by a plan.

    Args:
        module: A module whose `@main` (or only public function) takes the plan's arguments.
        plan: The plan.
        tokens: Number of ordering tokens before the arguments and the results.

    Returns:
        The plan for donated arguments.

    Raises:
        ModuleError: The module has no entry function, or does not verify.
        PlanError: The plan and the entry function disagree.
    """
    main = modules.main_function(module)
    if main is None:
        # no-catalogue: pjit and compile_stablehlo never make such a plan
        raise ModuleError("the module has no function @main, and not exactly one public function")
    arguments, outputs = modules.function_types(main)
    _check_values("argument", arguments[tokens:], plan.args)
    _check_values("result", outputs[tokens:], plan.results)
    token: Attributes = {"jax.token": True}
    args = [*[token] * tokens, *[value_attributes(v, plan, result=False) for v in plan.args]]
    results = [*[token] * tokens, *[value_attributes(v, plan, result=True) for v in plan.results]]
    donation = NO_DONATION
    if any(plan.donated):
        donation = plan_donation(plan)
        _mark_donated(args, donation, tokens)
    modules.make_entry(main)
    _write_body(main, plan, tokens)
    attributes: Attributes = {
        "sym_name": modules.sanitize(plan.name),
        "mhlo.num_replicas": 1,
        "mhlo.num_partitions": len(plan.devices),
    }
    try:
        modules.annotate(main, args, results, attributes)
        modules.verify(module)
        if plan.partitioner is Partitioner.SHARDY:
            lift_meshes(module)
    except ValueError as error:
        # no-catalogue: pjit and compile_stablehlo never make such a plan
        raise ModuleError(f"the module {plan.name} does not verify: {error}") from None
    return donation


def _write_body(main: modules.Function, plan: ProgramPlan, tokens: int) -> None:
    """Write operations at the ends of the body: open shardings and memory kinds."""
    none = [None] * tokens
    # Shardy's attributes say all, unless values are partial results.
    if plan.partitioner is not Partitioner.SHARDY or plan.has_unreduced:
        args = [*none, *[body_constraint(v, plan) for v in plan.args]]
        nothing: list[list[modules.Constraint]] = [[]] * tokens
        results = [*nothing, *[result_constraints(v, plan) for v in plan.results]]
        modules.constrain_boundary(main, args, results)
    modules.annotate_memory_kinds(main, [*none, *[v.memory_kind for v in plan.results]])


def _check_values(
    what: str, types: Sequence[modules.TensorType | str], values: Sequence[ValuePlan]
) -> None:
    if len(types) != len(values):
        # no-catalogue: pjit and compile_stablehlo never make such a plan
        raise PlanError(f"@main has {counted(len(types), what)}, the plan has {len(values)}")
    for i, (kind, value) in enumerate(zip(types, values, strict=True)):
        if value.is_token and isinstance(kind, str):
            continue
        if isinstance(kind, str):
            # no-catalogue: pjit and compile_stablehlo never make such a plan
            raise PlanError(
                f"{what} {i} of @main is a {kind}, and the plan has the shape {value.shape}"
            )
        ndim = len(value.shape)
        if kind.shape[:ndim] != value.shape or len(kind.shape) != ndim + value.trailing:
            raise PlanError(  # no-catalogue: pjit and compile_stablehlo never make such a plan
                f"{what} {i} of @main has the shape {kind.shape}, and the plan has {value.shape}"
                + (f" and {value.trailing} trailing" if value.trailing else "")
            )
