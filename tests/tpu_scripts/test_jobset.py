"""The manifest of a job on GKE, and the shell script that runs in its pods."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import wait_for

SCRIPTS = Path(__file__).parents[2] / "tpu_scripts"

_SPEC = importlib.util.spec_from_file_location("jobset", SCRIPTS / "jobset.py")
assert _SPEC is not None and _SPEC.loader is not None
jobset = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(jobset)

JOB = {
    "name": "one",
    "accelerator": "v5litepod-16",
    "image": "docker.pkg.dev/p/r/job:1",
    "command": 'python "train.py" # $HOME\ntrue',
}


def print_manifest(**flags: Any) -> str:
    words = [f"--{name}={value}" for name, value in {**JOB, **flags}.items()]
    return jobset.make_manifest(jobset.parse_arguments(words)[0])


def read_manifest(**flags: Any) -> Any:
    return yaml.safe_load(print_manifest(**flags))


def find_job(manifest: Any) -> Any:
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def test_manifest_requests_whole_slices() -> None:
    manifest = read_manifest(slices=3)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"]["name"] == "one"
    assert "alpha.jobset.sigs.k8s.io/exclusive-topology" in manifest["metadata"]["annotations"]
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 3
    job = find_job(manifest)
    assert (job["parallelism"], job["completions"]) == (4, 4)
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 30
    (container,) = pod["containers"]
    chips = {"google.com/tpu": "4"}
    assert container["resources"] == {"requests": chips, "limits": chips}
    assert container["image"] == JOB["image"]


NODES = {
    "v5litepod-8": ("tpu-v5-lite-podslice", "2x4", "ct5lp-hightpu-8t", 1, "8"),
    "v5litepod-8 --machine=ct5lp-hightpu-4t": (
        *("tpu-v5-lite-podslice", "2x4", "ct5lp-hightpu-4t", 2, "4"),
    ),
    "v6e-8 --machine=ct6e-standard-4t": ("tpu-v6e-slice", "2x4", "ct6e-standard-4t", 2, "4"),
    "v6e-1": ("tpu-v6e-slice", "1x1", "ct6e-standard-1t", 1, "1"),
    "v6e-64": ("tpu-v6e-slice", "8x8", "ct6e-standard-4t", 16, "4"),
    "v5p-128": ("tpu-v5p-slice", "4x4x4", "ct5p-hightpu-4t", 16, "4"),
    "v4-8": ("tpu-v4-podslice", "2x2x1", "ct4p-hightpu-4t", 1, "4"),
    "tpu7x-128": ("tpu7x", "4x4x4", "tpu7x-standard-4t", 16, "4"),
}


@pytest.mark.parametrize(("flags", "expected"), NODES.items())
def test_nodes_are_selected_by_generation_and_machine(flags: str, expected: tuple) -> None:
    accelerator, _, machine = flags.partition(" --machine=")
    job = find_job(read_manifest(accelerator=accelerator, machine=machine))
    pod = job["template"]["spec"]
    assert expected == (
        pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"],
        pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"],
        pod["nodeSelector"]["node.kubernetes.io/instance-type"],
        job["completions"],
        pod["containers"][0]["resources"]["limits"]["google.com/tpu"],
    )


def test_capacity_queue_and_priority_are_requested_by_labels() -> None:
    for capacity in ("spot", "flex-start"):
        pod = find_job(read_manifest(capacity=capacity))["template"]["spec"]
        assert pod["nodeSelector"][f"cloud.google.com/gke-{capacity}"] == "true"
        assert pod["tolerations"][0]["key"] == f"cloud.google.com/gke-{capacity}"
    manifest = read_manifest(queue="team-a", priority="high", reservation="1e3")
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    pod = find_job(manifest)["template"]["spec"]
    assert pod["priorityClassName"] == "high"
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "1e3"
    assert not re.search("spot|kueue|priority|reservation", print_manifest())


def choose_action(manifest: Any, *, code: int = 0, condition: str = "") -> str:
    """Return what JobSet does after the end of a pod, by the documented order of its rules."""
    job = find_job(manifest)
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        conditions = [each["type"] for each in rule.get("onPodConditions", ())]
        if condition in conditions or code in rule.get("onExitCodes", {}).get("values", ()):
            reason, message = "PodFailurePolicy", f"Pod x matching FailJob rule at index {index}"
            break
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_failed_programs_are_not_restarted_and_preempted_ones_without_limit() -> None:
    manifest = read_manifest(restarts=7)
    unlimited = "RestartJobSetAndIgnoreMaxRestarts"
    assert choose_action(manifest, code=137, condition="DisruptionTarget") == unlimited
    assert choose_action(manifest, code=143) == unlimited
    assert {choose_action(manifest, code=code) for code in (75, 134, 137)} == {"RestartJobSet"}
    assert {choose_action(manifest, code=code) for code in (1, 2, 139)} == {"FailJobSet"}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7


def test_command_passes_through_yaml_and_kubernetes_unchanged() -> None:
    command = "echo $$ \"$(POD) $HOME\" '\\' \t\u2028\U0001f600\x7fé\n#x: {y}"
    pod = find_job(read_manifest(command=command))["template"]["spec"]
    *_, word = pod["containers"][0]["command"]
    # Kubernetes replaces $$ by $, and leaves a $ before other characters.
    assert re.sub(r"\$\$", "$", word) == command and not re.search(r"(?<!\$)(\$\$)*\$\(", word)


INVALID = {
    "no image": ({"image": " "}, "--image is empty.*--image=REGION-docker"),
    "no command": ({"command": " "}, "--command is empty.*--command='date'"),
    "bytes in the command": ({"command": "\udc80"}, "--command is .*Unicode"),
    "a generation without nodes": ({"accelerator": "v3-8"}, "GKE has no TPU v3; write one of v4"),
    "a long name": ({"name": "a" * 41}, f"--name={'a' * 40}$"),
    "an invalid name": ({"name": "7_Job"}, "--name='7_Job'.*--name=job-7-job$"),
    "an unknown accelerator": ({"accelerator": "v5lightpod-16"}, "--accelerator=v5lightpod-16: "),
    "a machine of another pool": (
        {"accelerator": "v6e-16", "machine": "ct6e-standard-8t"},
        "--machine=ct6e-standard-8t.*v6e:4x4.*--machine=ct6e-standard-4t$",
    ),
    "slices of one host": (
        {"accelerator": "v6e-8", "slices": 2},
        "--slices=2: .*MEGASCALE.*ct6e-standard-8t.*--slices=1",
    ),
    "no slice": ({"slices": 0}, "--slices=0.*1 or more"),
    "an invalid queue": ({"queue": "a b"}, "--queue='a b'.*--queue=my-queue"),
}


@pytest.mark.parametrize(("flags", "text"), INVALID.values(), ids=INVALID.keys())
def test_invalid_flags_are_refused(flags: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        print_manifest(**flags)


@pytest.mark.slow
def test_script_exits_with_2_and_names_the_flag() -> None:
    words = [sys.executable, str(SCRIPTS / "jobset.py"), "--name=a", "--accelerator=v6e-4"]
    done = subprocess.run([*words, "--image=", "--command=x"], capture_output=True, text=True)
    assert done.returncode == 2 and "error: --image is empty" in done.stderr


@pytest.mark.parametrize(
    "command",
    [["--command=KEY=SECRET \udc80"], ["--command", "env", "KEY=SECRET", "python", "--key=SECRET"]],
)
def test_messages_show_no_secrets_of_the_command(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{name}={value}" for name, value in JOB.items() if name != "command"]
    with pytest.raises(SystemExit):
        jobset.main([*words, *command])
    out, error = capsys.readouterr()
    assert not out and "--command" in error and "SECRET" not in error


def start_pod(command: str, **options: Any) -> "subprocess.Popen[str]":
    script = find_job(read_manifest())["template"]["spec"]["containers"][0]["command"][2]
    environment = {**os.environ, "JOBSET_RESTART_ATTEMPT": "2"}
    words = ["bash", "-c", script, "job", command]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True, **options
    )


@pytest.mark.slow
def test_pod_counts_starts_from_1_and_ends_with_the_code_of_the_command() -> None:
    with start_pod("echo $LAUNCHER_ATTEMPT; exit 3") as pod:
        assert pod.communicate()[0] == "3\n" and pod.returncode == 3
    with start_pod("kill -ABRT $BASHPID") as pod:
        pod.communicate()
        assert pod.returncode == 134


@pytest.mark.slow
def test_peer_of_a_lost_process_ends_after_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "sleep"
    stand_in.write_text(f"#!/bin/sh\necho $1 >>{tmp_path}/slept\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for code in (0, 1, 75):
        with start_pod(f"exit {code}") as pod:
            pod.communicate()
            assert pod.returncode == code
    assert (tmp_path / "slept").read_text() == "20\n"


@pytest.mark.slow
def test_sigterm_reaches_the_program_which_ends_before_the_pod(tmp_path: Path) -> None:
    program = "trap 'echo saved >saved; exit 0' TERM; echo >started; while :; do sleep 0.02; done"
    with start_pod(f'bash -c "{program}"; echo never', cwd=tmp_path) as pod:
        wait_for((tmp_path / "started").exists, "start of the program")
        pod.send_signal(signal.SIGTERM)
        assert pod.communicate()[0] == "" and pod.returncode == 143
    assert (tmp_path / "saved").read_text() == "saved\n"


def test_manifest_has_only_fields_of_jobset() -> None:
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="make check installs it")
    flags = {"slices": 2, "queue": "q", "priority": "p", "capacity": "spot", "reservation": "r"}
    manifest = read_manifest(**flags)
    typed = api.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    assert list_missing(manifest, typed) == []


def list_missing(value: Any, typed: Any, path: str = "") -> list[str]:
    """Return the paths of values that a typed copy lacks or has changed."""
    if isinstance(value, dict) and isinstance(typed, dict):
        pairs = [(value[key], typed.get(key), f"{path}.{key}") for key in value]
    elif isinstance(value, list) and isinstance(typed, list) and len(value) == len(typed):
        pairs = [(each, typed[n], f"{path}[{n}]") for n, each in enumerate(value)]
    else:
        return [] if value == typed else [path]
    return [each for pair in pairs for each in list_missing(*pair)]


@pytest.mark.slow
def test_skypilot_task_counts_the_starts_of_each_host_from_1(tmp_path: Path) -> None:
    program = tmp_path / "venv/bin/xlashard"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho $LAUNCHER_ATTEMPT\n")
    program.chmod(0o755)
    run = yaml.safe_load((SCRIPTS / "sky.yaml").read_text())["run"]
    run = run.replace("/mnt/runs", str(tmp_path / "runs"))
    counts = []
    for task, rank in [("one", 0), ("one", 1), ("one", 0), ("one", 1), ("two", 0)]:
        names = {"SKYPILOT_TASK_ID": task, "SKYPILOT_NODE_RANK": str(rank), "HOME": str(tmp_path)}
        words = ["bash", "-euc", run]
        counts.append(subprocess.check_output(words, env={**os.environ, **names}, text=True))
    assert counts == ["1\n", "1\n", "2\n", "2\n", "1\n"]


def test_skypilot_task_resumes_on_the_image_of_its_accelerator() -> None:
    task = yaml.safe_load((SCRIPTS / "sky.yaml").read_text())
    resources = task["resources"]
    assert resources["use_spot"] and "--auto-resume" in task["run"]
    words = ["create", "my-tpu", "us-west4-a", resources["accelerators"].removeprefix("tpu-")]
    created = subprocess.run(
        [SCRIPTS / "tpu_vm.sh", "--dry-run", *words], capture_output=True, text=True, check=True
    )
    assert f"--version={resources['accelerator_args']['runtime_version']} " in created.stdout
    (folder,) = task["file_mounts"]
    assert f"--runs {folder} " in task["run"]
