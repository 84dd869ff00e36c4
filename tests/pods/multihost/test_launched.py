"""Jobs on stand-ins of Slurm, GKE and TPU VMs on this machine: their places, and who is missing."""

import contextlib
import http.server
import os
import random
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.core.processes import ROOT
from tests.documents import read_blocks
from tests.fork_server import python_command
from tests.waiting import wait_for

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("pod_launched.py")
TPU = {"JAX_FORCE_TPU_INIT": "1", "JAX_PLATFORMS": "cpu"}


def choose_hosts(count: int) -> list[str]:
    """Return loopback addresses at which no other test listens."""
    chance = random.SystemRandom()
    network = f"127.{chance.randrange(1, 255)}.{chance.randrange(255)}"
    return [f"{network}.{number + 1}" for number in range(count)]


class Job:
    """Hosts of a job: a folder with a copy of the program's files, and a process, on each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def home(self, host: int) -> Path:
        home = self.folder / str(host)
        if not home.exists():
            home.mkdir()
            (home / "network.py").write_text("LAYERS = 2\n")
        return home

    def start(self, host: int, variables: Mapping[str, str], *command: str) -> None:
        """Start the program of a host; its output is a file beside its folder."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        words = command or (*python_command(environment), str(SCRIPT))
        with (self.folder / f"{host}.log").open("w") as log:
            self.processes[host] = subprocess.Popen(
                words, cwd=self.home(host), env=environment, stdout=log, stderr=log, text=True
            )

    def wait(self) -> dict[int, int]:
        return {host: process.wait(timeout=200) for host, process in self.processes.items()}

    def log(self, host: int) -> str:
        return (self.folder / f"{host}.log").read_text()

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {host}\n{self.log(host)}" for host in self.processes)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


@contextlib.contextmanager
def serve_metadata(attributes: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Serve the metadata of TPU VMs.

    Args:
        attributes: Attributes by the name of the host.

    Yields:
        Address of the server; with `/` and the name of a host it serves that host's.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host, _, key = self.path[1:].partition("/computeMetadata/v1/instance/attributes/")
            text = attributes[host].get(key)
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def slurm_variables(hosts: list[str], process: int, job: int) -> dict[str, str]:
    network = hosts[0].rpartition(".")[0]
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": f"{network}.[1-{len(hosts)}]",
        "SLURM_NTASKS": str(len(hosts)),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": "0",
    }


def read_batch_script() -> str:
    """Return the batch script of the guide."""
    guide = (ROOT / "docs/guides/pods.md").read_text(encoding="utf-8")
    (script,) = (
        "\n".join((*block.code, ""))
        for block in read_blocks(guide)
        if block.language == "sh" and "#SBATCH" in "".join(block.code)
    )
    return script


# Runs the step of the batch script in four tasks, and returns the largest of their exit codes.
SRUN = """#!/usr/bin/env bash
pids=() code=0
for task in 0 1 2 3; do
    export SLURM_PROCID=$task SLURM_STEP_NODELIST=$NODES SLURM_LOCALID=0
    (cd "$HOSTS/$task" && exec $PROGRAM) &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    wait "$pid" || { one=$?; [ "$one" -le "$code" ] || code=$one; }
done
exit "$code"
"""


