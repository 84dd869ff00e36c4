"""Wrong arguments end in an error that says what to write, never in an internal one."""

import pytest

from tests.bad_input import run


@pytest.mark.slow
def test_random_wrong_arguments_end_in_errors_for_users() -> None:
    """Whatever stands for an argument: no internal error, no end of the process, no array lost."""
    titles: list[str] = []
    found = run(0, 3000, titles.append)
    assert not found, "\n".join(f"{trouble}: {call}" for trouble, call in found.items())
    assert len(titles) == 3000
