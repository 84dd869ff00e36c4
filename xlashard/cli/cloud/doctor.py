"""The doctor: checks that a TPU works, is free, and that all workers see all of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlashard.cli.cloud.session import Command, Finished, Session
from xlashard.cli.cloud.tpu import REMOTE, copy_tools, ready_status, run_on_all
from xlashard.errors import counted
from xlashard.support.background import end_process
from xlashard.support.consoles import make_console
from xlashard.support.formatting import Escaped, in_bytes

_LEAST_DISK = 5 * 1024**3


_LEAST_LOCKED = 64 * 1024**3


_INSTALL = "install what jax requires: pip install --upgrade 'jax[tpu]', or run.py again"


_SET_UP = "install the code: run.py"


_PROBE = "python3 ~/.xlashard/probe.py"
# Time for all workers to connect to worker 0, in seconds.
_LISTENS = 120
_MARKS = {True: ("✓", "green"), None: ("!", "yellow"), False: ("✗", "red")}


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        worker: Label of the worker; empty for a check of all workers together.
        subject: Subject of the check.
        ok: Verdict; None for a nuisance.
        observed: Observation.
        advice: Remedy, unless all is well.
    """

    worker: str
    subject: str
    ok: bool | None
    observed: str
    advice: str = ""


def check(session: Session) -> int:
    """Check all workers of the TPU, or this machine if the TPU's name is missing.

    Returns:
        1 if something is wrong.

    Raises:
        CloudError: The TPU is not ready, or a worker can't be reached.
    """
    return check_workers(session) if session.settings.tpu.name else check_machine(session)


def check_machine(session: Session, root: str = "/") -> int:
    """Check this machine alone.

    Args:
        session: The call of the script.
        root: Parent of `/dev`, `/proc` and `/sys`.

    Returns:
        1 if something is wrong.
    """
    words = (sys.executable, str(REMOTE / "probe.py"), "look")
    if session.runner.dry:
        return session.runner.run(Command(words, "check this machine")).code
    environment = {**os.environ, "PROBE_ROOT": root}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return report(findings_of("", json.loads(done.stdout), None))


def check_workers(session: Session) -> int:
    """Check all workers of a TPU, and that they work together."""
    addresses = ready_status(session).addresses
    workers = range(len(addresses))
    copy_tools(session, workers)
    results = dict(
        zip(workers, run_on_all(session, workers, f"{_PROBE} look", "check"), strict=True)
    )
    if session.runner.dry:
        _check_network(session, addresses)
        _count_chips(session, workers)
        return 0
    looks = {str(w): look for w, done in results.items() if (look := _report_of(done)) is not None}
    findings = [
        Finding(str(worker), "ssh", False, done.last_error, "wait, or create the TPU again")
        for worker, done in results.items()
        if str(worker) not in looks
    ]
    chips = session.accelerator.chips_per_host if session.settings.tpu.accelerator else None
    for label, look in looks.items():
        findings += findings_of(label, look, chips)
    if looks:
        findings.append(compare_versions(looks))
    findings += _check_network(session, addresses)
    if any(finding.ok is False for finding in findings):
        # The count would fail, or disturb a job.
        advice = "repair the rest first, and check again"
        findings.append(Finding("", "all chips", None, "not counted", advice))
    else:
        findings.append(_count_chips(session, workers))
    return report(findings)


def _report_of(done: Finished) -> Mapping[str, Any] | None:
    """Return the last line of a probe, which is JSON; None if the probe failed."""
    if done.code:
        return None
    try:
        return json.loads(done.stdout.strip().splitlines()[-1].removeprefix("chips: "))
    except (ValueError, IndexError):
        return None


def _check_network(session: Session, addresses: Sequence[str]) -> list[Finding]:
    """Check that each worker reaches worker 0, which listens meanwhile."""
    port = session.settings.doctor.port
    others = range(1, len(addresses)) or range(1)
    listen = session.gcloud.ssh(0, f"{_PROBE} listen {port} {_LISTENS}", "listen on")
    process = session.runner.start(listen, subprocess.DEVNULL)
    try:
        if process is not None and process.stdout is not None:
            process.stdout.readline()  # From now on it listens, or another process does.
        script = f"{_PROBE} reach {addresses[0]} {port} 10"
        results = run_on_all(session, others, script, "reach the coordinator from")
    finally:
        if process is not None:
            end_process(process)
            process.communicate()
    failed = {"reached": False, "problem": "the worker itself is unreachable"}
    return [
        judge_reach(str(worker), f"{addresses[0]}:{port}", _report_of(done) or failed)
        for worker, done in zip(others, results, strict=True)
        if not session.runner.dry
    ]


