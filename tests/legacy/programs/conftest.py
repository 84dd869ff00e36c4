"""Share compiled programs between runs of one program in several modes."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(shared_programs: None) -> None:
    """Compile once what several runs of a program compile."""
