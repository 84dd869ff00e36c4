"""``xlashard doctor --all-hosts``: one table that compares the hosts of a job.

Each host sends a report to process 0, at the address where the job's coordination service would
listen. JAX's runtime and the chips are left alone. Reports are validated, and printed escaped: any
client that reaches the address can send one.
"""

import hashlib
import os
import platform
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xlashard
from xlashard.cli.commands.doctor_checks import PREFIXES, Check, shown
from xlashard.cli.commands.tpu_host import check_tpu_host, list_chips
from xlashard.core.processes.process_facts import installed_versions
from xlashard.errors import ProcessesError, counted
from xlashard.pods.multihost.cluster_info import (
    ClusterInfo,
    InitializeRequest,
    bind_address,
    find_cluster,
    split_address,
    start_text,
)
from xlashard.pods.multihost.connections import (
    ATTEMPT,
    Connection,
    address_text,
    connect,
    listen,
)
from xlashard.support.documents import decode
from xlashard.support.formatting import format_processes, group_by_value, print_error, printable

# Missing hosts are reported after this time, in seconds: they are known within a minute.
_ARRIVE = 45.0
_RETRY = 0.2
# Seconds between the last report and the verdict of process 0.
_VERDICT = 10.0
_DISTRIBUTIONS = ("jax", "jaxlib", "libtpu", "numpy")
_UNSET = "not set"
# Variables that differ from host to host, or from process to process.
_OWN_VARIABLES = frozenset(
    {
        *("TPU_WORKER_ID", "TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
        *("TPU_WORKER_HOSTNAMES", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_PROCESS_ID"),
        *("XLASHARD_POD_PROCESS_ID", "CUDA_VISIBLE_DEVICES"),
    }
)


@dataclass(frozen=True)
class HostReport:
    """Report of one host.

    Attributes:
        process: Index of its process.
        host: Host name.
        facts: Versions, digests of code, and number of chips, which should be equal on all hosts.
        variables: Variables that xlashard, JAX, XLA and libtpu read.
        problems: Failed checks of the host itself.
    """

    process: int
    host: str
    facts: dict[str, str]
    variables: dict[str, str]
    problems: tuple[str, ...]


def run() -> int:
    """Meet the other hosts, and print the table in process 0.

    Returns:
        The exit code, equal on all hosts that process 0 has heard: 1 if hosts are missing, differ,
        or have a problem.
    """
    request = InitializeRequest(None, None, None, None, _ARRIVE, None, None)
    try:
        info = find_cluster(request)
        if info.processes == 1:
            print_error(
                "doctor --all-hosts compares the hosts of a job, and this process was started "
                "alone: start it as the job is started, such as srun xlashard doctor --all-hosts, "
                "or xlashard pod -n 2 -- xlashard doctor --all-hosts"
            )
            return 1
        own = make_report(info.process_id, info.processes, os.environ)
        if info.process_id:
            return _send(info, own)
        bind = bind_address(info, request)
    except ProcessesError as error:
        print_error(error)
        return 1
    return _collect(info, bind, own)


def make_report(process: int, count: int, environment: Mapping[str, str]) -> HostReport:
    """Return the report of this host.

    Args:
        process: Index of its process.
        count: Number of processes that it expects.
        environment: For example `os.environ`.
    """
    facts = {"processes": str(count), "Python": platform.python_version()}
    facts["xlashard"] = _digest_package()
    installed = installed_versions(_DISTRIBUTIONS)
    facts |= {name: installed.get(name, "not installed") for name in _DISTRIBUTIONS}
    facts["code"] = _describe_commit()
    facts["chips"] = str(len(list_chips()))
    variables = {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(PREFIXES) and name not in _OWN_VARIABLES
    }
    failed = (each for each in check_tpu_host(environment) if each.status == "fail")
    problems = tuple(f"{each.subject}: {each.observed}" for each in failed)
    return HostReport(process, socket.gethostname(), facts, variables, problems)


def _digest_package() -> str:
    digest, folder = hashlib.sha256(), Path(xlashard.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return f"{xlashard.__version__}, files {digest.hexdigest()[:12]}"


def _describe_commit() -> str:
    """Return the commit of the working folder, with a digest of its changes."""

    def call_git(*words: str) -> bytes | None:
        try:
            done = subprocess.run(["git", *words], capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit, changes = call_git("rev-parse", "--short=12", "HEAD"), call_git("diff", "HEAD")
    if commit is None:
        return "no git commit"
    changed = f", changed: {hashlib.sha256(changes).hexdigest()[:12]}" if changes else ""
    return f"commit {commit.decode().strip()}{changed}"


def _send(info: ClusterInfo, own: HostReport) -> int:
    """Send the report of this host to process 0; return the exit code that it answers."""
    end, reason, place = time.monotonic() + _ARRIVE, "", split_address(info.coordinator)
    while time.monotonic() < end:
        try:
            connection = Connection(connect(place))
            connection.send(**asdict(own))
            connection.socket.settimeout(_ARRIVE + _VERDICT)
            answers: list[dict[str, Any]] | None = []
            while answers == []:
                answers = connection.receive()
            if answers:
                return 1 if answers[0].get("failed", True) else 0
            reason = "it closed the connection"
        except (OSError, ValueError) as error:
            reason = str(error)
        time.sleep(_RETRY)
    print_error(
        f"process {info.process_id} of {info.processes} has not reached process 0 at "
        f"{info.coordinator} in {_ARRIVE:.0f} s ({printable(reason)}). "
        f"{start_text(info.environment, info.processes)}"
    )
    return 1


def _collect(info: ClusterInfo, bind: tuple[str, int], own: HostReport) -> int:
    """Receive the reports of the other hosts, print the table, and answer the exit code."""
    try:
        with listen(bind) as listener:
            reports, peers = _receive_reports(listener, info.processes)
    except OSError as error:
        print_error(
            f"process 0 of {info.processes} cannot listen at {address_text(bind)} "
            f"({error.strerror}): end the job that runs, or set another port in all processes: "
            "export JAX_COORDINATOR_PORT=8477"
        )
        return 1
    start = start_text(info.environment, info.processes)
    checks = list(compare_hosts({**reports, 0: own}, info.processes, start))
    print("\n".join(map(shown, checks)), flush=True)
    failed = any(check.status == "fail" for check in checks)
    for peer in peers:
        peer.send(failed=failed)
        peer.close()
    return 1 if failed else 0


def _receive_reports(
    listener: socket.socket, count: int
) -> tuple[dict[int, HostReport], list[Connection]]:
    """Return the reports by process once all others have sent theirs or the time is over."""
    reports: dict[int, HostReport] = {}
    peers: list[Connection] = []
    end = time.monotonic() + _ARRIVE
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(reports) < count - 1 and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    accepted = listener.accept()[0]
                    accepted.settimeout(ATTEMPT)
                    selector.register(accepted, selectors.EVENT_READ, Connection(accepted))
                    continue
                connection: Connection = key.data
                try:
                    messages = connection.receive()
                    received = [decode(HostReport, message) for message in messages or ()]
                except (OSError, ValueError):
                    messages, received = None, []
                for report in received:
                    if 0 < report.process < count:
                        reports[report.process] = report
                        peers.append(connection)
                if messages is None:
                    selector.unregister(connection.socket)
                    connection.close()
    return reports, peers


def compare_hosts(reports: Mapping[int, HostReport], count: int, start: str) -> Iterator[Check]:
    """Compare the reports of hosts.

    Args:
        reports: Reports by process.
        count: Number of processes of the job.
        start: Advice on starting the missing ones.
    """
    missing = [process for process in range(count) if process not in reports]
    if missing:
        observed = f"{format_processes(missing)} of {count} missing after {_ARRIVE:.0f} s"
        yield Check("hosts", "fail", observed, start)
    else:
        yield Check("hosts", "ok", f"{count} of {count}")
    for name in dict.fromkeys(name for report in reports.values() for name in report.facts):
        yield _compare(name, {p: r.facts.get(name, _UNSET) for p, r in reports.items()}, reports)
    alike = 0
    for name in sorted({name for report in reports.values() for name in report.variables}):
        values = {p: r.variables.get(name, _UNSET) for p, r in reports.items()}
        if len(set(values.values())) > 1:
            yield _compare(name, values, reports)
        else:
            alike += 1
    if alike:
        yield Check("environment", "ok", f"{counted(alike, 'variable')} equal on all hosts")
    problems: dict[str, list[int]] = {}
    for process, report in sorted(reports.items()):
        for problem in report.problems:
            problems.setdefault(problem, []).append(process)
    for problem, processes in problems.items():
        subject, _, observed = problem.partition(": ")
        where = _name_hosts(processes, reports)
        yield Check(subject, "fail", f"{observed} on {where}", "xlashard doctor there")


def _compare(name: str, values: Mapping[int, str], reports: Mapping[int, HostReport]) -> Check:
    groups = group_by_value(values)
    if len(groups) == 1:
        return Check(name, "ok", groups[0][0])
    observed = "; ".join(f"{value} on {_name_hosts(who, reports)}" for value, who in groups)
    return Check(name, "fail", observed, f"make {name} equal on all hosts")


def _name_hosts(processes: list[int], reports: Mapping[int, HostReport]) -> str:
    named = format_processes(processes)
    return f"{named} ({reports[processes[0]].host})" if len(processes) == 1 else named
