"""Launch environments of multi-process programs, and the commands that start programs in them."""

import shlex
import sys
from collections.abc import Callable, Mapping

from xlashard._jax.runtime.coordination import Cluster, tpu_attribute
from xlashard.lazily import dataclass

# Seconds that a process waits while no other has connected. A launcher starts all processes at
# once, so a lone process was not started by it. Over ssh and by hand the starts are some seconds
# apart, as on a machine that is busy emulating them; Kubernetes starts each pod when capacity is
# available.
_AT_ONCE = 10.0
_OVER_SSH = 15.0
_BY_HAND = 30.0
_WHEN_THERE_IS_ROOM = 300.0


@dataclass(frozen=True)
class LaunchEnvironment:
    """A kind of environment in which several processes run.

    Attributes:
        title: Name in messages.
        alone: Seconds that a process waits while no other has connected.
        launch: Returns the command, or instructions, that start all processes, from the program's
            command and the number of processes.
    """

    title: str
    alone: float
    launch: Callable[[str, int], str]


def _on_tpu_vm(command: str, processes: int) -> str:
    name = tpu_attribute("NODE_ID") or "$TPU_NAME"
    zone = tpu_attribute("ZONE") or "$ZONE"
    every = " (on every slice)" if tpu_attribute("MEGASCALE_NUM_SLICES") else ""
    quoted = shlex.quote(command)
    return (
        f"gcloud compute tpus tpu-vm ssh {name} --zone={zone} --worker=all --command={quoted}"
        f"{every}"
    )


def _on_kubernetes(command: str, processes: int) -> str:
    return (
        f"let the Job's (or JobSet's) container run `{command}`, with parallelism: {processes}, "
        f"completions: {processes} and completionMode: Indexed; `kubectl get pods` lists the pods "
        "that are not running yet"
    )


def _by_slurm(command: str, processes: int) -> str:
    return f"srun --ntasks={processes} {command}"


def _by_mpi(command: str, processes: int) -> str:
    return f"mpirun -n {processes} {command}"


def _emulated(command: str, processes: int) -> str:
    return f"xlashard pod -n {processes} -- {command}"


def _by_hand(command: str, processes: int) -> str:
    return (
        f"{command}, {processes} times with the same coordinator and with process_id 0 … "
        f"{processes - 1}"
    )


EMULATED = LaunchEnvironment("an emulated pod", _BY_HAND, _emulated)
GIVEN = LaunchEnvironment("its arguments", _BY_HAND, _by_hand)
SLURM = LaunchEnvironment("Slurm", _AT_ONCE, _by_slurm)

_BY_CLUSTER = {
    "gcetpu": LaunchEnvironment("a Cloud TPU slice", _OVER_SSH, _on_tpu_vm),
    "gketpu": LaunchEnvironment("a TPU slice in GKE", _WHEN_THERE_IS_ROOM, _on_kubernetes),
    "K8sCluster": LaunchEnvironment("Kubernetes", _WHEN_THERE_IS_ROOM, _on_kubernetes),
    "slurm": SLURM,
    "ompi": LaunchEnvironment("Open MPI", _AT_ONCE, _by_mpi),
}


def environment_of(cluster: Cluster) -> LaunchEnvironment:
    """Return the environment that JAX has detected."""
    other = LaunchEnvironment(cluster.name, _BY_HAND, _by_hand)
    return _BY_CLUSTER.get(cluster.name, other)


def own_command() -> str:
    """Return the command that started this program: `python train.py --steps=10`."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def unlaunched_tasks(variables: Mapping[str, str]) -> int:
    """Return the number of tasks of a Slurm job from inside its batch script; otherwise 0.

    A program started there without `srun` runs once, and only the job's variables reveal the other
    tasks.
    """
    if "SLURM_JOB_ID" not in variables or "SLURM_STEP_NODELIST" in variables:
        return 0
    tasks = variables.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdecimal() else 0
