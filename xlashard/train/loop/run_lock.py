"""Lock of a run's folder: one launch writes into it at a time.

The lock is the file ``run.lock`` with the owner: host, process, and time of its start. It holds
while the owner lives. On the owner's machine the process table shows that. Another machine watches
the file, which the owner touches every `BEAT` seconds: a lock without a touch for `LEASE`
seconds is stale. No clocks of two machines are compared.

A file system that creates files exclusively (all local ones, NFS) lets one of two simultaneous
launches in. On a mounted object store the last writer wins, so each reads its lock back, and again
with every touch.
"""

import fcntl
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from xlashard.core.processes.stack_dump import OWN_THREADS
from xlashard.support.background import read_process_stat, start_background
from xlashard.support.documents import decode, parse_json, read_text, write_whole
from xlashard.train.errors import RunError, SettingsError

LOCK = "run.lock"
"""Name of the lock in a run's folder."""

BEAT = 10.0
"""Seconds between two touches of a lock."""

LEASE = 90.0
"""Seconds without a touch after which the lock of another machine is stale.

Clients of NFS and of mounted object stores cache the time of a file for up to 60 s.
"""

# Seconds to wait for a launch on this machine that is about to take the same lock.
_CLAIM_TIMEOUT = 5.0
_LOOK = 0.5


