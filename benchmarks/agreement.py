"""Cost of comparing a program between processes before its first run.

The benchmark starts pods of 2 and of 4 processes. In each, it times the comparison of a program
that is new to all processes beside a bare barrier in their shared store, which is the least that
any exchange between them costs; whole first calls, including tracing and compiling, with the
comparison and without; and repeat calls, which compare nothing. Where there are fewer cores than
processes, their digests are computed one after the other.

    python -m benchmarks.agreement [--rounds N] [--json PATH] [--strict]
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._measure import (
    ExtraGoal,
    Goal,
    Measurement,
    Report,
    TimeGoal,
    interleave,
    read_options,
)
from xlashard import Mesh, NamedSharding, P, make_array_from_callback, multihost, pjit
from xlashard._jax.lowering import uses_shardy
from xlashard._jax.runtime import compiler
from xlashard.core.processes import RENDEZVOUS, Barrier, store
from xlashard.core.program.consistency import CONSISTENCY
from xlashard.core.program.consistency.fingerprint import ProgramFingerprint
from xlashard.testing import pod

ROOT = Path(__file__).resolve().parents[1]
PODS = (2, 4)
# Number of layers of the function, and size of its module.
SIZES = {2: "45 lines", 50: "900 lines", 300: "5,400 lines"}
EXTRA = 5e-3
MEETING, COMPARED, PLAIN = "a meeting alone", "compared", "not compared"
DIGEST = "its digest alone"
FIRST, REPEAT = "first call, with tracing and compiling", "repeat call"
JIT_REPEAT = "repeat call of jax.jit"
MARK = "FIGURES "

type Samples = dict[str, list[float]]


def layers(count: int) -> Callable[[Any], Any]:
    """Return a function whose module grows with a number."""

    def function(x: Any) -> Any:
        for number in range(count):
            x = jnp.tanh(x @ x) + jnp.sin(x) * number
            x = jnp.where(x > 0, x, -x) / (1 + jnp.sum(x))
        return x

    return function


class Member:
    """Process of a pod."""

    def __init__(self, rounds: int) -> None:
        jax.distributed.initialize()
        self.rounds = rounds
        self.everybody = tuple(range(jax.process_count()))
        self.rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
        whole = np.ones((16, 16), np.float32)
        self.x = make_array_from_callback((16, 16), self.rows, lambda index: whole[index])
        self.made = 0

    def meet(self, series: str = "benchmark") -> None:
        """Wait for the other processes."""
        RENDEZVOUS.exchange(Barrier(self.everybody, series, 600), "")

    def in_step(self, candidates: Mapping[str, Callable[[], object]]) -> Samples:
        """Time calls that all processes make together, each after a barrier."""
        samples: Samples = {name: [] for name in candidates}
        for number in range(-2, self.rounds):
            gc.collect()
            turn = number % len(candidates)
            for name in [*candidates][turn:] + [*candidates][:turn]:
                self.meet("before")
                began = time.perf_counter()
                candidates[name]()
                if number >= 0:
                    samples[name].append(time.perf_counter() - began)
        return samples

    def new_programs(self, count: int) -> Samples:
        """Time the comparison of a program that is new in every round."""
        # Compilation takes long and is not measured here.
        lowered = pjit(layers(count)).lower(self.x)._program
        plan = lowered.plan
        request = compiler.CompileRequest(plan.devices, uses_shardy(), (False,), (True,))
        fingerprint = ProgramFingerprint(plan, lowered.body.module, request)

        def another() -> ProgramFingerprint:
            self.made += 1
            return replace(fingerprint, plan=replace(fingerprint.plan, name=f"program_{self.made}"))

        def write_and_read() -> None:
            self.made += 1
            key = f"benchmark/{jax.process_index()}/{self.made}"
            store.write(key, b"one word")
            assert store.read(key) == b"one word"

        return self.in_step(
            {
                MEETING: self.meet,
                COMPARED: lambda: CONSISTENCY.admit(another()),
                DIGEST: lambda: another().digest,
                "a write and a read": write_and_read,
            }
        )

    def first_calls(self) -> Samples:
        """Time whole calls of new functions."""

        def call() -> None:
            jax.block_until_ready(pjit(lambda x: x * 2 + 1)(self.x)._handle)

        def unchecked() -> None:
            with multihost.checked_programs(False):
                call()

        return self.in_step({PLAIN: unchecked, COMPARED: call})

    def repeat_calls(self) -> Samples:
        """Time repeat calls of pjit-ed functions, some compared and some not."""
        return self.repeated(pjit, self.x)

    def repeat_calls_of_jit(self) -> Samples:
        """Time repeat calls of functions of `jax.jit`, some compared and some not."""
        return self.repeated(jax.jit, self.x.to_jax())

    def repeated(self, jit: Callable[[Any], Any], x: Any) -> Samples:
        """Time repeat calls of two functions, of which one was compared at its first call."""
        compared, plain = (jit(lambda x: x + 1) for _ in range(2))
        with multihost.checked_programs(True):
            compared(x)
        with multihost.checked_programs(False):
            plain(x)
        calls = {PLAIN: lambda: plain(x), COMPARED: lambda: compared(x)}
        measured = interleave(calls, rounds=max(self.rounds, 11), inner=200)
        self.meet()
        return {name: list(m.samples) for name, m in measured.items()}


def work(rounds: int) -> None:
    """Run one process of the pod; the first process reports the figures."""
    member = Member(rounds)
    figures: dict[str, Samples] = {f"new program of {n} layers": {} for n in SIZES}
    for count in SIZES:
        figures[f"new program of {count} layers"] = member.new_programs(count)
    figures[FIRST] = member.first_calls()
    figures[REPEAT] = member.repeat_calls()
    figures[JIT_REPEAT] = member.repeat_calls_of_jit()
    if jax.process_index() == 0:
        print(MARK + json.dumps(figures), flush=True)


def measured_in(processes: int, rounds: int) -> dict[str, dict[str, Measurement]]:
    """Return the figures of one pod."""
    here = {"PYTHONPATH": str(ROOT)}
    members = pod(processes=processes, devices_per_process=2, timeout=240, environment=here)
    run = members.run_script(__file__, "--member", rounds)
    line = next(x for x in run.outputs[0].splitlines() if x.startswith(MARK))
    figures = json.loads(line.removeprefix(MARK))
    return {
        title: {name: Measurement(name, 1, tuple(s)) for name, s in samples.items()}
        for title, samples in figures.items()
    }


def goals_of(title: str, meeting: float) -> dict[str, Goal | float]:
    """Return the time limits of the comparison.

    Args:
        title: Title of the table.
        meeting: Time of a bare barrier, in seconds.
    """
    if title == REPEAT:
        return {COMPARED: 1.05}
    if title == JIT_REPEAT:
        return {COMPARED: 1.02}
    if title == FIRST:
        return {COMPARED: ExtraGoal(EXTRA + meeting)}
    return {COMPARED: ExtraGoal(EXTRA), DIGEST: TimeGoal(EXTRA)}


def report_pod(report: Report, processes: int, rounds: int) -> None:
    """Measure one pod and print its tables."""
    measured = measured_in(processes, rounds)
    new: Sequence[str] = [title for title in measured if title.startswith("new")]
    meeting = measured[new[0]][MEETING].median
    for title, found in measured.items():
        size = next((s for n, s in SIZES.items() if title.endswith(f" {n} layers")), "")
        report.add(
            f"{processes} processes, {title}{f' ({size})' if size else ''}",
            found,
            baseline=MEETING if title in new else PLAIN,
            goals=goals_of(title, meeting),
        )


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = read_options("Comparing programs between processes", rounds=15)
    report = Report("agreement")
    for processes in PODS:
        report_pod(report, processes, options.rounds)
    return report.finish(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        work(int(sys.argv[2]))
    else:
        raise SystemExit(main())
