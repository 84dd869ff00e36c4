"""Run a script for a topology: its programs are compiled for the topology instead of run."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax.runtime.stand_in_devices import Zeros, emulate_devices, stand_in
from xlashard._jax.trace.lower_for import move_mesh, move_sharding
from xlashard._jax.trace.observed_programs import JitLowering, ObservedProgram, Run, unobserved
from xlashard._jax.trace.target_chip import assume_chip
from xlashard.analysis.programs.from_script import RecordedProgram
from xlashard.analysis.programs.program import Compilation, LoweredModule
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec, to_jax
from xlashard.errors import TopologyError
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.preflight.compilation import compile_for_report
from xlashard.predict.preflight.mesh_mapping import meshes_of_program, resolve_mesh
from xlashard.predict.preflight.preflight_run import read_on_topology
from xlashard.predict.preflight.report.build import build_report
from xlashard.predict.preflight.report.measured import Calibration
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import Price
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.core.array.array_class import handles
else:
    # For calls of pjit-ed functions, which have it loaded.
    handles = deferred("xlashard.core.array.array_class.handles")

_RUN_BELOW = 1 << 28
"""Bytes on all devices below which an operation outside of `jit` runs."""

_RUN_ALONE_BELOW = 1 << 31
"""Bytes below which a program of one device runs."""


@dataclass
class ScriptDevices:
    """Emulated devices of a script that stand in for those of a topology.

    Attributes:
        topology: The topology.
        options: Compiler options.
        estimate: Whether to stop the compiler before code generation.
        status: Returns a context manager that shows the work in progress.
    """

    topology: BaseTopology
    options: Mapping[str, Any]
    estimate: bool
    status: Callable[[str], AbstractContextManager[Any]]
    _compiled: dict[RecordedProgram, tuple[Mesh, Compilation]] = field(default_factory=dict)

    def begin(self) -> None:
        """Emulate the devices.

        Raises:
            TopologyError: If JAX has other devices already.
        """
        emulated, devices = emulate_devices(self.topology.num_devices), self.topology.devices
        if len(emulated) != len(devices) or emulated[0].platform != "cpu":
            raise TopologyError(  # no-catalogue: needs a process of its own
                f"this process has {len(emulated)} devices of {emulated[0].platform} already, "
                f"instead of {len(devices)} emulated ones for {self.topology}"
            )
        self._to_topology = dict(zip(emulated, devices, strict=True))
        self._to_emulated = dict(zip(devices, emulated, strict=True))
        self._zeros = Zeros()
        undo = ExitStack()
        undo.enter_context(assume_chip(devices[0], in_kernels=True, all_threads=True))
        undo.callback(stand_in(dict(zip(emulated, devices, strict=True))))
        self.end = undo.close

    def check_options(self) -> None:
        """Compile a small program with the compiler options, before the script runs.

        Raises:
            CompileError: If an option is unknown or invalid.
        """
        everywhere = NamedSharding(self.topology.mesh({"devices": -1}), PartitionSpec())
        x = jax.ShapeDtypeStruct((), np.float32, sharding=everywhere)

        def small(x: Any) -> Any:
            return x

        with unobserved():
            lowered = read_on_topology(small, (x,), {}, self.topology, None).program
            assert isinstance(lowered, LoweredModule)
            lowered.compile(self.options)

    def is_compiled(self, program: RecordedProgram) -> bool:
        """Return True for a program that is compiled for the topology instead of run."""
        if program.is_operation:
            return False
        return program.num_devices > 1 or self.topology.num_devices == 1

    def results(self, recorded: RecordedProgram, program: ObservedProgram, run: Run) -> list[Any]:
        """Return the results of a call: zeros, if the program is not run.

        Args:
            recorded: The program.
            program: The program with the arguments of the call.
            run: Runs it on the emulated devices.
        """
        nbytes = recorded.nbytes
        if recorded.num_devices > 1:
            nbytes *= recorded.num_devices
        limit = _RUN_BELOW if recorded.num_devices > 1 else _RUN_ALONE_BELOW
        if not self.is_compiled(recorded) and nbytes < limit:
            return run()
        shardings = self._result_shardings(recorded, program)
        arrays = [*map(self._zeros.array, program.jaxpr.out_avals, shardings)]
        is_jit = isinstance(program, JitLowering)
        return arrays if is_jit else [*map(handles.wrap_result, arrays)]

    def _result_shardings(self, recorded: RecordedProgram, program: ObservedProgram) -> list[Any]:
        if isinstance(program, JitLowering):
            requested = program.params["out_shardings"]
            if all(hasattr(sharding, "device_set") for sharding in requested):
                return list(requested)
        _, compilation = self.compilation(recorded)
        return [
            move_sharding(to_jax(value.sharding, value.aval.shape), self._to_emulated)
            for value in compilation.results[: len(program.jaxpr.out_avals)]
            if value.sharding is not None  # An argument that the program drops has none.
        ]

    def compilation(self, recorded: RecordedProgram) -> tuple[Mesh, Compilation]:
        """Return the mesh on the topology and a program that was compiled for it.

        Raises:
            XlashardError: As `preflight` does.
        """
        if recorded not in self._compiled:
            with unobserved(), self.status(f"compiling {recorded.name} for {self.topology}"):
                program, own = recorded.program, recorded.mesh
                on = None if own is None else move_mesh(own, self._to_topology)
                lowered = program.lower(self._to_topology)
                mesh = on or resolve_mesh(self.topology, None, meshes_of_program(program))
                compiled = compile_for_report(lowered, self.options, estimate=self.estimate)
                self._compiled[recorded] = mesh, compiled
        return self._compiled[recorded]

    def report(
        self,
        recorded: RecordedProgram,
        price: Price | None = None,
        kernel_costs: Mapping[str, KernelCost] | None = None,
        calibration: Calibration | None = None,
    ) -> PreflightReport:
        """Return the report of a program.

        Args:
            recorded: The program.
            price: Price of a chip-hour.
            kernel_costs: Costs of kernels by name.
            calibration: Measured slowdowns of the chip; None for the published rates.

        Raises:
            XlashardError: As `preflight` does.
        """
        mesh, compilation = self.compilation(recorded)
        place = f" ({recorded.source})" if recorded.source else ""
        return build_report(
            compilation,
            self.topology,
            mesh,
            title=f"{recorded.name}{place}",
            price=price,
            kernel_costs=kernel_costs,
            calibration=calibration,
            is_laid_out=False,
        )
