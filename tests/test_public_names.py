"""Names that `docs/reference` lists are imported from the paths that it lists."""

import importlib
import re
from pathlib import Path

import pytest

import xlashard

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference" / "api"
NAMES = sorted(
    name
    for page in PAGES.glob("*.md")
    for names in re.findall(r"<!-- api: (.*?) -->", page.read_text(encoding="utf-8"))
    for name in names.split(", ")
)


def test_reference_lists_names() -> None:
    assert len(NAMES) > 100


@pytest.mark.parametrize("module", sorted({name.rpartition(".")[0] for name in NAMES}))
def test_names_of_the_reference_are_imported(module: str) -> None:
    listed = [name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == module]
    members = importlib.import_module(module)
    assert all(getattr(members, name) is not None for name in listed)


def test_pjit_stays_the_function_beside_its_reports() -> None:
    report = importlib.import_module("xlashard.pjit.report")
    assert xlashard.pjit(lambda x: x + 1)(1) == 2
    assert xlashard.pjit.report is report
