"""Memory of a run: what can't fit is refused, and what did not fit is reported in one line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from xlashard._jax.runtime.transfer import is_out_of_memory, read_requested_bytes
from xlashard.support.formatting import error_line, in_bytes
from xlashard.support.host_memory import read_memory_limit
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
        SettingsError: The memory of a device is smaller; for CPU devices, which share it, that of
            this machine or of the cgroup of this process.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    state, batch = least_bytes(settings)
    available, source = _read_capacity(local)
    if available is None or state + batch <= available:
        return
    raise SettingsError(
        f"the run does not fit: on each device parameters and AdamW's moments take "
        f"{_format_bytes(state)} and a batch at least {_format_bytes(batch)}, and a device has "
        f"{_format_bytes(available)}{source}. {_advise(settings)}"
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


def _read_capacity(devices: Sequence[Any]) -> tuple[int | None, str]:
    """Return the bytes of one of the devices, None if unknown, and the memory that CPUs share."""
    if not devices:
        return None, ""
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit"), ""
    limit = read_memory_limit()
    memory = f"the memory limit in {limit.file}" if limit.file else "this machine's memory"
    return limit.bytes // len(devices), f", a share of {len(devices)} in {memory}"


def _format_bytes(count: int) -> str:
    return f"{in_bytes(count)} ({count:,} bytes)"
