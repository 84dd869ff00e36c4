"""Text of an automatic layout: sections of the terminal report, and Python code."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from xlashard.auto.plan.path_rules import path_rules
from xlashard.auto.plan.plan_model import (
    HeldMemory,
    Outcome,
    PlanFields,
    PlannedConstraint,
    PlannedLayout,
    PlannedValue,
    UnforeseenTransfer,
)
from xlashard.pjit.report.tables import WIDE, Page, head, line_text, listing, section, table
from xlashard.preflights.render.report_text import WORDS
from xlashard.wording import in_bytes, in_percent, in_seconds

COLOURS: dict[Outcome, str] = {
    "fits": "green",
    "out of memory": "red",
    "refused": "red",
    "not compiled": "dim",
}
_REASON = 60
_REFUSED = r"^(?:compiling \S+ failed: (?:the worker process ended with )?|XLA can't compile \S+: )"
"""Start of a compiler's error, which follows the outcome without it."""


def plan_sections(plan: PlanFields, page: Page) -> Iterator[RenderableType | None]:
    """Yield the sections of the printed report.

    Args:
        plan: The plan.
        page: The page.
    """
    yield from plan_summary(plan, page)
    yield _values(page, "Arguments", plan.inputs, plan.runner_up)
    yield _values(page, "Results", plan.outputs, plan.runner_up)
    yield _constraints(plan, page)
    yield _collectives(plan, page)
    if plan.unforeseen:
        yield _unforeseen(plan, page)


def plan_summary(plan: PlanFields, page: Page) -> Iterator[RenderableType | None]:
    """Yield the sections that describe the layout, without its single values.

    Args:
        plan: The plan.
        page: The page.
    """
    yield _head(plan)
    yield section("Layouts", "time of a step, memory of a device", _layouts(plan))
    if plan.held:
        yield _held(plan, page)
    yield _rules(plan)


def _head(plan: PlanFields) -> RenderableType:
    chosen, second = plan.layouts[0], plan.runner_up
    time = in_seconds(chosen.best_seconds)
    facts: list[tuple[str, str | Text]] = [("step", time if plan.fits else f"{time}, if it fitted")]
    used = in_bytes(chosen.total_bytes or chosen.predicted_bytes)
    memory = f"{used} of {in_bytes(plan.memory_bytes)} on each device"
    facts.append(("memory", memory if plan.fits else Text(f"{memory}: no layout fits", "red")))
    if plan.smallest_slice:
        facts.append(("would do", plan.smallest_slice))
    if second is not None and chosen.best_seconds:
        slower = second.best_seconds / chosen.best_seconds - 1
        facts.append(("second", f"{second.name}, {in_percent(slower)} slower"))
    if plan.shares:
        whole = sum(seconds for _, seconds in plan.shares) or 1.0
        names = WORDS[plan.links].shares
        parts = [
            f"{names.get(name, name)} {in_percent(seconds / whole)}"
            for name, seconds in plan.shares[:4]
        ]
        facts.append(("time", ", ".join(parts)))
    if plan.gap is not None:
        facts.append(("solved", f"each axis within {in_percent(plan.gap)}, given the others"))
    if plan.least_seconds is not None:
        least = in_seconds(plan.least_seconds)
        predicted = in_seconds(chosen.predicted_seconds)
        facts.append(("bound", f"predicted {predicted}, no layout below {least}: its work alone"))
    if plan.unknown_primitives:
        facts.append(("whole", f"no sharding rule: {', '.join(plan.unknown_primitives)}"))
    mesh = " · ".join(f"{name}={size}" for name, size in plan.mesh)
    return head(plan.name, [plan.devices, mesh], facts)


def _layouts(plan: PlanFields) -> RenderableType:
    best = plan.layouts[0].best_seconds
    rows = [
        (
            Text(layout.name, "" if n else "bold"),
            "" if layout.seconds is None else in_seconds(layout.best_seconds),
            f"{layout.best_seconds / best:.2f} x" if n and best and layout.seconds else "",
            "" if layout.total_bytes is None else in_bytes(layout.total_bytes),
            in_seconds(layout.predicted_seconds),
            in_bytes(layout.predicted_bytes),
            Text(_verdict(layout), COLOURS[layout.outcome]),
        )
        for n, layout in enumerate(plan.layouts)
    ]
    return table(["", ">step", ">", ">memory", ">predicted", ">", "verdict"], rows)


