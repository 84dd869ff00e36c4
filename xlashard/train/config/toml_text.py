"""Values and settings in TOML notation, and the differences of two TOML documents."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any


def to_toml(settings: Any) -> str:
    """Write settings as a TOML document that `schema.read` reads back."""
    return "\n".join(_table_lines(settings, "")).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """Return a value in TOML notation."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # JSON and TOML escapes differ only for DEL, which TOML requires escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case Mapping():
            return (
                "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
            )
    return json.dumps(str(value))


def toml_key(name: str) -> str:
    """Return a key, bare if TOML allows it."""
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isalnum() and bare.isascii() else toml_value(name)


def _table_lines(table: Any, path: str) -> Iterator[str]:
    """Yield the lines of a settings class or a mapping."""
    items = dict(table) if isinstance(table, Mapping) else vars(table)
    tables = {k: v for k, v in items.items() if is_dataclass(v) or isinstance(v, Mapping)}
    if path and (len(items) > len(tables) or isinstance(table, Mapping)):
        yield f"\n[{path}]"
    for key, value in items.items():
        if key not in tables:
            yield f"{toml_key(key)} = {toml_value(value)}"
    for key, value in tables.items():
        yield from _table_lines(value, f"{path}.{key}" if path else key)


def setting_changes(was: str, now: str) -> dict[str, str]:
    r"""Return the settings that differ between two TOML documents.

    Args:
        was: Old document.
        now: New document.

    Returns:
        Text by key, with old and new value: `model.width = 64 is 128`.

    Example:
        >>> setting_changes("[model]\nwidth = 64", "[model]\nwidth = 128")
        {'model.width': 'model.width = 64 is 128'}
    """
    before, after = ({key: toml_value(x) for key, x in _flat(text)} for text in (was, now))
    return {
        key: f"{key} = {old or '(not set)'} is {new or 'not set'}"
        for key, old, new in differences(before, after)
    }


def setting_in(text: str, key: str) -> str | None:
    """Return a setting of a TOML document in TOML notation."""
    return {k: toml_value(x) for k, x in _flat(text)}.get(key)


def _flat(text: str) -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [("", tomllib.loads(text))]
    while waiting:
        path, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}" if path else key, x) for key, x in value.items()]
        else:
            yield path, value


def differences(
    was: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield the keys whose values differ, each with its old and its new value."""
    for key in dict.fromkeys([*was, *now]):
        if was.get(key) != now.get(key):
            yield key, was.get(key), now.get(key)
