"""Planner of `pjit` under `AUTO`: searches for a layout, proves it, and keeps it.

A layout is planned by one of the processes of a mesh, which sends it to the others. If JAX has a
compilation cache, the layout is kept there for later processes.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.runtime import coordination
from xlashard._jax.runtime.global_state import BoundedCache, cleared_with_jax
from xlashard._jax.runtime.shardings import is_compile_only
from xlashard._jax.trace.tracing import equations
from xlashard._version import __version__
from xlashard.analysis.programs.from_pjit import read_call
from xlashard.auto.auto_program import AutoProgram, topology_of
from xlashard.auto.auto_shard import PROOF_SECONDS, solve
from xlashard.auto.problem import ConstraintSite, ProgramLayout, check_layout, insert_constraints
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.cache_miss import CacheMiss
from xlashard.core.pjit.compile import PROGRAMS
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.shardings.automatic import ChosenLayout
from xlashard.core.pjit.trace import Call
from xlashard.core.processes import processes_of, store
from xlashard.core.program.consistency import CONSISTENCY
from xlashard.core.program.environment import flags_here, versions
from xlashard.core.program.lowered import LoweredProgram
from xlashard.core.program.saved_format import entries_to_json, spec_from_json
from xlashard.core.program.uneven_shardings import warn
from xlashard.core.sharding import Mesh
from xlashard.errors import DamagedCacheWarning, ProcessesError
from xlashard.support.documents import decode, parse_json, read_text, write_whole
from xlashard.support.formatting import error_line

_FOLDER = "xlashard_layouts"


def plan_call(function: Function, call: Call, mesh: Mesh) -> ChosenLayout:
    """Return a layout for the shardings of a call that are None.

    Args:
        function: The function.
        call: A traced call of it.
        mesh: Mesh with automatic axes.

    Raises:
        CompileError: If the compiler refuses every layout.
        ProcessesError: If the process that plans failed, or sent no layout.
    """
    options = replace(function.options, share_binary=False)
    candidates = _Candidates(function.fun, options, function.static)
    program = AutoProgram(read_call(candidates, call), mesh, topology_of(mesh))
    layout = _LayoutStore(program).layout()
    jaxpr = insert_constraints(call.traced.jaxpr, mesh, layout.constraints)
    return ChosenLayout(layout.in_specs, layout.out_specs, jaxpr)


def plan_program(program: AutoProgram) -> ProgramLayout:
    """Return the fastest layout of a program, or, if none fits, that with the least memory.

    Args:
        program: The program.

    Raises:
        CompileError: If the compiler refuses every layout.
    """
    # The nominal chip of other devices is too rough for more proofs than the least.
    seconds = 0.0 if program.topology is None else PROOF_SECONDS
    return solve(program, program.problem(), seconds=seconds).proven[0].layout


_LAYOUTS = cleared_with_jax(BoundedCache())
"""Layouts by the digests of their programs."""


class _Candidates(Function):
    """Function whose programs are candidates, which no record and no report mentions."""

    def report_stages(self, *args: Any, **kwargs: Any) -> None:
        """Report nothing."""

    def lower(self, call: Call, request: LoweringRequest) -> LoweredProgram:
        """Return the module of a call."""
        return PROGRAMS.entry(call.traced.jaxpr, request).lower(call.traced.jaxpr, CacheMiss())


class _LayoutStore:
    """Layout of a program in other processes and in files.

    Args:
        program: The program.
    """

    def __init__(self, program: AutoProgram) -> None:
        self._program = program

    def layout(self) -> ProgramLayout:
        """Return the layout, planned here, by a peer, or before."""
        digest = self._digest()
        return _LAYOUTS.get_or_make(digest, lambda: self._shared_layout(digest))

    def _shared_layout(self, digest: str) -> ProgramLayout:
        devices = tuple(self._program.mesh.devices.flat)
        group, me = processes_of(devices), coordination.process_index()
        if len(group) < 2 or is_compile_only(devices[0]) or coordination.client() is None:
            return self._stored_layout(digest)
        return self._planned(digest) if me == group[0] else self._received(digest, group[0])

    def _digest(self) -> str:
        """Return a digest of the program and of what its layout depends on."""
        program, mesh = self._program.program, self._program.mesh
        values = (*program.arguments, *program.results)
        facts = [
            modules.digest(program.lower().module),
            # Constraints count equations, of which some leave nothing in the module.
            [eqn.primitive.name for eqn in equations(program.jaxpr)],
            list(mesh.shape.items()),
            [value.path for value in values],
            self._program.donated,
            [str(value.requested) for value in values],
            [(d.device_kind, getattr(d, "coords", None)) for d in mesh.devices.flat],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _stored_layout(self, digest: str) -> ProgramLayout:
        """Return the layout from its file; plan it and write the file if it doesn't exist."""
        folder = _cache_folder()
        if folder is None:
            return plan_program(self._program)
        used = versions(self._program.mesh.devices.flat[0].platform)
        facts = [digest, __version__, used, flags_here()]
        file = folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.json"
        try:
            return self._read_file(file)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            warn(
                f"{file} is no layout of {self._program.program.name} ({error_line(error)}): the "
                "layout is planned again, and the file is replaced",
                DamagedCacheWarning,
            )
        layout = plan_program(self._program)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, _text(layout))
        return layout

    def _read_file(self, file: Path) -> ProgramLayout:
        layout = _read(read_text(file))
        check_layout(self._program.jaxpr, self._program.mesh, layout)
        return layout

    def _planned(self, digest: str) -> ProgramLayout:
        """Return the layout, after it has been sent to the peers, or the error in its place."""
        key = f"layouts/{digest}"
        try:
            layout = self._stored_layout(digest)
        except Exception as error:
            store.write(key, json.dumps({"error": str(error)}).encode(), overwrite=True)
            raise
        store.write(key, _text(layout).encode(), overwrite=True)
        return layout

    def _received(self, digest: str, planner: int) -> ProgramLayout:
        """Return the layout that a peer planned.

        Raises:
            ProcessesError: If the peer failed, or sent no layout.
        """
        name, seconds = self._program.program.name, CONSISTENCY.policy.timeout
        text = store.read(f"layouts/{digest}", seconds)
        if text is None:
            raise ProcessesError(  # no-catalogue: needs several processes
                f"AUTO of {name} waited {seconds:g} s for the layout of process {planner}: call "
                f"{name} in all processes, with equal arguments",
                processes=(planner,),
            )
        reason = json.loads(text).get("error")
        if reason is not None:
            raise ProcessesError(  # no-catalogue: needs several processes
                f"process {planner} found no layout for {name}: {reason}", processes=(planner,)
            )
        return _read(text.decode())


