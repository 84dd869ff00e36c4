"""Writes `@main`: shardings, donation, layouts, memory kinds, names and the partition count."""

from xlashard._jax import modules
from xlashard._jax.lowering import lift_meshes
from xlashard.errors import CompileError
from xlashard.program.annotate import Attributes, value_attributes
from xlashard.program.donation import Donation, plan_donation
from xlashard.program.plan import Partitioner, ProgramPlan


def main_attributes(
    plan: ProgramPlan, donation: Donation, tokens: int
) -> tuple[list[Attributes], list[Attributes]]:
    """The attributes of every argument and result, the leading tokens included."""
    args: list[Attributes] = [{"jax.token": True} for _ in range(tokens)]
    results: list[Attributes] = [{"jax.token": True} for _ in range(tokens)]
    for i, value in enumerate(plan.args):
        attributes = value_attributes(value, plan.partitioner, result=False)
        target = donation.alias[i]
        if target is not None:
            attributes["tf.aliasing_output"] = target + tokens
        elif donation.donor[i]:
            attributes["jax.buffer_donor"] = True
        args.append(attributes)
    results += [value_attributes(v, plan.partitioner, result=True) for v in plan.results]
    return args, results


def write_main(module: modules.Module, plan: ProgramPlan, *, tokens: int = 0) -> Donation:
    """Annotates a module in place by a plan.

    Args:
        module: A module whose `@main` (or only public function) takes the plan's arguments.
        plan: The plan.
        tokens: How many ordering tokens come before the arguments and the results.

    Returns:
        What became of the donated arguments.

    Raises:
        CompileError: If the module has no entry function, or not one of the plan's arity.
    """
    main = modules.main_function(module)
    if main is None:
        raise CompileError("the module has no function @main, and not just one public function")
    given, returned = (len(side) for side in modules.function_types(main))
    if (given, returned) != (len(plan.args) + tokens, len(plan.results) + tokens):
        raise CompileError(
            f"@main takes {given} and gives {returned} values, the plan is for "
            f"{len(plan.args) + tokens} and {len(plan.results) + tokens}"
        )
    donation = plan_donation(plan)
    args, results = main_attributes(plan, donation, tokens)
    kinds = [None] * tokens + [v.memory_kind for v in plan.results]
    if any(kinds):
        modules.place_results(main, kinds)
    try:
        modules.annotate(
            main,
            args,
            results,
            {
                "sym_name": modules.sanitize(plan.name),
                "mhlo.num_replicas": 1,
                "mhlo.num_partitions": len(plan.devices),
            },
        )
        modules.verify(module)
        if plan.partitioner is Partitioner.SHARDY:
            lift_meshes(module)
    except ValueError as error:
        raise CompileError(f"the module {plan.name} does not verify: {error}") from None
    return donation
