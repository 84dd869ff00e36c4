"""Runs of the main job in separate processes, which a test can signal."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.core.processes import pod_python
from xlashard.pods.testing.launcher import Launch, LaunchPlan, OutputChunk, PodSize, ProcessExit

ROOT = Path(__file__).resolve().parents[3]
_PATIENCE = 240.0

type Watcher = Callable[[Launch, str], bool]
"""Callback with the pod and the first process's output so far; returns whether it has acted."""


class Pod:
    """Outcome of a pod.

    Attributes:
        codes: The exit code of each process.
        texts: The output of each.
        ended: When each ended, in seconds of one clock.
    """

    def __init__(self, count: int) -> None:
        self.codes = dict.fromkeys(range(count), 0)
        self.texts = dict.fromkeys(range(count), "")
        self.ended = dict.fromkeys(range(count), 0.0)

    def report(self) -> str:
        return "\n".join(f"--- {n}: {self.codes[n]}\n{self.texts[n]}" for n in self.codes)


_APART = """
import os, sys
from xlashard.cli.main import main
number = os.environ["XLASHARD_POD_PROCESS_ID"]
os.chdir(number)
sys.exit(main([word.replace("{process}", number) for word in sys.argv[1:]]))
"""


@dataclass(frozen=True)
class OwnSignal:
    """Signal that a process of a pod sends to itself, so that no machine is too slow for it.

    Attributes:
        number: The signal.
        process: The process.
        step: The step after which it comes; 0 for the compilation before the first one.
    """

    number: signal.Signals
    process: int
    step: int


_SIGNALLED = """
import os, sys
from xlashard.cli.main import main
from xlashard.train.loop import console, steps
number, process, step = map(int, sys.argv.pop(1).split(","))
show, build = console.Screen.step, steps.build_programs


def stepped(screen, done, *rest):
    show(screen, done, *rest)
    if done == step:
        os.kill(os.getpid(), number)


def built(*args):
    if not step:
        os.kill(os.getpid(), number)
    return build(*args)


if os.environ["XLASHARD_POD_PROCESS_ID"] == str(process):
    console.Screen.step, steps.build_programs = stepped, built
sys.exit(main(sys.argv[1:]))
"""


_CHOSEN = """
import functools, os, sys
from tests.train.examples import named_layout
from xlashard.auto import planner
from xlashard.cli.main import main
# The first process plans for all.
named = functools.partial(named_layout, name=sys.argv.pop(1))
planner.plan_program = named if os.environ["XLASHARD_POD_PROCESS_ID"] == "0" else None
sys.exit(main(sys.argv[1:]))
"""


def train(
    folder: Path,
    size: PodSize,
    *words: str,
    watch: Watcher | None = None,
    own: OwnSignal | None = None,
    apart: bool = False,
    layout: str = "",
) -> Pod:
    """Run ``xlashard train`` in the processes of a pod, to their end.

    Args:
        folder: Their working folder.
        size: Size of the pod.
        words: Words of the command line.
        watch: Called after every event, until it has acted.
        own: A signal that a process sends to itself.
        apart: Each process runs in a folder of its own below, named by its number, which also
            stands for ``{process}`` in the words.
        layout: Name of the layout that the search of the first process chooses.
    """
    program = ["-c", _APART] if apart else ["-m", "xlashard"]
    if own is not None:
        program = ["-c", _SIGNALLED, f"{int(own.number)},{own.process},{own.step}"]
    if layout:
        program = ["-c", _CHOSEN, layout]
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *_further_folders()])}
    plan = LaunchPlan(
        [*pod_python(size, environment), *program, "train", *words],
        size,
        environment=environment,
        folder=str(folder),
        one_stream=True,
    )
    return run_watched(plan, watch)


def _further_folders() -> list[str]:
    """Return the folders that `PYTHONPATH` adds to this process, such as one with gcsfs."""
    return [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x and x != str(ROOT)]


def run_watched(plan: LaunchPlan, watch: Watcher | None = None) -> Pod:
    """Run the processes of a pod to their end.

    Args:
        plan: Commands of the processes.
        watch: Called after every event, until it has acted.
    """
    pod, acted, end = Pod(plan.size.processes), watch is None, time.monotonic() + _PATIENCE
    launch = Launch(plan)
    try:
        while launch.running and time.monotonic() < end:
            for event in launch.events(1.0):
                if isinstance(event, OutputChunk):
                    pod.texts[event.process] += event.text.decode(errors="replace")
                elif isinstance(event, ProcessExit):
                    pod.codes[event.process] = event.code
                    pod.ended[event.process] = time.monotonic()
            if watch and not acted:
                acted = watch(launch, pod.texts[0])
        assert not launch.running, f"{sorted(launch.running)} did not end\n{pod.report()}"
    finally:
        launch.close()
    return pod


def signalled(text: str, number: signal.Signals, process: int) -> Watcher:
    """Return a watcher that signals one process when the first one has printed a text."""

    def watch(launch: Launch, printed: str) -> bool:
        if text not in printed:
            return False
        launch.signal(number, [process])
        return True

    return watch
