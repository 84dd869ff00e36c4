"""Several real processes that run one program."""

import contextlib
import os
import random
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tests.fork_server import python_command
from xlashard.config import PodPlace
from xlashard.pods.testing.emulated_devices import pod_environment
from xlashard.pods.testing.launcher import Launch, LaunchPlan, PodSize
from xlashard.pods.testing.supervision import EndingRules, PodRun, run_to_end

ROOT = Path(__file__).resolve().parents[3]
# State of a socket in /proc/net/tcp.
_LISTENING = "0A"


def run_many(
    script: Path, processes: int, devices: int, *args: str, timeout: float = 240
) -> list[str]:
    """Run a script in the processes of an emulated pod.

    In it, `join_the_others` initialises `jax.distributed`.

    Args:
        script: It gets the arguments; its environment has its place in the pod.
        processes: Number of processes.
        devices: Number of devices of each.
        args: The arguments.
        timeout: Seconds after which all processes dump their stacks and are ended.

    Returns:
        The output of each, if all succeeded.
    """
    done = run_pod([str(script), *args], PodSize(processes, devices), EndingRules(timeout))
    assert done.verdict.well, done.report()
    return list(done.outputs)


def run_in_one_pod(scripts: Sequence[Path], processes: int, devices: int) -> list[dict[str, str]]:
    """Run scripts in the processes of one emulated pod, one script after the other.

    Args:
        scripts: Each joins the pod first.
        processes: Number of processes.
        devices: Number of devices of each.

    Returns:
        The output of each process, by the script's name, if all succeeded.
    """
    runner = Path(__file__).with_name("one_after_the_other.py")
    records = []
    for output in run_many(runner, processes, devices, *map(str, scripts)):
        _, *parts = re.split(r"^--- (.*)\n", output, flags=re.M)
        records.append(dict(zip(parts[::2], parts[1::2], strict=True)))
    return records


def run_pod(words: Sequence[str], size: PodSize, rules: EndingRules, **variables: str) -> PodRun:
    """Run a script in the processes of an emulated pod, and return their ends of any kind.

    Args:
        words: The script, and its arguments.
        size: Size of the pod.
        rules: Rules for ending its processes.
        variables: Variables of their environment.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [*pod_python(size, environment), *words]
    plan = LaunchPlan(command, size, environment=environment, one_stream=True)
    return run_to_end(Launch(plan), rules)


def pod_python(size: PodSize, environment: Mapping[str, str]) -> list[str]:
    """Return the start of a command line that runs Python in each process of a pod.

    Args:
        size: Size of the pod.
        environment: Environment, to which the launcher adds the variables of the pod.
    """
    place = PodPlace("", size.processes, 0, size.devices)
    return python_command(pod_environment(environment, place))


def free_port() -> int:
    """Return a TCP port that no program uses, and that no program is given meanwhile.

    Ports that the system assigns begin at 32768, so another connection could take one of those
    between this call and its use.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def listening_addresses() -> set[str]:
    """Return the addresses at which this process listens, as the kernel writes them."""
    sockets = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # The folder that is being listed.
            sockets.add(os.readlink(f"/proc/self/fd/{file}"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                addresses.add(fields[1].partition(":")[0])
    return addresses


def join_the_others() -> None:
    """Join the pod that `run_many` started; called before JAX initialises its backend."""
    if not jax.distributed.is_initialized():
        jax.distributed.initialize()


def expect[E: Exception](kind: type[E], text: str, use: Callable[[], Any]) -> E:
    """Return the error that a call must raise, with a text in it; `pytest.raises` for scripts."""
    try:
        use()
    except kind as error:
        assert re.search(text, str(error), re.S), error
        return error
    raise AssertionError(f"no {kind.__name__}")