def _verdict(layout: PlannedLayout) -> str:
    if layout.measured_seconds is not None and layout.seconds is not None:
        return f"{layout.outcome}, measured; estimated {in_seconds(layout.seconds)}"
    reason = re.sub(_REFUSED, "", " ".join(layout.reason.split()))
    short = reason if len(reason) <= _REASON else f"{reason[: _REASON - 1]}…"
    return f"{layout.outcome}: {short}" if short else layout.outcome


def _held(plan: PlanFields, page: Page) -> RenderableType | None:
    def row(held: HeldMemory) -> Sequence[RenderableType]:
        line = "" if held.source is None else line_text(held.source)
        return page.path(held.name), held.type, in_bytes(held.device_bytes), line

    columns = ["value", "type", ">bytes", "line"]
    heading = "Memory", "what holds it on each device"
    return listing(page, heading, columns, plan.held, row, lambda held: held.device_bytes)


def _rules(plan: PlanFields) -> RenderableType:
    rules = path_rules({value.path: value.spec for value in plan.inputs})
    rows: list[Sequence[RenderableType]] = [
        (Text(pattern or "all others", "green" if pattern else "dim"), spec)
        for pattern, spec in rules
    ]
    rows += [
        (Text(f"axis {rule.name}", "cyan"), ", ".join(rule.axes) or "whole")
        for rule in plan.axis_rules
    ]
    return section("Rules", "the first that matches a path", table(["path", "spec"], rows))


def _values(
    page: Page, title: str, values: Sequence[PlannedValue], second: PlannedLayout | None
) -> RenderableType | None:
    def row(value: PlannedValue) -> Sequence[RenderableType]:
        spec = Text(f"{value.spec} fixed" if value.is_fixed else value.spec)
        cells = (page.path(value.path), value.type, spec, in_bytes(value.device_bytes))
        return (*cells, Text(value.runner_up, "dim"))[: len(columns)]

    largest = sorted(values, key=lambda value: -value.device_bytes)
    columns = ["path", "type", "spec", ">of a device"]
    if second is not None and page.width >= WIDE:
        columns.append(second.name)
    return listing(page, (title, ""), columns, largest, row, lambda value: value.device_bytes)


def _constraints(plan: PlanFields, page: Page) -> RenderableType | None:
    alike = Counter((_where(c), c.operation, c.kind, c.type, c.spec) for c in plan.constraints)
    found = [(*key, count) for key, count in alike.items()]
    if not found:
        return None
    rows = [
        (line, operation, kind, of, spec, f"{count} x" if count > 1 else "")
        for line, operation, kind, of, spec, count in page.rows(found)
    ]
    body = table(["line", "operation", "", "type", "spec", ">"], rows)
    note = f"{len(plan.constraints)} values, constrained in the function"
    return section("Constraints inside", note, body, page.left(len(found) - len(rows)))


def _where(value: PlannedConstraint | UnforeseenTransfer) -> str:
    return "" if value.source is None else line_text(value.source)


def _collectives(plan: PlanFields, page: Page) -> RenderableType | None:
    def row(total: Any) -> Sequence[RenderableType]:
        return total.kind, total.along, f"{total.times:,}", in_bytes(total.sent_bytes)

    columns = ["what", "along", ">runs", ">sent"]
    heading = "Collectives", "of the compiled program, per device and step"
    return listing(page, heading, columns, plan.collectives, row, lambda t: t.sent_bytes)


def _unforeseen(plan: PlanFields, page: Page) -> RenderableType:
    rows = [
        (c.kind, c.along, c.type, f"{c.times:,}", in_seconds(c.seconds), _where(c))
        for c in page.rows(plan.unforeseen)
    ]
    body = table(["what", "along", "type", ">runs", ">on links", "line"], rows)
    note = "of the compiler's own choice"
    more = page.left(len(plan.unforeseen) - len(rows))
    return section("Unforeseen collectives", note, body, more)


