"""Helpers of tests of pjit."""

import threading

import jax
import numpy as np

from xlashard import Mesh


def make_mesh(shape, names, devices=None):
    """Return a mesh over the first devices, or over the given ones.

    On one device, every axis has size 1: a test that needs more carries the marker `devices`.
    """
    if devices is None or jax.device_count() == 1:
        devices = jax.devices()
    shape = (1,) * len(shape) if jax.device_count() == 1 else shape
    count = int(np.prod(shape))
    return Mesh(np.array(devices[:count]).reshape(shape), names)


def f32(*shape):
    """Return small distinct numbers, `[*shape]`."""
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) / 8


def spec_of(array):
    """Return the partition spec of an array, without trailing Nones."""
    entries = list(array.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def device_ids(array):
    """Return the ids of an array's devices."""
    return sorted(d.id for d in array.devices())


class Compilations:
    """Replacement of the compiler that counts and records compilations."""

    def __init__(self, compiler):
        self._compiler = compiler
        self._lock = threading.Lock()
        self.count = 0
        self.made = []

    def __call__(self, *args, **kwargs):
        with self._lock:
            self.count += 1
        self.made.append(self._compiler(*args, **kwargs))
        return self.made[-1]


def fresh():
    """Return a function that no other test has compiled."""
    return lambda x: x * 2 + 1


class Traces:
    """Function that counts its traces."""

    def __init__(self, body=lambda x: x * 2 + 1):
        self.count = 0

        def fun(x):
            self.count += 1
            return body(x)

        self.fun = fun


def by_set_mesh(mesh, call):
    """Call with a mesh set by `jax.set_mesh`."""
    with jax.set_mesh(mesh):
        return call()


def by_with(mesh, call):
    """Call with a mesh set by `with mesh:`."""
    with mesh:
        return call()


def under(name, value, call):
    """Call under another setting of JAX."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        return call()
    finally:
        jax.config.update(name, before)
