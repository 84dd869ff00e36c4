"""Text of an automatic layout: the head and sections of its report, and Python code."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from jinja2 import Template

from xlashard.analysis.explain.sections import collectives_section, values_section
from xlashard.analysis.report.cells import Content, Span, Style, TableCell, join_cell
from xlashard.analysis.report.parts import Column, Head, KeyFigure, Section
from xlashard.analysis.report.printable import Part
from xlashard.analysis.report.templating import make_environment
from xlashard.analysis.report.texts import line_text
from xlashard.auto.plan.plan_model import (
    HeldMemory,
    LogicalAxisRule,
    Outcome,
    PlanFields,
    PlannedConstraint,
    PlannedLayout,
    is_parameter_path,
    path_rules,
)
from xlashard.errors import counted
from xlashard.hlo.collectives import CollectiveTotal
from xlashard.predict.preflight.render.report_text import WORDS
from xlashard.support.formatting import (
    elided,
    in_bytes,
    in_percent,
    in_seconds,
    sizes_text,
)

OUTCOME_STYLES: dict[Outcome, Style] = {
    "fits": "good",
    "out of memory": "bad",
    "refused": "bad",
    "not compiled": "quiet",
}
_REASON = 60
_REFUSED = r"^(?:compiling \S+ failed: (?:the worker process ended with )?|XLA can't compile \S+: )"
"""Start of a compiler's error, which follows the outcome without it."""


def plan_parts(plan: PlanFields) -> Iterator[Part]:
    """Yield the head and the sections of a plan."""
    yield from plan_summary(plan)
    yield from plan_details(plan)


def plan_summary(plan: PlanFields) -> Iterator[Part]:
    """Yield the parts that describe the layout, without its single values."""
    yield _head(plan)
    yield _layouts(plan)
    yield _HELD.with_rows(plan.held)
    rules = path_rules({value.path: value.spec for value in plan.inputs})
    yield _RULES.with_rows([*rules, *plan.axis_rules])


def plan_details(plan: PlanFields) -> Iterator[Section]:
    """Yield the sections of single values and collectives."""
    yield values_section("plan-arguments", "Arguments", plan.inputs)
    yield values_section("plan-results", "Results", plan.outputs)
    yield _constraints(plan)
    yield _COLLECTIVES.with_rows(plan.collectives)
    unforeseen = collectives_section(
        plan.unforeseen,
        "of the compiler's own choice",
        "a step",
        WORDS[plan.links].networks,
        plan.excerpts,
    )
    yield replace(
        unforeseen, id="unforeseen", title="Unforeseen collectives", summary="", widths={}
    )


def _head(plan: PlanFields) -> Head:
    time = in_seconds(plan.chosen.best_seconds)
    return Head(
        title=plan.name,
        place=[plan.devices, sizes_text(plan.mesh)],
        headline=f"{time} a step" if plan.fits else "No layout fits",
        notes=[(word, join_cell(note)) for word, note in _notes(plan)],
        figures=list(_key_figures(plan)),
        severity="fits" if plan.fits else "not",
    )


def _key_figures(plan: PlanFields) -> Iterator[KeyFigure]:
    chosen, second = plan.chosen, plan.runner_up
    used, whole = in_bytes(chosen.best_bytes), in_bytes(plan.memory_bytes)
    if plan.fits:
        seconds, note = chosen.best_seconds, f"of the layout {chosen.label}"
        yield KeyFigure("step", in_seconds(seconds), seconds, note)
    yield KeyFigure("memory", used, chosen.best_bytes, f"of {whole} on each device")
    if second is not None:
        seconds, note = second.best_seconds, f"of the layout {second.label}"
        if chosen.best_seconds:
            note += f", {in_percent(seconds / chosen.best_seconds - 1)} slower"
        yield KeyFigure("second", in_seconds(seconds), seconds, note)
    if plan.gap is not None:
        note = "of an axis to its best, given the others, at most"
        yield KeyFigure("gap", in_percent(plan.gap), plan.gap, note)


def _notes(plan: PlanFields) -> Iterator[tuple[str, Content]]:
    if plan.shares and plan.fits:
        whole = sum(seconds for _, seconds in plan.shares) or 1.0
        names = WORDS[plan.links].shares
        parts = (
            f"{names.get(name, name)} {in_percent(seconds / whole)}"
            for name, seconds in plan.shares[:4]
        )
        yield "time", ", ".join(parts)
    if plan.least_seconds is not None and plan.fits:
        least, predicted = map(in_seconds, (plan.least_seconds, plan.chosen.predicted_seconds))
        yield "model", f"predicted {predicted}, by a model in which the work alone takes {least}"
    if plan.untied_seconds is not None and plan.fits:
        text = in_seconds(plan.untied_seconds)
        yield (
            "rules",
            f"one spec for each name and for equal layers; {text} with one for each array",
        )
    elif plan.beyond_rules:
        arrays = counted(plan.beyond_rules, "argument")
        yield "rules", f"names and equal layers don't express {arrays}: tie='names' does"
    if not plan.fits:
        yield "too large", Span("no layout fits", "bad")
    if plan.smallest_slice:
        yield "would do", plan.smallest_slice
    if plan.unknown_primitives:
        yield "whole", Span(f"no sharding rule: {', '.join(plan.unknown_primitives)}", "warn")


