"""Memory of a run: what can't fit is refused, and what did not fit is reported in one line."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from xlashard._jax.runtime.transfer import is_out_of_memory, read_requested_bytes
from xlashard.support.formatting import error_line, in_bytes
from xlashard.train.config.settings import Settings
from xlashard.train.errors import RunError, SettingsError
from xlashard.train.formulas import least_bytes
from xlashard.train.model.layout import declared_arrays


def check_memory(settings: Settings, devices: Sequence[Any]) -> None:
    """Check that devices of this process can hold the state and a batch, before any allocation.

    The check is of a lower bound: what passes may exceed the memory nevertheless.

    Args:
        settings: Settings of the run.
        devices: Devices of the mesh, of all processes.

    Raises:
        SettingsError: The memory of a device, or of this machine for CPU devices, is smaller.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    state, batch = least_bytes(settings)
    available = _read_capacity(local)
    if available is None or state + batch <= available:
        return
    shared = f", a share of {len(local)} in this machine's memory" if _are_emulated(local) else ""
    raise SettingsError(
        f"the run does not fit: on each device parameters and AdamW's moments take "
        f"{_format_bytes(state)} and a batch at least {_format_bytes(batch)}, and a device has "
        f"{_format_bytes(available)}{shared}. {_advise(settings)}"
    )


@contextmanager
def reporting_scarcity(settings: Settings) -> Iterator[None]:
    """Report in one line that the memory did not suffice inside the block.

    Raises:
        RunError: It did not suffice.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        requested = read_requested_bytes(error)
        failed = (
            f"an allocation of {_format_bytes(requested)} failed"
            if requested
            else error_line(error, MemoryError, jax.errors.JaxRuntimeError)
        )
        state, batch = least_bytes(settings)
        raise RunError(
            f"the run does not fit: {failed}. On each device parameters and AdamW's moments take "
            f"{_format_bytes(state)}, and a batch at least {_format_bytes(batch)}. "
            f"{_advise(settings)}"
        ) from None


def _advise(settings: Settings) -> str:
    model, training = settings.model, settings.training
    state, batch = least_bytes(settings)
    path, largest = max(declared_arrays(model).items(), key=lambda named: named[1].size)
    smaller_model = (
        f"model.layers, model.width, model.mlp, model.vocab or model.experts (the largest "
        f"parameter is {path} {list(largest.shape)})"
    )
    smaller_batch = (
        f"training.batch (it is {training.batch}) or model.length (it is {model.length}), or "
        f"raise training.accumulate (it is {training.accumulate})"
    )
    return (
        f"Lower {smaller_model if state > batch else smaller_batch}, or shard over more devices "
        f"by [mesh] and [sharding.rules]"
    )


def _are_emulated(devices: Sequence[Any]) -> bool:
    return devices[0].platform == "cpu"


def _read_capacity(devices: Sequence[Any]) -> int | None:
    """Return the bytes of one of the devices; None where they are not reported."""
    if not devices:
        return None
    if _are_emulated(devices):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def _format_bytes(count: int) -> str:
    return f"{in_bytes(count)} ({count:,} bytes)"
