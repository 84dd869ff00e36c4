"""Run a script for a topology: its programs are compiled for the topology instead of run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.stand_in_devices import emulate_devices, stand_in
from xlashard._jax.runtime.stand_in_values import StandInValues, bytes_on_devices, reporting
from xlashard._jax.runtime.topologies import named_topology
from xlashard._jax.trace.jaxprs import is_ref
from xlashard._jax.trace.lower_for import move_mesh, move_sharding
from xlashard._jax.trace.observed_programs import (
    JitLowering,
    ObservedCall,
    ObservedProgram,
    unobserved,
)
from xlashard._jax.trace.target_chip import assume_chip
from xlashard.analysis.programs.from_script import (
    RecordedProgram,
    assume_shardings,
    run_or_stand_in,
    stand_in_results,
    with_sharding,
)
from xlashard.analysis.programs.program import Compilation, LoweredModule
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec, to_jax
from xlashard.errors import ArgumentError, TopologyError, counted
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.preflight.advice import AdviceTrials, try_script
from xlashard.predict.preflight.compilation import compile_for_report
from xlashard.predict.preflight.mesh_mapping import meshes_of_program, resolve_mesh
from xlashard.predict.preflight.preflight_run import check_devices, lower_on, read_on_topology
from xlashard.predict.preflight.report.build import build_report
from xlashard.predict.preflight.report.measured import Calibration
from xlashard.predict.preflight.report.preflight_model import AdviceReport
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import Price
from xlashard.predict.targets.base_topology import BaseTopology

_RUN_UP_TO = 1 << 28
"""Bytes on all devices up to which a program runs on the CPU, if its results are read."""

_RUN_ALONE_UP_TO = 1 << 31
"""Bytes up to which a program of one device runs."""


@dataclass
class ScriptDevices:
    """Emulated devices of a script that stand in for those of a topology.

    Attributes:
        topology: The topology.
        options: Compiler options.
        estimate: Whether to stop the compiler before code generation.
        status: Returns a context manager that shows the work in progress.
        run_up_to: Bytes of arguments and results on all devices up to which a program may run on
            the CPU; None for 256 MiB, and 2 GiB for a program of one device.
        pattern: Pattern of the values inside that reports show; empty for none.
        values: The arrays that stand in for results of the script.
    """

    topology: BaseTopology
    options: Mapping[str, Any]
    estimate: bool
    status: Callable[[str], AbstractContextManager[Any]]
    run_up_to: int | None = None
    pattern: str = ""
    values: StandInValues = field(default_factory=StandInValues)
    _compiled: dict[RecordedProgram, tuple[Mesh, Compilation] | Exception] = field(
        default_factory=dict
    )
    _shardings: dict[RecordedProgram, list[Any]] = field(default_factory=dict)

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
        undo = ExitStack()
        undo.callback(self.values.begin())
        undo.enter_context(assume_chip(devices[0], in_kernels=True, all_threads=True))
        undo.callback(stand_in(self._to_topology))
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

    def results(self, recorded: RecordedProgram, call: ObservedCall) -> list[Any]:
        """Return the results of a call: of a program that is not run, arrays that stand in.

        Args:
            recorded: The program.
            call: The call on the emulated devices.
        """
        values, jaxpr = self.values, call.program.jaxpr
        used = getattr(call.program, "used", (True,) * len(call.arguments))
        arguments = (*compress(call.arguments, used), *jaxpr.consts)
        is_pending = bool(values.calls(arguments))
        several = recorded.num_devices > 1
        upper = recorded.nbytes * recorded.num_devices
        limit = self._limit(_RUN_UP_TO if several else _RUN_ALONE_UP_TO)
        if not self.is_compiled(recorded) and upper <= limit:
            if not is_pending:
                return run_or_stand_in(values, recorded, call)
            if not recorded.is_operation or any(map(is_ref, arguments)):
                values.settle(arguments)
                return run_or_stand_in(values, recorded, call)
            # Zeros have the types and shardings of the results.
            return values.defer(recorded, call.run, arguments, call.run())
        if recorded in values.read_programs and not is_pending:
            return run_or_stand_in(values, recorded, call)
        if recorded not in self._shardings:
            self._shardings[recorded] = self._result_shardings(recorded, call.program)
        shardings = self._shardings[recorded]
        types = map(with_sharding, jaxpr.out_avals, shardings)
        nbytes = sum(map(bytes_on_devices, (*call.arguments, *types)))
        is_run = nbytes <= self._limit(_RUN_UP_TO)
        return stand_in_results(values, recorded, call, shardings, is_run=is_run)

    def _limit(self, default: int) -> int:
        return default if self.run_up_to is None else self.run_up_to

    def _result_shardings(self, recorded: RecordedProgram, program: ObservedProgram) -> list[Any]:
        if isinstance(program, JitLowering):
            requested = program.params["out_shardings"]
            if all(hasattr(sharding, "device_set") for sharding in requested):
                return list(requested)
        try:
            _, compilation = self.compilation(recorded)
        except Exception:
            # The report has the reason.
            return assume_shardings(recorded, program)
        return [
            move_sharding(to_jax(value.sharding, value.aval.shape), self._to_emulated)
            for value in compilation.results[: len(program.jaxpr.out_avals)]
            if value.sharding is not None  # An argument that the program drops has none.
        ]

    def compilation(self, recorded: RecordedProgram) -> tuple[Mesh, Compilation]:
        """Return the mesh on the topology and a program that was compiled for it, once.

        Raises:
            XlashardError: As `preflight` does; other errors of lowering and compiling propagate.
        """
        done = self._compiled.get(recorded)
        if done is None:
            try:
                done = self._compile(recorded)
            except Exception as error:
                done = error
            self._compiled[recorded] = done
        if isinstance(done, Exception):
            raise done
        return done

    def _compile(self, recorded: RecordedProgram) -> tuple[Mesh, Compilation]:
        status = self.status(f"compiling {recorded.name} for {self.topology}")
        with unobserved(), reporting(), status:
            program, devices = recorded.reported_program, self._to_topology
            own = program.mesh
            if own is not None:
                devices = self._map_devices(recorded.name, own)
                mesh = move_mesh(own, devices)
            elif self.topology.num_devices == 1:
                mesh = self.topology.mesh({"device": 1})
            else:
                mesh = resolve_mesh(self.topology, None, meshes_of_program(program))
            lowered = program.lower(devices)
            check_devices(lowered, self.topology)
            return mesh, compile_for_report(
                lowered, self.options, estimate=self.estimate, values=self.pattern
            )

    def _map_devices(self, name: str, mesh: Mesh) -> dict[Any, Any]:
        """Return the topology's device of each device of a mesh, in the order of the mesh.

        The script emulates the devices, or has made them by `jax.experimental.topologies`.

        Raises:
            ArgumentError: If they are those of another topology.
        """
        own = tuple(mesh.devices.flat)
        if self._to_topology.keys() >= set(own):
            return {device: self._to_topology[device] for device in own}
        devices = self.topology.match_devices(own)
        if devices is None:
            topology, slices = named_topology(own[0])
            more = "" if slices == 1 else f" --slices {slices}"
            raise ArgumentError(  # no-catalogue: needs a script
                f"{name} is lowered for {counted(len(own), 'device')} of {topology}, not for "
                f"those of {self.topology}: write --topology {topology}{more}"
            )
        return dict(zip(own, devices, strict=True))

    def try_advice(
        self,
        reports: Mapping[RecordedProgram, PreflightReport],
        kernel_costs: Mapping[str, KernelCost] | None = None,
        calibration: Calibration | None = None,
    ) -> tuple[Sequence[PreflightReport], Sequence[AdviceReport]]:
        """Return the reports with their suggestions tried, and the suggestions over all calls.

        Args:
            reports: The reports of the programs.
            kernel_costs: Costs of kernels by name.
            calibration: Measured slowdowns of the chip; None for the published rates.
        """
        rates = None if calibration is None else calibration.rates(self.topology.chip)
        trials = []
        for recorded, report in reports.items():
            mesh, compilation = self.compilation(recorded)
            trials.append(
                AdviceTrials(
                    report, compilation, mesh, self.topology, lower_on, kernel_costs, rates
                )
            )
        with self.status("trying suggestions"):
            return try_script(trials, [max(recorded.calls, 1) for recorded in reports])

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
