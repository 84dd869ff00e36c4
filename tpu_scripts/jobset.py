"""Prints a job on TPUs of a GKE cluster as a JobSet of Kubernetes: v4, v5e, v5p, v6e, tpu7x.

python tpu_scripts/jobset.py --name=my-job --accelerator=v6e-16 --image=IMAGE --command=COMMAND |
    kubectl apply --filename=-

It needs JobSet 0.10 or later in the cluster: https://jobset.sigs.k8s.io
"""

import argparse
import math
import re
import string
import sys

from xlashard.errors import TopologyError
from xlashard.predict.targets.tpu.topology_names import (
    SliceName,
    parse_topology_name,
    shape_name,
)

# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
NODES = {
    "v4": ("tpu-v4-podslice", "ct4p-hightpu", (4,)),
    "v5e": ("tpu-v5-lite-podslice", "ct5lp-hightpu", (1, 4, 8)),
    "v5p": ("tpu-v5p-slice", "ct5p-hightpu", (4,)),
    "v6e": ("tpu-v6e-slice", "ct6e-standard", (1, 4, 8)),
    "tpu7x": ("tpu7x", "tpu7x-standard", (4,)),
}
"""Label of the nodes, family of machine types, and chips of its machines by generation."""

# Machines of a slice of several hosts have four chips in each generation.
CHIPS_OF_MANY = 4
# The longest name of a pod is a DNS label, too: NAME-slice-99-9999-abcde.
LONGEST_NAME = 40
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?")


class Template(string.Template):
    """Text with placeholders such as `@name`, as `$` is common in shell scripts."""

    delimiter = "@"


MANIFEST = """\
# https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2
# https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: @name
@{metadata}\
spec:
  failurePolicy:
    maxRestarts: @restarts
    rules:
    # The node was preempted or drained, or the pod got SIGTERM: the first two rules below.
    - name: preempted
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: ["rule at index [01]$"]
    # The third rule: a peer or the machine is lost, or memory is short. `maxRestarts` is the limit.
    - name: lost
      action: RestartJobSet
      onJobFailureReasons: [PodFailurePolicy]
    # The program failed by itself, and would again.
    - name: failed
      action: FailJobSet
      onJobFailureReasons: [BackoffLimitExceeded]
  successPolicy:
    operator: All
  network:
    enableDNSHostnames: true
    subdomain: @name
  replicatedJobs:
  - name: slice
    replicas: @slices
    template:
      spec:
        completionMode: Indexed
        parallelism: @hosts
        completions: @hosts
        # The JobSet restarts all pods or none.
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onPodConditions: [{type: DisruptionTarget, status: "True"}]
          - action: FailJob
            onExitCodes: {containerName: worker, operator: In, values: [143]} # SIGTERM
          - action: FailJob
            # A peer is gone (xlashard), SIGABRT (JAX's own check of peers), SIGKILL.
            onExitCodes: {containerName: worker, operator: In, values: [75, 134, 137]}
        template:
          spec:
            restartPolicy: Never
@{priority}\
            # Pods find each other by the names of their hosts.
            hostNetwork: true
            dnsPolicy: ClusterFirstWithHostNet
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: @node_label
              cloud.google.com/gke-tpu-topology: @topology
              node.kubernetes.io/instance-type: @machine
@{placement}\
            # Time for the checkpoint that a job writes after SIGTERM.
            terminationGracePeriodSeconds: @grace
            containers:
            - name: worker
              image: @image
              command:
              - bash
              - -c
              - |
@{script}\
              - job
              - @command
              env:
              - {name: PYTHONUNBUFFERED, value: "1"}
              - name: JOBSET_RESTART_ATTEMPT
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
              ports:
              - containerPort: 8471 # TPUs in one slice
              - containerPort: 8080 # between slices
              resources:
                requests: {google.com/tpu: "@chips"}
                limits: {google.com/tpu: "@chips"}
              securityContext:
                privileged: true
"""

