"""For tests of programs for many devices: emulated devices and pods, and what programs may do."""

from xlashard.testing.launcher import PodSize
from xlashard.testing.pods import Pod, pod
from xlashard.testing.supervision import PodRun, Verdict

__all__ = ["Pod", "PodRun", "PodSize", "Verdict", "pod"]
