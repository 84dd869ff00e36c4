"""Test tools for multi-device programs: emulated devices, emulated pods, program assertions.

The room behind it is `xlashard.pods.testing`.
"""

from xlashard.pods.testing.emulated_devices import EmulatedDevices, emulated_devices
from xlashard.pods.testing.expectations import (
    assert_collectives,
    assert_no_resharding,
    assert_peak_bytes_at_most,
)
from xlashard.pods.testing.launcher import PodSize
from xlashard.pods.testing.pods import EmulatedPod, Pod, pod
from xlashard.pods.testing.supervision import PodRun, Verdict

__all__ = [
    "EmulatedDevices",
    "EmulatedPod",
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
