"""Process index and count, in the environments of all launchers, and without one."""

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from jax._src import cloud_tpu_init
from jax._src.clusters import cloud_tpu_cluster

from tests.message_patterns import naming
from xlashard.config import PodPlace, place_variables
from xlashard.errors import ArgumentError, ProcessesError
from xlashard.pods.multihost import cluster_info
from xlashard.pods.multihost.cluster_info import (
    InitializeRequest,
    bind_address,
    check_types,
    find_cluster,
)

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-010],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_VERSION": "4.1.6",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
GKE = {"TPU_WORKER_HOSTNAMES": "127.0.0.2,127.0.0.3,127.0.0.4", "TPU_WORKER_ID": "2"}
# Other attributes that JAX reads.
OTHERS = (
    *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "TPU_SKIP_MDS_QUERY"),
    *("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"),
)
METADATA = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "unknown:unknown:127.0.0.2,unknown:unknown:127.0.0.3",
    "tpu-env": "NODE_ID: 'my-tpu'\nZONE: 'us-central2-b'\n",
}


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set variables, with those of all launchers removed, and a TPU VM's metadata."""

    def make(variables: Mapping[str, str], tpu_vm: bool = False) -> None:
        for name in (*SLURM, *OPEN_MPI, *GKE, *OTHERS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", tpu_vm)
        monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", tpu_vm)
        # In GKE, machines do not know the slice that their containers form.
        known = {} if "TPU_WORKER_HOSTNAMES" in variables else METADATA
        monkeypatch.setattr(
            cloud_tpu_cluster,
            "get_metadata",
            lambda key: (known.get(key, ""), 200 if key in known else 404),
        )
        monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "train.py", "--steps", "9"])

    make({})
    return make


def asked(**changes: Any) -> InitializeRequest:
    defaults = dict.fromkeys(("coordinator", "processes", "process_id", "timeout", "bind", "tls"))
    return InitializeRequest(**{**defaults, "heartbeat": 100.0, **changes})


def detected(**changes: Any) -> tuple[str, int, int, str, tuple[int, ...] | None]:
    at = find_cluster(asked(**changes))
    return at.environment.title, at.processes, at.process_id, at.coordinator, at.local_devices


@pytest.mark.usefixtures("setting")
def test_default_is_one_process() -> None:
    assert detected() == ("one process", 1, 0, "", None)
    assert detected(processes=1) == ("one process", 1, 0, "", None)


@pytest.mark.parametrize("name", ["timeout", "heartbeat"])
def test_error_of_an_invalid_timeout_suggests_a_valid_value(name: str) -> None:
    with pytest.raises(ArgumentError, match=naming(f"initialize: {name}", "'long'", f"{name}=600")):
        check_types(asked(**{name: "long"}))


def test_slurm_step_is_detected(setting: Any) -> None:
    setting(SLURM)
    assert detected() == ("Slurm", 4, 3, "node007:61441", (1,))


def test_open_mpi_job_is_detected(setting: Any) -> None:
    setting(OPEN_MPI)
    title, processes, process_id, coordinator, local = detected()
    assert (title, processes, process_id, local) == ("Open MPI", 2, 1, (0,))
    assert coordinator.startswith("10.96.0.1:")


def test_gke_tpu_slice_is_detected(setting: Any) -> None:
    setting(GKE, tpu_vm=True)
    assert detected() == ("a TPU slice in GKE", 3, 2, "127.0.0.2:8482", None)
    setting({**GKE, "JAX_COORDINATOR_PORT": "9000"}, tpu_vm=True)
    assert detected()[3] == "127.0.0.2:9000"


def test_several_slices_of_gke_are_one_job(setting: Any) -> None:
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.9:8080",
    }
    setting({**GKE, **slices}, tpu_vm=True)
    assert detected() == ("a TPU slice in GKE", 6, 5, "127.0.0.9:8482", None)


def test_cloud_tpu_slice_is_detected(setting: Any) -> None:
    setting({}, tpu_vm=True)
    assert detected() == ("a Cloud TPU slice", 2, 1, "127.0.0.2:8482", None)


