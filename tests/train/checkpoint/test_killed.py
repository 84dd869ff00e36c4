"""Processes that are killed while they save: committed steps stay, partial ones are not listed."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.device_counts import emulate_devices
from tests.fork_server import python_command

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("killed.py")


def run_script(folder: Path, *args: str) -> str:
    environment = {
        **os.environ,
        **emulate_devices(2),
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [*python_command(environment), str(SCRIPT), str(folder), *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_kills_at_random_times_keep_committed_steps(tmp_path: Path) -> None:
    output = run_script(tmp_path, "5", "random", "20")
    (halves,) = re.findall(r"20 kills, (\d+) in the middle of a save", output)
    assert int(halves) >= 5


@pytest.mark.slow
def test_kills_before_each_file_change_keep_committed_steps(tmp_path: Path) -> None:
    """Every file opened for writing, every new folder, each rename and each deletion."""
    output = run_script(tmp_path, "0", "each")
    (changes,) = re.findall(r"killed before each of (\d+) changes", output)
    assert int(changes) >= 10
