"""``xlashard train``: from command-line arguments to a run and its exit code."""

import argparse
import re
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jax

from xlashard._jax.runtime.topologies import quiet_backends
from xlashard.errors import ProcessesError
from xlashard.multihost import initialize, leave
from xlashard.pods.testing.emulated_devices import request_devices
from xlashard.support.formatting import print_error
from xlashard.train.checkpoint.arrays import is_saving
from xlashard.train.config.schema import reference, toml_value
from xlashard.train.config.settings import Settings, load_settings
from xlashard.train.errors import DataError, RunError, SettingsError
from xlashard.train.loop.console import Screen, make_console
from xlashard.train.loop.job import run_job
from xlashard.train.loop.run_folder import Resumed, last_run, newest_resumable, read_run
from xlashard.train.loop.steps import is_compiling
from xlashard.train.loop.stop import exit_code
from xlashard.train.model.checks import check_settings
from xlashard.train.stores import SCHEME, check_store, locate

# `gs:/bucket`, too: a shell script that joins paths makes one slash of two.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<place>/.*)")
# https://cloud.google.com/storage/docs/cloud-storage-fuse and https://github.com/s3fs-fuse/s3fs-fuse,
# which rename folders and append to files; Mountpoint for S3 does neither.
_MOUNTS = {"gs": "gcsfuse --implicit-dirs {0} /mnt/{0}", "s3": "s3fs {0} /mnt/{0}"}


def run(arguments: argparse.Namespace) -> int:
    """Run `xlashard train`.

    Args:
        arguments: Parsed arguments.

    Returns:
        The exit code: 0 for success, 1 if the run diverged or another process failed, 2 for
        invalid settings or data, 130 after Ctrl-C, 143 after SIGTERM.
    """
    if arguments.keys:
        for key, kind, default, note in reference(Settings):
            print(f"{key} = {default}  # {kind}: {note}")
        return 0
    try:
        settings, resumed = _resolve(arguments)
        paths = tuple(read_location("data.paths", path) for path in settings.data.paths)
        settings = replace(settings, data=replace(settings.data, paths=paths))
        check_settings(settings)
    except RunError as error:
        print_error(error)
        return 2
    except OSError as error:
        print_error(_describe_file(error))
        return 2
    return _train(settings, resumed, locate(arguments.runs))


def _train(settings: Settings, resumed: Resumed | None, runs: Path) -> int:
    """Train and return the exit code."""
    try:
        pod = initialize(heartbeat=settings.pod.heartbeat)
    except ProcessesError as error:
        print_error(error)
        return 1
    # Those of a program that calls this command, which goes on.
    earlier = frozenset(threading.enumerate())
    try:
        devices = start_devices(settings.devices.emulate, pod.count)
        screen = Screen(make_console(), settings.training.log_every)
        outcome = run_job(settings, devices, screen, runs, resumed)
    except RunError as error:
        print_error(error)
        return _end(2 if isinstance(error, SettingsError | DataError) else 1, earlier)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return _end(130, earlier)
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            print_error(_describe_file(error))
            return _end(1, earlier)
        # On a pod the interpreter's own way to end would wait for processes that have failed, too.
        traceback.print_exc()
        return _end(1, earlier)
    code = exit_code(outcome.signal) if outcome.stopped else 0
    if is_compiling(_list_new(earlier)) or (outcome.stopped and jax.process_count() > 1):
        # A compilation can't be ended, and Python would wait for it. A process that leaves because
        # it compiles is missing in the shutdown of a peer that has compiled already.
        leave(code, "it was stopped")
    return code


def _describe_file(error: OSError) -> str:
    """Describe a file of a run that this user can't use, or its disk."""
    return (
        f"{error.filename} can't be read or written: {error.strerror}. Make it readable and "
        f"writable for the user of this process, on a disk with free space"
    )


def _end(code: int, earlier: frozenset[threading.Thread]) -> int:
    """End this process if it has peers, compiles or saves; otherwise return the exit code."""
    threads = _list_new(earlier)
    if jax.process_count() > 1 or is_compiling(threads) or is_saving(threads):
        leave(code, "it has failed")
    return code


