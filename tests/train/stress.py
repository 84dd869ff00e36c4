"""Faults in the main job: ``python -m tests.train.stress --faults 200 --seed 1``.

A chain is one run of the main job on a pod of two processes. Each of its launches has a fault at a
random point, until the last one finishes the run. Its losses and its last checkpoint are then
compared with those of a run without faults: to the bit, or within eight units in the last place
where a launch of the chain had one process, which adds in another order. The faults and the exit
code of every launch are printed, and so is the seed that repeats them; timing is the machine's, so
a repetition hits other lines of the code.

The runs are in a file system of their own in memory, which a fault fills, where this user may mount
one. Elsewhere a full disk is a limit of the size of files.
"""

import argparse
import atexit
import hashlib
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

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
steps = 160
batch = 4
eval_every = 40
eval_batches = 1
log_every = 20
[checkpoint]
every = 10
keep = 3
[pod]
heartbeat = 15
watchdog = 60
[generation]
bytes = 4
"""

DOCUMENTED = {0, 1, 75, 130, 143, 128 + signal.SIGKILL}
"""Exit codes of a launch with a fault; 2 is allowed where the folder itself is at fault."""

NO_FAULT = "the launch gave no occasion"
"""Description of a launch without its fault, which does not count."""

# Seconds; long enough for a machine with other work, since a launch prints every 20 steps.
_LIMIT = 300.0  # Without a line of output, after which a launch hangs.
_LEFT = 120.0  # For the last process of a launch to end.
_CLOSE = 8 * 2.0**-23  # Eight units in the last place of float32.
_SPACE = 64 << 20  # Bytes of the file system of the runs.
_TAG = "STRESS_LAUNCH"
# Each launch would compile every module of the package again.
_UNSET = ("XLA_FLAGS", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
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


def digest_last(run: Path) -> str:
    """Return the name of the last checkpoint with a digest of its arrays."""
    last = sorted((run / "checkpoints").glob("0*"))[-1]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found: Any = reader.metadata(last / "arrays")
        tree = getattr(getattr(found, "item_metadata", found), "tree", found)
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        how = ocp.args.PyTreeRestore(restore_args=plain)
        state = reader.restore(last / "arrays", args=how)
    parts = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state))
    return f"{last.name} {hashlib.sha256(parts).hexdigest()}"


class Launched:
    """A launch of the main job on a pod.

    Args:
        folder: Working folder.
        words: Words of ``xlashard train``.
        processes: Number of processes; their devices are two.
        before: Words before the command, which start it under some limit.
    """

    def __init__(
        self, folder: Path, words: list[str], processes: int = 2, before: Sequence[str] = ()
    ) -> None:
        self.tag, self._lines = os.urandom(6).hex(), list[str]()
        python = [sys.executable, "-m", "xlashard"]
        pod = ["pod", "-n", str(processes), "-d", str(2 // processes), "--"]
        command = [*before, *python, *pod, *python, "train", *words]
        environment = {k: v for k, v in os.environ.items() if k not in _UNSET}
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.launcher = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, _TAG: self.tag},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.kill)
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

    def kill(self) -> None:
        """Kill the processes of the launch that are left."""
        for pid in self.alive():
            send(pid, signal.SIGKILL)

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
            code = self._await_launcher()
            end = time.monotonic() + _LEFT
            while (left := self.alive()) and time.monotonic() < end:
                time.sleep(0.1)
            if left:
                raise Failure(f"processes are left behind: {left}\n{self.text[-3000:]}")
        finally:
            self.kill()
            self._reader.join(5)
        return code if code >= 0 else 128 - code

    def _await_launcher(self) -> int:
        printed, end = 0, 0.0
        while True:
            if end == 0.0 or len(self._lines) > printed:
                printed, end = len(self._lines), time.monotonic() + _LIMIT
            try:
                return self.launcher.wait(1)
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    raise Failure(f"the launch hangs\n{self.text[-3000:]}") from None


@dataclass
class Chain:
    """One run with faults.

    Attributes:
        folder: Working folder of the launches.
        name: Name of the run.
        chance: Source of all choices.
        exact: False once a launch had another number of processes.
        launches: Launches so far.
    """

    folder: Path
    name: str
    chance: random.Random
    exact: bool = True
    launches: list[Launched] = field(default_factory=list)

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
        self.launches.append(Launched(self.folder, self.words, **options))
        return self.launches[-1]

    def steps(self) -> int:
        """Return how many steps are recorded."""
        with suppress(OSError):
            return (self.run / "metrics.jsonl").read_text().count('"train"')
        return 0

    def read_lock(self) -> str:
        """Return the lock of the run; "" if there is none."""
        with suppress(OSError):
            return (self.run / "run.lock").read_text()
        return ""

    def has_checkpoints(self, count: int) -> bool:
        """Return whether the run has so many checkpoints."""
        return len(list(self.run.glob("checkpoints/0*"))) >= count

    def prepare(self, count: int) -> bool:
        """Run until there are so many checkpoints; return False if that ends the run."""
        if self.has_checkpoints(count):
            return True
        launched = self.launch()
        launched.wait_for(lambda: self.has_checkpoints(count))
        send(launched.find().get("0"), signal.SIGTERM)
        return self.check_code(launched) != 0

    def await_phase(self, launched: Launched, *phases: str) -> str:
        """Wait for a random phase of a launch; return its name, or "" if the launch has ended."""
        chance, before = self.chance, self.steps()
        saving = set(self.run.glob("checkpoints/.saving-*"))
        usual = ["start", "compile", "step", "step", "save", "save", "end"]
        phase = chance.choice(phases or usual)
        conditions: dict[str, Callable[[], bool]] = {
            "start": lambda: "0" in launched.find(),
            "compile": lambda: "Compiling the" in launched.text,
            "folder": self.run.exists,
            "step": lambda: self.steps() > before or "Compiled in" in launched.text,
            "save": lambda: not saving.issuperset(self.run.glob("checkpoints/.saving-*")),
            "end": lambda: "step 160/160" in launched.text,
        }
        longest = {"start": 5.0, "compile": 3.0, "step": 1.0, "save": 0.1, "end": 0.3, "folder": 4}
        launched.wait_for(conditions[phase])
        time.sleep(chance.random() * longest[phase])
        return phase if launched.launcher.poll() is None else ""

    def check_code(self, launched: Launched, *more: int, fault: str = "") -> int:
        """Print the fault; wait for the end of a launch; return its documented exit code."""
        if fault:
            print(f"  {self.name}: {fault} ...", flush=True)
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
    """Send a signal, or two, to a process, the guard, or the launcher."""
    launched = chain.launch()
    launched.wait_for(lambda: len(launched.find()) > 3)
    found = launched.find()
    phase = chain.await_phase(launched)
    if not phase:
        return NO_FAULT, chain.check_code(launched)
    what = [_signal_target(chain, launched, found)]
    if chain.chance.random() < 0.25:
        time.sleep(chain.chance.random() * 2)
        what.append(_signal_target(chain, launched, found))
    fault = f"{phase}: {', then '.join(what)}"
    return fault, chain.check_code(launched, fault=fault)


def _signal_target(chain: Chain, launched: Launched, found: dict[str, int]) -> str:
    target = chain.chance.choice(["0", "1", "0", "1", "guard", "launcher", "all"])
    kind = chain.chance.choice(["KILL", "KILL", "TERM", "INT", "STOP"])
    pids = list(found.values()) if target == "all" else [found.get(target)]
    for pid in pids:
        send(pid, signal.Signals[f"SIG{kind}"])
    if kind == "STOP":
        # Shorter or longer than the heartbeat, or for good.
        seconds, then = chain.chance.choice([(2, "CONT"), (25, "CONT"), (3, "KILL")])
        end = time.monotonic() + seconds
        launched.wait_for(lambda: time.monotonic() > end)
        kind += f" for {seconds} s, {then}"
        for pid in pids:
            send(pid, signal.Signals[f"SIG{then}"])
    return f"{kind} to {target}"


def launch_twice(chain: Chain) -> tuple[str, int]:
    """Launch the run a second time: beside a running, a stopped or a killed launch, or at once."""
    if not chain.prepare(1):
        return NO_FAULT, 0
    way = chain.chance.choice(["running", "stopped", "together", "first killed", "second killed"])
    print(f"  {chain.name}: second launch, {way} ...", flush=True)
    before = chain.read_lock()
    first = chain.launch()
    if way != "together":
        first.wait_for(lambda: chain.read_lock() not in (before, ""))
    if way == "stopped":
        # It still owns the folder, however long the second launch takes.
        held = first.alive()
        for pid in held:
            send(pid, signal.SIGSTOP)
        second = chain.launch()
        code = chain.check_code(second, 2)
        for pid in held:
            send(pid, signal.SIGCONT)
        codes = chain.check_code(first, 2), code
        allowed = {(0, 2), (75, 2)}
    else:
        second = chain.launch()
        if way.endswith("killed"):
            victim = first if way == "first killed" else second
            victim.wait_for(lambda: len(victim.find()) > 3)
            time.sleep(chain.chance.random() * 6)
            for pid in victim.find().values():
                send(pid, signal.SIGKILL)
        codes = chain.check_code(first, 2), chain.check_code(second, 2)
        allowed = {(0, 2), (2, 0)} if way == "together" else {(0, 2)}
    if "is finished" in first.text + second.text:
        # The other one had ended before.
        allowed = {(0, 0)}
    if not way.endswith("killed") and codes not in allowed:
        texts = f"{first.text[-2000:]}\n{second.text[-2000:]}"
        raise Failure(f"{way}: two launches ended with {codes}\n{texts}")
    return f"second launch, {way}: {codes}", min(codes)


def limit_files(chain: Chain) -> tuple[str, int]:
    """Let every file end at a size."""
    limit = chain.chance.choice([200, 3000, 9000, 30000])
    launched = chain.launch(before=["prlimit", f"--fsize={limit}"])
    fault = f"files of {limit} bytes at most"
    return fault, chain.check_code(launched, 2, fault=fault)


def fill_disk(chain: Chain) -> tuple[str, int]:
    """Fill the disk at a random point, but for some bytes, and free it again after the launch."""
    runs = chain.run.parent
    if not os.path.ismount(runs):
        return limit_files(chain)
    left = chain.chance.choice([0, 4096, 20000, 60000])
    at_start = chain.chance.random() < 0.3
    launched = None if at_start else chain.launch()
    phase = "before the start" if launched is None else chain.await_phase(launched)
    ballast = runs / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            free = os.statvfs(runs).f_bavail * os.statvfs(runs).f_frsize - left
            if free <= 0 or not file.write(bytes(min(free, 1 << 20))):
                break
    launched = launched or chain.launch()
    fault = f"{phase}: disk full but for {left} bytes" if phase else NO_FAULT
    try:
        code = chain.check_code(launched, 2, fault=fault)
    finally:
        ballast.unlink()
    return fault, code


def forbid_writing(chain: Chain) -> tuple[str, int]:
    """Make the folder of the run, or that of all runs, read-only, and writable again after it."""
    runs, at_start = chain.run.parent, chain.chance.random() < 0.3
    # The administrator may write everywhere, but for this capability.
    words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if not os.getuid() else []
    launched = None if at_start else chain.launch(before=words)
    phase = "before the start" if launched is None else chain.await_phase(launched)
    places = [path for path in (runs, chain.run, chain.run / "checkpoints") if path.exists()]
    place = chain.chance.choice(places)
    place.chmod(0o555)
    launched = launched or chain.launch(before=words)
    what = f"{phase}: {place.relative_to(chain.folder)} is read-only" if phase else NO_FAULT
    try:
        code = chain.check_code(launched, 2, fault=what)
    finally:
        place.chmod(0o755)
    return what, code


def cut_file(chain: Chain) -> tuple[str, int]:
    """Cut a file off between two launches."""
    if not chain.prepare(2):
        return NO_FAULT, 0
    last = max(chain.run.glob("checkpoints/0*"))
    parts = [path for path in last.rglob("*") if path.is_file()]
    path = chain.chance.choice(
        [chain.run / "config.toml", chain.run / "metrics.jsonl", *sorted(parts)[:8]]
    )
    size = chain.chance.randrange(max(path.stat().st_size, 1))
    os.truncate(path, size)
    fault = f"{path.relative_to(chain.run)} cut to {size} bytes"
    launched = chain.launch()
    code = chain.check_code(launched, fault=fault)
    if advice := _MOVE.search(launched.text):
        # The command is relative to the working folder.
        (chain.folder / advice[1]).rename(chain.folder / advice[2])
    elif path in parts and code != 0:
        raise Failure(f"{path} was cut to {size} bytes\n{launched.text[-2000:]}")
    return fault, code


def rename_folder(chain: Chain) -> tuple[str, int]:
    """Rename the run's folder while it runs, and back."""
    launched, away = chain.launch(), chain.run.with_name(f"{chain.name}-away")
    phase = chain.await_phase(launched, "folder", "step", "save", "end")
    if not phase:
        return NO_FAULT, chain.check_code(launched)
    chain.run.rename(away)
    fault = f"{phase}: folder renamed"
    code = chain.check_code(launched, 2, fault=fault)
    if chain.run.exists():
        left = [x.name for x in chain.run.rglob("*") if x.is_file() and x.name.startswith("check")]
        if left:
            raise Failure(f"the renamed run went on in a new folder: {left}")
        shutil.rmtree(chain.run)
    away.rename(chain.run)
    return fault, code