def _count_chips(session: Session, workers: Sequence[int]) -> Finding:
    """Count the chips by a program that runs on all workers together."""
    seconds = session.settings.doctor.chips_within
    script = (
        "PATH=~/.xlashard/venv/bin:$PATH; cd ~/.xlashard; "
        f"timeout {2 * seconds:g} python probe.py count {seconds:g}"
    )
    results = run_on_all(session, workers, script, "count the chips on")
    for done in results:
        if done.code:
            session.report(f"could not {done.command.purpose}:\n{done.stderr}")
    reports = {str(w): _report_of(done) for w, done in zip(workers, results, strict=True)}
    devices = None
    if session.settings.tpu.accelerator:
        devices = session.accelerator.chips * session.accelerator.devices_per_chip
    return judge_chips(reports, len(workers), devices)


def report(findings: Sequence[Finding], console: Console | None = None) -> int:
    """Print findings as a table.

    Returns:
        1 if something is wrong.
    """
    console = console or make_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "worker", "check", "observed"):
        table.add_column(title, overflow="fold")
    for finding in _merged(findings):
        mark, style = _MARKS[finding.ok]
        observed = Text(finding.observed)
        if finding.advice:
            observed.append(f"\n→ {finding.advice}", style="bold")
        table.add_row(Text(mark, style=style), finding.worker or "all", finding.subject, observed)
    console.print(Escaped(table))
    wrong = sum(finding.ok is False for finding in findings)
    console.print(f"{counted(wrong, 'problem')}" if wrong else "all is well")
    return 1 if wrong else 0


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings that are equal on several workers as one."""
    workers: dict[Finding, list[str]] = {}
    for finding in findings:
        workers.setdefault(replace(finding, worker=""), []).append(finding.worker)
    return [replace(finding, worker=", ".join(labels)) for finding, labels in workers.items()]


def findings_of(worker: str, look: Mapping[str, Any], chips: int | None) -> list[Finding]:
    """Return the findings for one worker.

    Args:
        worker: Label of the worker.
        look: Report of `probe.py look` on the worker.
        chips: Expected number of chips; None if unknown.
    """
    return [
        _chips(worker, look["chips"], chips),
        _holders(worker, look["holders"], look["unseen"]),
        _lock(worker, look["lock"], look["holders"]),
        _versions(worker, look["versions"]),
        *_memory(worker, look["memory"]),
    ]


def _chips(worker: str, chips_seen: Sequence[str], expected: int | None) -> Finding:
    observed = counted(len(chips_seen), "chip") + (f" ({chips_seen[0]} ...)" if chips_seen else "")
    if not chips_seen:
        advice = "the VM has no TPU, or its driver is not loaded: create the TPU again"
        return Finding(worker, "TPU", False, "no /dev/accel* and no /dev/vfio/*", advice)
    if expected is not None and len(chips_seen) != expected:
        advice = "a chip or its driver is broken: create the TPU again"
        return Finding(worker, "TPU", False, f"{observed}, expected {expected}", advice)
    return Finding(worker, "TPU", True, observed)


def _holders(worker: str, holders: Sequence[Mapping[str, Any]], unseen: int) -> Finding:
    if holders:
        observed = "; ".join(f"process {each['pid']}: {each['command'] or '?'}" for each in holders)
        pids = " ".join(str(each["pid"]) for each in holders)
        own = all(each["own"] for each in holders)
        how = f"kill {pids}" if own else f"sudo kill {pids}"
        advice = f"wait for the job to end, or end it: {how}"
        return Finding(worker, "held by", False, observed, advice)
    if unseen:
        hidden = counted(unseen, "process", "processes")
        observed = f"no process; {hidden} of other users can't be inspected"
        return Finding(worker, "held by", True, observed)
    return Finding(worker, "held by", True, "no process")


def _lock(
    worker: str, lock: Mapping[str, Any] | None, holders: Sequence[Mapping[str, Any]]
) -> Finding:
    if lock is None:
        return Finding(worker, "libtpu's lock", True, "none")
    if lock["opened"] or holders:
        return Finding(worker, "libtpu's lock", True, "of the process that holds the TPU")
    observed = "/tmp/libtpu_lockfile exists, but no process holds the TPU"
    if lock["own"]:
        return Finding(worker, "libtpu's lock", True, observed)
    advice = "it belongs to another user: sudo rm /tmp/libtpu_lockfile"
    return Finding(worker, "libtpu's lock", False, observed, advice)


def _versions(worker: str, report: Mapping[str, Any]) -> Finding:
    if report["problem"]:
        return Finding(worker, "versions", False, report["problem"], _SET_UP)
    installed = report["found"]
    observed = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    missing = [name for name in ("jax", "jaxlib", "libtpu") if not installed.get(name)]
    if missing:
        text = f"{observed}; no {', no '.join(missing)}"
        return Finding(worker, "versions", False, text, _SET_UP)
    wrong = [
        f"{name} {installed[name]}, but jax {installed['jax']} requires {versions}"
        for name, versions in required_versions(report["requirements"]).items()
        if not versions.contains(installed[name], prereleases=True)
    ]
    if wrong:
        return Finding(worker, "versions", False, "; ".join(wrong), _INSTALL)
    return Finding(worker, "versions", True, observed)


def _memory(worker: str, report: Mapping[str, Any]) -> Iterable[Finding]:
    total, free = report["total"], report["available"]
    if total and free is not None:
        ok = True if free > 0.2 * total else None
        observed = f"{in_bytes(free)} of {in_bytes(total)} free"
        advice = "" if ok else "find the process that uses it: ps aux --sort=-rss"
        yield Finding(worker, "memory", ok, observed, advice)
    locked = report["locked"]
    if locked is not None and 0 <= locked < _LEAST_LOCKED:
        observed = f"a process may lock {in_bytes(locked)}"
        advice = "transfers may fail: raise it, ulimit -l unlimited, or memlock in limits.conf"
        yield Finding(worker, "locked memory", None, observed, advice)
    pages = report["hugepages"]
    if pages not in (None, "always"):
        advice = (
            "transfers are faster with them: "
            "sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'"
        )
        yield Finding(worker, "huge pages", None, f"transparent_hugepage is {pages}", advice)
    disk = report["disk"]
    if disk < _LEAST_DISK:
        yield Finding(worker, "disk", None, f"{in_bytes(disk)} free", "delete files")


def compare_versions(looks: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Check that all workers have the same versions."""
    by_text: dict[str, list[str]] = {}
    for worker, look in looks.items():
        installed = look["versions"]["found"]
        text = ", ".join(f"{name} {version}" for name, version in installed.items())
        by_text.setdefault(text, []).append(worker)
    if len(by_text) == 1:
        return Finding("", "same versions", True, f"on {counted(len(looks), 'worker')}")
    observed = "; ".join(f"{text} on {', '.join(workers)}" for text, workers in by_text.items())
    return Finding("", "same versions", False, observed, "install the code again: run.py")