def test_single_host_tpu_is_one_process(setting: Any) -> None:
    setting({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, tpu_vm=True)
    assert detected() == ("a TPU slice in GKE", 1, 0, "", None)


def test_emulated_pod_has_precedence_over_open_mpi(setting: Any) -> None:
    setting({**OPEN_MPI, **place_variables(PodPlace("127.0.0.1:4000", 4, 2, 2))})
    assert detected() == ("an emulated pod", 4, 2, "127.0.0.1:4000", None)


def test_arguments_have_precedence_over_the_environment(setting: Any) -> None:
    setting(SLURM)
    by_arguments = detected(coordinator="10.0.0.1:80", processes=3, process_id=1)
    assert by_arguments == ("its arguments", 3, 1, "10.0.0.1:80", None)
    assert detected(coordinator="10.0.0.1:80")[3] == "10.0.0.1:80"
    assert detected(processes=1) == ("one process", 1, 0, "", None)
    assert detected(processes=4, process_id=3)[:3] == ("Slurm", 4, 3)


@pytest.mark.parametrize(
    ("variables", "tpu_vm", "command"),
    [
        (SLURM, False, "srun --ntasks=8 python train.py --steps 9"),
        (OPEN_MPI, False, "mpirun -n 8 python train.py --steps 9"),
        (GKE, True, "parallelism: 8, completions: 8"),
        (
            {},
            True,
            "gcloud compute tpus tpu-vm ssh my-tpu --zone=us-central2-b --worker=all "
            "--command='python train.py --steps 9'",
        ),
        (
            place_variables(PodPlace("127.0.0.1:4000", 4, 2, 2)),
            False,
            "xlashard pod -n 8 -- python train.py --steps 9",
        ),
    ],
)
def test_mismatched_process_count_shows_the_launch_command(
    setting: Any, variables: Mapping[str, str], tpu_vm: bool, command: str
) -> None:
    setting(variables, tpu_vm)
    with pytest.raises(ProcessesError) as caught:
        find_cluster(asked(processes=8))
    assert "initialize(processes=8)" in str(caught.value)
    assert command in str(caught.value)


def test_mismatched_process_id_is_refused(setting: Any) -> None:
    setting(SLURM)
    with pytest.raises(ProcessesError, match=r"process_id=1\): Slurm .*process_id=3"):
        find_cluster(asked(process_id=1))


def test_slurm_batch_script_is_refused(setting: Any) -> None:
    batch = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS")}
    setting({**batch, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    with pytest.raises(ProcessesError, match="srun --ntasks=4 python train.py") as caught:
        find_cluster(asked())
    assert caught.value.processes == (1, 2, 3)
    assert detected(processes=1)[1] == 1
    setting({**batch, "SLURM_NTASKS": "1"})
    assert detected()[1] == 1


def test_incomplete_cluster_environment_is_refused(setting: Any) -> None:
    setting({"TPU_WORKER_HOSTNAMES": "a,b"}, tpu_vm=True)
    with pytest.raises(ProcessesError, match=r"initialize\(processes=1\)"):
        find_cluster(asked())


def _unknown_host(name: str) -> str:
    raise cloud_tpu_cluster.socket.gaierror(-2, f"Name or service not known: {name}")


@pytest.mark.slow
def test_unresolvable_coordinator_name_is_reported(setting: Any) -> None:
    hosts = "no-such-host.invalid,127.0.0.3"
    setting({"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": "1"}, tpu_vm=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cloud_tpu_cluster.time, "sleep", lambda seconds: None)
        # An unreachable name server takes seconds for the same result.
        patch.setattr(cloud_tpu_cluster.socket, "gethostbyname", _unknown_host)
        with pytest.raises(ProcessesError, match="no-such-host.invalid") as caught:
            find_cluster(asked(timeout=1))
    assert "kubectl get pods" in str(caught.value)


@pytest.mark.parametrize(
    ("coordinator", "bind", "where"),
    [
        ("127.0.0.1:80", None, ("127.0.0.1", 80)),
        ("localhost:80", None, ("localhost", 80)),
        ("[::1]:80", None, ("::1", 80)),
        ("10.0.0.1:80", None, ("10.0.0.1", 80)),
        ("10.0.0.1:80", "0.0.0.0:81", ("0.0.0.0", 81)),
    ],
)
@pytest.mark.usefixtures("setting")
def test_bind_address_defaults_to_the_coordinator_address(
    coordinator: str, bind: str | None, where: tuple[str, int]
) -> None:
    request = asked(coordinator=coordinator, processes=2, process_id=0, bind=bind)
    assert bind_address(find_cluster(request), request) == where


@pytest.mark.usefixtures("setting")
def test_loopback_coordinator_name_binds_all_interfaces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"node7": "127.0.1.1", "node8": "10.0.0.8"}
    monkeypatch.setattr(
        cluster_info.socket,
        "getaddrinfo",
        lambda host, port, **_: [(2, 1, 6, "", (known[host], port))],
    )
    request = asked(coordinator="node8:80", processes=2, process_id=0)
    assert bind_address(find_cluster(request), request) == ("10.0.0.8", 80)
    assert not caplog.records
    request = asked(coordinator="node7:80", processes=2, process_id=0)
    assert bind_address(find_cluster(request), request) == ("0.0.0.0", 80)
    assert "bind='HOST:80'" in caplog.text
