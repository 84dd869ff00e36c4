"""Figures of chips and machines in TOML files, each beside its source."""

import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from xlashard.documents import decode
from xlashard.predict.targets.chip import Chip


def read_chips[C: Chip](path: Path, kind: type[C]) -> tuple[C, ...]:
    """Return the chips of a TOML file.

    Args:
        path: A file with a table for each chip: its title, and every figure as `[value, source]`.
        kind: Dataclass of the chips.

    Raises:
        ValueError: A table is invalid.
    """
    keys = [field.name for field in fields(kind) if field.name not in ("name", "sources")]
    return tuple(_read_chip(kind, name, **table) for name, table in read_tables(path, keys).items())


def _read_chip[C: Chip](kind: type[C], name: str, title: str, **table: Any) -> C:
    figures = decode(dict[str, tuple[Any, str]], table, name)
    sources = [[key, source] for key, (_, source) in figures.items()]
    values = {key: value for key, (value, _) in figures.items()}
    return decode(kind, {"name": name, "title": title, "sources": sources, **values}, name)


def read_tables(path: Path, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the tables of a TOML file by name, but for `sources`.

    Args:
        path: The file. `{key}` in a string stands for that text of its table `sources`, whose own
            texts may have keys of texts above them.
        keys: Keys of each table.

    Raises:
        ValueError: A table has other keys, or a string has the key of no source.
    """
    tables = tomllib.loads(path.read_text("utf-8"), parse_float=_parse_number)
    sources: dict[str, str] = {}
    for key, text in tables.pop("sources").items():
        sources[key] = text.format_map(sources)
    for name, table in tables.items():
        for key in sorted(set(keys) ^ table.keys()):
            problem = "is unknown" if key in table else "is missing"
            # no-catalogue: the files are those of the package
            raise ValueError(f"{name}.{key} {problem}")
        for key, value in table.items():
            table[key] = _insert_sources(value, sources, f"{name}.{key}")
    return tables


def _insert_sources(value: Any, sources: dict[str, str], path: str) -> Any:
    if isinstance(value, list):
        return [_insert_sources(item, sources, path) for item in value]
    try:
        return value.format_map(sources) if isinstance(value, str) else value
    except KeyError as key:
        # no-catalogue: the files are those of the package
        raise ValueError(f"{path} has the unknown source {key}") from None


def _parse_number(text: str) -> float:
    """Return the value of `312e12` as an integer, and that of `19.5e12` as a float."""
    digits, _, exponent = text.partition("e")
    number = float(digits) if "." in digits else int(digits)
    return number * 10 ** int(exponent or 0)
