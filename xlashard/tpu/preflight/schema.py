"""The JSON Schema of a preflight report, made from the dataclasses and their docstrings."""

import inspect
import re
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from xlashard.tpu.preflight.fields import FORMAT
from xlashard.tpu.preflight.report import PreflightReport

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
