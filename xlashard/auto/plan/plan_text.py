"""Text of an automatic layout: sections of the terminal report, and Python code."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Template
from rich.console import RenderableType
from rich.text import Text

from xlashard.analysis.explain.model import CollectiveReport, ValueReport
from xlashard.analysis.explain.tables import WIDE, Page, head, line_text, listing, section, table
from xlashard.analysis.pictures.svg_html import make_environment
from xlashard.auto.plan.plan_model import (
    HeldMemory,
    Outcome,
    PlanFields,
    PlannedConstraint,
    PlannedLayout,
    is_parameter_path,
    path_rules,
)
from xlashard.predict.preflight.render.report_text import WORDS
from xlashard.support.formatting import (
    elided,
    in_bytes,
    in_percent,
    in_seconds,
    printable,
    sizes_text,
)

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
    yield _unforeseen(plan, page)


def plan_summary(plan: PlanFields, page: Page) -> Iterator[RenderableType | None]:
    """Yield the sections that describe the layout, without its single values.

    Args:
        plan: The plan.
        page: The page.
    """
    yield _head(plan)
    yield section("Layouts", "time of a step, memory of a device", _layouts(plan))
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
        facts.append(
            ("model", f"predicted {predicted}, by a model in which the work alone takes {least}")
        )
    if plan.unknown_primitives:
        facts.append(("whole", f"no sharding rule: {', '.join(plan.unknown_primitives)}"))
    return head(plan.name, [plan.devices, sizes_text(plan.mesh)], facts)


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
    return outcome_text(layout.outcome, re.sub(_REFUSED, "", " ".join(layout.reason.split())))


def outcome_text(outcome: Outcome, reason: str) -> str:
    """Return an outcome with the beginning of its reason.

    Args:
        outcome: The outcome.
        reason: The reason, or empty.
    """
    short = elided(" ".join(reason.split()), _REASON)
    return f"{outcome}: {short}" if short else outcome


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
    page: Page, title: str, values: Sequence[ValueReport], second: PlannedLayout | None
) -> RenderableType | None:
    def row(value: ValueReport) -> Sequence[RenderableType]:
        spec = Text(f"{value.spec} fixed" if value.decided_by == "caller" else value.spec)
        cells = (page.path(value.path), value.type, spec, in_bytes(value.device_bytes))
        return (*cells, Text(value.runner_up, "dim"))[: len(columns)]

    largest = sorted(values, key=lambda value: -value.device_bytes)
    columns = ["path", "type", "spec", ">of a device"]
    if second is not None and page.width >= WIDE:
        columns.append(second.name)
    return listing(page, (title, ""), columns, largest, row, lambda value: value.device_bytes)


def _constraints(plan: PlanFields, page: Page) -> RenderableType | None:
    note = f"{len(plan.constraints)} values, constrained in the function"
    return listing(
        page,
        ("Constraints inside", note),
        ("line", "operation", "", "type", "spec", ">"),
        list(Counter(map(_shown, plan.constraints)).items()),
        lambda item: (*item[0], f"{item[1]} x" if item[1] > 1 else ""),
    )


def _shown(constraint: PlannedConstraint) -> tuple[str, ...]:
    """Return the cells of a constraint, which equal ones share."""
    where, kind = _where(constraint), constraint.kind
    return where, constraint.operation, kind, constraint.type, constraint.spec


def _where(value: PlannedConstraint | CollectiveReport) -> str:
    return "" if value.source is None else line_text(value.source)


def _collectives(plan: PlanFields, page: Page) -> RenderableType | None:
    def row(total: Any) -> Sequence[RenderableType]:
        return total.kind, total.along, f"{total.times:,}", in_bytes(total.sent_bytes)

    columns = ["what", "along", ">runs", ">sent"]
    heading = "Collectives", "of the compiled program, per device and step"
    return listing(page, heading, columns, plan.collectives, row, lambda t: t.sent_bytes)


def _unforeseen(plan: PlanFields, page: Page) -> RenderableType | None:
    return listing(
        page,
        ("Unforeseen collectives", "of the compiler's own choice"),
        ("what", "along", "type", ">runs", ">on links", "line"),
        plan.unforeseen,
        lambda c: (
            c.kind,
            c.along,
            ", ".join(c.operands),
            f"{c.times:,}",
            in_seconds(c.seconds),
            _where(c),
        ),
    )


@lru_cache(maxsize=1)
def _code_template() -> Template:
    environment = make_environment(__package__ or "", autoescape=False, keep_trailing_newline=True)
    environment.filters["repr"] = repr
    # A line's file may have any name.
    environment.filters["comment"] = lambda text: printable(" ".join(text.split()))
    return environment.get_template("plan_code.jinja")


def plan_code(plan: PlanFields) -> str:
    """Return the layout as Python code.

    Args:
        plan: The plan.
    """
    names, sizes = zip(*plan.mesh, strict=True)
    sides = {"ARGUMENTS": plan.inputs, "RESULTS": plan.outputs}
    positional = [argument.path for argument in plan.arguments if not argument.keyword]
    named = [argument.path for argument in plan.arguments if argument.keyword]
    fun = plan.name if is_parameter_path(plan.name) and plan.name.isidentifier() else "fun"
    return _code_template().render(
        plan=plan,
        names=names,
        sizes=sizes,
        rules={
            table: path_rules({value.path: value.spec for value in values})
            for table, values in sides.items()
        },
        fun=fun,
        positional=positional,
        named=named,
        call=", ".join([fun, *positional, *(f"{path}={path}" for path in named)]),
        donated=tuple(n for n, argument in enumerate(plan.arguments) if argument.donated),
        constraints=dict.fromkeys(map(_shown, plan.constraints)),
    )
