"""Test tools for multi-device programs: emulated devices, emulated pods, program assertions.

The room behind it is `xlashard.pods.testing`.
"""

from xlashard.pods.testing.compilations import assert_compiles
from xlashard.pods.testing.emulated_devices import EmulatedDevices, emulated_devices
from xlashard.pods.testing.expectations import (
    assert_collectives,
    assert_memory,
    assert_no_host_transfer,
    assert_no_resharding,
)
from xlashard.pods.testing.launcher import PodSize
from xlashard.pods.testing.pods import EmulatedPod, pod
from xlashard.pods.testing.sharded_values import (
    ShardingSummary,
    assert_sharded,
    sharding_summary,
)
from xlashard.pods.testing.supervision import PodRun, Verdict

__all__ = [
    "EmulatedDevices",
    "EmulatedPod",
    "PodRun",
    "PodSize",
    "ShardingSummary",
    "Verdict",
    "assert_collectives",
    "assert_compiles",
    "assert_memory",
    "assert_no_host_transfer",
    "assert_no_resharding",
    "assert_sharded",
    "emulated_devices",
    "pod",
    "sharding_summary",
]
