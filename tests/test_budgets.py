"""The package stays within `budgets.toml`, and a budget falls with what it limits."""

import pytest

from tests.house import Source, measure_budgets, read_budgets, read_source

_SLACK = {"code_lines": 0.01}
"""Part of a budget that may be unused; otherwise a commit that saves something lowers it."""


@pytest.mark.slow
def test_package_stays_within_its_budgets() -> None:
    measured = measure_budgets()
    assert measured.keys() == read_budgets().keys()
    for name, most in read_budgets().items():
        now = measured[name]
        assert now <= most, f"{name}: {now}, and tests/budgets.toml allows {most}"
        least = most * (1 - _SLACK.get(name, 0))
        assert now >= least, f"{name} fell to {now}: lower it in tests/budgets.toml"


def test_lines_of_code_are_those_without_comments_and_docstrings(tmp_path) -> None:
    path = tmp_path / "file.py"
    path.write_text(
        '"""A module."""\n\nimport os  # why\n\n# why\n\n\ndef f():\n    """A function."""\n'
        '    return """\n\n    text"""\n',
        encoding="utf-8",
    )
    assert read_source(path) == Source(path, code=5, comments=2, functions=[("f", 5)])
