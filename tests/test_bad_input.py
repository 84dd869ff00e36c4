"""Wrong arguments end in an error that shows the fix, never in an internal one."""

import pytest

from tests.bad_input import run


@pytest.mark.slow
def test_random_wrong_arguments_end_in_errors_for_users() -> None:
    """No argument causes an internal error, ends the process, or loses an array."""
    titles: list[str] = []
    found = run(0, 3000, titles.append)
    assert not found, "\n".join(f"{trouble}: {call}" for trouble, call in found.items())
    assert len(titles) == 3000
