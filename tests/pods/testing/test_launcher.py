"""Starting processes, reading their output and messages, and reporting their end."""

import errno
import json
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.message_patterns import naming
from tests.pods.testing.helpers import plan, python, ran
from tests.waiting import all_gone
from xlashard.config import PodPlace, place_variables, read_flags
from xlashard.errors import LaunchError
from xlashard.pods.testing.emulated_devices import (
    flagged_devices,
    flags_for_devices,
    pod_environment,
)
from xlashard.pods.testing.launcher import (
    CHANNEL,
    Launch,
    LaunchPlan,
    OutputChunk,
    ProcessExit,
)
from xlashard.pods.testing.supervision import EndingRules, Verdict, run_to_end

TELL = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.slow
def test_each_process_has_its_pod_variables() -> None:
    done = ran(python(TELL), processes=3)
    flags = [read_flags(json.loads(output)).pod for output in done.outputs]
    places = [place for place in flags if place is not None]
    assert [place.process_id for place in places] == [0, 1, 2]
    assert len({place.coordinator for place in places}) == 1
    assert places[0].coordinator.startswith("127.0.0.1:")
    assert {(place.processes, place.devices) for place in places} == {(3, 1)}


@pytest.mark.slow
def test_concurrent_launches_use_different_ports() -> None:
    with Launch(plan(python(TELL), 1)) as one, Launch(plan(python(TELL), 1)) as other:
        ports = {
            json.loads(output_of(launch))["JAX_COORDINATOR_ADDRESS"] for launch in (one, other)
        }
    assert len(ports) == 2


def output_of(launch: Launch) -> bytes:
    text = b""
    while launch.running:
        text += b"".join(e.text for e in launch.events(30) if isinstance(e, OutputChunk))
    return text + b"".join(e.text for e in launch.rest() if isinstance(e, OutputChunk))


