"""The report of a preflight: a frozen value that prints itself and travels as JSON.

The JSON Schema of a preflight report, made from the dataclasses and their docstrings.
"""

import inspect
import re
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from xlashard.pjit.report.kept import KeptReport
from xlashard.tpu.preflight.render.formatting import topology_text
from xlashard.tpu.preflight.render.html import fragment, page
from xlashard.tpu.preflight.render.terminal_report import PreflightText
from xlashard.tpu.preflight.report.preflight_model import FORMAT, RECORD, PreflightFields
from xlashard.wording import in_bytes, in_seconds


@dataclass(frozen=True, repr=False)
class PreflightReport(KeptReport, PreflightFields):
    """What a program would take, do and cost on a TPU topology. Made by `xlashard.preflight`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` keeps it, in the form
    that `docs/preflight.schema.json` describes.

    Attributes:
        name: The function's name.
        title: What was asked: the settings file, or `module:function`.
        outcome: `fits`, or `out of memory` where the compiler refuses the program for its memory:
            `memory` says what it would take, and `time` and `traffic` are those of that program.
        topology: The devices.
        mesh: The mesh axes and where they lie on the torus.
        partitioner: `shardy` or `gspmd`.
        memory: Bytes of one device.
        time: How long one execution takes.
        traffic: The collectives, those that take longest first.
        inputs: Shardings of the arguments.
        outputs: Shardings of the results.
        donations: Arguments that were donated, and those that could be.
        replications: Values that are held more often than anyone said.
        replicated: Arguments and results that every device holds whole though mesh axes could cut
            them, the largest first.
        replicated_above: From how many bytes on they are named.
        throughput: For a step of training.
        price: By a price that the caller gave.
        compile_seconds: How long the compiler took here.
        versions: What the report depends on besides the program.
    """

    _record = RECORD

    @property
    def fits(self) -> bool:
        """Whether the compiler took the program."""
        return self.outcome == "fits"

    def _shown(self, *, full: bool) -> PreflightText:
        return PreflightText(self, full=full)

    def __repr__(self) -> str:
        used = f"{in_bytes(self.memory.total_bytes)} of {in_bytes(self.memory.available_bytes)}"
        found = f"{self.outcome}, {used}, {in_seconds(self.time.seconds)}"
        chips = topology_text(self.topology)
        return f"<PreflightReport of {self.name} on {chips}: {found}; print it>"

    def to_html(self) -> str:
        """The report as one HTML page, which needs nothing from elsewhere.

        It draws the mesh on the torus, the memory of a device, the times and the roofline, and its
        tables sort and filter. Write it in UTF-8.
        """
        return page(self)

    def _repr_html_(self) -> str:
        return fragment(self)


type Schema = dict[str, Any]

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def make_schema() -> Schema:
    """What `PreflightReport.to_json` writes, as JSON Schema of draft 2020-12.

    Readers must pass over fields that they don't know: a new one doesn't change the format.

    Example:
        >>> schema = make_schema()
        >>> schema["properties"]["compile_seconds"]
        {'type': 'number', 'description': 'How long the compiler took here.'}
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
    """The schema of a dataclass."""
    hints = typing.get_type_hints(kind)
    said = attribute_texts(kind)
    properties = {
        f.name: {**_of(hints[f.name], defined), "description": said[f.name]} for f in fields(kind)
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
    """The schema of an annotation."""
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
    """What the docstring of a class says of each attribute."""
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
