"""Run random programs from the command line.

A worker process runs one program after the other and reports its position. If XLA ends the process,
the next worker continues after that program.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tests.conftest  # noqa: F401  gives this process its devices, before JAX is imported
from tests.auto.random_layouts import find_layout_failure
from tests.core.pjit.random_programs.against_jax import find_difference
from tests.core.pjit.random_programs.checking import XLA, Failure, find_failure
from tests.core.pjit.random_programs.description import Program
from tests.core.pjit.random_programs.environment import jax_sharded
from tests.core.pjit.random_programs.generator import draw_program
from tests.core.pjit.random_programs.invalid import draw_invalid
from tests.core.pjit.random_programs.running import make_mesh, read_header, run, under
from tests.core.pjit.random_programs.shrinking import shrink
from tests.core.pjit.random_programs.text import program_text

PROGRAMS_PER_WORKER = 100
CRASH = "crash"


def main() -> int:
    """Run the requested programs; return 1 if any failed."""
    options = _options()
    if options.worker:
        return _work(options)
    seeds = options.seed or range(options.start, options.start + options.count)
    if options.show:
        for seed in seeds:
            print(program_text(_draw(seed, options)))
        return 0
    chunks = [seeds[i : i + PROGRAMS_PER_WORKER] for i in range(0, len(seeds), PROGRAMS_PER_WORKER)]
    kinds: Counter[str] = Counter()
    done = 0
    with ThreadPoolExecutor(options.processes) as pool:
        for failures in pool.map(lambda chunk: list(_supervise(chunk, options)), chunks):
            for seed, failure in failures:
                kinds[failure.kind] += 1
                _report(seed, failure, options)
            done = min(done + PROGRAMS_PER_WORKER, len(seeds))
            print(f"{done} of {len(seeds)} programs", file=sys.stderr, flush=True)
    of_xla = kinds.pop(XLA, 0)
    print(f"{len(seeds)} programs, {kinds.total()} failed {dict(kinds) or ''}, {of_xla} by XLA")
    return 1 if kinds else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.core.pjit.random_programs", description=__doc__
    )
    parser.add_argument("--count", type=int, default=100, help="how many programs")
    parser.add_argument("--start", type=int, default=0, help="the seed of the first")
    parser.add_argument("--seed", type=int, action="append", help="this one (several times: these)")
    parser.add_argument("--show", action="store_true", help="print the programs, run nothing")
    parser.add_argument("--as-drawn", action="store_true", help="show failing ones as they are")
    parser.add_argument("--processes", type=int, default=1, help="how many at once")
    parser.add_argument(
        "--partitioner", choices=["shardy", "gspmd"], help="instead of the one that is drawn"
    )
    parser.add_argument(
        "--against-jax",
        action="store_true",
        help="compare with jax.jit on the same mesh, also what is refused and where results lie",
    )
    parser.add_argument(
        "--layouts", action="store_true", help="run them under the layouts that AUTO finds"
    )
    parser.add_argument(
        "--invalid",
        action="store_true",
        help="spoil each program by one mistake, and compare the classes of errors too",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _is_set(options: argparse.Namespace, name: str) -> bool:
    return getattr(options, name.removeprefix("--").replace("-", "_"))


def _draw(seed: int, options: argparse.Namespace) -> Program:
    return (draw_invalid if options.invalid else draw_program)(seed)


def _emit(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _work(options: argparse.Namespace) -> int:
    """Run the texts in a file, and report the position before and the failure after each."""
    request = json.loads(Path(options.worker).read_text())
    for position, text in enumerate(request["texts"]):
        _emit(position=position)
        if request["library"] == "jax" and options.layouts:
            find_layout_failure(text, options.partitioner, under_jit=True)
            continue
        if request["library"] == "jax":
            header = read_header(text)
            with under(options.partitioner or header.partitioner):
                run(text, jax_sharded(make_mesh(header)))
            continue
        if options.layouts:
            failure = find_layout_failure(text, options.partitioner)
        elif options.against_jax:
            failure = find_difference(text, options.partitioner, classes=options.invalid)
        else:
            failure = find_failure(text, options.partitioner)
        if failure is not None:
            _emit(failure=[failure.kind, failure.message, failure.jax], position=position)
            if request["stop"]:
                return 0
    _emit(done=True)
    return 0


def _run_worker(
    texts: Sequence[str], options: argparse.Namespace, *, stop: bool = False, library: str = ""
) -> tuple[list[tuple[int, Failure]], int | None]:
    """Run texts in a worker; return its failures, and its position if the process died."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "request.json")
        path.write_text(json.dumps({"texts": list(texts), "stop": stop, "library": library}))
        command = [sys.executable, "-m", __spec__.parent, "--worker", str(path)]
        if options.partitioner:
            command += ["--partitioner", options.partitioner]
        command += [
            name for name in ("--against-jax", "--layouts", "--invalid") if _is_set(options, name)
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found, position = [], 0
    for line in done.stdout.splitlines():
        fields = json.loads(line) if line.startswith("{") else {}
        position = fields.get("position", position)
        if "failure" in fields:
            found.append((position, Failure(*fields["failure"])))
    if done.returncode == 0:
        return found, None
    lines = [line for line in done.stderr.splitlines() if "Check failed" in line or "Error" in line]
    message = lines[0] if lines else done.stderr[-500:]
    return [*found, (position, Failure(CRASH, f"the process died: {message}"))], position


def _supervise(seeds: Sequence[int], options: argparse.Namespace) -> Iterator[tuple[int, Failure]]:
    """Run the programs of seeds, with a new worker after each crash."""
    start = 0
    while start < len(seeds):
        texts = [program_text(_draw(seed, options)) for seed in seeds[start:]]
        found, died = _run_worker(texts, options)
        for position, failure in found:
            is_crash = failure.kind == CRASH
            seen = _crash(texts[position], failure.message, options) if is_crash else failure
            yield seeds[start + position], seen
        if died is None:
            return
        start += died + 1


def _crash(text: str, message: str, options: argparse.Namespace) -> Failure:
    """Return the failure of a program that ends the process, by its outcome under `jax.jit`."""
    _, died = _run_worker([text], options, library="jax")
    jax_outcome = "right" if died is None else "ends the process too"
    return Failure(CRASH if died is None else XLA, message, jax_outcome)


def _report(seed: int, failure: Failure, options: argparse.Namespace) -> None:
    """Print a failure with its shrunk program; of a fault of XLA the seed and the difference."""
    if failure.kind == XLA:
        print(f"seed {seed}: {failure}", flush=True)
        return
    program = _draw(seed, options)
    if not options.as_drawn:
        program = shrink(program, lambda smaller: _first_failing(smaller, failure, options))
    print(f"{'-' * 80}\nseed {seed}: {failure}\n\n{program_text(program)}", flush=True)


def _first_failing(
    programs: Sequence[Program], failure: Failure, options: argparse.Namespace
) -> int | None:
    """Return the position of the first program that fails with the same kind."""
    start = 0
    while start < len(programs):
        texts = [program_text(program) for program in programs[start:]]
        found, _ = _run_worker(texts, options, stop=True)
        if not found:
            return None
        position, other = found[-1]
        if other.kind == failure.kind:
            return start + position
        start += position + 1
    return None


if __name__ == "__main__":
    sys.exit(main())
