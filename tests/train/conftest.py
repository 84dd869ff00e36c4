"""Share compiled programs between tests of training."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(shared_programs: None) -> None:
    """Compile the few training steps once that most tests here take, each for seconds."""
