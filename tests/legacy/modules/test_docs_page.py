"""The table of old names in the documentation has every entry."""

from docs.site_names import table
from xlashard.legacy.entries.keywords import list_keyword_entries
from xlashard.legacy.modules import entries


def test_every_name_has_one_row() -> None:
    lines = table().splitlines()
    rows = [line for line in lines if line.startswith(("| `jax.", "| `xlashard."))]
    names = [*entries(), *(entry.name for entry in list_keyword_entries())]
    assert len(rows) == len(names)
    for name in names:
        assert sum(row.startswith(f"| `{name}` | ") for row in rows) == 1
