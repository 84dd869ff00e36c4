"""Runs that exceed the memory: refused before anything is allocated, or reported in one line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from tests.message_patterns import naming
from tests.train.examples import settings
from xlashard.support.host_memory import MemoryLimit
from xlashard.train.errors import RunError, SettingsError
from xlashard.train.loop import memory
from xlashard.train.loop.memory import check_memory, reporting_scarcity

GIB = 1 << 30


def make_devices(limit: int | None, platform: str = "gpu") -> list[Any]:
    stats = None if limit is None else {"bytes_limit": limit}
    one = SimpleNamespace(platform=platform, process_index=0, memory_stats=lambda: stats)
    return [one] * 8


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        *[(f"model.{key}={2**31 - 1}", f"model.{key}") for key in ("layers", "length")],
        *[(f"model.{key}={2**30}", f"model.{key}") for key in ("width", "mlp", "vocab")],
        (f"model.experts={2**31 - 1}", "model.experts"),
        (f"training.batch={2**30}", "training.batch"),
    ],
)
@pytest.mark.parametrize("layout", ["rules", "auto"])
def test_sizes_that_no_machine_holds_are_refused(word: str, cause: str, layout: str) -> None:
    requested = settings(word, f"sharding.layout={layout}")
    for found in (make_devices(96 * GIB), make_devices(None, "cpu")):
        with pytest.raises(SettingsError, match=naming("does not fit", "bytes", cause)) as caught:
            check_memory(requested, found)
        assert len(str(caught.value).splitlines()) == 1


def test_refusal_of_cpu_devices_names_the_limit_of_the_cgroup(monkeypatch) -> None:
    limit = MemoryLimit(8 << 20, Path("/sys/fs/cgroup/job/memory.max"))
    monkeypatch.setattr(memory, "read_memory_limit", lambda: limit)
    check_memory(settings(), make_devices(None, "cpu")[:1])
    share = naming("1.0 MiB (1,048,576 bytes)", "share of 8", "/sys/fs/cgroup/job/memory.max")
    with pytest.raises(SettingsError, match=share):
        check_memory(settings("model.width=1024"), make_devices(None, "cpu"))


def test_runs_that_fit_and_devices_without_a_figure_pass() -> None:
    for found in (make_devices(GIB), make_devices(None), make_devices(None, "cpu"), []):
        check_memory(settings(), found)
    check_memory(settings("model.width=65536"), make_devices(None))


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (
            jax.errors.JaxRuntimeError(
                "INTERNAL: Error dispatching computation: Out of memory allocating 6442450944 bytes"
            ),
            ["6.0 GiB (6,442,450,944 bytes)"],
        ),
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6.00GiB.\nDetails"
            ),
            ["6.0 GiB (6,442,450,944 bytes)"],
        ),
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.1G of 15.7G."
            ),
            ["Used 20.1G of 15.7G"],
        ),
        (
            jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
            ["CUDA_ERROR_OUT_OF_MEMORY"],
        ),
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 4.00G. "
                "That was not possible."
            ),
            ["4.0 GiB (4,294,967,296 bytes)"],
        ),
        (MemoryError("Unable to allocate 8.00 GiB for an array"), ["8.0 GiB (8,589,934,592"]),
        (MemoryError(), ["MemoryError"]),
    ],
)
def test_exhausted_memory_is_one_line_with_bytes_and_advice(
    error: Exception, parts: list[str]
) -> None:
    expected = naming("does not fit", *parts, "each device", "Lower model.layers", "[mesh]")
    with pytest.raises(RunError, match=expected) as caught, reporting_scarcity(settings()):
        raise error
    assert len(str(caught.value).splitlines()) == 1
    assert not isinstance(caught.value, SettingsError)


def test_other_errors_stay_as_they_are() -> None:
    for error in (jax.errors.JaxRuntimeError("INTERNAL: link down"), ValueError("memory")):
        with pytest.raises(type(error)) as caught, reporting_scarcity(settings()):
            raise error
        assert caught.value is error
