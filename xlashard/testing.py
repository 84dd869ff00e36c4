"""Test tools for multi-device programs: emulated devices, emulated pods, program assertions.

| modules | contents |
|---|---|
| `emulated_devices` | emulated CPU devices, and the environment of a pod's processes |
| `expectations` | assertions on the collectives and the memory of a program |
| `pods` | functions and scripts run in every process of an emulated pod |
| `launcher`, `guard` | start, events and termination of the processes of a pod |
| `supervision` | timeouts, grace periods, the final verdict, filtering of output |
| `pod_command` | the command `xlashard pod` |
| `worker_pool`, `pod_worker`, `bootstrap` | processes that stay alive and serve requests |
| `pytest_plugin/` | implementation of the marker `pod` |
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
