"""JSON and TOML that another program, a user or a stranger wrote: bounded in size and in depth.

Every reader of such a document goes through this module, so that any content ends in a ValueError
and never in a RecursionError, nor in the memory of the whole machine.

The JSON of dataclasses, and its schema, follow from their annotations and docstrings. A file that
others may read meanwhile is written whole.
"""

import errno
import inspect
import json
import os
import re
import stat
import threading
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

from xlashard.errors import ArgumentError
from xlashard.support.formatting import in_bytes
from xlashard.support.lazily import dataclass

type Schema = dict[str, Any]
"""A JSON Schema, as parsed JSON."""

LARGEST = 64 << 20
"""Bytes of a document at most, unless its reader allows fewer."""

LARGEST_SETTINGS = 1 << 20
"""Bytes of a settings file at most; one with every setting has 4 KiB."""

# Brackets or tables inside each other. No document of this package has more than a dozen, and
# Python's own functions on nested values hold for several hundred.
_DEEPEST = 100

# A dotted key of as many parts, for which `tomllib` takes the square of their number.
_LONG_KEY = rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_DEEPEST}}}"""

# Without the sign.
_TOML_BITS, _JSON_BITS = 63, 1000


def read_text(path: str | os.PathLike[str], largest: int = LARGEST) -> str:
    """Return the text of a file in UTF-8.

    Args:
        path: The file; a device or a pipe is read as far as `largest` reaches.
        largest: Bytes at most.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is longer, no UTF-8, or its path holds a NUL.
    """
    # Paths of object stores, which are pure ones, open their objects by themselves.
    file = typing.cast(Path, path) if isinstance(path, PurePath) else Path(path)
    with file.open("rb") as stream:
        data = stream.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"it is longer than {in_bytes(largest)}")
    return data.decode("utf-8")


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file, whole or not at all: another process reads the old file or the new one.

    It is on the disk when this returns. A link keeps its target, and an existing file its mode and
    owner. What can't be replaced is written in place: a device, a pipe, a file that is mounted, or
    one whose folder takes no other.

    Args:
        path: The file, in an existing folder.
        data: Its content; text is written in UTF-8.

    Raises:
        OSError: The file can't be written; the old one stays.
    """
    content = data.encode() if isinstance(data, str) else data
    file = Path(os.path.realpath(path))
    if file.exists() and not file.is_file():
        file.write_bytes(content)
        return
    try:
        _replace(file, content)
    except OSError as error:
        if error.errno not in _NOT_REPLACEABLE or not file.is_file():
            raise
        _write_synced(file, content)


# Of a folder that takes no file, and of a file that is mounted.
_NOT_REPLACEABLE = errno.EACCES, errno.EPERM, errno.EBUSY


def _replace(file: Path, content: bytes) -> None:
    unfinished = file.with_name(f".{os.getpid()}.{threading.get_ident()}")
    try:
        _write_synced(unfinished, content)
        if file.exists():
            old = file.stat()
            with suppress(OSError):
                os.chown(unfinished, old.st_uid, old.st_gid)
            unfinished.chmod(stat.S_IMODE(old.st_mode))
        unfinished.replace(file)
        with suppress(OSError):
            sync_path(file.parent)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _write_synced(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_path(path: Path) -> None:
    """Write a file, or the names of a folder's files, to the disk, where the file system can.

    Args:
        path: The file or folder.

    Raises:
        OSError: The disk fails.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some network file systems have no such operation.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document.

    Raises:
        ValueError: The text is not JSON, nested too deep, or has an integer that no float reaches.
    """
    try:
        return _checked(json.loads(text), _JSON_BITS)
    except RecursionError:
        raise _too_deep() from None


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tables of a settings file.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is no TOML of a settings file's size.
    """
    return parse_toml(read_text(path, LARGEST_SETTINGS))


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Raises:
        ValueError: The text is not TOML, nested too deep, or has an integer of more than 64 bits,
            which TOML forbids.
    """
    if re.search(_LONG_KEY, text):
        raise _too_deep()
    import tomllib  # which few need, and `import xlashard` does without

    try:
        return _checked(tomllib.loads(text), _TOML_BITS)
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {_DEEPEST} levels deep")


def _checked[T](document: T, bits: int) -> T:
    """Return a parsed document after a check of its depth and its integers.

    Recursion is as deep as the document, so the check goes level by level.
    """
    level: list[Any] = [document]
    for _ in range(_DEEPEST + 1):
        large = next((x for x in level if isinstance(x, int) and x.bit_length() > bits), None)
        if large is not None:
            raise ValueError(f"it has an integer of {large.bit_length()} bits")
        inside = [
            x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)
        ]
        level = [x for each in inside for x in each]
        if not level:
            return document
    raise _too_deep()


