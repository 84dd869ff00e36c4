"""The doctor: checks that a TPU works, is free, and that all workers see all of it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlashard.cloud.findings import (
    Finding,
    compare_versions,
    findings_of,
    judge_chips,
    judge_reach,
)
from xlashard.cloud.gcloud import Command, Finished
from xlashard.cloud.jobs import end_process
from xlashard.cloud.session import Session
from xlashard.cloud.tpu import ready_status
from xlashard.cloud.workers import REMOTE, copy_tools, run_on_all
from xlashard.errors import counted

_PROBE = "python3 ~/.xlashard/probe.py"
# Time for all workers to connect to worker 0, in seconds.
_LISTENS = 120
_MARKS = {True: ("✓", "green"), None: ("!", "yellow"), False: ("✗", "red")}


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
        f"timeout {2 * seconds:g} python chips.py {seconds:g}"
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
    console = console or Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "worker", "check", "observed"):
        table.add_column(title, overflow="fold")
    for finding in _merged(findings):
        mark, style = _MARKS[finding.ok]
        observed = Text(finding.observed)
        if finding.advice:
            observed.append(f"\n→ {finding.advice}", style="bold")
        table.add_row(Text(mark, style=style), finding.worker or "all", finding.subject, observed)
    console.print(table)
    wrong = sum(finding.ok is False for finding in findings)
    console.print(f"{counted(wrong, 'problem')}" if wrong else "all is well")
    return 1 if wrong else 0


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings that are equal on several workers as one."""
    workers: dict[Finding, list[str]] = {}
    for finding in findings:
        workers.setdefault(replace(finding, worker=""), []).append(finding.worker)
    return [replace(finding, worker=", ".join(labels)) for finding, labels in workers.items()]
