"""Typed settings: frozen dataclasses read from TOML tables and ``--set`` words, and written back.

A settings class is a frozen dataclass whose fields come from `setting` (a value) or `section`
(another settings class). Type, default, bounds and description of a value are declared at its
field; checks, error texts and the reference table derive from them.
"""

import difflib
import json
import math
import shlex
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from xlashard.documents import parse_toml
from xlashard.train.errors import SettingsError


@dataclass(frozen=True)
class Bounds:
    """Range of a number; ``None`` is unbounded."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def refusal(self, value: float) -> str | None:
        """Return the violated bound as text, or ``None`` for a value inside the range."""
        if not math.isfinite(value):
            return "finite"
        if self.at_least is not None and value < self.at_least:
            return f"at least {self.at_least:g}"
        if self.above is not None and value <= self.above:
            return f"greater than {self.above:g}"
        if self.below is not None and value >= self.below:
            return f"less than {self.below:g}"
        if self.at_most is not None and value > self.at_most:
            return f"at most {self.at_most:g}"
        return None


def setting(default: Any, note: str, bounds: Bounds | None = None) -> Any:
    """Declare a value of a settings class.

    Args:
        default: Default value; a list or a dict is copied per instance.
        note: One line for the reference table.
        bounds: Range of a number, or of every number in a table.
    """
    metadata = {"note": note, "bounds": bounds or Bounds()}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, note: str) -> Any:
    """Declare a nested table with another settings class."""
    return field(default_factory=cls, metadata={"note": note})


@dataclass(frozen=True)
class Leaf:
    """Value of a settings tree: path, type, default and bounds."""

    path: str
    kind: Any
    default: Any
    note: str
    bounds: Bounds


def leaves(cls: type, prefix: str = "") -> Iterator[Leaf]:
    """Yield all values of a settings class, including nested tables, in declaration order."""
    for spec, kind in _fields(cls):
        path = prefix + spec.name
        if is_dataclass(kind):
            yield from leaves(typing.cast(type, kind), path + ".")
            continue
        yield Leaf(path, kind, _default(spec), spec.metadata["note"], spec.metadata["bounds"])


def read[T](cls: type[T], table: Mapping[str, Any], words: Iterable[str] = ()) -> T:
    """Build settings from a parsed TOML document and ``key=value`` overrides.

    Args:
        cls: The settings class.
        table: Document as `parse_toml` returns it.
        words: Overrides such as ``"model.layers=4"``; they take precedence over the document.

    Returns:
        The settings, every value with its declared type and inside its range.

    Raises:
        SettingsError: Lists every problem with the key's full path and a line to write
            instead.

    Example:
        >>> from xlashard.train.config.settings import Settings
        >>> read(Settings, {"model": {"layers": 2}}, ["model.heads=8"]).model.heads
        8
    """
    problems: list[str] = []
    known = {leaf.path: leaf for leaf in leaves(cls)}
    values: dict[str, Any] = {}
    _read_table(cls, table, "", known, values, problems)
    for word in words:
        _read_word(cls, word, known, values, problems)
    if problems:
        raise SettingsError("\n".join(problems))
    return _build(cls, values, "")


def reference(cls: type) -> list[tuple[str, str, str, str]]:
    """Return rows of (key, type, default, note) for every value of a settings class."""
    return [(x.path, describe(x.kind), toml_value(x.default), x.note) for x in leaves(cls)]


def describe(kind: Any) -> str:
    """Describe a declared type for error texts."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(toml_value(x) for x in get_args(kind))
    if get_origin(kind) is dict:
        return "a table of integers"
    if get_origin(kind) is tuple:
        return "a list of strings"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return names[kind]


# ---------------------------------------------------------------- reading


def _fields(cls: type) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(spec, hints[spec.name]) for spec in fields(cls)]


def _default(spec: Field[Any]) -> Any:
    if spec.default is not MISSING:
        return spec.default
    return typing.cast(Any, spec.default_factory)()


