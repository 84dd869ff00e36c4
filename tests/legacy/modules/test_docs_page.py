"""`docs/legacy.md` says what the table says."""

from tests.goldens import check_golden
from tests.legacy.modules.docs_page import BEGIN, END, PAGE, with_table
from xlashard.legacy.modules import entries


def test_the_table_is_that_of_the_entries(update_goldens) -> None:
    page = PAGE.read_text(encoding="utf-8")
    check_golden(PAGE, with_table(page), update=update_goldens, by="make docs-legacy")


def test_every_name_has_one_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index(BEGIN) : page.index(END)]
    rows = [line for line in table.splitlines() if line.startswith(("| `jax.", "| `xlashard."))]
    assert len(rows) == len(entries())
    for name in entries():
        assert f"\n| `{name}` | " in table
