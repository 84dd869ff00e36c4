"""For tests of programs for many devices: emulated devices and pods, and what programs may do.

| modules | what is in them |
|---|---|
| `emulated`, `environment` | emulated devices, and the environment of a process that has some |
| `expectations` | what a test says of a program: its collectives, its memory |
| `launcher`, `wires`, `guard` | starting the processes of a pod, hearing from them, ending them |
| `supervision`, `text`, `printing` | waiting for their end, and what is said and shown of it |
| `pods`, `functions` | functions and scripts that run in a pod |
| `pool`, `rounds`, `channel` | processes that stay, and what they are asked |
| `bootstrap`, `worker` | what runs in those |
| `pytest_pods`, `pytest_inside`, `pytest_merging` | tests on pods, outside and inside |
| `command` | `xlashard pod` |
"""

from xlashard.testing.emulated_devices import EmulatedDevices, emulated_devices
from xlashard.testing.expectations import (
    assert_collectives,
    assert_no_resharding,
    assert_peak_bytes_at_most,
)
from xlashard.testing.launch.launcher import PodSize
from xlashard.testing.launch.supervision import PodRun, Verdict
from xlashard.testing.pods import Pod, pod

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
