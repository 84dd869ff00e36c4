"""For tests of programs for many devices: emulated devices and pods, and what programs may do."""

from xlashard.testing.emulated import EmulatedDevices, emulated_devices
from xlashard.testing.expectations import (
    assert_collectives,
    assert_no_resharding,
    assert_peak_bytes_at_most,
)
from xlashard.testing.launcher import PodSize
from xlashard.testing.pods import Pod, pod
from xlashard.testing.supervision import PodRun, Verdict

__all__ = [
    "EmulatedDevices",
    "Pod",
    "PodRun",
    "PodSize",
    "Verdict",
    "assert_collectives",
    "assert_no_resharding",
    "assert_peak_bytes_at_most",
    "emulated_devices",
    "pod",
]
