"""The preflight report and its JSON schema."""

import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from rich.console import RenderableType

from xlashard.pjit.report.serde import SerializableReport
from xlashard.pjit.report.tables import Page
from xlashard.tpu.preflight.render.html import fragment, page
from xlashard.tpu.preflight.render.report_text import topology_text
from xlashard.tpu.preflight.render.terminal_report import preflight_sections
from xlashard.tpu.preflight.report.preflight_model import FORMAT, REPORT_FORMAT, PreflightFields
from xlashard.wording import in_bytes, in_seconds


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
        inputs: Shardings of the arguments.
        outputs: Shardings of the results.
        donations: Donated arguments, and arguments that could be donated.
        replications: Values with more copies than specified.
        replicated: Fully replicated arguments and results that mesh axes could shard, largest
            first.
        replicated_above: Minimum bytes of the listed values.
        throughput: Throughput of a training step.
        price: Cost at the caller's price.
        compile_seconds: Compile time on this machine.
        versions: Versions and flags that the report depends on.

    Example:
        >>> import jax
        >>> from xlashard import pjit, preflight
        >>> x = jax.ShapeDtypeStruct((1024,), "float32")
        >>> double, chip = pjit(lambda x: x * 2), {"data": 1}
        >>> report = preflight(double, x, topology="v5e-1", mesh=chip)  # doctest: +SKIP
        >>> report.outcome, report.memory.argument_bytes  # doctest: +SKIP
        ('fits', 4096)
    """

    _format = REPORT_FORMAT

    @property
    def fits(self) -> bool:
        """True if the compiler accepted the program."""
        return self.outcome == "fits"

    def _sections(self, page: Page) -> Iterator[RenderableType | None]:
        return preflight_sections(self, page)

    def __repr__(self) -> str:
        used = f"{in_bytes(self.memory.total_bytes)} of {in_bytes(self.memory.available_bytes)}"
        found = f"{self.outcome}, {used}, {in_seconds(self.time.seconds)}"
        chips = topology_text(self.topology)
        return f"<PreflightReport of {self.name} on {chips}: {found}; print it>"

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page, to be written in UTF-8.

        The page draws the mesh on the torus, the memory of a device, the times and the roofline,
        with tables that sort and filter.
        """
        return page(self)

    def _repr_html_(self) -> str:
        return fragment(self)


type Schema = dict[str, Any]

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def make_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of `PreflightReport.to_json`.

    Readers must ignore unknown fields: a new field doesn't change the format.

    Example:
        >>> schema = make_schema()
        >>> schema["properties"]["compile_seconds"]
        {'type': 'number', 'description': 'Compile time on this machine.'}
    """
    defined: dict[str, Schema] = {}
    report = _object(PreflightReport, defined)
    properties = {
        "format": {"const": FORMAT, "description": "Number of the format."},
        **report["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:xlashard:preflight:{FORMAT}",
        "title": "Preflight report",
        "description": report["description"],
        "type": "object",
        "properties": properties,
        "required": ["format", *report["required"]],
        "$defs": dict(sorted(defined.items())),
    }


def _object(kind: Any, defined: dict[str, Schema]) -> Schema:
    """Return the schema of a dataclass."""
    hints = typing.get_type_hints(kind)
    descriptions = attribute_texts(kind)
    properties = {
        f.name: {**_of(hints[f.name], defined), "description": descriptions[f.name]}
        for f in fields(kind)
    }
    required = [f.name for f in fields(kind) if f.default is MISSING]
    first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    return {
        "type": "object",
        "description": " ".join(first.split()),
        "properties": properties,
        "required": required,
    }


def _of(kind: Any, defined: dict[str, Schema]) -> Schema:
    """Return the schema of an annotation."""
    if isinstance(kind, typing.TypeAliasType):
        return _of(kind.__value__, defined)
    if is_dataclass(kind):
        name = typing.cast("type", kind).__name__
        if name not in defined:
            defined[name] = _object(kind, defined)
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return {
            "anyOf": [
                {"type": "null"} if a is types.NoneType else _of(a, defined) for a in arguments
            ]
        }
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is not tuple:
        return {"type": _NAMES[kind]}
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], defined)}
    return {
        "type": "array",
        "prefixItems": [_of(a, defined) for a in arguments],
        "items": False,
        "minItems": len(arguments),
    }


def attribute_texts(kind: type) -> dict[str, str]:
    """Return the documentation of each attribute in a class docstring."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break
        start = re.match(r"    (\w+): (.*)", line)
        if start is not None:
            name = start[1]
            found[name] = start[2]
        elif line.strip():
            found[name] += f" {line.strip()}"
    return found
