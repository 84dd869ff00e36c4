"""TPU VMs from nothing to a job and away again, on machines that are folders of this one."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.cloud.conftest import Cloud
from xlashard.cloud.jobs import new_job, start_job
from xlashard.cloud.preparing import ready_workers, setup
from xlashard.cloud.provisioning import create, delete, wait
from xlashard.cloud.running import run, ssh
from xlashard.errors import CloudError


def make(cloud: Cloud, **settings: object) -> None:
    """A TPU that is set up."""
    session = cloud.session(**settings)
    create(session)
    wait(session)
    setup(session)


def await_text(cloud: Cloud, label: str, text: str) -> None:
    """Returns when a worker has written something."""
    deadline = time.monotonic() + 20
    while text not in cloud.log(label):
        assert time.monotonic() < deadline, f"{text!r} never came: {cloud.log(label)!r}"
        time.sleep(0.01)


@pytest.mark.slow
def test_from_nothing_to_a_job_and_away_again(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    make(cloud)
    assert "asked for one (v4-16, on-demand: 8 chips, 2 workers)" in cloud.said
    assert (
        run(cloud.session(run__command="sh job.sh; echo $COLOUR", run__environment=["COLOUR=red"]))
        == 0
    )
    assert cloud.log("0") == "hello from 0\nred\n"
    assert cloud.log("1") == "hello from 1\nred\n"
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == ["[0] hello from 0", "[0] red", "[1] hello from 1", "[1] red"]
    assert cloud.said[-1].startswith("done on 2 workers; logs in ")
    assert delete(cloud.session()) == 0
    assert cloud.said[-1] == "deleted one"
    assert not (cloud.folder / "tpus" / "one.json").exists()
    assert cloud.running() == []


@pytest.mark.slow
def test_what_is_there_is_not_made_again(cloud: Cloud) -> None:
    make(cloud)
    assert create(cloud.session()) == 0
    assert cloud.said[-1] == "nothing to do: one is READY"
    assert cloud.verbs().count("compute tpus tpu-vm create one") == 1
    delete(cloud.session())
    assert delete(cloud.session()) == 0
    assert cloud.said[-1] == "nothing to do: there is no one"


@pytest.mark.slow
def test_what_was_taken_away_is_in_the_way(cloud: Cloud) -> None:
    make(cloud)
    cloud.preempt()
    with pytest.raises(
        CloudError, match=r"(?s)earlier TPU: one is PREEMPTED.*delete.py --name=one"
    ):
        create(cloud.session())
    with pytest.raises(CloudError, match="will not come: one is PREEMPTED"):
        wait(cloud.session())
    with pytest.raises(CloudError, match=r"(?s)not ready: one is PREEMPTED.*wait.py --name=one"):
        run(cloud.session(run__command="true"))


def test_nobody_has_asked_for_it(cloud: Cloud) -> None:
    with pytest.raises(CloudError, match=r"(?s)there is no TPU one.*create.py --name=one"):
        wait(cloud.session())


def test_it_does_not_come_in_time(cloud: Cloud) -> None:
    cloud.faults(stays="CREATING")
    create(cloud.session())
    with pytest.raises(CloudError, match=r"(?s)not ready: one is CREATING.*--ready_within=0.2"):
        wait(cloud.session(wait__ready_within=0.1))


@pytest.mark.slow
def test_a_worker_that_does_not_come_up_is_named(cloud: Cloud) -> None:
    cloud.faults(never_comes=[1])
    create(cloud.session())
    with pytest.raises(CloudError) as caught:
        wait(cloud.session(wait__ssh_within=0.2))
    text = str(caught.value)
    assert "worker 1 of one did not answer" in text and "worker 0" not in text
    assert "Connection timed out" in text
    assert "gcloud compute tpus tpu-vm ssh one --zone=here --worker=1" in text


@pytest.mark.slow
def test_a_worker_that_comes_late_is_waited_for(cloud: Cloud) -> None:
    cloud.faults(ssh_fails={"1": 2})
    create(cloud.session())
    assert wait(cloud.session()) == 0
    assert cloud.said.count("1 worker of 2 not answering yet") == 2


def test_other_workers_than_the_name_says(cloud: Cloud) -> None:
    cloud.faults(hosts=3)
    create(cloud.session())
    with pytest.raises(CloudError, match=r"(?s)has 3 workers, but v4-16.*2 workers.*--accelerator"):
        wait(cloud.session())


@pytest.mark.slow
def test_ssh_that_fails_twice_is_tried_again(cloud: Cloud) -> None:
    make(cloud)
    cloud.faults(ssh_fails={"0": 2})
    setup(cloud.session())
    said = [text for text in cloud.said if "try " in text]
    assert "could not make a folder on worker 0 (exit code 255" in said[0]
    assert said[0].endswith("try 2 of 5 in 0.02 s") and said[1].endswith("try 3 of 5 in 0.04 s")
    assert len(said) == 2


@pytest.mark.slow
def test_ssh_that_always_fails_is_told_with_its_command(cloud: Cloud) -> None:
    make(cloud)
    cloud.faults(ssh_fails={"0": 99, "1": 99})
    with pytest.raises(CloudError) as caught:
        run(cloud.session(run__command="true", wait__ssh_tries=2))
    text = str(caught.value)
    assert "could not start on worker 0 (exit code 255)" in text
    assert "Connection closed by remote host" in text and "tpu-vm ssh one" in text
    assert "It failed on 1 other worker too." in text


@pytest.mark.slow
def test_a_connection_that_breaks_loses_no_byte(cloud: Cloud) -> None:
    make(cloud)
    cloud.write_code(job_sh="for i in $(seq 300); do echo line $i; done")
    setup(cloud.session())
    cloud.faults(ssh_breaks={"0": [40, 100, 1500], "1": [4]})
    assert run(cloud.session(run__command="sh job.sh")) == 0
    lines = "".join(f"line {number}\n" for number in range(1, 301))
    assert cloud.log("0") == lines
    assert cloud.log("1") == lines


@pytest.mark.slow
def test_the_first_that_fails_ends_the_others(cloud: Cloud) -> None:
    make(cloud)
    script = (
        "if [ $XLASHARD_POD_PROCESS_ID = 1 ]; then echo about to fail; exit 3; fi; "
        "trap 'echo told to end; exit 143' TERM; sleep 60 & wait"
    )
    assert run(cloud.session(run__command=script)) == 3
    assert cloud.said[-1].startswith("worker 1 failed first: exit code 3; worker 0: exit code 143")
    assert cloud.said[-1].endswith("about to fail")
    assert "told to end" in cloud.log("0")
    assert cloud.running() == []


@pytest.mark.slow
def test_what_an_earlier_run_left_is_ended(cloud: Cloud) -> None:
    make(cloud)
    # It detaches, and ignores being asked.
    script = "(trap '' TERM; setsid sleep 61) & trap '' TERM; sleep 60"
    _never_followed(cloud.session(run__command=script, run__grace=0.1))
    assert cloud.running()
    assert run(cloud.session(run__command="true", run__grace=0.1)) == 0
    assert any("ended what was left there" in text for text in cloud.said)
    assert cloud.running() == []


def _never_followed(session) -> None:
    """Starts a job as `run` does, and leaves it, as when a laptop is closed."""
    start_job(session, ready_workers(session), new_job(session.settings.run.command, {}))


@pytest.mark.slow
def test_a_job_is_followed_again(cloud: Cloud) -> None:
    make(cloud)
    with pytest.raises(CloudError, match="(?s)no job was started on one.*run.py --name=one"):
        run(cloud.session(run__attach=True))
    _never_followed(cloud.session(run__command="echo started; sleep 0.3; echo done; exit 4"))
    assert run(cloud.session(run__attach=True)) == 4
    assert cloud.log("0") == "started\ndone\n"
    assert cloud.log("1") == "started\ndone\n"
    assert run(cloud.session(run__attach=True)) == 4  # It is over by now.
    assert cloud.log("0") == "started\ndone\n"


@pytest.mark.slow
def test_ctrl_c_ends_the_job_on_all_workers(cloud: Cloud) -> None:
    make(cloud)

    def press() -> None:
        await_text(cloud, "0", "ready")
        await_text(cloud, "1", "ready")
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    script = "trap 'echo bye; exit 5' TERM; echo ready; sleep 60 & wait"
    assert run(cloud.session(run__command=script)) == 130
    presser.join()
    assert "SIGINT: ending the job on all workers" in " ".join(cloud.said)
    assert cloud.log("0") == "ready\nbye\n"
    assert cloud.log("1") == "ready\nbye\n"
    assert cloud.running() == []


@pytest.mark.slow
def test_a_worker_that_is_not_set_up(cloud: Cloud) -> None:
    make(cloud)
    with pytest.raises(CloudError, match=r"(?s)worker 0 has no folder other.*setup.py --name=one"):
        run(cloud.session(run__command="true", setup__folder="other"))


@pytest.mark.slow
def test_an_installation_that_fails_is_told_once(cloud: Cloud) -> None:
    session = cloud.session(setup__install="echo no such package >&2; exit 9")
    create(session)
    wait(session)
    with pytest.raises(CloudError, match=r"could not set up worker 0 \(exit code 77\)") as caught:
        setup(session)
    assert "no such package" in str(caught.value)
    assert "It failed on 1 other worker too." in str(caught.value)
    assert not any("try 2" in text for text in cloud.said)


@pytest.mark.slow
def test_code_is_copied_as_it_is_now(cloud: Cloud) -> None:
    installed = "echo x >>~/count"
    make(cloud, setup__install=installed)
    count = cloud.folder / "homes" / "one--0" / "count"
    setup(cloud.session(setup__install=installed))
    assert count.read_text() == "x\n"  # The same once more installs nothing.
    (cloud.folder / "code" / "job.sh").unlink()
    cloud.write_code(other_sh="echo other")
    setup(cloud.session(setup__install=installed))
    assert count.read_text() == "x\nx\n"
    assert os.listdir(cloud.folder / "homes" / "one--0" / "job") == ["other.sh"]


@pytest.mark.slow
def test_a_shell_on_a_worker(cloud: Cloud, capfd: pytest.CaptureFixture[str]) -> None:
    make(cloud)
    assert ssh(cloud.session(), ["1", "pwd"]) == 0
    assert capfd.readouterr().out == f"{cloud.folder}/homes/one--1\n"
    assert ssh(cloud.session(), []) == 0
    assert capfd.readouterr().out == "a shell\n"
    with pytest.raises(CloudError, match="there is no worker '7'; there are 0, 1"):
        ssh(cloud.session(), ["7"])


@pytest.mark.slow
def test_several_slices_are_queued_and_named_in_logs(cloud: Cloud) -> None:
    cloud.faults(hosts=1)
    two = {"tpu__slices": 2, "tpu__accelerator": "v4-8", "tpu__capacity": "spot"}
    make(cloud, **two)
    (created,) = [words for words in cloud.calls() if "create" in words]
    assert created[:4] == ["compute", "tpus", "queued-resources", "create"]
    assert {"--node-count=2", "--node-prefix=one", "--spot"} <= set(created)
    assert "--runtime-version=tpu-ubuntu2204-base" in created
    assert run(cloud.session(run__command="sh job.sh", **two)) == 0
    assert cloud.log("0.0") == "hello from 0\n"
    assert cloud.log("1.0") == "hello from 1\n"
    delete(cloud.session(**two))
    assert not list((cloud.folder / "tpus").iterdir())
    assert not list((cloud.folder / "queued").iterdir())


@pytest.mark.slow
def test_a_request_that_is_refused_says_why(cloud: Cloud) -> None:
    cloud.faults(stays="FAILED")
    create(cloud.session(tpu__queued=True))
    with pytest.raises(CloudError, match=r"one is FAILED \(no capacity in that zone\)"):
        wait(cloud.session(tpu__queued=True))
    assert delete(cloud.session(tpu__queued=True)) == 0


@pytest.mark.slow
def test_logs_stay_where_they_are_said_to_be(cloud: Cloud) -> None:
    make(cloud)
    run(cloud.session(run__command="sh job.sh"))
    folder = Path(cloud.said[-1].rpartition("logs in ")[2])
    assert sorted(os.listdir(folder)) == ["worker-0.log", "worker-1.log"]
    assert folder.parent == cloud.folder / "logs" / "one"
