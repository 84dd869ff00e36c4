"""A few of the refused donations, interrupts and forks of `python -m tests.core.pjit.stress`."""

import random

import pytest

from tests.core.pjit import stress


@pytest.mark.slow
def test_refused_donations_leave_every_array_intact():
    assert stress.refused(25, random.Random(1)).total() == 25


@pytest.mark.slow
def test_calls_with_deleted_shards_are_refused():
    assert stress.lost(40, random.Random(1)).total() == 40


@pytest.mark.slow
@pytest.mark.parametrize("keys", [False, True])
def test_interrupts_leave_the_old_or_the_new_state(keys):
    assert stress.interrupted(40, random.Random(2), keys=keys).total() == 40


@pytest.mark.slow
def test_forks_leave_the_parent_as_it_is():
    assert stress.forked(12, random.Random(3)).total() == 12
