"""Faults in the main job: ``python -m tests.train.stress --faults 200 --seed 1``.

A chain is one run of the main job on a pod of two processes. Each of its launches has a fault at a
random point, until the last one finishes the run. Its losses and its last checkpoint are then
compared with those of a run without faults: to the bit, or within 1e-6 where a launch of the chain
had another number of processes. The faults and the exit code of every launch are printed, and so is
the seed that repeats them; timing is the machine's, so a repetition hits other lines of the code.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTINGS = """
[devices]
emulate = 2
[mesh]
fsdp = 2
[sharding.rules]
batch = "fsdp"
embed = "fsdp"
[model]
layers = 1
width = 16
heads = 2
kv_heads = 2
mlp = 32
length = 32
[training]
steps = 400
batch = 4
eval_every = 100
eval_batches = 1
log_every = 50
[checkpoint]
every = 20
keep = 3
[pod]
heartbeat = 20
watchdog = 60
[generation]
bytes = 4
"""

DOCUMENTED = {0, 1, 75, 130, 143, 128 + signal.SIGKILL}
"""Exit codes of a launch with a fault; 2 is allowed where the folder itself is at fault."""

NO_FAULT = "the launch gave no occasion"
"""Description of a launch without its fault, which does not count."""

_LIMIT = 300.0  # Seconds for one launch; a longer one hangs.
_LEFT = 20.0  # Seconds for the last process of a launch to end.
_CLOSE = 1e-6
_TAG = "STRESS_LAUNCH"
_MOVE = re.compile(r"  mv (\S+) (\S+)")

type Points = dict[tuple[str, int], float]


class Failure(Exception):
    """Something was lost, hung, or ended with another exit code."""


def measure(run: Path) -> Points:
    """Return the losses of a run; each step once."""
    points: Points = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if record["kind"] in ("train", "eval"):
                key = record["kind"], record["step"]
                if key in points:
                    raise Failure(f"{key} is in metrics.jsonl twice")
                points[key] = record["loss"]
    return points


_DIGEST = """
import hashlib, sys, jax, numpy as np, orbax.checkpoint as ocp
with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    found = reader.metadata(sys.argv[1])
    tree = getattr(getattr(found, "item_metadata", found), "tree", found)
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    state = reader.restore(sys.argv[1], args=ocp.args.PyTreeRestore(restore_args=plain))
print(hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state))).hexdigest())
"""


def digest_last(run: Path) -> str:
    """Return the name of the last checkpoint with a digest of its arrays."""
    last = sorted((run / "checkpoints").glob("0*"))[-1]
    words = [sys.executable, "-c", _DIGEST, str(last / "arrays")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return f"{last.name} {done.stdout.split()[-1]}"


class Launched:
    """A launch of the main job on a pod.

    Args:
        folder: Working folder.
        words: Words of ``xlashard train``.
        processes: Number of processes; their devices are two.
        limit: Bytes that a file of the launch may have; None for no limit.
    """

    def __init__(
        self, folder: Path, words: list[str], processes: int = 2, limit: int | None = None
    ) -> None:
        self.tag, self._lines = os.urandom(6).hex(), list[str]()
        python = [sys.executable, "-m", "xlashard"]
        pod = ["pod", "-n", str(processes), "-d", str(2 // processes), "--"]
        command = [*python, *pod, *python, "train", *words]
        if limit is not None:
            command = ["prlimit", f"--fsize={limit}", *command]
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
        environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
        self.launcher = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, _TAG: self.tag},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            self._lines.append(line)

    @property
    def text(self) -> str:
        """Return the output so far."""
        return "".join(self._lines)

    def find(self) -> dict[str, int]:
        """Return the process ids of the launch: launcher, guard, 0, 1."""
        found = {"launcher": self.launcher.pid}
        for pid in self.alive():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                place = re.search(
                    rb"XLASHARD_POD_PROCESS_ID=(\d+)", Path(f"/proc/{pid}/environ").read_bytes()
                )
                if any(word.endswith(b"guard.py") for word in words):
                    found["guard"] = pid
                elif place and b"train" in words:
                    found.setdefault(place[1].decode(), pid)
        return found

    def alive(self) -> list[int]:
        """Return the processes of the launch that have not ended, by number."""
        alive = []
        for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            with suppress(OSError):
                tag = f"{_TAG}={self.tag}".encode()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if tag in (entry / "environ").read_bytes().split(b"\0") and state != "Z":
                    alive.append(int(entry.name))
        return alive

    def wait_for(self, seen: Callable[[], bool]) -> None:
        """Wait until a condition holds or the launch ends."""
        end = time.monotonic() + _LIMIT
        while self.launcher.poll() is None and time.monotonic() < end and not seen():
            time.sleep(0.005)

    def end(self) -> int:
        """Wait for the end; return the exit code as of a shell.

        Raises:
            Failure: The launch hangs, or leaves processes behind.
        """
        try:
            code = self.launcher.wait(_LIMIT)
            end = time.monotonic() + _LEFT
            while (left := self.alive()) and time.monotonic() < end:
                time.sleep(0.1)
            if left:
                raise Failure(f"processes are left behind: {left}\n{self.text[-3000:]}")
        except subprocess.TimeoutExpired:
            raise Failure(f"the launch hangs\n{self.text[-3000:]}") from None
        finally:
            for pid in self.alive():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._reader.join(5)
        return code if code >= 0 else 128 - code


@dataclass
class Chain:
    """One run with faults.

    Attributes:
        folder: Working folder of the launches.
        name: Name of the run.
        chance: Source of all choices.
        exact: False once a launch had another number of processes.
    """

    folder: Path
    name: str
    chance: random.Random
    exact: bool = True

    @property
    def run(self) -> Path:
        """Return the folder of the run."""
        return self.folder / "runs" / self.name

    @property
    def words(self) -> list[str]:
        """Return the words that start or resume the run."""
        if list((self.run / "checkpoints").glob("0*")):
            return ["--resume", f"runs/{self.name}"]
        # A run without a checkpoint starts again.
        shutil.rmtree(self.run, ignore_errors=True)
        return ["--config", "stress.toml", "--name", self.name]

    def launch(self, **options: Any) -> Launched:
        """Start or resume the run."""
        return Launched(self.folder, self.words, **options)

    def steps(self) -> int:
        """Return how many steps are recorded."""
        with suppress(OSError):
            return (self.run / "metrics.jsonl").read_text().count('"train"')
        return 0

    def await_phase(self, launched: Launched) -> str:
        """Wait for a random phase of a launch; return its name."""
        chance, before = self.chance, self.steps()
        saving = set(self.run.glob("checkpoints/.saving-*"))
        phase = chance.choice(["start", "compile", "step", "step", "save", "save", "end"])
        conditions: dict[str, Callable[[], bool]] = {
            "start": lambda: "0" in launched.find(),
            "compile": lambda: "Compiling the" in launched.text,
            "step": lambda: self.steps() > before or "Compiled in" in launched.text,
            "save": lambda: not saving.issuperset(self.run.glob("checkpoints/.saving-*")),
            "end": lambda: "step 400/400" in launched.text,
        }
        longest = {"start": 5.0, "compile": 3.0, "step": 1.0, "save": 0.1, "end": 0.8}
        launched.wait_for(conditions[phase])
        time.sleep(chance.random() * longest[phase])
        return phase

    def check_code(self, launched: Launched, *more: int) -> int:
        """Wait for the end of a launch; return its documented exit code."""
        code = launched.end()
        if code not in DOCUMENTED | set(more):
            raise Failure(f"exit code {code}\n{launched.text[-3000:]}")
        if "Traceback" in launched.text and code not in (130, 143):
            raise Failure(f"a traceback\n{launched.text[-3000:]}")
        return code


def send(pid: int | None, number: int) -> None:
    """Signal a process that may have ended."""
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def signal_process(chain: Chain) -> tuple[str, int]:
    """Send a signal to a process, the guard, or the launcher."""
    launched = chain.launch()
    launched.wait_for(lambda: len(launched.find()) > 3)
    found = launched.find()
    phase = chain.await_phase(launched)
    target = chain.chance.choice(["0", "1", "0", "1", "guard", "launcher", "all"])
    kind = chain.chance.choice(["KILL", "KILL", "TERM", "INT", "STOP"])
    pids = list(found.values()) if target == "all" else [found.get(target)]
    for pid in pids:
        send(pid, signal.Signals[f"SIG{kind}"])
    if kind == "STOP":
        # Shorter or longer than the heartbeat, or for good.
        seconds, then = chain.chance.choice([(2, "CONT"), (40, "CONT"), (3, "KILL")])
        end = time.monotonic() + seconds
        launched.wait_for(lambda: time.monotonic() > end)
        kind += f" for {seconds} s, {then}"
        for pid in pids:
            send(pid, signal.Signals[f"SIG{then}"])
    return f"{phase}: {kind} to {target}", chain.check_code(launched)


def launch_twice(chain: Chain) -> tuple[str, int]:
    """Launch the run a second time while it runs, and kill one of the two or neither."""
    first = chain.launch()
    phase = chain.await_phase(first)
    before = chain.run.exists() and bool(list(chain.run.glob("checkpoints/0*")))
    if not before:
        return NO_FAULT, chain.check_code(first)
    second = Launched(chain.folder, ["--resume", f"runs/{chain.name}"])
    victim = chain.chance.choice([None, first, second])
    if victim is not None:
        victim.wait_for(lambda: len(victim.find()) > 3)
        time.sleep(chain.chance.random() * 6)
        for pid in victim.find().values():
            send(pid, signal.SIGKILL)
    codes = chain.check_code(first, 2), chain.check_code(second, 2)
    if victim is None and codes not in ((0, 2), (0, 0), (2, 0)):
        raise Failure(f"two launches ended with {codes}\n{second.text[-2000:]}")
    who = {None: "neither", first: "the first", second: "the second"}[victim]
    return f"{phase}: second launch, {who} killed, {codes}", min(codes)


def limit_files(chain: Chain) -> tuple[str, int]:
    """Let every file end at a size, as a full disk does."""
    limit = chain.chance.choice([200, 3000, 9000, 30000])
    return f"files of {limit} bytes at most", chain.check_code(chain.launch(limit=limit), 2)


def cut_file(chain: Chain) -> tuple[str, int]:
    """Cut a file off between two launches."""
    steps = sorted(chain.run.glob("checkpoints/0*"))
    parts = [path for path in steps[-1].rglob("*") if path.is_file()] if len(steps) > 1 else []
    files = [chain.run / "config.toml", chain.run / "metrics.jsonl", *parts[:8]]
    path = chain.chance.choice([path for path in files if path.exists()] or [None])
    if path is None:
        return NO_FAULT, chain.check_code(chain.launch())
    size = chain.chance.randrange(path.stat().st_size)
    os.truncate(path, size)
    launched = chain.launch()
    code = chain.check_code(launched)
    if advice := _MOVE.search(launched.text):
        # The command is relative to the working folder.
        (chain.folder / advice[1]).rename(chain.folder / advice[2])
    elif path in parts and code != 0:
        raise Failure(f"{path} was cut to {size} bytes\n{launched.text[-2000:]}")
    return f"{path.relative_to(chain.run)} cut to {size} bytes", code


def rename_folder(chain: Chain) -> tuple[str, int]:
    """Rename the run's folder while it runs, and back."""
    launched, away = chain.launch(), chain.run.with_name(f"{chain.name}-away")
    phase = chain.await_phase(launched)
    if not chain.run.exists():
        return NO_FAULT, chain.check_code(launched)
    chain.run.rename(away)
    code = chain.check_code(launched, 2)
    if chain.run.exists():
        left = [x.name for x in chain.run.rglob("*") if x.is_file() and x.name.startswith("check")]
        if left:
            raise Failure(f"the renamed run went on in a new folder: {left}")
        shutil.rmtree(chain.run)
    away.rename(chain.run)
    return f"{phase}: folder renamed", code


