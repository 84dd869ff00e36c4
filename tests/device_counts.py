"""Tests on fewer devices than the eight for which they are written.

`devices(n)` marks what needs n devices. Most tests do without: one that requests more devices than
there are ends at the line that takes them from `jax.devices()`, which counts as a skip.
"""

import functools
import linecache
import os
import traceback
from pathlib import Path

USUAL = 8
EMULATED = int(os.environ.get("XLASHARD_TEST_DEVICES") or USUAL)
"""Number of emulated devices of each test process."""

COUNT_FLAG = "--xla_force_host_platform_device_count"
# Test programs run once or twice on a few numbers, so XLA's time for optimised code is lost:
# without it they compile in two thirds of the time. The partitioner works the same.
# A flag of the same name that follows wins.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

_TESTS = str(Path(__file__).parent)


def emulate_devices(count: int) -> dict[str, str]:
    """Return environment variables by which a process of a test has emulated CPU devices."""
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{QUICK_COMPILE} {COUNT_FLAG}={count}"}


@functools.cache
def count_devices() -> int:
    """Return the number of devices that the tests run on."""
    if not os.environ.get("XLASHARD_TEST_PLATFORM"):
        return EMULATED
    import jax

    return len(jax.devices())


def describe_missing_devices(error: BaseException | None) -> str:
    """Return which line requested devices that do not exist; "" if that is not the reason.

    Args:
        error: Error that ended a test, a fixture, or the import of a file.
    """
    if count_devices() >= USUAL:
        return ""
    while error is not None:
        if isinstance(error, ValueError | IndexError) and (line := _find_request(error)):
            return f"needs more than {count_devices()} devices: {line}"
        error = error.__cause__
    return ""


def _find_request(error: BaseException) -> str:
    """Return the statement of a test that raised an error, if it takes devices."""
    frames = [
        (frame, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(_TESTS)
    ]
    if not frames:
        return ""
    frame, number = frames[-1]
    line = linecache.getline(frame.f_code.co_filename, number).strip()
    # `jax.make_mesh` takes its devices itself.
    return line if "devices" in line.lower() or "make_mesh(" in line else ""
