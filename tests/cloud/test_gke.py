"""Jobs on GKE: the manifest, and what happens to one on a cluster of local processes."""

import json
import os
import signal
import threading
import time

import pytest

from tests.cloud.conftest import Cloud
from xlashard.cloud.gke import apply, delete, do, follow, run
from xlashard.cloud.jobset import jobset
from xlashard.errors import CloudError

GKE = {"tpu__accelerator": "v4-16", "gke__image": "docker.pkg.dev/p/r/job:1"}


def test_the_manifest_asks_for_whole_slices(cloud: Cloud) -> None:
    session = cloud.session(
        tpu__accelerator="v5litepod-16",
        tpu__slices=3,
        tpu__capacity="spot",
        tpu__labels=["team=llm"],
        gke__image="docker.pkg.dev/p/r/job:1",
        gke__volumes=["runs=/mnt/runs"],
        gke__queue="tpus",
        gke__pod_account="trainer",
        gke__selectors=["pool=mine"],
        run__command="python train.py",
        run__environment=["COLOUR=red"],
    )
    made = jobset(session.settings)
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    labels = {"kueue.x-k8s.io/queue-name": "tpus", "team": "llm"}
    assert made["metadata"]["labels"] == labels
    (replicated,) = made["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 3
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (4, 4)
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
        "pool": "mine",
    }
    assert pod["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    assert pod["serviceAccountName"] == "trainer"
    (container,) = pod["containers"]
    chips = {"google.com/tpu": "4"}
    assert container["resources"] == {"requests": chips, "limits": chips}
    assert {"name": "COLOUR", "value": "red"} in container["env"]
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    assert volume["persistentVolumeClaim"] == {"claimName": "runs"}
    assert mount == {"name": volume["name"], "mountPath": "/mnt/runs"}
    assert container["command"][2].endswith("\npython train.py")
    assert json.loads(json.dumps(made)) == made


HOSTS = {
    "v5litepod-8": ("tpu-v5-lite-podslice", "2x4", 1, "8"),
    "v6e-64": ("tpu-v6e-slice", "8x8", 16, "4"),
    "v5p-128": ("tpu-v5p-slice", "4x4x4", 16, "4"),
    "v4-8": ("tpu-v4-podslice", "2x2x1", 1, "4"),
    "tpu7x-128": ("tpu7x", "4x4x4", 16, "4"),
}


@pytest.mark.parametrize(("name", "wanted"), HOSTS.items())
def test_nodes_of_each_generation(cloud: Cloud, name: str, wanted: tuple) -> None:
    session = cloud.session(**{**GKE, "tpu__accelerator": name, "run__command": "true"})
    job = jobset(session.settings)["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    selected = pod["nodeSelector"]
    found = (
        selected["cloud.google.com/gke-tpu-accelerator"],
        selected["cloud.google.com/gke-tpu-topology"],
        job["completions"],
        pod["containers"][0]["resources"]["limits"]["google.com/tpu"],
    )
    assert found == wanted


def test_a_training_run_goes_on_after_a_restart(cloud: Cloud) -> None:
    command = "xlashard train --config configs/1b.toml --runs /mnt/runs"
    made = jobset(cloud.session(**GKE, run__command=command).settings)
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    script = pod["containers"][0]["command"][2]
    assert "ls -dt /mnt/runs/1b/checkpoints/[0-9]*" in script
    assert 'xlashard train --runs /mnt/runs --resume "${last%/checkpoints/*}"' in script


@pytest.mark.slow
def test_from_nothing_to_its_end_and_away_again(cloud: Cloud) -> None:
    command = "echo hello from $TPU_WORKER_ID of $COLOUR"
    session = cloud.session(**GKE, run__command=command, run__environment=["COLOUR=red"])
    assert run(session) == 0
    assert cloud.log("0.0") == "hello from 0 of red\n"
    assert cloud.log("0.1") == "hello from 1 of red\n"
    assert not list((cloud.folder / "jobsets").iterdir())
    assert any("the JobSet one has completed" in text for text in cloud.said)


@pytest.mark.slow
def test_it_starts_anew_and_completes(cloud: Cloud) -> None:
    cloud.faults(logs_fail=2)
    script = (
        "if [ $LAUNCHER_ATTEMPT = 0 ] && [ $TPU_WORKER_ID = 1 ]; then echo taken away; exit 1; fi; "
        "echo attempt $LAUNCHER_ATTEMPT; if [ $LAUNCHER_ATTEMPT = 0 ]; then sleep 60; fi"
    )
    assert run(cloud.session(**GKE, run__command=script)) == 0
    assert cloud.log("0.0").endswith("attempt 1\n")
    assert cloud.log("0.1").endswith("attempt 1\n")
    assert "the JobSet has started anew (restart 1)" in cloud.said
    assert cloud.running() == []


@pytest.mark.slow
def test_it_fails_in_the_end(cloud: Cloud) -> None:
    script = "if [ $TPU_WORKER_ID = 1 ]; then echo no luck; exit 3; fi; sleep 60"
    session = cloud.session(**GKE, run__command=script, gke__restarts=0, watch__keep=True)
    assert run(session) == 3
    assert "pod one-slice-0-1-00000 failed: exit code 3" in cloud.said[-1]
    assert cloud.said[-1].endswith("no luck")
    assert delete(cloud.session(**GKE)) == 0
    assert cloud.running() == []


def test_its_pods_do_not_start(cloud: Cloud) -> None:
    cloud.faults(never_starts=True)
    session = cloud.session(**GKE, run__command="true", wait__ready_within=0.1)
    apply(session)
    with pytest.raises(CloudError) as caught:
        follow(session)
    text = str(caught.value)
    assert "no pod of one has started: 0/3 nodes are available: Insufficient google.com/tpu" in text
    assert "--ready_within=0.2" in text


@pytest.mark.slow
def test_ctrl_c_leaves_it_running(cloud: Cloud) -> None:
    def press() -> None:
        while "ready" not in cloud.log("0.0"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    apply(cloud.session(**GKE, run__command="echo ready; sleep 60"))
    presser = threading.Thread(target=press)
    presser.start()
    assert follow(cloud.session(**GKE)) == 130
    presser.join()
    assert "goes on without being followed" in cloud.said[-1]
    assert "gke.py delete --name=one" in cloud.said[-1]
    assert cloud.running()


WRONG = {
    "no image": ({"gke__image": ""}, "--image="),
    "no command": ({"run__command": " "}, "--command="),
    "a generation without nodes": ({"tpu__accelerator": "v3-8"}, "GKE has no TPU v3; it has v4"),
    "a name that is too long": ({"tpu__name": "a" * 41}, f"--name={'a' * 40}$"),
    "no accelerator": ({"tpu__accelerator": ""}, "--accelerator=v5litepod-16"),
    "another accelerator": ({"tpu__accelerator": "v5lightpod-16"}, "--accelerator=v5lightpod-16: "),
    "a volume without a path": ({"gke__volumes": ["runs"]}, "--volumes=KEY=VALUE"),
}


@pytest.mark.parametrize(("settings", "text"), WRONG.values(), ids=WRONG.keys())
def test_wrong_requests(cloud: Cloud, settings: dict, text: str) -> None:
    session = cloud.session(**{**GKE, "run__command": "true", **settings})
    with pytest.raises(CloudError, match=text) as caught:
        apply(session)
    assert caught.value.code == 2
    assert cloud.calls() == []


def test_wrong_words(cloud: Cloud) -> None:
    for words in ([], ["start"], ["run", "now"]):
        with pytest.raises(CloudError, match="manifest, run, apply, follow, delete"):
            do(cloud.session(**GKE), words)


def test_there_is_none(cloud: Cloud) -> None:
    with pytest.raises(CloudError, match="there is no JobSet one in the namespace default"):
        follow(cloud.session(**GKE))
