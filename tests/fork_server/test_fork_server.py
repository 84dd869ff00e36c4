"""A forked process behaves as a fresh one: arguments, environment, streams, signals, exit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import python_command
from tests.grouped_cases import Together
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks of JAX are safe on Linux only"),
]


def run(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [*python_command(), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


def start(code: str) -> subprocess.Popen[str]:
    command = [*python_command(), "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_forked_process_has_arguments_environment_streams_and_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, sys\n"
        "atexit.register(print, 'at the end')\n"
        "print(sys.argv, sys.path[0], os.getcwd(), os.environ['OF_ITS_OWN'], input(), __name__)\n"
        "1 / 0\n"
    )
    environment = {**os.environ, "OF_ITS_OWN": "5"}
    done = run(str(script), "a b", cwd=tmp_path, env=environment, input="typed\n")
    expected = f"{[str(script), 'a b']} {tmp_path} {tmp_path} 5 typed __main__\nat the end\n"
    assert (done.returncode, done.stdout) == (1, expected)
    frames = ["Traceback (most recent call last):", f'  File "{script}", line 4, in <module>']
    assert done.stderr.splitlines()[:2] == frames
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_exit_status_equals_that_of_the_program() -> None:
    with Together() as together:
        for code, status, error in (
            ("import sys; sys.exit(3)", 3, ""),
            ("import sys; sys.exit('no')", 1, "no\n"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
            ("import os; os.abort()", -signal.SIGABRT, ""),
        ):
            with together.case(code):
                done = run("-c", code)
                assert done.returncode == status and done.stderr.startswith(error)
        with together.case("module"):
            assert "usage: python -m json.tool" in run("-m", "json.tool", "--help").stdout


def test_forked_process_has_its_own_devices_and_no_xlashard_module() -> None:
    code = (
        "import sys; print([m for m in sys.modules if m.startswith('xlashard')])\n"
        "import jax; print(len(jax.devices()))"
    )
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    assert run("-c", code, env=environment).stdout == "[]\n3\n"


def test_forked_process_reads_environment_variables_of_python_and_jax(tmp_path: Path) -> None:
    code = (
        "import faulthandler, sys; print(sys.path[1], faulthandler.is_enabled())\n"
        "import jax; print(jax.config.jax_compilation_cache_dir)\n"
        "print(jax.config.jax_persistent_cache_min_compile_time_secs)\n"
        "print(sys.stdout.write_through)"
    )
    given = {"PYTHONPATH": str(tmp_path), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/cache",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    without = {name: os.environ[name] for name in os.environ.keys() - given.keys() - cache.keys()}
    environment = {**without, **given, **cache}
    done = run("-c", code, env=environment)
    assert done.stdout == f"{tmp_path} True\n{tmp_path}/cache\n0.3\nTrue\n"
    assert python_command(environment) == python_command(without)


def test_forked_process_receives_signals_and_ends_with_its_client() -> None:
    waiting = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with start(waiting) as interrupted:
        assert interrupted.stdout is not None and interrupted.stderr is not None
        interrupted.stdout.readline()
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.stderr.read().endswith("KeyboardInterrupt\n")
        assert interrupted.wait(60) == -signal.SIGINT
    with start(waiting) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        killed.kill()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "end of the forked process")