SCRIPT = """\
# Kubernetes sends SIGTERM to this shell alone, which passes it on to all processes of the job.
set -m
export LAUNCHER_ATTEMPT=$((JOBSET_RESTART_ATTEMPT + 1))
bash -c "trap 'exit 143' TERM
$1" &
trap 'kill -TERM -- -$!; signalled=1' TERM
while signalled=; wait $!; code=$?; [ -n "$signalled" ]; do :; done
# A job fails for the reason of the pod that ends first: let the cause be before its consequences.
[ "$code" != 75 ] || sleep 20
exit "$code"
"""
"""Shell script that runs the command, its first argument, in each pod."""

CAPACITIES = {
    "on-demand": "",
    "spot": "cloud.google.com/gke-spot",
    "flex-start": "cloud.google.com/gke-flex-start",
}
"""Label, and taint, of the nodes of each kind of capacity."""


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return the flags, and the parser that reports invalid ones."""
    parser = argparse.ArgumentParser(
        "jobset.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    required = parser.add_argument_group("required")
    required.add_argument("--name", required=True, help="name of the JobSet")
    required.add_argument("--accelerator", required=True, help="v6e-16, or v6e:4x4")
    required.add_argument("--image", required=True, help="container image with the program")
    required.add_argument("--command", required=True, help="shell command, run on each host")
    parser.add_argument("--slices", type=int, default=1, help="slices, joined by the network")
    parser.add_argument(
        "--machine", default="", help="type of the node pool's machines: ct6e-standard-4t"
    )
    parser.add_argument("--capacity", choices=CAPACITIES, default="on-demand")
    parser.add_argument("--reservation", default="", help="name of a reservation")
    parser.add_argument("--queue", default="", help="local queue of Kueue")
    parser.add_argument("--priority", default="", help="priority class of the pods")
    parser.add_argument(
        "--restarts", type=int, default=3, help="limit of restarts that no preemption causes"
    )
    parser.add_argument("--grace", type=int, default=30, help="seconds between SIGTERM and SIGKILL")
    flags, rest = parser.parse_known_args(words)
    if rest:
        # Not the words themselves: those of a command that is not quoted may be secrets.
        parser.error(
            f"{len(rest)} unknown words: write the command as one, --command='python a.py'"
        )
    return flags, parser


def quote(text: str) -> str:
    """Return a text as a double-quoted scalar of YAML."""

    def escape(match: re.Match[str]) -> str:
        return f"\\U{ord(match[0]):08x}" if match[0] not in '"\\' else f"\\{match[0]}"

    return f'"{re.sub(r"[^ -~]|[\"\\]", escape, text)}"'


def find_machine(topology: SliceName, requested: str) -> tuple[str, int, int]:
    """Return the type of the machines, the chips of each, and their number in a slice.

    Raises:
        ValueError: The generation or the machine is unavailable.
    """
    generation, chips = topology.generation.name, math.prod(topology.shape)
    if generation not in NODES:
        raise ValueError(
            f"--accelerator: GKE has no TPU {generation}; write one of {', '.join(NODES)}"
        )
    _, family, sizes = NODES[generation]
    fitting = [size for size in sizes if size == chips or size == CHIPS_OF_MANY < chips]
    machines = {f"{family}-{size}t": size for size in reversed(fitting)}
    if not machines:
        raise ValueError(f"--accelerator: GKE has no machines for {topology.text}")
    machine = requested or next(iter(machines))
    if machine not in machines:
        raise ValueError(
            f"--machine={requested} has no node pool of {topology.text}; write "
            f"--machine={' or --machine='.join(machines)}"
        )
    return machine, machines[machine], chips // machines[machine]


def check_flags(flags: argparse.Namespace) -> None:
    """Check names, numbers and texts.

    Raises:
        ValueError: A flag is invalid.
    """
    if not NAME.fullmatch(flags.name) or len(flags.name) > LONGEST_NAME:
        near = re.sub(r"[^-a-z0-9]+", "-", flags.name.lower())[:LONGEST_NAME].strip("-")
        near = near if near[:1].isalpha() else f"job-{near}"[:LONGEST_NAME].strip("-")
        raise ValueError(
            f"--name={flags.name!r} is invalid: expected up to {LONGEST_NAME} small letters, digits"
            f" and hyphens, from a letter on (names of pods are longer); write --name={near}"
        )
    for label in ("reservation", "queue", "priority"):
        value = getattr(flags, label)
        if value and not LABEL.fullmatch(value):
            raise ValueError(
                f"--{label}={value!r} is invalid: expected up to 63 small letters, digits, hyphens "
                f"and dots; write --{label}=my-{label}"
            )
    for number, least in (("slices", 1), ("restarts", 0), ("grace", 1)):
        value = getattr(flags, number)
        if value < least:
            raise ValueError(f"--{number}={value} is invalid: write {least} or more")
    for text, example in (("image", "REGION-docker.pkg.dev/PROJECT/NAME"), ("command", "'date'")):
        value = getattr(flags, text)
        if not value.strip() or "\0" in value or re.search("[\ud800-\udfff]", value):
            # The value may hold secrets, so no message shows it.
            raise ValueError(f"--{text} is empty or not Unicode text; write --{text}={example}")


def make_manifest(flags: argparse.Namespace) -> str:
    """Return the JobSet as YAML: one Job for each slice, one pod for each host.

    Raises:
        ValueError: A flag is invalid.
    """
    check_flags(flags)
    try:
        topology = parse_topology_name(flags.accelerator)
    except TopologyError as error:
        raise ValueError(f"--accelerator={flags.accelerator}: {error}") from None
    machine, chips, hosts = find_machine(topology, flags.machine)
    if flags.slices > 1 and hosts == 1:
        raise ValueError(
            f"--slices={flags.slices}: GKE sets the variables of several slices (MEGASCALE_*) only "
            f"where a slice has several hosts, and {topology.text} is one machine, {machine}; "
            "write --slices=1, or a larger --accelerator"
        )
    metadata, placement = "", ""
    if flags.queue:
        metadata += f"  labels:\n    kueue.x-k8s.io/queue-name: {quote(flags.queue)}\n"
    if hosts > 1:
        # Each slice of several hosts has a node pool of its own.
        key, value = "alpha.jobset.sigs.k8s.io/exclusive-topology", "cloud.google.com/gke-nodepool"
        metadata += f"  annotations:\n    {key}: {value}\n"
    if flags.reservation:
        placement += f"{'':14}cloud.google.com/reservation-name: {quote(flags.reservation)}\n"
    if label := CAPACITIES[flags.capacity]:
        placement += f'{"":14}{label}: "true"\n{"":12}tolerations:\n'
        placement += (
            f'{"":12}- {{key: {label}, operator: Equal, value: "true", effect: NoSchedule}}\n'
        )
    return Template(MANIFEST).substitute(
        name=quote(flags.name),
        metadata=metadata,
        restarts=flags.restarts,
        slices=flags.slices,
        hosts=hosts,
        priority=f"{'':12}priorityClassName: {quote(flags.priority)}\n" * bool(flags.priority),
        node_label=NODES[topology.generation.name][0],
        topology=shape_name(topology.shape),
        machine=machine,
        placement=placement,
        grace=flags.grace,
        image=quote(flags.image),
        script="".join(f"{'':16}{line}\n" for line in SCRIPT.splitlines()),
        # Kubernetes reads $$ as $, and replaces $(NAME) by a variable.
        command=quote(flags.command.replace("$", "$$")),
        chips=chips,
    )


def main(words: list[str]) -> None:
    """Print the manifest of the flags, or exit with 2."""
    flags, parser = parse_arguments(words)
    try:
        text = make_manifest(flags)
    except ValueError as error:
        parser.error(str(error))
    print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