def test_slurm_job_finds_its_place_and_counts_its_starts(job: Job, tmp_path: Path) -> None:
    hosts = choose_hosts(4)
    for host in range(4):
        job.home(host)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/sh\necho "$@" >>"$HOSTS/requeued"\n')):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    script = tmp_path / "batch.sh"
    script.write_text(read_batch_script())
    variables = slurm_variables(hosts, 0, random.SystemRandom().randrange(10**6))
    nodes = variables.pop("SLURM_STEP_NODELIST")
    variables |= {"NODES": nodes, "HOSTS": str(tmp_path)}
    variables["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    program = " ".join([*python_command(), str(SCRIPT)])
    for restarts in ("", "1"):
        own = {"PROGRAM": program} | ({"SLURM_RESTART_COUNT": restarts} if restarts else {})
        job.start(0, {**variables, **own}, "bash", str(script))
        assert job.wait() == {0: 0}, job.logs
        attempt = 2 if restarts else 1
        for process in range(4):
            # All write into one file, which may get the ends of lines later.
            assert f"process {process} of 4, Slurm, attempt {attempt}" in job.log(0)
    assert not (tmp_path / "requeued").exists()
    # A lost peer and a preemption start the job again, and a failed program doesn't.
    failing = tmp_path / "bin" / "failing"
    for code, restarts, requeued in ((75, 0, 1), (143, 1, 1), (1, 0, 0), (75, 3, 0)):
        failing.write_text(f"#!/bin/sh\nexit {code}\n")
        failing.chmod(0o755)
        (tmp_path / "requeued").write_text("")
        own = {"PROGRAM": "failing", "SLURM_RESTART_COUNT": str(restarts)}
        job.start(0, {**variables, **own}, "bash", str(script))
        assert job.wait() == {0: code}, job.logs
        lines = (tmp_path / "requeued").read_text().splitlines()
        assert lines == [f"requeue {variables['SLURM_JOB_ID']}"] * requeued


def test_tpu_vms_are_found_by_their_metadata_and_other_code_is_named(job: Job) -> None:
    hosts = choose_hosts(4)
    endpoints = ",".join(f"unknown:unknown:{host}" for host in hosts)
    metadata = {
        f"t1v-{process}": {
            "agent-worker-number": str(process),
            "worker-network-endpoints": endpoints,
            "tpu-env": "NODE_ID: 'my-tpu'\nZONE: 'us-central2-b'\n",
        }
        for process in range(4)
    }
    (job.home(2) / "network.py").write_text("LAYERS = 4\n")
    with serve_metadata(metadata) as address:
        for process in range(4):
            job.start(process, {**TPU, "GCE_METADATA_IP": f"{address}/t1v-{process}"})
        assert set(job.wait().values()) == {0}, job.logs
    other = r"process 2 \(pid \d+ on .*\) has other code: network \(network.py\) is (\w{8}), and "
    for process in range(4):
        assert f"process {process} of 4, a Cloud TPU slice, attempt 1\n" in job.log(process)
        match = re.findall(rf"^{other}(?!\1)\w{{8}} in processes 0, 1, 3", job.log(process), re.M)
        assert len(match) == 1, job.logs


def test_slices_in_gke_name_the_host_with_another_libtpu(job: Job) -> None:
    hosts = choose_hosts(2)
    (job.home(3) / "libtpu-0.0.1.dist-info").mkdir()
    (job.home(3) / "libtpu-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.1\n"
    )
    for process in range(4):
        slices = {
            "TPU_WORKER_HOSTNAMES": ",".join(hosts),
            "TPU_WORKER_ID": str(process % 2),
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(process // 2),
            "MEGASCALE_COORDINATOR_ADDRESS": hosts[0],
        }
        job.start(process, {**TPU, **slices})
    # The others may come after process 0 has ended, and would wait for it as for a pod to come.
    assert [job.processes[process].wait(timeout=200) for process in (0, 3)] == [1, 1], job.logs
    text = r"process 3 \(pid \d+ on .*\) has jax .*, libtpu 0\.0\.1, but process 0 \("
    for process in (0, 3):
        assert re.search(
            f"of process {process} of 4, found by a TPU slice in GKE: {text}", job.log(process)
        )


def test_missing_host_is_named_while_the_others_wait(job: Job) -> None:
    hosts, number = choose_hosts(4), random.SystemRandom().randrange(10**6)
    for process in (0, 1, 3):
        job.start(process, slurm_variables(hosts, process, number))
    named = re.compile(
        r"process \d of 4: still waiting for process 2 \(\d+ s\)\. Start it in all 4: srun"
    )
    for process in (0, 1, 3):
        wait_for(lambda process=process: named.search(job.log(process)), "missing process", 120)
