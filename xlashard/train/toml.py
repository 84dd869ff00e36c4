"""Settings and single values in TOML's notation."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def to_toml(settings: Any) -> str:
    """Writes settings as a TOML document that `schema.read` turns into equal settings."""
    lines: list[str] = []
    _write_table(settings, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """One value in TOML's notation."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case Mapping():
            return (
                "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
            )
    return json.dumps(str(value))


def toml_key(name: str) -> str:
    """A key, bare where TOML allows it."""
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isalnum() and bare.isascii() else toml_value(name)


def _write_table(settings: Any, path: str, lines: list[str]) -> None:
    plain = [(s.name, getattr(settings, s.name)) for s in fields(settings)]
    values = [(k, v) for k, v in plain if not is_dataclass(v) and not isinstance(v, Mapping)]
    tables = [(k, v) for k, v in plain if is_dataclass(v) or isinstance(v, Mapping)]
    if path and values:
        lines.append(f"\n[{path}]")
    lines.extend(f"{toml_key(k)} = {toml_value(v)}" for k, v in values)
    for key, value in tables:
        inner = f"{path}.{key}" if path else key
        if not isinstance(value, Mapping):
            _write_table(value, inner, lines)
            continue
        lines.append(f"\n[{inner}]")
        lines.extend(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items())