def _layouts(plan: PlanFields) -> Section[PlannedLayout]:
    best = plan.chosen

    def name(layout: PlannedLayout) -> TableCell:
        return join_cell(Span(layout.label, "strong" if layout is best else "name"))

    def step(layout: PlannedLayout) -> float | None:
        return layout.best_seconds if layout.outcome == "fits" and layout.seconds else None

    def predict(layout: PlannedLayout) -> float | None:
        # The search counts bytes above the memory as time.
        too_large = layout.predicted_bytes > plan.memory_bytes
        return None if too_large else layout.predicted_seconds

    def factor(layout: PlannedLayout) -> str:
        seconds = step(layout)
        if layout is best or not best.best_seconds or seconds is None:
            return ""
        return f"{seconds / best.best_seconds:.2f} x"

    return Section(
        "layouts",
        "Layouts",
        "time of a step, memory of a device; predicted: by the search",
        columns=(
            Column("layout", name),
            Column(">step", step, "seconds"),
            Column(">", factor, "", "of the best"),
            Column(">memory", "total_bytes", "bytes"),
            Column(">predicted", predict, "seconds"),
            Column("> ", "predicted_bytes", "bytes", "predicted memory"),
            Column("verdict", lambda p: Span(_verdict(p), OUTCOME_STYLES[p.outcome])),
        ),
        rows=plan.layouts,
        most=10**6,
    )


def _verdict(layout: PlannedLayout) -> str:
    if layout.outcome == "out of memory":
        return "does not fit"
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


_HELD = Section[HeldMemory](
    "held",
    "Memory",
    "what holds it on each device",
    columns=(
        Column("value", "name", "path"),
        Column("type", "type", "code"),
        Column(">bytes", "device_bytes", "bytes"),
        Column("line", "source", "line"),
    ),
)


def _rule_cells(rule: tuple[str, str] | LogicalAxisRule) -> tuple[Span, Span]:
    if isinstance(rule, LogicalAxisRule):
        return Span(f"axis {rule.name}", "kind"), Span(", ".join(rule.axes) or "whole", "code")
    pattern, spec = rule
    return Span(pattern, "path") if pattern else Span("all others", "quiet"), Span(spec, "code")


_RULES = Section[tuple[str, str] | LogicalAxisRule](
    "rules",
    "Rules",
    "the first that matches a path",
    columns=(
        Column("path", lambda rule: _rule_cells(rule)[0], tip="Regular expression"),
        Column("spec", lambda rule: _rule_cells(rule)[1]),
    ),
    whole_paths="path",
    most=10**6,
)


def _constraints(plan: PlanFields) -> Section[tuple[tuple[str, ...], int]]:
    return Section(
        "constraints",
        "Constraints inside",
        f"{counted(len(plan.constraints), 'value')}, constrained in the function",
        columns=(
            Column("line", lambda item: item[0][0], "code"),
            Column("operation", lambda item: item[0][1]),
            Column("value", lambda item: item[0][2], ""),
            Column("type", lambda item: item[0][3], "code"),
            Column("spec", lambda item: item[0][4], "code"),
            Column(">times", lambda item: f"{item[1]} x" if item[1] > 1 else "", ""),
        ),
        rows=list(Counter(map(_shown, plan.constraints)).items()),
    )


def _shown(constraint: PlannedConstraint) -> tuple[str, ...]:
    """Return the cells of a constraint, which equal ones share."""
    line = line_text(constraint.source)
    return line, constraint.operation, constraint.kind, constraint.type, constraint.spec


_COLLECTIVES = Section[CollectiveTotal](
    "plan-collectives",
    "Collectives",
    "of the compiled program, per device and step",
    columns=(
        Column("what", "kind", "kind"),
        Column("along", "along"),
        Column(">runs", "times", "{:,}".format),
        Column(">sent", "sent_bytes", "bytes"),
    ),
    row_name=lambda total: f"{total.kind} {total.along}",
)


@lru_cache(maxsize=1)
def _code_template() -> Template:
    environment = make_environment(__package__ or "", autoescape=False, keep_trailing_newline=True)
    environment.filters["repr"] = repr
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
        inside={} if plan.explicit_axes else _constraint_table(plan),
    )


def _constraint_table(plan: PlanFields) -> dict[tuple[str | int, ...], list[str]]:
    """Return the specs inside by place; one value may get several, in their order."""
    table: dict[tuple[str | int, ...], list[str]] = {}
    for c in plan.constraints:
        kind = f"parameter of body {c.body}" if c.kind == "parameter" else c.kind
        if c.operation or not plan.wrapper:
            # Wrappers order the arguments of the function inside in another way.
            table.setdefault((c.line, c.operation, c.number, kind, c.index), []).append(c.spec)
    return table
