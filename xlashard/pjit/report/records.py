"""Frozen reports as JSON and back: what their fields' annotations say is all that is needed."""

import json
import types
import typing
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from typing import Any

from xlashard.documents import parse_json
from xlashard.errors import ArgumentError


@dataclass(frozen=True)
class Record:
    """A kind of report that travels as JSON.

    Attributes:
        noun: What a message calls one: `program report`.
        format: Number of its format. It grows when a field changes its meaning or goes away.
        again: How a person writes one anew.
    """

    noun: str
    format: int
    again: str

    def to_dict(self, report: Any) -> dict[str, Any]:
        """A report as dicts, lists, strings and numbers, with the number of the format."""
        return {"format": self.format, **json.loads(json.dumps(asdict(report)))}

    def read[T](self, kind: type[T], text: str) -> T:
        """A report from its JSON.

        Fields that this version does not know are passed over, and those that are missing and have
        a default get it: both come from versions that write the same format.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape.
        """
        try:
            found = parse_json(text)
        except ValueError as error:
            raise ArgumentError(
                f"the text is no {self.noun}, for it is not JSON: {error}. Write it with "
                f"{self.again}"
            ) from None
        format_ = found.get("format") if isinstance(found, dict) else None
        if format_ is None:
            raise ArgumentError(
                f"the text is JSON, but no {self.noun}: it has no format. Write it with "
                f"{self.again}"
            )
        if format_ != self.format:
            raise ArgumentError(
                f"the text is a {self.noun} of format {format_}, this version of xlashard reads "
                f"format {self.format}: write it again with {self.again}"
            )
        try:
            return _decoded(kind, found, "")
        except _OddValueError as odd:
            raise ArgumentError(
                f"the text is no {self.noun}: {odd}. Write it again with {self.again}"
            ) from None


class _OddValueError(Exception):
    """A value that is not what its field's annotation says."""


def _decoded(kind: Any, value: Any, path: str) -> Any:
    """A JSON value as what a field's annotation says."""
    if isinstance(kind, typing.TypeAliasType):
        return _decoded(kind.__value__, value, path)
    if is_dataclass(kind):
        return _dataclass(kind, value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        (wanted,) = (a for a in arguments if a is not types.NoneType)
        return None if value is None else _decoded(wanted, value, path)
    if origin is tuple:
        return _tuple(arguments, value, path)
    if origin is typing.Literal:
        return _checked(value, value in arguments, "one of " + ", ".join(arguments), path)
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return _checked(value, is_number, "a number", path)
    return _checked(value, type(value) is kind, _WORDS[kind], path)


_WORDS: typing.Mapping[type, str] = {str: "a text", int: "a whole number", bool: "true or false"}


def _checked(value: Any, fits: bool, wanted: str, path: str) -> Any:
    if not fits:
        raise _OddValueError(f"{path} is {json.dumps(value)[:60]}, not {wanted}")
    return value


def _dataclass(kind: Any, value: Any, path: str) -> Any:
    _checked(value, isinstance(value, dict), "an object", path)
    hints = typing.get_type_hints(kind)
    given = {f.name: f for f in fields(kind) if f.name in value}
    missing = [f.name for f in fields(kind) if f.name not in value and not _has_default(f)]
    if missing:
        raise _OddValueError(f"{path}{'.' if path else ''}{missing[0]} is missing")
    return kind(
        **{
            name: _decoded(hints[name], value[name], f"{path}{'.' if path else ''}{name}")
            for name in given
        }
    )


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    _checked(value, isinstance(value, list), "a list", path)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    _checked(value, len(value) == len(kinds), f"a list of {len(kinds)}", path)
    return tuple(
        _decoded(kind, item, f"{path}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )
