"""The preflight report and its JSON schema."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.predict.preflight.render.preflight_sections import FOOTER, list_parts
from xlashard.predict.preflight.render.report_text import (
    step_time_text,
    topology_name,
    topology_text,
)
from xlashard.predict.preflight.render.step_timeline import trace_of
from xlashard.predict.preflight.report.preflight_model import REPORT_FORMAT, PreflightFields
from xlashard.support.documents import Schema
from xlashard.support.formatting import in_bytes
from xlashard.support.tracebacks import short_tracebacks


@dataclass(frozen=True, repr=False)
class PreflightReport(SerializableReport, PreflightFields):
    """Report of a program on a TPU topology. Made by `xlashard.preflight`.

    `print(report)`, rich's `print` and `report.print()` display it; `to_json` serializes it as
    specified by the schema of `make_schema`.

    Attributes:
        name: Name of the function.
        title: Source of the program: settings file, or `module:function`.
        outcome: `fits`, or `out of memory` if the compiler rejects the program for its memory;
            `memory`, `time` and `traffic` describe the rejected program.
        topology: The devices.
        mesh: Mesh axes and their position on the torus.
        partitioner: `shardy` or `gspmd`.
        memory: Memory of one device.
        time: Time of one execution.
        traffic: Collectives, longest time first.
        inputs: Arguments, then closed-over arrays, with their buffers in HBM.
        outputs: Results with their buffers in HBM.
        donations: Donated arguments, and arguments that could be donated.
        unmet: Requests that the program does not follow, and values that each device holds whole
            without a request, most bytes first.
        replicated: Fully replicated arguments and results that mesh axes could shard, largest
            first.
        replicated_above: Minimum bytes of the listed values.
        throughput: Throughput of a training step.
        price: Cost at the caller's price.
        compile_seconds: Compile time on this machine.
        versions: Versions and flags that the report depends on.
        repeated: Work that every device repeats, the largest share first.
        constants: Closed-over arrays that are constants of each device's program, largest first.
        is_estimate: Whether the compiler was stopped before code generation. Memory then lacks the
            code; all else is that of a whole compilation.
        spills: Attention scores that are too large for VMEM, with the block that avoids it.
        forgotten: The facts that a stage does not keep, and that the report therefore lacks, as one
            clause; empty for a function.
        is_laid_out: Whether xlashard laid out the mesh, from its axis sizes; else the devices have
            the order of the mesh that was given.
        degraded: Reason why figures are missing or rough, such as a full disk that cut the
            compiler's dump off; empty for a whole report. No budget is met by a degraded one.
        warnings: Warnings of the compiler that name no operation; `unmet` has the others.
        advice: Suggestions for the collectives that are not required, and those that help
            together, the best first.
        values: Values inside that match the pattern of `preflight(..., values=...)`, most bytes
            first.
        excerpts: Lines around the source lines of collectives and of their callers.

    Example:
        >>> import jax
        >>> from xlashard import pjit, preflight
        >>> x = jax.ShapeDtypeStruct((1024,), "float32")
        >>> double, chip = pjit(lambda x: x * 2), {"data": 1}
        >>> report = preflight(double, x, topology="v5e-1", mesh=chip)  # doctest: +SKIP
        >>> report.outcome, report.memory.argument_bytes  # doctest: +SKIP
        ('fits', 4096)
    """

    _kind = "preflight"
    _footer = FOOTER
    _format = REPORT_FORMAT

    @property
    def fits(self) -> bool:
        """True if the compiler accepted the program."""
        return self.outcome == "fits"

    def parts(self) -> Iterator[Part]:
        """Yield the head and the sections."""
        return list_parts(self)

    def page_name(self) -> str:
        """Return the name of the program on a page."""
        return self.heading

    def page_title(self) -> str:
        """Return the title of its page."""
        return f"{self.heading} on {topology_name(self.topology)}: {self.outcome}"

    def __repr__(self) -> str:
        used = f"{in_bytes(self.memory.total_bytes)} of {in_bytes(self.memory.available_bytes)}"
        kind = "estimate, " if self.is_estimate else ""
        facts = f"{kind}{self.outcome}, {used}, {step_time_text(self.time)}"
        chips = topology_text(self.topology)
        return f"<PreflightReport of {self.name} on {chips}: {facts}; print it>"

    def to_trace(self) -> str:
        """Return the schedule of a step as a trace that ui.perfetto.dev opens.

        The JSON has a track for the cores, the links along each mesh axis, copies, and the host,
        and for each operation its unit, kind and source line. Every iteration of a loop is there,
        unless they have more than 300,000 operations.

        Raises:
            ArgumentError: If an older version made the report, without a schedule.
        """
        with short_tracebacks:
            return json.dumps(trace_of(self))


def make_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of `PreflightReport.to_json`.

    Readers must ignore unknown fields: a new field doesn't change the format.

    Example:
        >>> schema = make_schema()
        >>> schema["properties"]["compile_seconds"]
        {'type': 'number', 'description': 'Compile time on this machine.'}
    """
    return PreflightReport.json_schema()
