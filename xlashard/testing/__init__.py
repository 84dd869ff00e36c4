"""Test tools for multi-device programs: emulated devices, emulated pods, program assertions.

| modules | contents |
|---|---|
| `emulated_devices` | emulated CPU devices in one process |
| `expectations` | assertions on the collectives and the memory of a program |
| `pods` | functions and scripts run in every process of an emulated pod |
| `launch/` | launch and supervision of processes, and the command `xlashard pod` |
| `workers/` | processes that stay alive and serve requests |
| `pytest_plugin/` | implementation of the marker `pod` |
"""

from xlashard.testing.emulated_devices import EmulatedDevices, emulated_devices
from xlashard.testing.expectations import (
    assert_collectives,
    assert_no_resharding,
    assert_peak_bytes_at_most,
)
from xlashard.testing.launch.launcher import PodSize
from xlashard.testing.launch.supervision import PodRun, Verdict
from xlashard.testing.pods import EmulatedPod, Pod, pod

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