def judge_reach(worker: str, to: str, report: Mapping[str, Any]) -> Finding:
    """Check that a worker reaches the coordinator."""
    if report["reached"]:
        return Finding(worker, "coordinator", True, f"{to} in {1000 * report['seconds']:.0f} ms")
    advice = "check the firewall: allow traffic in the network (default-allow-internal)"
    return Finding(worker, "coordinator", False, f"{to}: {report['problem']}", advice)


def judge_chips(
    reports: Mapping[str, Mapping[str, Any] | None], workers: int, devices: int | None
) -> Finding:
    """Check that all workers see all chips.

    Args:
        reports: Report of `probe.py count` by worker; None where it failed.
        workers: Expected number of processes.
        devices: Expected number of devices; None if unknown.
    """
    subject = "all chips"
    silent = [worker for worker, report in reports.items() if report is None]
    if silent:
        observed = f"the program that counts them failed on {', '.join(silent)}"
        return Finding("", subject, False, observed, "read its output above")
    counts = {w: (each["processes"], each["devices"]) for w, each in reports.items() if each}
    processes, counted_devices = next(iter(counts.values()))
    summed = all(each["summed"] == counted_devices for each in reports.values() if each)
    expected = devices in (None, counted_devices) and processes == workers
    if len(set(counts.values())) == 1 and expected and summed:
        of = counted(processes, "process", "processes")
        return Finding("", subject, True, f"{counted(counted_devices, 'device')}, of {of}")
    observed = "; ".join(
        f"{counted(own, 'process', 'processes')}, {counted(own_devices, 'device')} on {worker}"
        for worker, (own, own_devices) in counts.items()
    )
    observed += f"; expected {counted(workers, 'process', 'processes')}"
    observed += f", {counted(devices, 'device')}" if devices else ""
    return Finding("", subject, False, observed, "create the TPU again: a host is missing")


def required_versions(requirements: Sequence[str]) -> dict[str, SpecifierSet]:
    """Return the versions of jaxlib and libtpu that `jax[tpu]` requires.

    Example:
        >>> required_versions(["libtpu==0.0.50.*; extra == 'tpu'", "numpy>=2.1"])
        {'libtpu': <SpecifierSet('==0.0.50.*')>}
    """
    versions: dict[str, SpecifierSet] = {}
    for each in map(Requirement, requirements):
        active = each.marker is None or each.marker.evaluate({"extra": "tpu"})
        if each.name in ("jaxlib", "libtpu") and active:
            versions[each.name] = versions.get(each.name, SpecifierSet()) & each.specifier
    return versions