def _read_table(
    cls: type,
    table: Mapping[str, Any],
    prefix: str,
    known: dict[str, Leaf],
    values: dict[str, Any],
    problems: list[str],
) -> None:
    kinds = {spec.name: kind for spec, kind in _fields(cls)}
    for name, raw in table.items():
        path = prefix + name
        kind = kinds.get(name)
        if kind is None:
            problems.append(_unknown(path, raw, known, kinds, word=False))
        elif not is_dataclass(kind):
            _read_value(known[path], raw, values, problems, word=False)
        elif isinstance(raw, Mapping):
            _read_table(typing.cast(type, kind), raw, path + ".", known, values, problems)
        else:
            first = next(leaf for leaf in known.values() if leaf.path.startswith(path + "."))
            shown = _line(first.path, first.default, word=False)
            problems.append(f"{path} must be a table, not {_shown(raw)}. Write:\n{shown}")


def _read_word(
    cls: type, word: str, known: dict[str, Leaf], values: dict[str, Any], problems: list[str]
) -> None:
    path, equals, text = word.partition("=")
    path = path.strip()
    if not equals:
        leaf = _nearest(path, known) or next(iter(known.values()))
        line = _line(leaf.path, leaf.default, word=True)
        problems.append(f"--set {word}: the value is missing. Write:\n{line}")
        return
    table, _, name = path.rpartition(".")
    if table in known and get_origin(known[table].kind) is dict:
        grown = {**values.get(table, known[table].default), name: _word_value(int, text)}
        _read_value(known[table], grown, values, problems, word=True)
        return
    if path not in known:
        roots = {spec.name: kind for spec, kind in _fields(cls)}
        problems.append(_unknown(path, _word_value(None, text), known, roots, word=True))
        return
    _read_value(known[path], _word_value(known[path].kind, text), values, problems, word=True)


def _word_value(kind: Any, text: str) -> Any:
    """Parse a value of the command line as TOML, or return the bare text if it is not TOML."""
    text = text.strip()
    bare_string = kind is str or get_origin(kind) is Literal
    if bare_string and not text.startswith(('"', "'")):
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


class _Mismatch(Exception):
    """The raw value does not have the declared type."""


def _read_value(
    leaf: Leaf, raw: Any, values: dict[str, Any], problems: list[str], word: bool
) -> None:
    try:
        value = _coerce(leaf.kind, raw)
    except _Mismatch:
        line = _line(leaf.path, _repaired(leaf, raw), word)
        expected = describe(leaf.kind)
        problems.append(f"{leaf.path} must be {expected}, not {_shown(raw)}. Write:\n{line}")
        return
    for key, number in _numbers(value):
        refusal = leaf.bounds.refusal(number)
        if refusal is None:
            continue
        line = _line(leaf.path, leaf.default, word)
        problems.append(f"{leaf.path}{key} must be {refusal}, not {number!r}. Write:\n{line}")
        return
    values[leaf.path] = value


def _coerce(kind: Any, raw: Any) -> Any:
    """Convert the raw value to its type; an integer is a number, a string a list of one."""
    origin = get_origin(kind)
    if origin is Literal and raw in get_args(kind):
        return raw
    if origin is dict and isinstance(raw, Mapping) and all(map(_is_int, raw.values())):
        return dict(raw)
    if origin is tuple:
        listed = [raw] if isinstance(raw, str) else raw
        if isinstance(listed, list | tuple) and all(isinstance(x, str) for x in listed):
            return tuple(listed)
    if kind is float and (isinstance(raw, float) or _is_int(raw)):
        return float(typing.cast(float, raw))
    if (kind is int and _is_int(raw)) or (kind in (bool, str) and isinstance(raw, kind)):
        return raw
    raise _Mismatch


def _is_int(raw: Any) -> bool:
    return isinstance(raw, int) and not isinstance(raw, bool)


