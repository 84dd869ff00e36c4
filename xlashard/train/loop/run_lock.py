"""Lock of a run's folder: one launch writes into it at a time.

The lock is the file ``run.lock`` with the owner: host, process, and time of its start. It holds
while the owner lives. On the owner's machine the process table shows that. Another machine watches
the file, which the owner touches every `BEAT` seconds: a lock without a touch for `LEASE`
seconds is stale. No clocks of two machines are compared.

A file system that creates files exclusively (all local ones, NFS) lets one of two simultaneous
launches in. On a mounted object store the last writer wins, so each reads its lock back, and again
with every touch. A lock on an object store is an object, which is only written in place of the
generation that was read; each touch makes a new one.
"""

import fcntl
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from xlashard.core.processes.stack_dump import OWN_THREADS
from xlashard.support.background import read_process_stat, start_background
from xlashard.support.documents import decode, parse_json, read_text, write_whole
from xlashard.train.errors import RunError, SettingsError
from xlashard.train.stores import (
    is_object,
    open_objects,
    read_object,
    replace_object,
    reporting_store,
)

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
            folder=_read_inode(folder),
            token=secrets.token_hex(8),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_alive(self, folder: Path) -> bool | None:
        """Return whether the owner still uses the folder; None if this machine can't see it."""
        if self.machine != _identify_machine():
            return None
        if self.folder != _read_inode(folder):
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


type Stamp = bytes | tuple[int, int] | None
"""Mark of a lock that every touch changes; None without a lock."""


class _LockFile:
    """Lock in a folder of a file system.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK

    def read(self) -> tuple[Owner | None, Stamp]:
        """Return the owner, None without a lock or for a damaged one, and the stamp."""
        return _read_owner(self.path), _read_stamp(self.path)

    def write(self, own: Owner, stamp: Stamp) -> None:
        """Write the lock, in place of a stale or damaged one."""
        _write_lock(self.path, own)

    def touch(self, own: Owner, stamp: Stamp) -> None:
        """Show others that the owner lives."""
        os.utime(self.path)

    def restore(self, own: Owner, stamp: Stamp) -> None:
        """Write the lock again after its removal; raise RunError if its folder is gone."""
        folder = self.path.parent
        if not folder.is_dir() or folder.stat().st_ino != own.folder:
            raise RunError(
                f"the folder {folder} of the run was renamed or removed. Rename it back, or resume "
                f"the run in its new place:\n  xlashard train --resume FOLDER"
            )
        write_whole(self.path, json.dumps(asdict(own)))

    def remove(self, stamp: Stamp) -> None:
        """Remove the lock."""
        self.path.unlink()


class _LockObject:
    """Lock on an object store, whose stamp is a generation.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        with reporting_store(folder):
            self._objects = open_objects(folder)

    def read(self) -> tuple[Owner | None, Stamp]:
        """Return the owner, None without a lock or for a damaged one, and the stamp."""
        with reporting_store(self.path):
            text, generation = read_object(self._objects, LOCK)
        return _parse_owner(text or b""), generation

    def write(self, own: Owner, stamp: Stamp) -> None:
        """Write the lock in place of the generation that was read; raise an error for another."""
        if not self._replace(json.dumps(asdict(own)).encode(), stamp):
            holder, _ = self.read()
            # A write that took effect, but whose answer was lost, is repeated and finds itself.
            if holder is None or holder.token != own.token:
                raise _describe_owner(self.path.parent, holder)

    touch = restore = write

    def remove(self, stamp: Stamp) -> None:
        """Remove the lock, if it still has the generation that was read."""
        self._replace(None, stamp)

    def _replace(self, text: bytes | None, stamp: Stamp) -> bool:
        with reporting_store(self.path):
            return replace_object(self._objects, LOCK, text, stamp)


class RunLock:
    """Held lock of a run's folder.

    Args:
        lock: The file or object.
        owner: This process.
        lost: Called in a background thread, with the error, when the lock is no longer this one.
    """

    def __init__(
        self, lock: _LockFile | _LockObject, owner: Owner, lost: Callable[[RunError], object]
    ) -> None:
        self._lock, self._owner, self._lost = lock, owner, lost
        self._end = threading.Event()
        self._thread = start_background(self._beat, self._end.set, f"{OWN_THREADS}lock")

    def check(self) -> Stamp:
        """Check that the folder is still there and still this launch's.

        Returns:
            The stamp of the lock; None if it had to be written again.

        Raises:
            RunError: The folder was moved or removed, or another launch has taken its lock.
            OSError: The file system does not answer.
        """
        (holder, stamp), path = self._lock.read(), self._lock.path
        if holder is None:
            # The lock was removed or damaged, and perhaps its folder.
            self._lock.restore(self._owner, stamp)
            return None
        if holder.token != self._owner.token:
            raise RunError(
                f"the folder {path.parent} was taken over by {holder}: this process had not "
                f"touched {path} for {LEASE:g} s. The other launch continues the run."
            )
        return stamp

    def release(self) -> None:
        """Remove the lock, if it is still this one."""
        self._end.set()
        self._thread.join()
        with suppress(OSError):
            holder, stamp = self._lock.read()
            if holder is not None and holder.token == self._owner.token:
                self._lock.remove(stamp)

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            try:
                stamp = self.check()
                if stamp is not None:
                    self._lock.touch(self._owner, stamp)
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
    try:
        own = Owner.of_this_process(folder)
        lock = _LockObject(folder) if is_object(folder) else _LockFile(folder)
        silent = _find_silent_owner(lock, show)
        with nullcontext() if is_object(folder) else _claiming(folder):
            holder, stamp = lock.read()
            if holder not in (None, silent) and holder.is_alive(folder) is not False:
                raise _describe_owner(folder, holder)
            lock.write(own, stamp)
    except OSError as error:
        raise SettingsError(
            f"the folder {folder} cannot be used for a run: {error.strerror}. Make it writable, or "
            f"copy it to a folder that is"
        ) from None
    return RunLock(lock, own, lost)


def _find_silent_owner(
    lock: _LockFile | _LockObject, show: Callable[[str], object]
) -> Owner | None:
    """Return the owner on another machine if it does not touch its lock for a lease."""
    (holder, stamp), folder = lock.read(), lock.path.parent
    if holder is None or holder.is_alive(folder) is not None:
        return None
    show(f"Waiting     for a sign of {holder}, which used {folder}: {LEASE:g} s at most")
    return None if _is_touched(lock, stamp) else holder


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


def _is_touched(lock: _LockFile | _LockObject, first: Stamp) -> bool:
    """Return True once a lock has another stamp; False if it keeps its stamp for the lease."""
    end = time.monotonic() + LEASE
    while time.monotonic() < end:
        time.sleep(_LOOK)
        holder, now = lock.read()
        if now != first:
            return holder is not None
    return False


def _read_stamp(path: Path) -> tuple[int, int] | None:
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
        return _parse_owner(read_text(path, largest=1 << 16))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _parse_owner(text: str | bytes) -> Owner | None:
    try:
        return decode(Owner, parse_json(text))
    except ValueError:
        return None


def _read_inode(folder: Path) -> int:
    """Return the inode of a folder; 0 for one of an object store, which is only a prefix."""
    return 0 if is_object(folder) else folder.stat().st_ino


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
