"""The manifest of a job on GKE."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.cli.cloud.conftest import ROOT, Cloud
from xlashard.cli.cloud.cloud_settings import manifest, read_accelerator
from xlashard.errors import CloudError

JOB = {"gke__image": "docker.pkg.dev/p/r/job:1", "run__command": 'python "train.py" # $HOME\ntrue'}


def jobset(cloud: Cloud, **settings: Any) -> Any:
    return yaml.safe_load(manifest(cloud.session(**{**JOB, **settings}).settings))


def test_the_manifest_requests_whole_slices(cloud: Cloud) -> None:
    made = jobset(
        cloud, tpu__accelerator="v5litepod-16", gke__slices=3, tpu__capacity="spot", gke__restarts=7
    )
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert made["metadata"]["name"] == "one"
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 7}
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
    }
    assert pod["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    assert pod["terminationGracePeriodSeconds"] == 2
    (container,) = pod["containers"]
    chips = {"google.com/tpu": "4"}
    assert container["resources"] == {"requests": chips, "limits": chips}
    assert container["image"] == JOB["gke__image"]
    program, option, script = container["command"]
    assert (program, option) == ("bash", "-c")
    assert script.partition("\n")[2] == JOB["run__command"]
    names = [each["name"] for each in container["env"]]
    assert names == ["PYTHONUNBUFFERED", "LAUNCHER_ATTEMPT"]


def test_on_demand_jobset_has_no_spot_selector(cloud: Cloud) -> None:
    text = json.dumps(jobset(cloud))
    assert "spot" not in text


HOSTS = {
    "v5litepod-8": ("tpu-v5-lite-podslice", "2x4", 1, "8"),
    "v6e-64": ("tpu-v6e-slice", "8x8", 16, "4"),
    "v5p-128": ("tpu-v5p-slice", "4x4x4", 16, "4"),
    "v4-8": ("tpu-v4-podslice", "2x2x1", 1, "4"),
    "tpu7x-128": ("tpu7x", "4x4x4", 16, "4"),
}


@pytest.mark.parametrize(("name", "expected"), HOSTS.items())
def test_nodes_are_selected_by_generation(cloud: Cloud, name: str, expected: tuple) -> None:
    made = jobset(cloud, tpu__accelerator=name)
    job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    selected = pod["nodeSelector"]
    assert expected == (
        selected["cloud.google.com/gke-tpu-accelerator"],
        selected["cloud.google.com/gke-tpu-topology"],
        job["completions"],
        pod["containers"][0]["resources"]["limits"]["google.com/tpu"],
    )


INVALID = {
    "no image": ({"gke__image": ""}, "--image="),
    "no command": ({"run__command": " "}, "--command="),
    "a generation without nodes": (
        {"tpu__accelerator": "v3-8"},
        "GKE has no TPU v3; expected .*v4",
    ),
    "a name that is too long": ({"tpu__name": "a" * 41}, f"--name={'a' * 40}$"),
    "no accelerator": ({"tpu__accelerator": ""}, "--accelerator=v5litepod-16"),
    "an unknown accelerator": (
        {"tpu__accelerator": "v5lightpod-16"},
        "--accelerator=v5lightpod-16: ",
    ),
}


@pytest.mark.parametrize(("settings", "text"), INVALID.values(), ids=INVALID.keys())
def test_invalid_settings_are_refused(cloud: Cloud, settings: dict, text: str) -> None:
    with pytest.raises(CloudError) as caught:
        jobset(cloud, **settings)
    assert re.search(text, str(caught.value)) and caught.value.code == 2


def test_skypilot_task_resumes_on_the_image_of_its_accelerator() -> None:
    task = yaml.safe_load((ROOT / "tpu_scripts" / "sky.yaml").read_text())
    resources = task["resources"]
    accelerator = read_accelerator(resources["accelerators"].removeprefix("tpu-"))
    assert resources["accelerator_args"]["runtime_version"] == accelerator.image
    assert resources["use_spot"] and "--auto-resume" in task["run"]
    (folder,) = task["file_mounts"]
    assert f"--runs {folder} " in task["run"]
