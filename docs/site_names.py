"""The table of `docs/reference/legacy_names.md`, from the entries."""

import importlib
from collections.abc import Iterator, Sequence

from xlashard.legacy.entries.keywords import list_keyword_entries
from xlashard.legacy.libraries.entries import list_library_entries
from xlashard.legacy.modules import Entry, entries_by_module

_HEAD = "| name | until JAX | what it does | today |\n|---|---|---|---|"
_VERBS = {"works": "works", "differs": "works, but ", "refused": "is refused: "}


def table() -> str:
    """Return the table of all entries, by module."""
    sections = [_section(*item) for item in entries_by_module().items()]
    sections.append(_section("keywords", tuple(list_keyword_entries())))
    return "\n\n".join("\n".join(lines) for lines in sections)


def library_table() -> str:
    """Return the table of the names that other libraries than JAX took away."""
    rows = (
        f"| `{entry.name}` | {entry.library} {entry.gone} | {_does(entry, _cell(entry.note))} "
        f"| {_code(entry.today)} |"
        for entry in sorted(list_library_entries().values(), key=lambda entry: entry.name.lower())
    )
    return "\n".join(["| name | until | what it does | today |\n|---|---|---|---|", *rows])


def _section(name: str, entries: Sequence[Entry]) -> Iterator[str]:
    about = importlib.import_module(f"xlashard.legacy.modules.{name}").__doc__ or name
    yield f"### {about.splitlines()[0].rstrip('.')}\n"
    yield _HEAD
    yield from map(_row, sorted(entries, key=lambda entry: entry.name.lower()))


def _row(entry: Entry) -> str:
    note = _cell(entry.note.rstrip("."))
    return f"| `{entry.name}` | {entry.gone} | {_does(entry, note)} | {_code(entry.today)} |"


def _does(entry: Entry, note: str) -> str:
    if entry.treatment == "works":
        return f"works; {note[0].lower()}{note[1:]}" if note else "works"
    return _VERBS[entry.treatment] + (note[0].lower() + note[1:] if note[:2] != "JA" else note)


def _code(code: str) -> str:
    return f"`{_cell(code)}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