def remove_checkpoints(chain: Chain) -> tuple[str, int]:
    """Remove what is being saved while the run saves it."""
    launched = chain.launch()
    phase = chain.await_phase(launched)
    for path in chain.run.glob("checkpoints/.saving-*"):
        shutil.rmtree(path, ignore_errors=True)
    return f"{phase}: .saving-* removed", chain.check_code(launched)


def change_size(chain: Chain) -> tuple[str, int]:
    """Continue with one process in place of two."""
    chain.exact = False
    launched = chain.launch(processes=1)
    phase = chain.await_phase(launched)
    send(launched.find().get("0"), signal.SIGTERM)
    return f"{phase}: one process, TERM", chain.check_code(launched)


KINDS: list[tuple[Callable[[Chain], tuple[str, int]], int]] = [
    (signal_process, 10),
    (launch_twice, 4),
    (cut_file, 3),
    (limit_files, 2),
    (rename_folder, 1),
    (remove_checkpoints, 1),
    (change_size, 1),
]
"""Kinds of faults, with their weights."""


def compare(chain: Chain, expected: Points, digest: str) -> None:
    """Compare a finished run with the one without faults.

    Raises:
        Failure: A step is missing, or a value differs.
    """
    points = measure(chain.run)
    if missing := expected.keys() ^ points.keys():
        raise Failure(f"steps are missing or too many: {sorted(missing)}")
    worst = max(abs(points[key] - loss) for key, loss in expected.items())
    if chain.exact and (worst or digest_last(chain.run) != digest):
        raise Failure(f"the run differs by {worst:g} from one without faults")
    if worst > _CLOSE:
        raise Failure(f"losses differ by {worst:g} on another number of processes")
    print(f"= {chain.name}: equal, by {worst:g}" + (" and to the bit" if chain.exact else ""))