def _cache_folder() -> Path | None:
    """Return the folder of layouts in JAX's compilation cache; None without one on this machine."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache or "://" in folder:
        return None
    return Path(folder) / _FOLDER


def _text(layout: ProgramLayout) -> str:
    record = asdict(replace(layout, transfers=()))
    record["in_specs"] = list(map(entries_to_json, layout.in_specs))
    record["out_specs"] = list(map(entries_to_json, layout.out_specs))
    record["constraints"] = [
        [site.path, site.kind, site.index, entries_to_json(spec)]
        for site, spec in layout.constraints
    ]
    return json.dumps(record)


def _read(text: str) -> ProgramLayout:
    """Return the layout of a text.

    Raises:
        ValueError: The text is not one of `_text`, as are KeyError and TypeError.
    """
    record = parse_json(text)
    constraints = tuple(
        (decode(ConstraintSite, dict(path=path, kind=kind, index=index)), spec_from_json(entries))
        for path, kind, index, entries in record["constraints"]
    )
    specs = {side: tuple(map(spec_from_json, record[side])) for side in ("in_specs", "out_specs")}
    numbers = {name: decode(float, record[name], name) for name in ("seconds", "memory_bytes")}
    return ProgramLayout(str(record["name"]), **specs, constraints=constraints, **numbers)
