"""`tpu_vm.sh`, with a gcloud that runs the commands of workers in folders of this machine."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.waiting import wait_for

SCRIPT = Path(__file__).parents[2] / "tpu_scripts" / "tpu_vm.sh"

GCLOUD = """#!/usr/bin/env bash
# Workers are folders; a connection is a process.
printf '%q ' "$@" >>"$CLOUD/calls"; echo >>"$CLOUD/calls"
verb=$4; code=0; files=(); only='*'
for word in "${@:5}"; do
    case $word in
        --command=*) command=${word#*=} ;;
        --worker=all) ;;
        --worker=*) only=${word#*=} ;;
        /*) files+=("$word") ;;
    esac
done
for worker in "$CLOUD"/workers/$only; do
    case $verb in
        scp) cp "${files[@]}" "$worker" ;;
        ssh) (cd "$worker" && HOME=$worker bash -c "$command") || code=$? ;;
    esac
done
exit $code
"""


class Cloud:
    """Two workers of a TPU, and a folder of code that git tracks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code = folder, folder / "code"
        for path in ("bin", "code", "workers/0/job.venv", "workers/1/job.venv"):
            (folder / path).mkdir(parents=True)
        (folder / "bin" / "gcloud").write_text(GCLOUD)
        (folder / "bin" / "gcloud").chmod(0o755)
        subprocess.run(["git", "init", "-q", self.code], check=True)
        (self.code / "a file.txt").write_text("tracked")
        (self.code / "ignored").touch()
        (self.code / ".gitignore").write_text("ignored\n")

    def start(self, *words: str, **variables: str) -> "subprocess.Popen[str]":
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        own = {"CLOUD": str(self.folder), "PATH": path, "INSTALL": "echo installed >>~/installed"}
        return subprocess.Popen(
            [SCRIPT, *words],
            cwd=self.code,
            env={**os.environ, **own, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        with self.start(*words, **variables) as process:
            output = process.communicate(timeout=60)[0]
        return process.returncode, output

    @property
    def calls(self) -> str:
        return (self.folder / "calls").read_text()


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path)


TPU = ("my-tpu", "us-west4-a")


@pytest.mark.slow
def test_command_runs_in_the_code_on_all_workers_and_is_never_shown(cloud: Cloud) -> None:
    script = 'echo "$LAUNCHER_ATTEMPT" "$1"; cat *.txt; ls -A; pwd'
    code, output = cloud.run(
        *("run", *TPU, "sh", "-c", script, "sh", "it's SECRET $HOME"), LAUNCHER_ATTEMPT="2"
    )
    assert code == 0, output
    for worker in ("0", "1"):
        home = cloud.folder / "workers" / worker
        lines = ["2 it's SECRET $HOME", "tracked.gitignore", "a file.txt", str(home / "job")]
        assert (home / "job.log").read_text().splitlines() == lines
        assert (home / "installed").read_text() == "installed\n"
        assert (home / "job.command").stat().st_mode & 0o077 == 0
    assert output.count("SECRET") == 2  # The output of the job itself.
    assert "SECRET" not in cloud.calls and "--worker=all" in cloud.calls
    code, output = cloud.run("--dry-run", "run", *TPU, "echo", "SECRET")
    assert code == 0 and "gcloud compute tpus tpu-vm scp" in output and "SECRET" not in output
    assert cloud.run("run", *TPU, "sh", "-c", "exit 3")[0] == 3


@pytest.mark.slow
def test_job_outlives_its_connection_and_ends_by_sigterm_of_the_next(cloud: Cloud) -> None:
    home = cloud.folder / "workers" / "0"
    program = "trap 'echo saved; exit' TERM; echo begun; while :; do sleep 0.02; done"
    with cloud.start("run", *TPU, "bash", "-c", program) as process:
        wait_for((home / "job.log").exists, "start of the job")
        wait_for(lambda: "begun" in (home / "job.log").read_text(), "output of the job")
        process.kill()
    with cloud.start("logs", *TPU, "0") as logs:
        assert logs.stdout is not None and logs.stdout.readline() == "begun\n"
        assert cloud.run("run", *TPU, "echo", "next")[0] == 0
        assert logs.stdout.read().endswith("saved\n")
    assert (home / "job.log").read_text() == "next\n"


CREATED = {
    "v5litepod-16": "--accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite ",
    "v5p-64": "--accelerator-type=v5p-64 --version=v2-alpha-tpuv5 ",
    "v6e-256": "--accelerator-type=v6e-256 --version=v2-alpha-tpuv6e ",
    "v4:2x2x4": "--type=v4 --topology=2x2x4 --version=tpu-ubuntu2204-base ",
}


def test_tpus_are_created_by_accelerator_type_or_topology(cloud: Cloud) -> None:
    for kind, flags in CREATED.items():
        code, output = cloud.run("--dry-run", "create", *TPU, kind, "--spot")
        assert code == 0 and f" create my-tpu {flags}--spot --zone=us-west4-a " in output


REFUSED = {
    "a topology that gcloud does not have": (
        ("create", *TPU, "v5p:2x2x4"),
        "TYPE=v5p:2x2x4: gcloud has --topology for v2, v3 and v4 alone: write a size",
    ),
    "a generation after v6e": (("create", *TPU, "tpu7x-64"), "TYPE=tpu7x-64: .*use jobset.py"),
    "another name of v5e": (("create", *TPU, "v5e-16"), "gcloud's name is v5litepod-16"),
    "no type": (("create", *TPU), "TYPE='' is unknown: write .*v5litepod-16"),
    "no command": (("run", *TPU), "COMMAND is missing: write run NAME ZONE xlashard train"),
    "an invalid name": (("delete", "My_TPU", "us-west4-a"), "NAME='My_TPU' is invalid: .*my-tpu"),
    "an invalid zone": (("delete", "my-tpu", "us-west4"), "ZONE='us-west4' .*write us-west4-a"),
    "another verb": (("watch", *TPU), "write create, run, logs or delete, not 'watch'"),
}


@pytest.mark.parametrize(("words", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_calls_are_refused(cloud: Cloud, words: tuple[str, ...], text: str) -> None:
    code, output = cloud.run(*words)
    assert code == 2
    assert re.search(text, output), output
    assert not (cloud.folder / "calls").exists()
