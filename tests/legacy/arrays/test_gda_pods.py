"""`GlobalDeviceArray`s over two processes."""

from pathlib import Path

import pytest

from tests.core.processes import run_many


@pytest.mark.integration
def test_gda_in_two_processes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("pod_gda.py")
    for output in run_many(script, 2, 4, str(tmp_path)):
        assert "all as it should be" in output, output