def plan_code(plan: PlanFields) -> str:
    """Return the layout as Python code.

    Args:
        plan: The plan.
    """
    names, sizes = zip(*plan.mesh, strict=True)
    stored = bool(plan.constraints)
    lines = [
        "import re",
        *(["from pathlib import Path"] if stored else []),
        "",
        "import jax",
        "from jax.sharding import AxisType, NamedSharding",
        "from jax.sharding import PartitionSpec as P",
        *(["", "from xlashard import AutoPlan"] if stored else []),
        "",
        f"axis_types = (AxisType.Auto,) * {len(names)}",
        f"mesh = jax.make_mesh({sizes}, {names}, axis_types=axis_types)",
        "",
        "# Specs by regular expressions over paths: the first that matches holds.",
    ]
    for what, values in (("ARGUMENTS", plan.inputs), ("RESULTS", plan.outputs)):
        rules = path_rules({value.path: value.spec for value in values})
        lines += [f"{what} = [", *(f"    ({p!r}, {spec})," for p, spec in rules), "]"]
    lines += [
        "",
        "",
        "def shardings(rules, name, tree):",
        "    def sharding(path, _):",
        "        path = name + jax.tree_util.keystr(path)",
        "        spec = next(spec for rule, spec in rules if re.search(rule, path))",
        "        return NamedSharding(mesh, spec)",
        "",
        "    return jax.tree_util.tree_map_with_path(sharding, tree)",
    ]
    if all(argument.path for argument in plan.arguments):
        lines += _jit_lines(plan)
    if plan.constraints:
        lines += [*_loader_lines(plan), *_constraint_lines(plan)]
    return "\n".join(lines) + "\n"


def _jit_lines(plan: PlanFields) -> list[str]:
    """Return the lines that compile the function."""
    name = plan.name if plan.name.isidentifier() else "fun"
    positional = [argument.path for argument in plan.arguments if not argument.keyword]
    named = [argument.path for argument in plan.arguments if argument.keyword]
    call = ", ".join([name, *positional, *(f"{path}={path}" for path in named)])
    lines = ["", ""]
    if named:
        # jax.jit takes no arguments by keyword beside in_shardings.
        lines += [
            f"{path} = jax.device_put({path}, shardings(ARGUMENTS, {path!r}, {path}))"
            for path in (*positional, *named)
        ]
    else:
        lines += [
            "in_shardings = (",
            *(f"    shardings(ARGUMENTS, {path!r}, {path})," for path in positional),
            ")",
        ]
    lines += [
        f'out_shardings = shardings(RESULTS, "result", jax.eval_shape({call}))',
        f"{name}_sharded = jax.jit(",
        f"    {name},",
        *([] if named else ["    in_shardings=in_shardings,"]),
        "    out_shardings=out_shardings,",
    ]
    donated = [n for n, argument in enumerate(plan.arguments) if argument.donated]
    if donated and not named:
        lines.append(f"    donate_argnums={tuple(donated)},")
    return [*lines, ")"]


def _loader_lines(plan: PlanFields) -> list[str]:
    """Return a function that compiles with the constraints inside, from the stored plan."""
    name = plan.name if plan.name.isidentifier() else "fun"
    donated = [n for n, argument in enumerate(plan.arguments) if argument.donated]
    options = f", donate_argnums={tuple(donated)}" if donated else ""
    return [
        *("", "", f"def {name}_from_plan(path):"),
        "    # With the constraints inside, from the file of plan.to_json().",
        "    plan = AutoPlan.from_json(Path(path).read_text())",
        f"    return plan.apply({name}, mesh=mesh{options})",
    ]


def _constraint_lines(plan: PlanFields) -> list[str]:
    """Return the constraints inside as comments with their lines of source."""
    lines = ["", "", "# Inside the function, at these lines:"]
    alike = dict.fromkeys(
        (_where(c), c.operation, c.kind, c.type, c.spec) for c in plan.constraints
    )
    for where, operation, kind, of, spec in alike:
        what = "result" if kind == "result" else f"{kind}"
        lines += [
            f"# {where or 'unknown line'}: {what} of {operation}, {of}",
            f"#     x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, {spec}))",
        ]
    return lines
