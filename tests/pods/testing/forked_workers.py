"""Pytest plugin: the workers of pods are forks of a process that has imported JAX."""

from tests.core.processes import pod_python
from xlashard.pods.testing import worker_pool

worker_pool._python = pod_python
