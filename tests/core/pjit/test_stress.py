"""A few of the refused donations, interrupts and forks of `python -m tests.core.pjit.stress`."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.pjit import stress

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_refused_donations_leave_every_array_intact():
    assert stress.refused(25, random.Random(1)).total() == 25


@pytest.mark.devices(8)
@pytest.mark.slow
def test_calls_with_deleted_shards_are_refused():
    assert stress.lost(40, random.Random(1)).total() == 40


@pytest.mark.slow
@pytest.mark.parametrize("keys", [False, True])
def test_interrupts_leave_the_old_or_the_new_state(keys):
    assert stress.interrupted(40, random.Random(2), keys=keys).total() == 40


@pytest.mark.slow
def test_forks_leave_the_parent_as_it_is():
    # In a process of its own, whose children don't run the exit handlers of pytest.
    counts = [word for name in ("refused", "lost", "interrupts") for word in (f"--{name}", "0")]
    command = [sys.executable, "-m", "tests.core.pjit.stress", *counts, "--forks", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0 and "12 forks in" in done.stdout, done.stdout + done.stderr
