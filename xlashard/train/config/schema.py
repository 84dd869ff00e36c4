"""Typed settings: frozen dataclasses read from TOML tables and ``--set`` words, and written back.

A settings class is a frozen dataclass whose fields come from `setting` (a value) or `section`
(another settings class). Type, default, bounds and description of a value are declared at its
field; checks, error texts and the reference table derive from them.
"""

import difflib
import json
import math
import operator
import shlex
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from xlashard.support.documents import parse_toml
from xlashard.support.formatting import closest
from xlashard.train.errors import SettingsError

LARGEST_INTEGER = 2**31 - 1
"""Largest size or count of a setting: programs count steps, positions and tokens in int32."""

LARGEST_NUMBER = 3.4028234663852886e38
"""Largest number of a setting: programs compute in float32."""


@dataclass(frozen=True)
class Bounds:
    """Range of a number; ``None`` is unbounded below, and above the largest of its type."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def refusal(self, value: float) -> str | None:
        """Return the violated bound as text, or ``None`` for a value inside the range."""
        if isinstance(value, float) and not math.isfinite(value):
            return "finite"
        largest = LARGEST_NUMBER if isinstance(value, float) else LARGEST_INTEGER
        for bound, is_beyond, text in (
            (self.at_least, operator.lt, "at least"),
            (self.above, operator.le, "greater than"),
            (self.below, operator.ge, "less than"),
            (largest if self.at_most is None else self.at_most, operator.gt, "at most"),
        ):
            if bound is not None and is_beyond(value, bound):
                return f"{text} {bound if isinstance(bound, int) else format(bound, 'g')}"
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


def section(cls: type, note: str, short: str = "") -> Any:
    """Declare a nested table with another settings class.

    Args:
        cls: The settings class.
        note: One line for the reference table.
        short: Setting of the table that a value in place of the table sets; empty for none.
    """
    return field(default_factory=cls, metadata={"note": note, "short": short})


@dataclass(frozen=True)
class Leaf:
    """Value of a settings tree: path, type, default, bounds, and the table that it stands for."""

    path: str
    kind: Any
    default: Any
    note: str
    bounds: Bounds
    table: str = ""


def leaves(cls: type, prefix: str = "") -> Iterator[Leaf]:
    """Yield all values of a settings class, including nested tables, in declaration order."""
    defaults = cls()
    for spec, kind in _fields(cls):
        path, metadata = prefix + spec.name, spec.metadata
        if not is_dataclass(kind):
            default = getattr(defaults, spec.name)
            yield Leaf(path, kind, default, metadata["note"], metadata["bounds"])
            continue
        for leaf in leaves(typing.cast(type, kind), path + "."):
            is_short = leaf.path == f"{path}.{metadata['short']}"
            yield replace(leaf, table=path) if is_short else leaf


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
    reader = _SettingsReader(cls)
    reader.read_table(cls, table, "")
    for word in words:
        reader.read_word(word)
    if reader.problems:
        raise SettingsError("\n".join(reader.problems))
    return _build(cls, reader.values, "")


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


def _fields(cls: type) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(spec, hints[spec.name]) for spec in fields(cls)]


class _SettingsReader:
    """Values and problems of the documents and words that were read."""

    def __init__(self, cls: type) -> None:
        self._roots = {spec.name: kind for spec, kind in _fields(cls)}
        self._known = {leaf.path: leaf for leaf in leaves(cls)}
        self._short = {leaf.table: path for path, leaf in self._known.items() if leaf.table}
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []

    def read_table(self, cls: type, table: Mapping[str, Any], prefix: str) -> None:
        """Read a table of a document."""
        kinds = {spec.name: kind for spec, kind in _fields(cls)}
        for name, raw in table.items():
            path = prefix + name
            kind = kinds.get(name)
            if kind is None:
                self.problems.append(_unknown(path, raw, self._known, kinds, word=False))
            elif not is_dataclass(kind):
                self._read_value(self._known[path], raw, word=False)
            elif isinstance(raw, Mapping):
                self.read_table(typing.cast(type, kind), raw, path + ".")
            elif path in self._short:
                self._read_value(self._known[self._short[path]], raw, word=False)
            else:
                first = next(x for x in self._known.values() if x.path.startswith(path + "."))
                shown = setting_line(first.path, first.default, word=False)
                self.problems.append(f"{path} must be a table, not {_shown(raw)}. Write:\n{shown}")

    def read_word(self, word: str) -> None:
        """Read an override of the command line."""
        known = self._known
        path, equals, text = word.partition("=")
        path = self._short.get(path.strip(), path.strip())
        table, _, name = path.rpartition(".")
        if not equals:
            leaf = _nearest(path, known) or next(iter(known.values()))
            line = setting_line(leaf.path, leaf.default, word=True)
            self.problems.append(f"--set {word}: the value is missing. Write:\n{line}")
        elif table in known and get_origin(known[table].kind) is dict:
            old = self.values.get(table, known[table].default)
            self._read_value(known[table], {**old, name: _word_value(int, text)}, word=True)
        elif path in known:
            self._read_value(known[path], _word_value(known[path].kind, text), word=True)
        else:
            raw = _word_value(None, text)
            self.problems.append(_unknown(path, raw, known, self._roots, word=True))

    def _read_value(self, leaf: Leaf, raw: Any, word: bool) -> None:
        value = _coerce(leaf.kind, raw)
        if value is None:
            line = setting_line(leaf.path, _repaired(leaf, raw), word)
            self.problems.append(
                f"{leaf.path} must be {describe(leaf.kind)}, not {_shown(raw)}. Write:\n{line}"
            )
            return
        for key, number in _numbers(value):
            if refusal := leaf.bounds.refusal(number):
                line = setting_line(leaf.path, leaf.default, word)
                self.problems.append(
                    f"{leaf.path}{key} must be {refusal}, not {_elide(number)}. Write:\n{line}"
                )
                return
        self.values[leaf.path] = value


def _word_value(kind: Any, text: str) -> Any:
    """Parse a value of the command line as TOML, or return the bare text if it is not TOML."""
    text = text.strip()
    bare_string = kind is str or get_origin(kind) is Literal
    if bare_string and not text.startswith(('"', "'")):
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        pass
    try:
        # TOML has no integers of more than 64 bits, for which the range is the better error.
        return int(text) if kind in (int, float) else text
    except ValueError:
        return text


def _coerce(kind: Any, raw: Any) -> Any:
    """Convert a raw value to its type, or return None if it has another one.

    An integer is a number, a string a list of one.
    """
    origin = get_origin(kind)
    if origin is Literal and raw in get_args(kind):
        return raw
    if origin is dict and isinstance(raw, Mapping) and all(map(_is_int, raw.values())):
        return dict(raw)
    if origin is tuple:
        listed = [raw] if isinstance(raw, str) else raw
        if isinstance(listed, list | tuple) and all(isinstance(x, str) for x in listed):
            return tuple(listed)
    if kind is float and _is_int(raw):
        # An integer may exceed every float.
        return float(max(min(typing.cast(int, raw), 10**300), -(10**300)))
    if (kind is int and _is_int(raw)) or (kind in (bool, str, float) and isinstance(raw, kind)):
        return raw
    return None


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


def _unknown(
    path: str, raw: Any, known: dict[str, Leaf], siblings: Mapping[str, Any], word: bool
) -> str:
    tables = _tables(known)
    if path in tables:
        return f"{path} is a table. Its keys are: {', '.join(tables[path])}."
    close = closest(path, tables)
    if isinstance(raw, Mapping) and close:
        meant = f"[{close}]"
        return f"[{path}] is not a table of settings. Did you mean {meant}? Write:\n  {meant}"
    leaf = _nearest(path, known)
    if leaf is None:
        return f"{path} is not a setting. The keys of this table are: {', '.join(siblings)}."
    value = _coerce(leaf.kind, raw)
    if value is None:
        value = _repaired(leaf, raw)
    line = setting_line(leaf.path, value, word)
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
        value = _coerce(leaf.kind, candidate)
        if value is not None and all(leaf.bounds.refusal(x) is None for _, x in _numbers(value)):
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
    return prefix + _elide(raw)


def _elide(raw: Any) -> str:
    text = toml_value(raw)
    return text if len(text) <= 60 else text[:57] + "..."


def setting_line(path: str, value: Any, word: bool = False) -> str:
    """Return the lines of a settings file, or of ``--set`` for a word, that write a setting."""
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


def to_toml(settings: Any) -> str:
    """Write settings as a TOML document that `read` reads back."""
    return "\n".join(_table_lines(settings, "")).lstrip("\n") + "\n"


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
            pairs = (f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items())
            return "{" + ", ".join(pairs) + "}"
    return json.dumps(str(value))


def toml_key(name: str) -> str:
    """Return a key, bare if TOML allows it."""
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isalnum() and bare.isascii() else toml_value(name)