def remove_checkpoints(chain: Chain) -> tuple[str, int]:
    """Remove what is being saved while the run saves it."""
    launched = chain.launch()
    saving = set(chain.run.glob("checkpoints/.saving-*"))
    launched.wait_for(lambda: not saving.issuperset(chain.run.glob("checkpoints/.saving-*")))
    removed = list(chain.run.glob("checkpoints/.saving-*"))
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    fault = f"{len(removed)} .saving-* removed" if removed else NO_FAULT
    return fault, chain.check_code(launched, fault=fault)


def change_size(chain: Chain) -> tuple[str, int]:
    """Continue with one process in place of two."""
    launched = chain.launch(processes=1)
    phase = chain.await_phase(launched)
    if not phase:
        chain.exact = False
        return NO_FAULT, chain.check_code(launched)
    chain.exact = False
    send(launched.find().get("0"), signal.SIGTERM)
    fault = f"{phase}: one process, TERM"
    return fault, chain.check_code(launched, fault=fault)


KINDS: list[tuple[Callable[[Chain], tuple[str, int]], int]] = [
    (signal_process, 10),
    (launch_twice, 4),
    (cut_file, 3),
    (fill_disk, 3),
    (forbid_writing, 3),
    (limit_files, 1),
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
    worst = max(abs(points[key] - loss) / loss for key, loss in expected.items())
    if chain.exact and (worst or digest_last(chain.run) != digest):
        raise Failure(f"the run differs by {worst:g} from one without faults")
    if worst > _CLOSE:
        raise Failure(f"losses differ by {worst:g} on another number of processes")
    print(f"= {chain.name}: equal, by {worst:g}" + (" and to the bit" if chain.exact else ""))


def run_chain(chain: Chain, most: int) -> int:
    """Run a chain of at most so many faults, at least one, to its end; return how many there were.

    A fault may come twice in a row.
    """
    count, kind = 0, signal_process
    while count < most:
        if not count or chain.chance.random() < 0.75:
            kinds, weights = zip(*KINDS, strict=True)
            kind = chain.chance.choices(kinds, weights)[0]
        what, code = kind(chain)
        count += what != NO_FAULT
        print(f"  {chain.name} {count}: {what}: exit code {code}", flush=True)
        if code == 0 and count:
            break
        if code == 0:
            # The launch was faster than its fault.
            shutil.rmtree(chain.run)
            chain.exact = True
    launched = chain.launch()
    code = launched.end()
    if code:
        raise Failure(f"the last launch ended with exit code {code}\n{launched.text[-3000:]}")
    return count


@contextmanager
def make_runs(folder: Path) -> Iterator[None]:
    """Make the folder of all runs, a small file system if this user may mount one."""
    runs = folder / "runs"
    runs.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={_SPACE},mode=755", "stress", str(runs)]
    with suppress(OSError):
        subprocess.run(words, check=False, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        if os.path.ismount(runs):
            shutil.copytree(runs, folder / "kept", ignore=shutil.ignore_patterns("calm"))
            subprocess.run(["umount", "--lazy", str(runs)], check=False)


def run_chains(folder: Path, faults: int, seed: int) -> int:
    """Run chains until there were as many faults as requested; return the number of failures."""
    calm = Chain(folder, "calm", random.Random())
    run_chain(calm, 0)
    expected, digest = measure(calm.run), digest_last(calm.run)
    count = failures = number = 0
    while count < faults:
        number += 1
        chain = Chain(folder, f"chain-{number}", random.Random(f"{seed}-{number}"))
        most = min(chain.chance.randint(2, 8), faults - count)
        print(f"{chain.name}, seed {seed}-{number}: up to {most} faults", flush=True)
        try:
            count += run_chain(chain, most)
            compare(chain, expected, digest)
            shutil.rmtree(chain.run)
        except Exception as failure:
            # Whatever a fault leaves behind, such as no file to read, is a verdict on its chain.
            count, failures = count + 1, failures + 1
            what = failure if isinstance(failure, Failure) else traceback.format_exc()
            print(f"! {chain.name} in {chain.run}: {what}", flush=True)
        except BaseException:
            print(f"? {chain.name} was interrupted: no verdict", flush=True)
            raise
        finally:
            for launched in chain.launches:
                launched.kill()
    print(f"seed {seed}: {count} faults, {number} chains, {failures} failures")
    return failures


def main() -> int:
    """Run chains until there were as many faults as requested; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    jax.config.update("jax_platforms", "cpu")
    folder = Path(tempfile.mkdtemp(prefix="stress-"))
    (folder / "stress.toml").write_text(SETTINGS)
    with make_runs(folder):
        failures = run_chains(folder, arguments.faults, arguments.seed)
    if not failures:
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