def _list_new(earlier: frozenset[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in earlier]


def start_devices(emulated: int, processes: int = 1) -> list[Any]:
    """Start JAX with emulated CPU devices, or for 0 with the real devices.

    Args:
        emulated: Number of devices over all processes, an equal share in each.
        processes: Number of processes.

    Raises:
        SettingsError: JAX already runs with other devices, or the devices do not divide over the
            processes.
    """
    if not emulated:
        with quiet_backends():
            return jax.devices()
    if emulated % processes:
        raise SettingsError(
            f"devices.emulate = {emulated} does not divide over {processes} processes. Start as "
            f"many as divide it, or write, with a mesh of that size:\n"
            f"  --set devices.emulate={max(round(emulated / processes), 1) * processes}"
        )
    request_devices(emulated // processes)
    # JAX may run already, with other devices.
    devices = jax.devices("cpu")
    if processes > 1 and len(devices) != emulated:
        raise SettingsError(
            f"devices.emulate = {emulated}, but the {processes} processes were started with "
            f"{len(devices)} CPU devices. Start them with {emulated // processes} each:\n"
            f"  xlashard pod -n {processes} -d {emulated // processes} -- COMMAND"
        )
    if len(devices) < emulated:
        raise SettingsError(
            f"devices.emulate = {emulated}, but JAX already runs with {len(devices)} CPU "
            f"devices. Write, before the program starts:\n"
            f"  XLA_FLAGS=--xla_force_host_platform_device_count={emulated}"
        )
    return devices[:emulated]


def _resolve(arguments: argparse.Namespace) -> tuple[Settings, Resumed | None]:
    """Return the settings, and the run to resume, if any."""
    for name in ("config", "runs", "resume"):
        if value := getattr(arguments, name):
            place = read_location(f"--{name}", value, with_objects=True)
            if place.startswith(SCHEME):
                check_store(f"--{name}", place)
            setattr(arguments, name, place)
    if arguments.data:
        arguments.data = [read_location("--data", value) for value in arguments.data]
    words = _words(arguments)
    if arguments.resume is None:
        if not arguments.config:
            raise SettingsError(
                "--config is missing. Write, for example:\n  --config configs/tiny.toml"
            )
        settings = load_settings(locate(arguments.config), words)
        folder = None
        if arguments.auto_resume:
            folder = newest_resumable(locate(arguments.runs), settings.run.name)
        if folder is None:
            return settings, None
        resumed = read_run(folder, words)
        return resumed.settings, resumed
    if arguments.config:
        raise SettingsError(
            "a resumed run has its own settings, so --resume excludes --config. To change "
            "settings write:\n  --resume RUN --set KEY=VALUE"
        )
    folder = locate(arguments.resume) if arguments.resume else last_run(locate(arguments.runs))
    resumed = read_run(folder, words)
    return resumed.settings, resumed


def read_location(option: str, location: str, *, with_objects: bool = False) -> str:
    """Return the path of a file or folder, from a path or a `file://` URL, or the URL of objects.

    Args:
        option: Option in messages.
        location: The path or URL.
        with_objects: Whether the option accepts a `gs://` URL.

    Raises:
        SettingsError: It is a URL of another scheme, such as `s3://`, or of another host.

    Example:
        >>> read_location("--runs", "file:///mnt/runs"), read_location("--runs", "runs")
        ('/mnt/runs', 'runs')
    """
    match = _URL.fullmatch(location)
    if match is None:
        return location
    scheme, place = match["scheme"].lower(), match["place"]
    if scheme == "file":
        host, _, path = place.removeprefix("//").partition("/")
        if place.startswith("//") and host in ("", "localhost"):
            return f"/{unquote(path)}"
        raise SettingsError(
            f"{option} must be a file:// URL of this host, not {location}. Write "
            f"{option} file:///{place.lstrip('/')}"
        )
    if with_objects and f"{scheme}://" == SCHEME and place.strip("/"):
        return SCHEME + place.strip("/")
    bucket = place.strip("/").partition("/")[0] or "BUCKET"
    path = f"/mnt/{place.strip('/') or 'BUCKET'}"
    mount = _MOUNTS.get(scheme, "mount {0} at /mnt/{0}").format(bucket)
    kinds = "a file:// or gs:// URL" if with_objects else "a file:// URL"
    raise SettingsError(
        f"{option} must be a path of the file system or {kinds}, not {location}. Mount "
        f"the bucket on each host, and write its path:\n  {mount}\n  {option} {path}"
    )


def _words(arguments: argparse.Namespace) -> list[str]:
    """Return all overrides of the command line in the form of ``--set``."""
    words = list(arguments.set)
    if arguments.data:
        words.append(f"data.paths={toml_value(arguments.data)}")
    if arguments.name is not None:
        words.append(f"run.name={toml_value(arguments.name)}")
    if arguments.steps is not None:
        words.append(f"training.steps={arguments.steps}")
    return words