@dataclass(frozen=True)
class Owner:
    """Process that holds a lock.

    Attributes:
        host: Name of its machine.
        machine: Boot and process namespace of the machine, in which `pid` is unique.
        pid: Process id.
        started: Start of the process in clock ticks since boot; empty where it is unknown.
        folder: Inode of the folder, which a copy of the folder does not have.
        token: Random identifier of the launch.
        since: Local time at which the lock was taken.
    """

    host: str
    machine: str
    pid: int
    started: str
    folder: int
    token: str
    since: str

    @classmethod
    def of_this_process(cls, folder: Path) -> Self:
        """Return this process as the owner of a folder."""
        pid = os.getpid()
        return cls(
            host=platform.node(),
            machine=_identify_machine(),
            pid=pid,
            started=_read_start(pid) or "",
            folder=folder.stat().st_ino,
            token=secrets.token_hex(8),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_alive(self, folder: Path) -> bool | None:
        """Return whether the owner still uses the folder; None if this machine can't see it."""
        if self.machine != _identify_machine():
            return None
        if self.folder != folder.stat().st_ino:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # It is a process of another user.
        started = _read_start(self.pid)
        if Path("/proc/self/stat").exists():
            return bool(started) and started == self.started
        return None


class RunLock:
    """Held lock of a run's folder.

    Args:
        folder: The run's folder.
        owner: This process.
        lost: Called in a background thread, with the error, when the lock is no longer this one.
    """

    def __init__(self, folder: Path, owner: Owner, lost: Callable[[RunError], object]) -> None:
        self._path, self._owner, self._lost = folder / LOCK, owner, lost
        self._end = threading.Event()
        self._thread = start_background(self._beat, self._end.set, f"{OWN_THREADS}lock")

    def check(self) -> None:
        """Check that the folder is still there and still this launch's.

        Raises:
            RunError: The folder was moved or removed, or another launch has taken its lock.
            OSError: The file system does not answer.
        """
        holder, folder = _read_owner(self._path), self._path.parent
        if holder is not None and holder.token == self._owner.token:
            return
        if holder is not None:
            raise RunError(
                f"the folder {folder} was taken over by {holder}: this process had not touched "
                f"{self._path} for {LEASE:g} s. The other launch continues the run."
            )
        if not folder.is_dir() or folder.stat().st_ino != self._owner.folder:
            raise RunError(
                f"the folder {folder} of the run was renamed or removed. Rename it back, or resume "
                f"the run in its new place:\n  xlashard train --resume FOLDER"
            )
        # The lock alone was removed or damaged.
        write_whole(self._path, json.dumps(asdict(self._owner)))

    def release(self) -> None:
        """Remove the lock, if it is still this one."""
        self._end.set()
        self._thread.join()
        holder = _read_owner(self._path)
        if holder is not None and holder.token == self._owner.token:
            with suppress(OSError):
                self._path.unlink()

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            try:
                self.check()
                os.utime(self._path)
            except RunError as error:
                self._lost(error)
                return
            except OSError:
                continue  # A server that is away for a moment; the next touch follows.


def take_lock(
    folder: Path, lost: Callable[[RunError], object], show: Callable[[str], object]
) -> RunLock:
    """Take the lock of a run's folder, also from an owner that has died.

    Args:
        folder: The run's folder.
        lost: Called in a background thread with the error if the lock is lost later.
        show: Shows a line before a wait for the lock of another machine.

    Raises:
        SettingsError: Another launch uses the folder, or the lock can't be written.
    """
    path = folder / LOCK
    try:
        own = Owner.of_this_process(folder)
        silent = _find_silent_owner(folder, show)
        with _claiming(folder):
            holder = _read_owner(path)
            if holder not in (None, silent) and holder.is_alive(folder) is not False:
                raise _describe_owner(folder, holder)
            _write_lock(path, own)
    except OSError as error:
        raise SettingsError(
            f"the folder {folder} cannot be used for a run: {error.strerror}. Make it writable, or "
            f"copy it to a folder that is"
        ) from None
    return RunLock(folder, own, lost)


def _find_silent_owner(folder: Path, show: Callable[[str], object]) -> Owner | None:
    """Return the owner on another machine if it does not touch its lock for a lease."""
    holder = _read_owner(folder / LOCK)
    if holder is None or holder.is_alive(folder) is not None:
        return None
    show(f"Waiting     for a sign of {holder}, which used {folder}: {LEASE:g} s at most")
    return None if _is_touched(folder / LOCK) else holder


def _write_lock(path: Path, own: Owner) -> None:
    """Write the lock, in place of a stale or damaged one, and read it back.

    Raises:
        SettingsError: Another launch was faster.
    """
    text = json.dumps(asdict(own))
    draft = path.with_name(f".{LOCK}-{own.token}")
    write_whole(draft, text)
    try:
        if not path.exists():
            # A link appears with its content, or fails if there is a lock already.
            os.link(draft, path)
        else:
            draft.replace(path)
    except FileExistsError:
        pass
    except OSError:
        # Mounted object stores and some network file systems have no links.
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(text)
    finally:
        with suppress(OSError):
            draft.unlink()
    holder = _read_owner(path)
    if holder is None or holder.token != own.token:
        raise _describe_owner(path.parent, holder)


def _describe_owner(folder: Path, holder: Owner | None) -> SettingsError:
    return SettingsError(
        f"the folder {folder} is in use by {holder or 'another launch'}. Two launches would "
        f"overwrite each other's metrics and checkpoints: wait for its end or stop it, or start a "
        f"run of its own:\n  xlashard train --config {folder / 'config.toml'} --name NAME"
    )


@contextmanager
def _claiming(folder: Path) -> Iterator[None]:
    """Exclude other launches on this machine while the lock is read and replaced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _CLAIM_TIMEOUT
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK / 10)
            except OSError:
                break  # This file system has no such locks; the lock is read back.
        yield
    finally:
        os.close(descriptor)


def _is_touched(path: Path) -> bool:
    """Return True once a lock is touched; False without a touch within the lease."""
    first, end = _stamp(path), time.monotonic() + LEASE
    while time.monotonic() < end:
        time.sleep(_LOOK)
        now = _stamp(path)
        if now != first:
            return now is not None
    return False


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what a touch of a file changes; an opened file is not answered from a cache."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino


def _read_owner(path: Path) -> Owner | None:
    """Return the owner in a lock; None without a lock, or for a damaged one."""
    try:
        return decode(Owner, parse_json(read_text(path, largest=1 << 16)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _identify_machine() -> str:
    """Return the boot and the process namespace of this machine, or its name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _read_start(pid: int) -> str | None:
    """Return when a process started; None if it has ended, also if its parent has not noticed."""
    try:
        fields = read_process_stat(pid)
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
