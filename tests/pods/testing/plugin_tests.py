"""Tests on pods with every possible outcome; `test_plugin.py` runs them, and checks the reports."""

import logging
import os
import shutil
import signal
import sys
import unittest

import jax
import numpy as np
import pytest
from jax.experimental.multihost_utils import process_allgather

from xlashard.testing import assert_collectives, assert_no_resharding

ON_TWO = pytest.mark.pod(processes=2, devices=2)


@pytest.fixture
def doubled(request):
    print("set up in", jax.process_index())
    yield 2 * request.param if hasattr(request, "param") else 2
    print("torn down in", jax.process_index())


@pytest.fixture
def broken():
    raise LookupError("no such thing")


def test_without_a_marker_runs_in_one_process():
    assert jax.process_count() == 1


@ON_TWO
@pytest.mark.parametrize("number", [1, 2])
def test_passes(number, doubled, tmp_path, capsys):
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
    assert process_allgather(np.array(number)).sum() == number * doubled
    (tmp_path / str(jax.process_index())).touch()
    process_allgather(np.array(number))
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    print("to capsys")
    assert capsys.readouterr().out == "to capsys\n"


@jax.jit
def total(x):
    return x.sum()


def test_compiles_once(assert_compiles):
    assert_compiles(at_most=1)
    total(np.ones(2))
    total(np.ones(2))


def test_compiles_too_often(assert_compiles):
    assert_compiles(total, at_most=1)
    total(np.ones(3))
    total(np.ones(4))


@ON_TWO
def test_compiles_too_often_in_pods(assert_compiles):
    assert_compiles(at_most=0)
    total(np.ones(3))


@ON_TWO
def test_expectations_of_a_jax_function():
    mesh = jax.make_mesh((4,), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.make_array_from_process_local_data(rows, np.ones(2, np.float32), (4,))
    assert_collectives(total, (x,), all_reduce=1, others=0)
    assert_no_resharding(total, (x,))
    assert total(x) == 4
    with pytest.raises(AssertionError, match="all_gather=1: the program has 0"):
        assert_collectives(total, (x,), all_gather=1)


@ON_TWO
class TestInAClass:
    kept = 0

    def setup_method(self):
        self.kept = 3

    @pytest.mark.parametrize("doubled", [5], indirect=True)
    def test_passes(self, doubled, record_property):
        record_property("doubled", doubled)
        assert (self.kept, doubled) == (3, 10)

    @pytest.mark.pod(processes=1, devices=3)
    def test_marker_of_a_method_overrides_that_of_the_class(self):
        assert (jax.process_count(), jax.device_count()) == (1, 3)


@ON_TWO
def test_module_state_is_stored():
    sys.modules["left_behind"] = sys


@ON_TWO
def test_module_state_is_shared_by_the_next_test():
    assert "left_behind" in sys.modules


@pytest.mark.pod(processes=2, devices=2, fresh=True)
def test_fresh_pod_has_no_module_state():
    assert "left_behind" not in sys.modules


@ON_TWO
def test_fails_everywhere(doubled):
    print("printed by", jax.process_index())
    logging.getLogger("some").warning("logged by %d", jax.process_index())
    os.write(2, b"written to the descriptor\n")
    result = {"shape": (2, doubled)}
    assert result == {"shape": (2, 3)}


@ON_TWO
def test_processes_survive_an_identical_failure():
    assert sys.modules.setdefault("seen_by_a_later_one", sys)


@ON_TWO
def test_fails_in_one():
    assert jax.process_index() == 0, "only the first is right"
    process_allgather(np.array(1))


@ON_TWO
def test_processes_are_replaced_after_a_failure_in_one():
    assert "seen_by_a_later_one" not in sys.modules


@ON_TWO
def test_is_killed():
    if jax.process_index() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@ON_TWO
def test_changes_its_process(tmp_path):
    os.chdir("/")
    os.environ["LEFT_BEHIND"] = "1"
    sys.path.insert(0, "/left/behind")
    jax.config.update("jax_enable_x64", True)
    jax.set_mesh(jax.make_mesh((4,), ("data",)))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    del sys.modules["logging"]
    shutil.rmtree(tmp_path.parent, ignore_errors=True)
    os.closerange(0, 3)


@ON_TWO
def test_finds_its_process_unchanged(tmp_path):
    assert os.path.isfile("pytest.ini") and "LEFT_BEHIND" not in os.environ
    assert "/left/behind" not in sys.path and "logging" in sys.modules
    assert not jax.config.jax_enable_x64 and jax.sharding.get_mesh().empty
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert tmp_path.is_dir()
    os.write(2, b"to the standard error\n")
    # The same processes.
    sys.modules["seen_before_the_shutdown"] = sys


@ON_TWO
def test_shuts_its_pod_down():
    assert "seen_before_the_shutdown" in sys.modules
    jax.distributed.shutdown()


@ON_TWO
def test_pod_is_replaced_after_its_shutdown():
    assert "seen_before_the_shutdown" not in sys.modules
    assert process_allgather(np.array(1)).sum() == 2


@ON_TWO
def test_is_interrupted():
    raise KeyboardInterrupt


@ON_TWO
def test_pod_is_replaced_after_an_interrupt():
    assert process_allgather(np.array(1)).sum() == 2


@pytest.mark.pod(processes=2, timeout=3)
def test_takes_too_long():
    def waits_for_ever():
        signal.pause()

    waits_for_ever()


@ON_TWO
def test_is_broken_in_setup(broken):
    raise AssertionError("never reached")


@ON_TWO
def test_skips_itself():
    pytest.skip("not on a pod")


@ON_TWO
@pytest.mark.skipif(True, reason="not at all")
def test_is_skipped_by_a_marker():
    raise AssertionError("never reached")


@ON_TWO
@pytest.mark.xfail(raises=ZeroDivisionError, reason="known")
def test_fails_as_expected():
    raise ZeroDivisionError


@ON_TWO
@pytest.mark.xfail(reason="fixed", strict=True)
def test_passes_unexpectedly():
    pass


@ON_TWO
def test_calls_breakpoint():
    breakpoint()


@ON_TWO
def test_skips_in_one():
    if jax.process_index():
        pytest.skip("not here")


@pytest.mark.pod(proceses=2)
def test_has_an_unknown_marker_argument():
    raise AssertionError("never reached")


@pytest.mark.pod(processes="2")
def test_has_an_invalid_process_count():
    raise AssertionError("never reached")


@pytest.mark.pod(2)
def test_has_a_positional_marker_argument():
    raise AssertionError("never reached")


@ON_TWO
class TestOfUnittest(unittest.TestCase):
    def test_is_refused(self):
        raise AssertionError("never reached")
