"""What several tests of pjit use."""

import threading

import jax
import numpy as np

from xlashard import Mesh


def make_mesh(shape, names, devices=None):
    """A mesh over the first devices, or over those given."""
    devices = jax.devices() if devices is None else devices
    count = int(np.prod(shape))
    return Mesh(np.array(devices[:count]).reshape(shape), names)


def f32(*shape):
    """Small distinct numbers, `[*shape]`."""
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) / 8


def spec_of(array):
    """The partition spec of an array, without what says nothing at its end."""
    entries = list(array.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def device_ids(array):
    """The ids of an array's devices."""
    return sorted(d.id for d in array.devices())


class Compilations:
    """Stands in for the compiler, counts, and keeps what it gave."""

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
    """A function that no other test has compiled."""
    return lambda x: x * 2 + 1


class Traces:
    """A function that counts how often it is traced."""

    def __init__(self, body=lambda x: x * 2 + 1):
        self.count = 0

        def fun(x):
            self.count += 1
            return body(x)

        self.fun = fun


def by_set_mesh(mesh, call):
    """Calls with the mesh in force that `jax.set_mesh` puts there."""
    with jax.set_mesh(mesh):
        return call()


def by_with(mesh, call):
    """Calls with the mesh in force that `with mesh:` puts there."""
    with mesh:
        return call()


def under(name, value, call):
    """Calls under another setting of JAX."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        return call()
    finally:
        jax.config.update(name, before)