def _numbers(value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", number) for key, number in value.items())
    elif isinstance(value, float) or _is_int(value):
        yield "", value


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    arguments = {}
    for spec, kind in _fields(cls):
        path = prefix + spec.name
        if is_dataclass(kind):
            arguments[spec.name] = _build(typing.cast(type, kind), values, path + ".")
        elif path in values:
            arguments[spec.name] = values[path]
    return cls(**arguments)


# ---------------------------------------------------------------- error texts


def _unknown(
    path: str, raw: Any, known: dict[str, Leaf], siblings: Mapping[str, Any], word: bool
) -> str:
    tables = _tables(known)
    if path in tables:
        return f"{path} is a table. Its keys are: {', '.join(tables[path])}."
    close = difflib.get_close_matches(path, tables, n=1, cutoff=0.6)
    if isinstance(raw, Mapping) and close:
        meant = f"[{close[0]}]"
        return f"[{path}] is not a table of settings. Did you mean {meant}? Write:\n  {meant}"
    leaf = _nearest(path, known)
    if leaf is None:
        return f"{path} is not a setting. The keys of this table are: {', '.join(siblings)}."
    try:
        value = _coerce(leaf.kind, raw)
    except _Mismatch:
        value = _repaired(leaf, raw)
    line = _line(leaf.path, value, word)
    return f"{path} is not a setting. Did you mean {leaf.path}? Write:\n{line}"


def _tables(known: Iterable[str]) -> dict[str, list[str]]:
    """Return the tables of all paths, each with its keys."""
    tables: dict[str, list[str]] = {}
    for path in known:
        parts = path.split(".")
        for end in range(1, len(parts)):
            keys = tables.setdefault(".".join(parts[:end]), [])
            if parts[end] not in keys:
                keys.append(parts[end])
    return tables


def _nearest(path: str, known: dict[str, Leaf]) -> Leaf | None:
    """Return the closest setting: a similar path, or the same key in another table."""
    key = path.rpartition(".")[2]
    same_key = [p for p in known if p.rpartition(".")[2] == key]
    near = [*difflib.get_close_matches(path, known, n=1, cutoff=0.7), *same_key]
    return known[near[0]] if near else None


def _repaired(leaf: Leaf, raw: Any) -> Any:
    """Return the value in the declared type if unambiguous (``"4"`` is 4), or the default."""
    candidates: list[Any] = []
    if isinstance(raw, str):
        candidates = [_word_value(None, raw.lower()), raw]
    elif isinstance(raw, float) and raw.is_integer():
        candidates = [int(raw)]
    elif isinstance(raw, int):
        candidates = [bool(raw)] if leaf.kind is bool else [str(raw)] if leaf.kind is str else []
    if get_origin(leaf.kind) is Literal and isinstance(raw, str):
        candidates += difflib.get_close_matches(raw, get_args(leaf.kind), n=1, cutoff=0.4)
    for candidate in candidates:
        try:
            value = _coerce(leaf.kind, candidate)
        except _Mismatch:
            continue
        if all(leaf.bounds.refusal(x) is None for _, x in _numbers(value)):
            return value
    return leaf.default


def _shown(raw: Any) -> str:
    names: list[tuple[type | types.UnionType, str]] = [
        (bool, ""),
        (int, "the integer "),
        (float, "the number "),
        (str, "the string "),
        (Mapping, "the table "),
        (list | tuple, "the list "),
    ]
    prefix = next((name for kind, name in names if isinstance(raw, kind)), "")
    text = toml_value(raw)
    return prefix + (text if len(text) <= 60 else text[:57] + "...")


def _line(path: str, value: Any, word: bool) -> str:
    table, _, key = path.rpartition(".")
    if not word:
        inside = isinstance(value, Mapping)
        pairs = value.items() if inside else [(key, value)]
        lines = [f"{toml_key(k)} = {toml_value(v)}" for k, v in pairs]
        return "\n".join(f"  {line}" for line in [f"[{path if inside else table}]", *lines])
    if isinstance(value, Mapping):
        return "  " + " ".join(f"--set {path}.{k}={toml_value(v)}" for k, v in value.items())
    text = value if isinstance(value, str) else toml_value(value)
    return f"  --set {shlex.quote(f'{path}={text}')}"


# ---------------------------------------------------------------- TOML notation


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
