"""``xlashard train``: from the words of the command line to a run and its exit code."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import jax

from xlashard.train.checks import check_settings
from xlashard.train.console import make_console, make_screen
from xlashard.train.errors import Diverged, RunError, SettingsError
from xlashard.train.job import run_job
from xlashard.train.schema import reference
from xlashard.train.settings import Settings, load_settings
from xlashard.train.toml import toml_value


def run(arguments: argparse.Namespace) -> int:
    """Trains as the command line asks.

    Args:
        arguments: The words, parsed.

    Returns:
        The exit code: 0 done, 1 diverged, 2 wrong settings or data, 130 stopped by Ctrl-C.
    """
    # A terminal that lacks a letter shows another one; it does not end the run.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    if arguments.keys:
        for key, kind, default, note in reference(Settings):
            print(f"{key} = {default}  # {kind}: {note}")
        return 0
    try:
        settings = _settings(arguments)
        check_settings(settings)
        devices = start_devices(settings.devices.emulate)
        screen = make_screen(make_console(), settings.training.log_every)
        outcome = run_job(settings, devices, screen, Path(arguments.runs))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, Diverged) else 2
    return 130 if outcome.interrupted else 0


# Emulated devices share the processor's cores. On a busy machine one may wait for the others longer
# than the 40 s after which XLA takes a collective for stuck, and ends the process.
_PATIENCE = "xla_cpu_collective_call_terminate_timeout_seconds"


def start_devices(emulated: int) -> list[Any]:
    """Starts JAX with emulated CPU devices, or (at 0) with the real devices that it finds.

    Raises:
        SettingsError: JAX runs already, with other devices.
    """
    if emulated:
        flags = os.environ.get("XLA_FLAGS", "")
        if _PATIENCE not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --{_PATIENCE}=1200".strip()
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", emulated)
        except RuntimeError:
            pass  # JAX runs already; below is seen with what.
        found = jax.devices("cpu")
        if len(found) < emulated:
            raise SettingsError(
                f"devices.emulate = {emulated}, but JAX runs already with {len(found)} CPU "
                f"devices. Write, before the program starts:\n"
                f"  XLA_FLAGS=--xla_force_host_platform_device_count={emulated}"
            )
        return found[:emulated]
    return jax.devices()


def _settings(arguments: argparse.Namespace) -> Settings:
    if not arguments.config:
        raise SettingsError("which settings? Write, for example:\n  --config configs/tiny.toml")
    words = list(arguments.set)
    if arguments.data:
        words.append(f"data.paths={toml_value(arguments.data)}")
    if arguments.name is not None:
        words.append(f"run.name={toml_value(arguments.name)}")
    if arguments.steps is not None:
        words.append(f"training.steps={arguments.steps}")
    return load_settings(arguments.config, words)