@pytest.mark.parametrize("processes", [1000, 10**20])
def test_open_file_limit(processes: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 100, before[1]))
    try:
        with pytest.raises(LaunchError, match=naming(f"{processes:,}", "processes")) as error:
            Launch(plan(python(TELL), processes, channels=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert error.value.errno == errno.EMFILE
    assert len(os.listdir("/proc/self/fd")) == opened


PLACE = PodPlace("127.0.0.1:1234", 2, 1, 4)


def test_pod_environment_variables() -> None:
    base = {
        "PATH": "/bin",
        "JAX_PLATFORMS": "tpu",
        "JAX_NUM_CPU_DEVICES": "16",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to=there",
    }
    result = pod_environment(base, PLACE)
    assert result["PATH"] == "/bin"
    assert result["JAX_PLATFORMS"] == "cpu"
    assert "JAX_NUM_CPU_DEVICES" not in result
    assert flagged_devices(result["XLA_FLAGS"]) == 4
    assert "--xla_dump_to=there" in result["XLA_FLAGS"].split()
    # The service must not listen where others connect.
    assert result["JAX_COORDINATOR_BIND_ADDRESS"] == "127.0.0.1:1234"
    assert read_flags(result).pod == PLACE
    assert "no_grpc_proxy" not in result
    assert pod_environment({"HTTPS_PROXY": "http://proxy"}, PLACE)["no_grpc_proxy"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ("", None),
        ("--xla_force_host_platform_device_count=3", 3),
        ("--xla_force_host_platform_device_count=3 --xla_force_host_platform_device_count=5", 5),
        ("--xla_force_host_platform_device_count_else=3", None),
        ("--xla_force_host_platform_device_count=many", None),
    ],
)
def test_device_count_flag_is_parsed_like_xla(flags: str, devices: int | None) -> None:
    assert flagged_devices(flags) == devices
    assert flagged_devices(flags_for_devices(flags, 7)) == 7


def test_user_flags_are_kept() -> None:
    own = "--xla_cpu_collective_call_terminate_timeout_seconds=9"
    assert flags_for_devices(own, 2).split().count(own) == 1
    assert flags_for_devices(own, 2).count("terminate_timeout") == 1


def test_pod_variables_round_trip() -> None:
    assert read_flags(place_variables(PLACE)).pod == PLACE


@pytest.mark.slow
def test_separate_and_merged_streams() -> None:
    source = "import sys\nfor i in range(3): print(i); print(-i, file=sys.stderr)"
    with Launch(plan(python(source), 1)) as launch:
        result = {"stdout": b"", "stderr": b""}
        while launch.running:
            for event in launch.events(30):
                if isinstance(event, OutputChunk):
                    result[event.stream] += event.text
        for event in launch.rest():
            if isinstance(event, OutputChunk):
                result[event.stream] += event.text
    assert result == {"stdout": b"0\n1\n2\n", "stderr": b"0\n-1\n-2\n"}
    assert ran(python(source), 1).outputs == ("0\n0\n1\n-1\n2\n-2\n",)


@pytest.mark.slow
def test_output_is_complete() -> None:
    done = ran(python("import sys; sys.stdout.write('x' * 3_000_001)"))
    assert [len(output) for output in done.outputs] == [3_000_001] * 2


def test_undecodable_output_is_shown() -> None:
    assert ran(python("import os; os.write(1, b'a\\xffb')"), 1).outputs == ("a�b",)


@pytest.mark.slow
def test_channels_are_bidirectional() -> None:
    source = (
        "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]));"
        "s.sendall(s.recv(99)[::-1]); s.recv(1)"
    )
    heard: dict[int, bytes] = {}
    with Launch(plan([*python(source), CHANNEL], channels=True)) as launch:
        for number, word in enumerate((b"abc", b"xyz")):
            launch.send(number, word)
        while len(heard) < 2:
            for event in launch.events(30):
                if isinstance(event, OutputChunk) and event.stream == "channel":
                    heard[event.process] = event.text
    assert heard == {0: b"cba", 1: b"zyx"}


@pytest.mark.slow
def test_missing_program_is_reported() -> None:
    with pytest.raises(LaunchError, match=naming("'nonesuch'", "PATH", "python -m package")):
        Launch(plan(["nonesuch"]))
    with pytest.raises(LaunchError, match="python script.py"):
        Launch(plan(["script.py"]))
    with pytest.raises(LaunchError, match=naming("'/nowhere'", "'true'")):
        Launch(plan(["true"], folder="/nowhere"))


def test_non_executable_program_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(3)")
    with pytest.raises(LaunchError, match=naming("Permission denied", str(script), "Python")):
        Launch(plan([str(script)]))


@pytest.mark.slow
def test_all_exit_codes_are_reported() -> None:
    source = "import os; os._exit(int(os.environ['XLASHARD_POD_PROCESS_ID']))"
    done = ran(python(source), 3)
    assert done.verdict.codes == (0, 1, 2)
    assert not done.verdict.well


FAIL_IN_ONE = """
import os, signal, sys
print("this is", os.environ["XLASHARD_POD_PROCESS_ID"], flush=True)
if os.environ["XLASHARD_POD_PROCESS_ID"] == "1":
    {}
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "cause", "code"),
    [
        ("sys.exit(3)", "exit code 3", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", 137),
        ("raise ValueError('broken')", "exit code 1", 1),
    ],
)
def test_a_failure_ends_the_other_processes(act: str, cause: str, code: int) -> None:
    done = ran(python(FAIL_IN_ONE.format(act)), 3, grace=0.2)
    verdict = done.verdict
    assert verdict.first is not None and verdict.first.process == 1
    assert verdict.ended == (0, 2)
    assert verdict.codes[0] == verdict.codes[2] == -signal.SIGTERM
    assert verdict.summary() == (
        f"process 1 failed first: {cause}; processes 0, 2 still ran 0.2 s later and were ended"
    )
    assert verdict.exit_code() == code
    report = done.report()
    assert report.index(f"--- process 1 ({cause}) ---") < report.index("--- process 0 (killed by")
    assert "ValueError: broken" in report or "raise" not in act


@pytest.mark.slow
def test_processes_that_ignore_sigterm_are_killed() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    done = ran(python(deaf + FAIL_IN_ONE.format("sys.exit(3)")), 2, grace=0.2)
    assert done.verdict.codes == (-signal.SIGKILL, 3)


def test_processes_that_end_within_the_grace_period_are_kept() -> None:
    source = "import os, sys; sys.exit(4 * (os.environ['XLASHARD_POD_PROCESS_ID'] == '0'))"
    verdict = ran(python(source), grace=60).verdict
    assert (verdict.codes, verdict.ended) == ((4, 0), ())
    assert verdict.summary() == "process 0 failed first: exit code 4"


STUCK = """
import os, signal, threading
def in_a_thread(): threading.Event().wait()
def in_front(): signal.pause()
threading.Thread(target=in_a_thread, daemon=True).start()
if os.environ["XLASHARD_POD_PROCESS_ID"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
in_front()
"""


def test_failures_are_reported_in_order() -> None:
    verdict = Verdict(
        (4, 0, -9), (ProcessExit(2, -9), ProcessExit(0, 4)), (), (), (), None, EndingRules()
    )
    assert verdict.summary() == (
        "process 2 failed first: killed by SIGKILL, then process 0: exit code 4"
    )
    assert verdict.exit_code() == 137


@pytest.mark.slow
def test_timeout_shows_all_stacks() -> None:
    done = ran(python(STUCK), timeout=2)
    assert done.verdict.timed_out == (0, 1)
    assert done.verdict.paused == (1,)
    assert done.verdict.exit_code() == 124
    summary = done.verdict.summary()
    assert summary.startswith("processes 0, 1 did not end within 2 s")
    assert summary.endswith("process 1 was stopped by a signal (SIGSTOP)")
    for output in done.outputs:
        assert "in in_a_thread" in output
    assert "in in_front" in done.outputs[0]
    assert done.verdict.codes == (-signal.SIGABRT,) * 2


@pytest.mark.slow
def test_timeout_leaves_no_core_file(tmp_path: Path) -> None:
    source = "import resource, time; resource.setrlimit(resource.RLIMIT_CORE, (2**20, 2**20));"
    source += f"import os; os.chdir({str(tmp_path)!r}); time.sleep(1000)"
    ran(python(source), 1, timeout=1)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_report_shows_the_last_lines() -> None:
    report = ran(python("print(*range(100), sep='\\n'); raise SystemExit(1)"), 1).report(lines=3)
    assert report.splitlines()[1:] == [
        "--- process 0 (exit code 1) ---",
        "[97 lines before]",
        "97",
        "98",
        "99",
    ]
    assert "[it wrote nothing]" in ran([sys.executable, "-c", "raise SystemExit(1)"], 1).report()


@pytest.mark.slow
def test_processes_may_end_during_the_launch() -> None:
    for _ in range(10):
        assert ran(["true"], 4).verdict.codes == (0,) * 4


class HeardLate(Launch):
    """Launch that is notified of its processes after they and their guard have ended."""

    def _await_start(self, plan: LaunchPlan) -> None:
        self._guard.wait()
        super()._await_start(plan)


def test_processes_may_end_before_supervision() -> None:
    done = run_to_end(HeardLate(plan(["true"], 4)), EndingRules())
    assert done.verdict.codes == (0,) * 4


def test_order_of_exits_on_a_busy_machine(tmp_path: Path) -> None:
    source = "import os, sys; open(sys.argv[1 + int(os.environ['XLASHARD_POD_PROCESS_ID'])]).read()"
    description = [str(tmp_path / str(number)) for number in range(3)]
    for name in description:
        os.mkfifo(name)
    with Launch(plan([*python(source), *description], 3)) as launch:
        # As if other processes had the CPU while they end, the last one first.
        os.kill(launch._guard.pid, signal.SIGSTOP)
        for number in (2, 1, 0):
            Path(description[number]).write_text("end")
            assert all_gone([launch.pids[number]])
        os.kill(launch._guard.pid, signal.SIGCONT)
        ends = []
        while launch.running:
            ends += [event.process for event in launch.events(30) if isinstance(event, ProcessExit)]
    assert ends == [2, 1, 0]
