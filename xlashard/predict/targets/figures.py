"""Figures of chips and machines in TOML files, each beside its source."""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from xlashard.predict.targets.chip import Chip


def read_chips[C: Chip](path: Path, kind: type[C]) -> tuple[C, ...]:
    """Return the chips of a TOML file.

    Args:
        path: A file with a table for each chip: its title, and every figure as `[value, source]`.
        kind: Dataclass of the chips.

    Raises:
        ValueError: A table is invalid.
    """
    keys = {field.name for field in fields(kind)} - {"name", "sources"}
    tables = read_tables(path, keys)
    return tuple(_read_chip(kind, name, **table) for name, table in tables.items())


def _read_chip[C: Chip](kind: type[C], name: str, title: str, **figures: Any) -> C:
    values, sources = {}, {}
    for key, figure in figures.items():
        match figure:
            case (value, str(source)):
                values[key], sources[key] = value, source
            case _:
                # no-catalogue: the package has the file
                raise ValueError(f"{name}.{key} is {figure!r}: expected [value, source]")
    return kind(name=name, title=title, sources=tuple(sources.items()), **values)


def read_tables(path: Path, keys: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the tables of a TOML file by name, but for the one of shared sources.

    Args:
        path: The file. Its table `sources` has texts, for which `{key}` stands in strings below.
        keys: Keys of each other table.

    Raises:
        ValueError: A table has other keys, or a string the key of no source.
    """
    tables = tomllib.loads(path.read_text("utf-8"), parse_float=_parse_number)
    sources: dict[str, str] = {}
    for key, text in tables.pop("sources").items():
        sources[key] = _resolve(text, sources, f"sources.{key}")
    for name, table in tables.items():
        for key in sorted(table.keys() ^ keys):
            problem = "unknown" if key in table else "missing"
            # no-catalogue: the package has the file
            raise ValueError(f"{name}.{key} is {problem}: expected {', '.join(sorted(keys))}")
        for key, value in table.items():
            table[key] = _resolve(value, sources, f"{name}.{key}")
    return tables


def _resolve(value: Any, sources: Mapping[str, str], path: str) -> Any:
    """Return a value with sources in place of their keys, and tuples in place of lists."""
    if isinstance(value, list):
        return tuple(_resolve(item, sources, path) for item in value)
    try:
        return value.format_map(sources) if isinstance(value, str) else value
    except KeyError as key:
        # no-catalogue: the package has the file
        raise ValueError(f"{path} has the unknown source {key}: add it to sources") from None


def _parse_number(text: str) -> float:
    """Return the value of `312e12` as an integer, and that of `19.5e12` as a float."""
    digits, _, exponent = text.partition("e")
    number = float(digits) if "." in digits else int(digits)
    return number * 10 ** int(exponent or 0)
