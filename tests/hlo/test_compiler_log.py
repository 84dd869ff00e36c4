"""Log of the compiler, collected from standard error."""

import os
import threading

import pytest

from xlashard.hlo.compiler_log import captured_log


@pytest.mark.parametrize("hides_warnings", [False, True])
def test_a_collected_log_is_passed_on_without_warnings_if_asked(capfd, monkeypatch, hides_warnings):
    # Other threads of a test run write nothing here.
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    warning = "W1130 04:27:52.202249    9404 spmd_partitioner.cc:666] [SPMD] Involuntary\n"
    others = "E1130 04:27:53.202249    9404 service.cc:1] failed\nplain\n"
    with captured_log(hides_warnings=hides_warnings) as log:
        os.write(2, (warning + others).encode())
    assert log == [warning + others]
    assert capfd.readouterr().err == (others if hides_warnings else warning + others)
