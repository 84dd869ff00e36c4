"""JSON schemas of reports, from their dataclasses and docstrings."""

import inspect
import re
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

type Schema = dict[str, Any]

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def report_schema(kind: type, noun: str, version: int) -> Schema:
    """Return the JSON Schema (draft 2020-12) of a kind of report.

    Args:
        kind: The dataclass of the report. Its docstring describes each attribute.
        noun: Name of the kind: `program report`.
        version: Version of its JSON format.
    """
    defined: dict[str, Schema] = {}
    report = _object(kind, defined)
    properties = {
        "format": {"const": version, "description": "Number of the format."},
        **report["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:xlashard:{noun.split()[0]}:{version}",
        "title": noun.capitalize(),
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
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break
        start = re.match(r"    (\w+): (.*)", line)
        if start is not None:
            name = start[1]
            texts[name] = start[2]
        elif line.strip():
            texts[name] += f" {line.strip()}"
    return texts