class JsonRecord:
    """Base class of dataclasses that processes send each other as JSON."""

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(typing.cast(Any, self)))

    @classmethod
    def from_json(cls, text: str | bytes) -> typing.Self:
        """Parse the JSON of `to_json`."""
        return decode(cls, json.loads(text))


def decode(kind: Any, value: Any, path: str = "") -> Any:
    """Return a JSON value as an instance of a type; `asdict` of a dataclass is read back.

    Unknown fields are ignored, and missing fields with a default get it.

    Args:
        kind: A dataclass, or the annotation of a field of one.
        value: The JSON value.
        path: Path of the value in messages.

    Raises:
        ValueError: The value is of another shape.
    """
    if isinstance(kind, typing.TypeAliasType):
        return decode(kind.__value__, value, path)
    if is_dataclass(kind):
        return _dataclass(kind, value, path)
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        (other,) = (a for a in arguments if a is not types.NoneType)
        return None if value is None else decode(other, value, path)
    if origin is tuple:
        return _tuple(arguments, value, path)
    if origin in (dict, Mapping):
        _expected(value, isinstance(value, dict), "an object", path)
        return {name: decode(arguments[1], item, f"{path}.{name}") for name, item in value.items()}
    if origin is typing.Literal:
        return _expected(value, value in arguments, "one of " + ", ".join(arguments), path)
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return _expected(value, is_number, "a number", path)
    return _expected(value, type(value) is kind, _NOUNS[kind], path)


_NOUNS: Mapping[type, str] = {str: "a string", int: "an integer", bool: "true or false"}


def _expected(value: Any, fits: bool, expected: str, path: str) -> Any:
    if not fits:
        raise ValueError(f"{path} is {json.dumps(value)[:60]}, not {expected}")
    return value


def _dataclass(kind: Any, value: Any, path: str) -> Any:
    _expected(value, isinstance(value, dict), "an object", path)
    hints, prefix = typing.get_type_hints(kind), f"{path}." if path else ""
    names = [field.name for field in fields(kind) if field.name in value]
    for field in fields(kind):
        if field.name not in names and field.default is field.default_factory is MISSING:
            raise ValueError(f"{prefix}{field.name} is missing")
    return kind(**{name: decode(hints[name], value[name], f"{prefix}{name}") for name in names})


def _tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    _expected(value, isinstance(value, list), "a list", path)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    _expected(value, len(value) == len(kinds), f"a list of {len(kinds)}", path)
    return tuple(
        decode(kind, item, f"{path}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


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

    def read[T](
        self, kind: type[T], text: str, check: Callable[[T], None] = lambda report: None
    ) -> T:
        """Read a report from its JSON.

        Unknown fields are ignored, and missing fields with a default get it: both come from
        versions of xlashard that write the same format.

        Args:
            kind: Class of the report.
            text: The JSON.
            check: Raises a ValueError for a report with invalid values.

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
            report = decode(kind, content)
            check(report)
            return report
        except ValueError as error:
            raise ArgumentError(
                f"the text is not a {self.noun}: {error}. Write it again with {self.producer}"
            ) from None


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def report_schema(kind: type, noun: str, version: int) -> Schema:
    """Return the JSON Schema (draft 2020-12) of a kind of report.

    Args:
        kind: The dataclass of the report. Its docstring describes each attribute.
        noun: Name of the kind: `program report`.
        version: Version of its JSON format.
    """
    defined: dict[str, Schema] = {}
    report = _object_schema(kind, defined)
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


def _object_schema(kind: Any, defined: dict[str, Schema]) -> Schema:
    """Return the schema of a dataclass."""
    hints = typing.get_type_hints(kind)
    descriptions = attribute_texts(kind)
    properties = {
        f.name: {**_schema_of(hints[f.name], defined), "description": descriptions[f.name]}
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


def _schema_of(kind: Any, defined: dict[str, Schema]) -> Schema:
    """Return the schema of an annotation."""
    if isinstance(kind, typing.TypeAliasType):
        return _schema_of(kind.__value__, defined)
    if is_dataclass(kind):
        name = typing.cast("type", kind).__name__
        if name not in defined:
            defined[name] = _object_schema(kind, defined)
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return {
            "anyOf": [
                {"type": "null"} if a is types.NoneType else _schema_of(a, defined)
                for a in arguments
            ]
        }
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is not tuple:
        return {"type": _JSON_TYPES[kind]}
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": _schema_of(arguments[0], defined)}
    return {
        "type": "array",
        "prefixItems": [_schema_of(a, defined) for a in arguments],
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
