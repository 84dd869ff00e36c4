"""Creating, querying and deleting a TPU, and the flags passed to gcloud."""

import subprocess
from pathlib import Path

import pytest

from tests.cli.cloud.conftest import Cloud
from tests.message_patterns import naming
from tests.waiting import all_gone, wait_for
from xlashard.cli.cloud.session import Command, Finished, Runner, backoff
from xlashard.cli.cloud.tpu import create, delete, query, ready_status
from xlashard.errors import CloudError


@pytest.mark.slow
def test_a_tpu_is_created_once_and_deleted(cloud: Cloud) -> None:
    assert create(cloud.session()) == 0
    assert cloud.reports == [
        "requested one: v4-16, on-demand, 8 chips, 2 workers",
        "waiting: one is CREATING",
        "one is READY: 2 workers",
    ]
    assert create(cloud.session()) == 0
    assert cloud.verbs().count("create") == 1
    assert ready_status(cloud.session()).addresses == ("127.0.0.1", "127.0.0.2")
    delete(cloud.session())
    delete(cloud.session())
    assert cloud.reports[-2:] == ["deleted one", "nothing to delete: one does not exist"]
    cloud.state = "DELETING"
    delete(cloud.session())
    assert cloud.verbs().count("delete") == 1


def test_error_of_a_preempted_tpu_suggests_the_next_command(cloud: Cloud) -> None:
    cloud.state = "PREEMPTED"
    with pytest.raises(CloudError, match=r"(?s)one is PREEMPTED.*delete.py --name=one"):
        create(cloud.session())
    with pytest.raises(CloudError, match=r"(?s)one is PREEMPTED.*create.py --name=one"):
        ready_status(cloud.session())


def test_failed_tpu_creation_is_reported(cloud: Cloud) -> None:
    cloud.final = "FAILED"
    with pytest.raises(CloudError, match="not available: one is FAILED"):
        create(cloud.session())


def test_tpu_creation_timeout_suggests_a_longer_timeout(cloud: Cloud) -> None:
    cloud.final = "CREATING"
    with pytest.raises(CloudError, match=r"(?s)not ready .*one is CREATING.*--ready_within=0.02"):
        create(cloud.session(wait__ready_within=0.01))


def test_number_of_workers_must_match_the_type(cloud: Cloud) -> None:
    cloud.hosts = 3
    with pytest.raises(CloudError, match=r"has 3 workers, expected .*v4-16.*2 workers.*--accel"):
        create(cloud.session())


FLAGS = {
    "network": ({"tpu__create_flags": ["--network=n"]}, ["--network=n"]),
    "reservation": ({"tpu__capacity": "reserved"}, ["--reserved"]),
    "spot": ({"tpu__capacity": "spot"}, ["--spot"]),
    "inside": ({"tpu__internal_ips": True, "tpu__project": "p"}, ["--internal-ips", "--project=p"]),
    "image": ({"tpu__runtime": "mine"}, ["--version=mine"]),
    "v4": ({}, ["--accelerator-type=v4-16", "--version=tpu-ubuntu2204-base", "--zone=here"]),
    "v5e": ({"tpu__accelerator": "v5e-16"}, ["--accelerator-type=v5litepod-16"]),
    "v6e": ({"tpu__accelerator": "v6e-16"}, ["--version=v2-alpha-tpuv6e"]),
    "v5p": ({"tpu__accelerator": "v5p-64"}, ["--version=v2-alpha-tpuv5"]),
    "a shape": ({"tpu__accelerator": "v4:2x8x8"}, ["--type=v4", "--topology=2x8x8"]),
}


@pytest.mark.parametrize(("settings", "flags"), FLAGS.values(), ids=FLAGS.keys())
def test_settings_become_gcloud_flags(cloud: Cloud, settings: dict, flags: list[str]) -> None:
    session = cloud.session(**settings)
    cloud.hosts = session.accelerator.hosts
    create(session)  # The stand-in refuses flags that gcloud does not have.
    (words,) = [words for words in cloud.commands if words[0] == "create"]
    assert set(flags) <= set(words)


def test_failed_query_is_retried(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [1, 1, 0]
    command = Command(("gcloud",), "query the TPU")
    done = [Finished(command, code, "[]", "warning\nquota") for code in codes]
    monkeypatch.setattr(Cloud, "run", lambda self, command: done.pop(0))
    assert query(cloud.session()).text == "one does not exist"
    assert cloud.reports == [
        "could not query the TPU one (exit code 1: quota); attempt 2 of 3 in 0.02 s",
        "could not query the TPU one (exit code 1: quota); attempt 3 of 3 in 0.04 s",
    ]


def test_invalid_gcloud_output_is_reported(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cloud, "_list", lambda self, values: "echo WARNING: no JSON")
    with pytest.raises(CloudError, match=naming("JSON", "'WARNING: no JSON")):
        query(cloud.session())


def test_error_of_missing_gcloud_suggests_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CloudError, match=naming("'gcloud'", "PATH", "--dry_run")):
        Runner().run(Command(("gcloud", "version"), "look"))


def test_an_interrupt_ends_a_command_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"

    def interrupted(process: "subprocess.Popen[bytes]") -> None:
        wait_for(lambda: child.exists() and child.read_text().endswith("\n"), "child")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    script = f"sleep 600 & echo $! > {child}; wait"
    with pytest.raises(KeyboardInterrupt):
        Runner().run(Command(("sh", "-c", script), "look"))
    assert all_gone([int(child.read_text())])


def test_retry_delays_grow_to_a_limit() -> None:
    pauses = backoff(10, limit=60)
    assert [next(pauses) for _ in range(5)] == [10, 20, 40, 60, 60]
