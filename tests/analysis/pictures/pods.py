"""Fake devices of many hosts, for pictures of pods on any machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xlashard import Mesh, Sharding
from xlashard.geometry import MeshGrid, Tiling, parse_spec


@dataclass(frozen=True)
class PodDevice:
    """Attributes of a device that a picture needs."""

    id: int
    process_index: int
    platform: str = "tpu"


class Pod(Sharding):
    """Tiles on fake devices."""

    def __init__(self, devices: Sequence[PodDevice], tiling: Tiling) -> None:
        self._devices = devices
        self._tiling = tiling

    @property
    def devices(self) -> Any:
        return self._devices

    def tiling(self, shape: Sequence[int]) -> Tiling:
        return self._tiling


def pod(mesh: Mapping[str, int], spec: Sequence[Any], ndim: int, per_host: int = 4) -> Pod:
    """Return a spec on a mesh of devices, of which `per_host` neighbours belong to each host."""
    grid = MeshGrid(tuple(mesh), tuple(mesh.values()))
    devices = [PodDevice(i, i // per_host) for i in range(grid.size)]
    return Pod(devices, Tiling.from_spec(grid, parse_spec(spec), ndim))


def pod_mesh(mesh: Mapping[str, int], per_host: int = 4) -> Mesh:
    """Return a mesh of fake devices, in their own order."""
    devices = np.empty(math.prod(mesh.values()), object)
    devices[:] = [PodDevice(i, i // per_host) for i in range(devices.size)]
    return Mesh(devices.reshape(tuple(mesh.values())), tuple(mesh))


class CountingList(Sequence):
    """List that counts accesses to its items."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items
        self.looks = 0

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: Any) -> Any:
        self.looks += 1
        return self._items[number]
