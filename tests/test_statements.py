"""The table of the statements of five documents: every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.grouped_cases import Together

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "statements.md"


@cache
def defined(path: Path) -> dict[str, ast.AST]:
    """Return the functions and classes of a file, methods by `Class::method`."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            found |= {f"{node.name}::{method.name}": method for method in methods}
    return found


def check_exists(test: str) -> None:
    file, _, name = test.partition("::")
    path = ROOT / file
    assert path.is_file(), f"no file {file}"
    if not name or name in defined(path):
        return
    class_name, _, method = name.partition("::")
    node = defined(path).get(class_name)
    assert isinstance(node, ast.ClassDef) and method, f"{file} has no {name}"
    # The tests of a suite are methods of a base class beside it.
    suite = defined(path.with_name("suite.py"))
    bases = [text for base in node.bases for text in re.findall(r"\w+Suite", ast.unparse(base))]
    assert any(f"{base}::{method}" in suite for base in bases), f"{file} has no {name}"


def test_every_named_test_exists() -> None:
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if "`tests/" in line]
    assert len(rows) > 150
    with Together() as all_of:
        for row in rows:
            for test in re.findall(r"`(tests/[^`]+)`", row):
                with all_of.case(row):
                    check_exists(test)


def test_every_row_has_a_statement_and_tests() -> None:
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| document", "| statement")):
            cells = re.split(r"\s*\|\s*", line.strip("| "))
            assert len(cells) == 2, line
