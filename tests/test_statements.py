"""The tables of `tests/README.md` name tests that exist."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.without_jax

FOLDER = Path(__file__).parent
ROWS = [line for line in (FOLDER / "README.md").read_text().splitlines() if "::" in line]


def list_tests(path: Path) -> set[str]:
    """Return the names of a file's test functions, with those of their classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def test_every_statement_has_tests_that_exist():
    named: dict[str, set[str]] = {}
    for row in ROWS:
        for identifier in re.findall(r"`([\w/.]+::[\w:]+)`", row):
            path, _, name = identifier.partition("::")
            named.setdefault(path, set()).add(name)
    missing = {path: names - list_tests(FOLDER / path) for path, names in named.items()}
    assert len(ROWS) > 90 and not {path: names for path, names in missing.items() if names}
