"""Annotation of `@main`: shardings, donation, layouts, memory kinds, names, partition count."""

from collections.abc import Sequence

from xlashard._jax.lower import annotations, modules
from xlashard._jax.lower.lowering import lift_meshes
from xlashard.errors import ModuleError, PlanError
from xlashard.program.ir.annotate import (
    Attributes,
    body_constraint,
    result_constraints,
    value_attributes,
)
from xlashard.program.ir.donation import Donation, plan_donation
from xlashard.program.ir.plan import Partitioner, ProgramPlan, ValuePlan


def main_attributes(plan: ProgramPlan, tokens: int) -> tuple[list[Attributes], list[Attributes]]:
    """Return the attributes of every argument and result, the leading tokens included.

    Raises:
        PlanError: A sharding does not fit its value.
    """
    args: list[Attributes] = [{"jax.token": True} for _ in range(tokens)]
    results: list[Attributes] = [{"jax.token": True} for _ in range(tokens)]
    args += [value_attributes(v, plan, result=False) for v in plan.args]
    results += [value_attributes(v, plan, result=True) for v in plan.results]
    return args, results


def _mark_donated(args: list[Attributes], donation: Donation, tokens: int) -> None:
    for i, (target, donor) in enumerate(zip(donation.alias, donation.donor, strict=True)):
        if target is not None:
            args[i + tokens]["tf.aliasing_output"] = target + tokens
        elif donor:
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
    _check_signature(main, plan, tokens)
    args, results = main_attributes(plan, tokens)
    donation = plan_donation(plan)
    _mark_donated(args, donation, tokens)
    annotations.make_entry(main)
    _write_body(main, plan, tokens)
    try:
        annotations.annotate(main, args, results, _module_attributes(plan))
        modules.verify(module)
        if plan.partitioner is Partitioner.SHARDY:
            lift_meshes(module)
    except ValueError as error:
        # no-catalogue: pjit and compile_stablehlo never make such a plan
        raise ModuleError(f"the module {plan.name} does not verify: {error}") from None
    return donation


def _module_attributes(plan: ProgramPlan) -> Attributes:
    return {
        "sym_name": modules.sanitize(plan.name),
        "mhlo.num_replicas": 1,
        "mhlo.num_partitions": len(plan.devices),
    }


def _write_body(main: modules.Function, plan: ProgramPlan, tokens: int) -> None:
    """Write operations at the ends of the body: open shardings and memory kinds."""
    none = [None] * tokens
    args = [*none, *[body_constraint(v, plan) for v in plan.args]]
    nothing: list[list[annotations.Constraint]] = [[]] * tokens
    results = [*nothing, *[result_constraints(v, plan) for v in plan.results]]
    annotations.constrain_boundary(main, args, results)
    annotations.annotate_memory_kinds(main, [*none, *[v.memory_kind for v in plan.results]])


def _check_signature(main: modules.Function, plan: ProgramPlan, tokens: int) -> None:
    arguments, results = modules.function_types(main)
    _check_values("argument", arguments[tokens:], plan.args)
    _check_values("result", results[tokens:], plan.results)


def _check_values(
    what: str, types: Sequence[modules.TensorType | str], values: Sequence[ValuePlan]
) -> None:
    if len(types) != len(values):
        # no-catalogue: pjit and compile_stablehlo never make such a plan
        raise PlanError(f"@main has {len(types)} {what}s, the plan has {len(values)}")
    for i, (kind, value) in enumerate(zip(types, values, strict=True)):
        if value.is_token and isinstance(kind, str):
            continue
        if isinstance(kind, str):
            # no-catalogue: pjit and compile_stablehlo never make such a plan
            raise PlanError(
                f"{what} {i} of @main is a {kind}, and the plan has the shape {value.shape}"
            )
        ndim = len(value.shape)
        if kind.shape[:ndim] != value.shape or len(kind.shape) != value.physical_ndim:
            raise PlanError(  # no-catalogue: pjit and compile_stablehlo never make such a plan
                f"{what} {i} of @main has the shape {kind.shape}, and the plan has {value.shape}"
                + (f" and {value.trailing} trailing" if value.trailing else "")
            )
