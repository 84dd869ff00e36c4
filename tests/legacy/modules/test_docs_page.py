"""The table of old names in the documentation has every entry."""

from pathlib import Path

from docs.site_names import library_table, table
from xlashard.legacy.entries.keywords import list_keyword_entries
from xlashard.legacy.libraries.entries import list_library_entries
from xlashard.legacy.modules import entries


def test_every_name_has_one_row() -> None:
    lines = table().splitlines()
    rows = [line for line in lines if line.startswith(("| `jax.", "| `jaxlib.", "| `xlashard."))]
    names = [*entries(), *(entry.name for entry in list_keyword_entries())]
    assert len(rows) == len(names)
    for name in names:
        assert sum(row.startswith(f"| `{name}` | ") for row in rows) == 1


def test_every_name_of_a_library_has_one_row() -> None:
    lines = library_table().splitlines()
    assert len(lines) == 2 + len(list_library_entries())
    for entry in list_library_entries().values():
        start = f"| `{entry.name}` | {entry.library} {entry.gone} | "
        assert sum(line.startswith(start) for line in lines) == 1


def test_locks_pin_every_package_once_and_one_jax() -> None:
    locks = sorted((Path(__file__).parents[3] / "docs" / "guides" / "locks").glob("*.txt"))
    pinned = [dict(line.split("==") for line in lock.read_text().split()) for lock in locks]
    assert [lock.stem for lock in locks] == ["easylm", "praxis", "t5x"]
    assert len({versions["jax"] for versions in pinned}) == 1
    for lock, versions in zip(locks, pinned, strict=True):
        assert len(versions) == len(lock.read_text().split())
        assert versions["jax"] == versions["jaxlib"] and "xlashard" not in versions