def run_chain(chain: Chain, most: int) -> int:
    """Run a chain of at most so many faults to its end; return how many there were."""
    count = 0
    while count < most:
        kinds, weights = zip(*KINDS, strict=True)
        what, code = chain.chance.choices(kinds, weights)[0](chain)
        count += what != NO_FAULT
        print(f"  {chain.name} {count}: {what}: exit code {code}", flush=True)
        if code == 0:
            break
    launched = chain.launch()
    code = launched.end()
    if code:
        raise Failure(f"the last launch ended with exit code {code}\n{launched.text[-3000:]}")
    return count


def main() -> int:
    """Run chains until there were as many faults as requested; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stress-"))
    (folder / "stress.toml").write_text(SETTINGS)
    calm = Chain(folder, "calm", random.Random())
    run_chain(calm, 0)
    expected, digest = measure(calm.run), digest_last(calm.run)
    count = failures = number = 0
    while count < arguments.faults:
        number += 1
        seed = f"{arguments.seed}-{number}"
        chain = Chain(folder, f"chain-{number}", random.Random(seed))
        most = min(chain.chance.randint(3, 8), arguments.faults - count)
        print(f"{chain.name}, seed {seed}: up to {most} faults", flush=True)
        try:
            count += run_chain(chain, most)
            compare(chain, expected, digest)
        except Failure as failure:
            count, failures = count + 1, failures + 1
            print(f"! {chain.name} in {chain.run}: {failure}", flush=True)
    print(f"seed {arguments.seed}: {count} faults, {number} chains, {failures} failures")
    if not failures:
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
