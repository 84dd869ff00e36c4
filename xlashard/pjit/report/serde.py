"""Reports as printable values that can be written as JSON and read back.

The JSON format and its schema follow from the annotations and docstrings of the dataclasses.
"""

import inspect
import json
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.documents import decode, parse_json
from xlashard.errors import ArgumentError
from xlashard.pjit.report.tables import Page
from xlashard.wording import Escaped, plain_text

type Schema = dict[str, Any]
"""A JSON Schema, as parsed JSON."""


class PrintableReport(ABC):
    """Report that `print`, rich's `print` and its own `print` show."""

    _print_all: ClassVar[str] = "report.print(all=True)"

    @abstractmethod
    def _sections(self, page: Page) -> Iterable[RenderableType | None]:
        """Yield the sections of the printed report, fitted to a page; None is skipped."""

    def renderable(self, *, all: bool = False, print_all: str = "") -> RenderableType:
        """Return the report as a value that rich prints.

        Args:
            all: Show every row, instead of the first few and a sum of the rest.
            print_all: Code or flag that shows every row; `report.print(all=True)` if empty.
        """
        return Escaped(_Sections(self, all, print_all or self._print_all))

    def print(self, *, all: bool = False, console: Console | None = None) -> None:
        """Print the report.

        Args:
            all: Show every row, instead of the first few and a sum of the rest.
            console: The console; standard output if None.
        """
        (console or Console()).print(self.renderable(all=all))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.renderable()

    def __str__(self) -> str:
        return plain_text(self.renderable())


@dataclass(frozen=True, eq=False)
class _Sections:
    """Rich renderable of a report's sections."""

    report: PrintableReport
    is_full: bool
    print_all: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = Page(options.max_width, self.is_full, self.print_all)
        return (part for part in self.report._sections(page) if part is not None)


@dataclass(frozen=True)
class ReportFormat:
    """JSON format of one kind of report.

    Attributes:
        noun: Name of the kind in messages: `program report`.
        version: Version of the format. It grows when a field changes its meaning or is removed.
        producer: Code that writes such a report.
    """

    noun: str
    version: int
    producer: str

    def to_dict(self, report: Any) -> dict[str, Any]:
        """Convert a report to dicts, lists, strings and numbers, with the version as `format`."""
        return {"format": self.version, **json.loads(json.dumps(asdict(report)))}

    def read[T](self, kind: type[T], text: str) -> T:
        """Read a report from its JSON.

        Unknown fields are ignored, and missing fields with a default get it: both come from
        versions of xlashard that write the same format.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape.
        """
        try:
            content = parse_json(text)
        except ValueError as error:
            raise ArgumentError(
                f"the text is not a {self.noun}: invalid JSON: {error}. Write it with "
                f"{self.producer}"
            ) from None
        version = content.get("format") if isinstance(content, dict) else None
        if version is None:
            raise ArgumentError(
                f"the JSON is not a {self.noun}: it has no format. Write it with {self.producer}"
            )
        if version != self.version:
            raise ArgumentError(
                f"the text is a {self.noun} of format {version}, but this version of xlashard "
                f"reads format {self.version}: write it again with {self.producer}"
            )
        try:
            return decode(kind, content)
        except ValueError as error:
            raise ArgumentError(
                f"the text is not a {self.noun}: {error}. Write it again with {self.producer}"
            ) from None


class SerializableReport(PrintableReport):
    """Report that is a frozen dataclass with a JSON format."""

    _format: ClassVar[ReportFormat]

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to dicts, lists, strings and numbers, with its format's version."""
        return self._format.to_dict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Write the report as JSON, with its format's version.

        Args:
            indent: Spaces per level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def json_schema(cls) -> Schema:
        """Return the JSON Schema (draft 2020-12) of what `to_json` writes."""
        return report_schema(cls, cls._format.noun, cls._format.version)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a report that `to_json` wrote.

        Args:
            text: The JSON.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape.
        """
        with short_tracebacks:
            return cls._format.read(cls, text)


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
