"""JSON and TOML that another program, a user or a stranger wrote: bounded in size and in depth.

Every reader of such a document goes through this module, so that any content ends in a ValueError
and never in a RecursionError, nor in the memory of the whole machine.
"""

import json
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from xlashard.wording import in_bytes

LARGEST = 64 << 20
"""Bytes of a document at most, unless its reader allows fewer."""

# A file of every setting has 4 KiB.
_LARGEST_SETTINGS = 1 << 20

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
    with Path(path).open("rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"it is longer than {in_bytes(largest)}")
    return data.decode("utf-8")


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
    return parse_toml(read_text(path, _LARGEST_SETTINGS))


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
