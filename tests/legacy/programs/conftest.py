"""Runs of one program in several modes share what they compile."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(shared_programs: None) -> None:
    """Compile once what several runs of a program compile."""
