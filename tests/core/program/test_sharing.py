"""`share_binary=True` in two real processes."""

from pathlib import Path

import pytest

from tests.core.processes import run_many


@pytest.mark.integration
def test_one_process_compiles_and_the_other_process_loads():
    script = Path(__file__).with_name("sharing.py")
    for output in run_many(script, 2, 2):
        assert "shared" in output, output
