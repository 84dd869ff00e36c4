"""Emulated devices, and flags that are set too late."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.fork_server import python_command
from tests.message_patterns import naming
from tests.pods.testing.helpers import environment
from xlashard.errors import DeviceCountError
from xlashard.pods.testing.emulated_devices import late_flags_text
from xlashard.testing import emulated_devices

FLAG = "--xla_force_host_platform_device_count"


def printed(source: str, *, fresh: bool = False, **more: str) -> str:
    """Return the output of a program in a subprocess, without the tests' device settings."""
    clean = environment(JAX_PLATFORMS="", XLA_FLAGS="", **more)
    python = [sys.executable] if fresh else python_command(clean)
    done = subprocess.run(
        [*python, "-c", source], env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FIRST = """
import os, jax
from xlashard.testing import emulated_devices
emulated = emulated_devices(5)
print(jax.device_count(), jax.devices()[0].platform, os.environ["XLA_FLAGS"].split()[-1])
with emulated as devices:
    print(len(devices))
with emulated_devices(3) as devices:
    print(devices == jax.devices()[:3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [{}, {"XLA_FLAGS": f"{FLAG}=2"}, {"JAX_NUM_CPU_DEVICES": "2"}])
def test_emulated_devices_set_the_flag_before_jax_starts(before: dict[str, str]) -> None:
    source = f"import os; os.environ.update({before!r})\n{FIRST}"
    assert printed(source, fresh=True) == f"5 cpu {FLAG}=5\n5\nTrue\n"


LATE = f"""
import os, jax
jax.devices("cpu")
os.environ["XLA_FLAGS"] = "{FLAG}=8"
from xlashard.testing import emulated_devices
try:
    emulated_devices(8)
except RuntimeError as error:
    print(type(error).__name__, error.asked, error.found, error)
"""


@pytest.mark.slow
def test_error_of_late_flags_suggests_a_fix() -> None:
    text = printed(LATE)
    assert text.startswith("DeviceCountError 8 1 ")
    assert re.search(naming("XLA_FLAGS requests 8", "conftest.py", "emulated_devices(8)"), text)
    assert f"export XLA_FLAGS={FLAG}=8" in text


def test_too_many_devices_are_refused() -> None:
    count = jax.device_count()
    with pytest.raises(
        DeviceCountError, match=f"with {count} CPU devices. It starts with"
    ) as caught:
        emulated_devices(count + 1)
    assert (caught.value.asked, caught.value.found) == (count + 1, count)


def test_fewer_emulated_devices_are_the_first_devices() -> None:
    before = os.environ["XLA_FLAGS"]
    with emulated_devices(3) as devices:
        assert devices == jax.devices()[:3]
    assert emulated_devices(3).devices == devices
    assert os.environ["XLA_FLAGS"] == before
    assert repr(emulated_devices(3)) == "emulated_devices(3)"


def test_late_flags_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    assert late_flags_text() == ""
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}=3")
    facts = naming("XLA_FLAGS", "3 emulated devices", "8", "emulated_devices(3)")
    assert re.search(facts, late_flags_text())
    monkeypatch.setenv("XLA_FLAGS", "")
    assert late_flags_text() == ""


TESTS = f"""
import os
import jax, xlashard

def test_it():
    jax.devices()
    os.environ["XLA_FLAGS"] = "{FLAG}=4"
    assert jax.device_count() == 4
"""


@pytest.mark.slow
def test_pytest_reports_late_flags_of_a_failed_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    clean = environment(XLA_FLAGS="")
    done = subprocess.run(
        [*python_command(clean), "-m", "pytest", "-p", "xlashard_pytest", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(naming("XLA_FLAGS", "4 emulated devices", "1", "too late"), done.stdout)


@pytest.mark.slow
@pytest.mark.pod(processes=2, devices=2)
def test_pod_size_has_precedence() -> None:
    assert len(emulated_devices(4).devices) == 4
    assert late_flags_text() == ""
    with pytest.raises(DeviceCountError, match=naming("4 devices", "devices=4)")):
        emulated_devices(8).devices  # noqa: B018
