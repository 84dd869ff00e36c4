"""GPUs and TPUs: which devices a machine has, and where programs are predicted for them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.device.programs import PROFILED, PROGRAMS_FOR_TPUS, DeviceProgram, list_programs
from xlashard import NamedSharding, P, PreflightReport, preflight
from xlashard.gpu import GPU_MODELS
from xlashard.predict.targets.tpu.generations import GENERATIONS
from xlashard.tpu import topology


@dataclass(frozen=True)
class Target:
    """A machine's GPU, or the TPUs of its slice.

    Attributes:
        rehearsal: Whether CPU devices stand for them, and programs are small.
        name: `gpu` or `tpu`.
        title: Name in texts.
        platform: JAX's name of their platform.
        emulated: CPU devices of a rehearsal.
    """

    rehearsal: bool
    name: str = field(default="", init=False)
    title: str = field(default="", init=False)
    platform: str = field(default="", init=False)
    emulated: int = field(default=1, init=False)

    @property
    def devices(self) -> list[Any]:
        """Devices that programs run on."""
        raise NotImplementedError

    @property
    def model(self) -> str | None:
        """Model of device that is predicted; None for one without figures."""
        raise NotImplementedError

    @property
    def programs(self) -> dict[str, DeviceProgram]:
        """Programs by name."""
        raise NotImplementedError

    @property
    def profiled(self) -> tuple[str, ...]:
        """Names of the programs whose profiles are read."""
        raise NotImplementedError

    @property
    def rehearsed(self) -> tuple[str, ...]:
        """Names of the programs that a rehearsal predicts."""
        raise NotImplementedError

    @property
    def tests(self) -> tuple[str, ...]:
        """Folders or files of the tests to run on the devices."""
        return ()

    def is_here(self) -> bool:
        """Return whether this machine has such devices."""
        raise NotImplementedError

    def arguments(self, program: DeviceProgram) -> list[jax.Array]:
        """Return arguments of a program on its devices."""
        return program.make_arguments(tiny=self.rehearsal)

    def predict(self, program: DeviceProgram) -> PreflightReport:
        """Return the prediction of a program."""
        raise NotImplementedError


@dataclass(frozen=True)
class GpuTarget(Target):
    """The first GPU of a machine."""

    name: str = field(default="gpu", init=False)
    title: str = field(default="GPUs", init=False)
    platform: str = field(default="cuda", init=False)

    @property
    def devices(self) -> list[Any]:
        """The first GPU."""
        return jax.devices()[:1]

    @property
    def model(self) -> str | None:
        """Model of GPU, as the driver reports it."""
        return "h100" if self.rehearsal else find_gpu_model(jax.devices()[0].device_kind)

    @property
    def programs(self) -> dict[str, DeviceProgram]:
        """Programs of one device; in a rehearsal those that need no library of GPUs."""
        found = [p for p in list_programs() if not p.sharded]
        return {p.name: p for p in found if not (self.rehearsal and p.needs_gpu)}

    @property
    def profiled(self) -> tuple[str, ...]:
        """Five programs."""
        return PROFILED

    @property
    def rehearsed(self) -> tuple[str, ...]:
        """A product and a sort, of which XLA warns."""
        return "product f32", "sort"

    def is_here(self) -> bool:
        """Return whether this machine has an NVIDIA GPU."""
        return Path("/dev/nvidiactl").exists()

    def predict(self, program: DeviceProgram) -> PreflightReport:
        """Return the prediction of a program on one GPU."""
        types = program.types(tiny=self.rehearsal)
        return preflight(jax.jit(program.function), *types, topology=f"{self.model}-1")


def find_gpu_model(device_kind: str) -> str | None:
    """Return the model of GPU with the name that a driver reports; None for one without figures."""
    words = re.split(r"[ -]", device_kind)
    for model in GPU_MODELS:
        if all(a == b for a, b in zip(words, re.split(r"[ -]", model.device_kind), strict=False)):
            return model.name
    return None


@dataclass(frozen=True)
class TpuTarget(Target):
    """All TPUs of a slice, on one host or several."""

    name: str = field(default="tpu", init=False)
    title: str = field(default="TPUs", init=False)
    platform: str = field(default="tpu", init=False)
    emulated: int = field(default=4, init=False)

    @property
    def devices(self) -> list[Any]:
        """All devices; in a rehearsal as many as a slice has."""
        found = jax.devices()
        return found[: max(n for n in (1, 4, 8) if n <= len(found))] if self.rehearsal else found

    @property
    def model(self) -> str | None:
        """Generation of the TPUs."""
        return "v5e" if self.rehearsal else find_generation(jax.devices()[0].device_kind)

    @cached_property
    def _slice(self) -> tuple[str, int]:
        """Name of the slice, and how many slices the devices are of."""
        devices = self.devices
        if self.rehearsal:
            return f"v5e-{len(devices)}", 1
        return f"{self.model}:{slice_shape(devices)}", len({slice_number(d) for d in devices})

    @property
    def programs(self) -> dict[str, DeviceProgram]:
        """Programs on each device, and on all of them together."""
        everything = {program.name: program for program in list_programs()}
        return {name: everything[name] for name in PROGRAMS_FOR_TPUS}

    @property
    def profiled(self) -> tuple[str, ...]:
        """One program."""
        return ("block gradients",)

    @property
    def rehearsed(self) -> tuple[str, ...]:
        """A program with a collective."""
        return ("sum of products",)

    @property
    def tests(self) -> tuple[str, ...]:
        """Tests of arrays; in a rehearsal of one file."""
        folder = "tests/core/array"
        return (f"{folder}/test_layouts.py" if self.rehearsal else folder,)

    def is_here(self) -> bool:
        """Return whether this machine is a TPU VM."""
        return bool([*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")])

    def arguments(self, program: DeviceProgram) -> list[jax.Array]:
        """Return arguments of a program on all devices, those of several hosts too."""
        mesh = jax.sharding.Mesh(np.array(self.devices), ("all",))
        places = [jax.NamedSharding(mesh, spec) for spec in self._specs(program)]
        make = jax.jit(lambda: program.make_arguments(tiny=self.rehearsal), out_shardings=places)
        return make()

    def predict(self, program: DeviceProgram) -> PreflightReport:
        """Return the prediction of a program on the slice."""
        place = topology(*self._slice)
        mesh = place.mesh({"all": place.num_devices})
        types = [
            jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, spec))
            for t, spec in zip(
                program.types(tiny=self.rehearsal), self._specs(program), strict=True
            )
        ]
        return preflight(
            jax.jit(program.function), *types, topology=place, mesh=mesh, estimate=self.rehearsal
        )

    def _specs(self, program: DeviceProgram) -> Iterator[P]:
        for number, _ in enumerate(program.types(tiny=True)):
            yield P("all") if number < program.sharded else P()


def find_generation(device_kind: str) -> str | None:
    """Return the generation of TPU with a device kind; None for one without figures."""
    return next((g.name for g in GENERATIONS if g.device_kind == device_kind), None)


def slice_number(device: Any) -> int:
    """Return the number of a device's slice."""
    return getattr(device, "slice_index", None) or 0


def slice_shape(devices: list[Any]) -> str:
    """Return the shape of a slice from the coordinates of its chips, such as 2x4 or 2x2x1."""
    coordinates = [d.coords for d in devices if slice_number(d) == slice_number(devices[0])]
    spans = [max(line) - min(line) + 1 for line in zip(*coordinates, strict=True)]
    generation = next(g for g in GENERATIONS if g.device_kind == devices[0].device_kind)
    return "x".join(map(str, spans[: generation.dimensions]))


TARGETS: dict[str, type[Target]] = {"gpu": GpuTarget, "tpu": TpuTarget}
