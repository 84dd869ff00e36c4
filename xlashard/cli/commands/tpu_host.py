"""Checks of a TPU host: chips, processes that hold them, libtpu's lock, limits of memory, disk."""

import contextlib
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from xlashard.cli.commands.doctor_checks import Check
from xlashard.errors import counted
from xlashard.support.formatting import in_bytes

# Smaller limits have made transfers between host and chips fail.
_LEAST_LOCKED = 64 * 1024**3
_LEAST_DISK = 5 * 1024**3
_LOCK_FILE = "/tmp/libtpu_lockfile"
# Set by GKE and by the start-up scripts of TPU VMs.
_TPU_VARIABLES = ("TPU_WORKER_ID", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_ACCELERATOR_TYPE")


def check_tpu_host(environment: Mapping[str, str], root: Path = Path("/")) -> Iterator[Check]:
    """Check this machine as a TPU host; describe what it can do without a TPU.

    Args:
        environment: For example `os.environ`.
        root: Parent of `/dev`, `/proc`, `/sys` and `/tmp`.
    """
    chips = list_chips(root)
    variable = next((name for name in _TPU_VARIABLES if environment.get(name)), None)
    if not chips and variable is None:
        if not any(root.glob("dev/nvidia[0-9]*")):
            yield Check(
                "this machine",
                "ok",
                "has no TPU and no GPU: emulated devices and xlashard pod run programs here; "
                "explain, preflight, sweep and compile compile them for TPUs and GPUs by name",
            )
        return
    yield _check_chips(chips, environment, variable)
    open_files = list(_list_open_files(root))
    holders = sorted(
        {
            pid
            for pid, file in open_files
            if file.startswith(("/dev/accel", "/dev/vfio/")) and file != "/dev/vfio/vfio"
        }
        - {os.getpid()}
    )
    yield _check_holders(holders, root)
    yield _check_lock(open_files, bool(holders), root)
    yield from _check_limits(root)


def list_chips(root: Path = Path("/")) -> list[str]:
    """Return the device files of the TPU's chips."""
    for pattern in ("dev/accel[0-9]*", "dev/vfio/[0-9]*"):
        if paths := sorted(root.glob(pattern)):
            return [f"/{path.relative_to(root)}" for path in paths]
    return []


def _check_chips(chips: list[str], environment: Mapping[str, str], variable: str | None) -> Check:
    advice = "a chip or its driver is broken: create the TPU again, or drain the node"
    if not chips:
        observed = f"no /dev/accel* and no /dev/vfio/*, but {variable} is set"
        return Check("TPU chips", "fail", observed, advice)
    observed = f"{counted(len(chips), 'chip')} ({chips[0]} ...)"
    bounds = environment.get("TPU_CHIPS_PER_HOST_BOUNDS", "")
    if re.fullmatch(r"\d+(,\d+)*", bounds):
        expected = math.prod(map(int, bounds.split(",")))
        if expected != len(chips):
            observed += f", expected {expected} by TPU_CHIPS_PER_HOST_BOUNDS={bounds}"
            return Check("TPU chips", "fail", observed, advice)
    return Check("TPU chips", "ok", observed)


def _list_open_files(root: Path) -> Iterator[tuple[int, str]]:
    """Yield each file that a process has open, with the process; other users' are hidden."""
    for link in root.glob("proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            yield int(link.parts[-3]), os.readlink(link)


def _check_holders(holders: list[int], root: Path) -> Check:
    if not holders:
        hidden = sum(
            not os.access(folder, os.R_OK | os.X_OK) for folder in root.glob("proc/[0-9]*/fd")
        )
        unknown = f"; {counted(hidden, 'process', 'processes')} of other users can't be inspected"
        return Check("TPU held by", "ok", f"no process{unknown * bool(hidden)}")
    commands, are_own = [], True
    for pid in holders:
        folder = root / "proc" / str(pid)
        with contextlib.suppress(OSError):
            are_own &= folder.stat().st_uid == os.getuid()
        words = (_read(folder / "cmdline") or "?").replace("\0", " ").strip()
        commands.append(f"process {pid}: {words[:200]}")
    kill = f"{'' if are_own else 'sudo '}kill {' '.join(map(str, holders))}"
    advice = f"wait for the job to end, or end it: {kill}"
    return Check("TPU held by", "fail", "; ".join(commands), advice)


def _check_lock(open_files: list[tuple[int, str]], is_held: bool, root: Path) -> Check:
    try:
        owner = (root / _LOCK_FILE[1:]).stat().st_uid
    except OSError:
        return Check("libtpu's lock", "ok", "none")
    if is_held or any(file == _LOCK_FILE for _, file in open_files):
        return Check("libtpu's lock", "ok", "of the process that holds the TPU")
    observed = f"{_LOCK_FILE} exists, but no process holds the TPU"
    if owner == os.getuid():
        return Check("libtpu's lock", "ok", observed)
    advice = f"it belongs to another user: sudo rm {_LOCK_FILE}"
    return Check("libtpu's lock", "fail", observed, advice)


def _check_limits(root: Path) -> Iterator[Check]:
    text = _read(root / "proc/meminfo") or ""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    total, free = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if total and free is not None:
        observed = f"{in_bytes(free)} of {in_bytes(total)} free"
        if free > 0.2 * total:
            yield Check("host memory", "ok", observed)
        else:
            advice = "find the process that uses it: ps aux --sort=-rss"
            yield Check("host memory", "note", observed, advice)
    locked = re.search(r"Max locked memory\s+(\d+)", _read(root / "proc/self/limits") or "")
    if locked and int(locked[1]) < _LEAST_LOCKED:
        observed = f"a process may lock {in_bytes(int(locked[1]))}"
        advice = "transfers may fail: raise it, ulimit -l unlimited, or memlock in limits.conf"
        yield Check("locked memory", "note", observed, advice)
    pages = _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", pages)
    if chosen and chosen[1] != "always":
        advice = (
            "transfers are faster with them: "
            "sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'"
        )
        yield Check("huge pages", "note", f"transparent_hugepage is {chosen[1]}", advice)
    disk = shutil.disk_usage(Path.home() if root == Path("/") else root).free
    if disk < _LEAST_DISK:
        yield Check("disk", "note", f"{in_bytes(disk)} free in the home folder", "delete files")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
