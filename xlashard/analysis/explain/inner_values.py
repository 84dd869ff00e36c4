"""Describe values inside of a program with the shardings that the partitioner chose."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from xlashard._jax.runtime.shardings import tile_texts
from xlashard._jax.trace.origins import CheckpointName, find_checkpoint_names, source_line
from xlashard.analysis.explain.descriptions import spec_text
from xlashard.analysis.explain.model import InnerValueReport, Pass
from xlashard.analysis.explain.unmet_requests import equation_line
from xlashard.analysis.programs.program import Compilation, WatchedValues
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.analysis.report.texts import line_text, short_name
from xlashard.core.sharding.gspmd import as_tiles, from_hlo
from xlashard.errors import GeometryError, ShardingError
from xlashard.hlo.collectives import is_rematerialized
from xlashard.hlo.module import Instruction
from xlashard.hlo.shapes import Shape, dtype_name

UNKNOWN = "unknown"
IN_SHARD_MAP = "in shard_map"
_EMPTY_ROW = InnerValueReport(
    name="",
    op_name="",
    shape=(),
    dtype="",
    spec="",
    device_bytes=0,
    copies=0,
    in_pass="forward",
    source=None,
)


def describe_inner_values(program: Compilation) -> tuple[InnerValueReport, ...]:
    """Describe the values inside that match the pattern of a report, most bytes first.

    A pattern that matches none has a row with the closest names.
    """
    if program.watched is None:
        return ()
    rows = _ValueFinder(program, program.watched).find()
    return tuple(sorted(rows, key=lambda row: -row.device_bytes * row.count))


@dataclass(frozen=True, eq=False)
class _ValueFinder:
    """Finds the values of a program that match a pattern.

    Attributes:
        program: The program.
        watched: The pattern, and the module with its values.
    """

    program: Compilation
    watched: WatchedValues

    def find(self) -> list[InnerValueReport]:
        """Return a row for each kind of value that matches."""
        counts: dict[InnerValueReport, int] = {}
        known: set[int] = set()
        for instruction, op_name, times in self._list_values():
            named = self._find_names(instruction, op_name)
            known |= set(map(id, named))
            source = self.program.sources.line(instruction.frames)
            names = [each.name for each in named]
            if self._matches(names, op_name, source):
                name = ", ".join(dict.fromkeys(names)) or short_name(op_name)
                for row in self._describe(instruction):
                    row = replace(
                        row,
                        name=name,
                        op_name=op_name,
                        in_pass=_find_pass(op_name),
                        source=source,
                        times=times,
                    )
                    counts[row] = counts.get(row, 0) + 1
        rows = [replace(row, count=count) for row, count in counts.items()]
        lost = [each for each in self._checkpoint_names if id(each) not in known]
        rows += [self._describe_lost(e) for e in lost if self._matches([e.name], "", None)]
        return list(dict.fromkeys(rows)) or [self._describe_closest()]

    @cached_property
    def _checkpoint_names(self) -> list[CheckpointName]:
        jaxpr = self.program.jaxpr
        return [] if jaxpr is None else find_checkpoint_names(jaxpr)

    def _list_values(self) -> Iterator[tuple[Instruction, str, int]]:
        """Yield the instructions that compute values, with their names and number of runs."""
        module = self.watched.module
        prefixes = {module.entry: ""}
        for name, site in module.call_sites.items():
            if name not in prefixes:
                continue  # The sum of a reduction is no value.
            for instruction in module.computations[name].instructions.values():
                op_name = instruction.op_name
                if op_name and not op_name.startswith("jit("):
                    op_name = prefixes[name] + op_name
                if instruction.opcode in _RUNNING:
                    # Names in a function that XLA has not put into its caller begin there.
                    prefixes |= dict.fromkeys(instruction.calls, f"{op_name}/")
                if _is_value(instruction.opcode, op_name):
                    yield instruction, op_name, site.times

    def _find_names(self, instruction: Instruction, op_name: str) -> list[CheckpointName]:
        """Return the names that `checkpoint_name` gives to the value of an instruction."""
        # XLA joins the names of equal operations.
        op_names = op_name.split(";")
        frames = instruction.frames[:1]
        dims = [array.dims for array in instruction.shape.arrays]
        return [
            named
            for named in self._checkpoint_names
            if named.op_name
            and any(name.endswith(f"/{named.op_name}") for name in op_names)
            and tuple(named.eqn.outvars[0].aval.shape) in dims
            and (not frames or source_line(named.maker) in [(f.file, f.line) for f in frames])
        ]

    def _matches(self, names: Iterable[str], op_name: str, source: SourceLine | None) -> bool:
        # The function itself is in the name of each operation.
        inside = op_name.partition("/")[2] if op_name.startswith("jit(") else op_name
        texts = [*names, inside, short_name(op_name)]
        if source is not None:
            texts += [source.function, line_text(source)]
        return any(map(self.watched.pattern.search, texts))

    def _describe(self, instruction: Instruction) -> Iterator[InnerValueReport]:
        """Yield a row for each array of an instruction, without what they have in common."""
        arrays, text = instruction.shape.arrays, instruction.attributes.sharding
        # The partitioner replicates values without a sharding.
        tiles = tile_texts(text) if text else ["{replicated}"] * len(arrays)
        for array, tile in zip(arrays, tiles, strict=False):
            spec, nbytes, copies = self._place(array, tile)
            yield replace(
                _EMPTY_ROW,
                shape=array.dims,
                dtype=dtype_name(array.dtype),
                spec=spec,
                device_bytes=nbytes,
                copies=copies,
                reason="" if spec != UNKNOWN else "the compiler leaves no module with shardings",
            )

    def _place(self, array: Shape, tile: str) -> tuple[str, int, int]:
        """Return the sharding of an array, its bytes on a device, and its copies."""
        if not self.watched.is_propagated:
            return UNKNOWN, 0, 0
        if tile.startswith("{manual"):
            return IN_SHARD_MAP, array.nbytes, 0
        try:
            sharding = from_hlo(tile, self.program.devices, self.program.mesh)
            tiling = as_tiles(sharding, array.dims).rank_tiling(len(array.dims))
            shard = replace(array, dims=tuple(tiling.shard_shape(array.dims, uneven=True)))
        except (GeometryError, ShardingError):
            return tile, 0, 0
        return spec_text(sharding), shard.nbytes, tiling.num_replicas

    def _describe_lost(self, named: CheckpointName) -> InnerValueReport:
        """Return the row of a name whose value the module does not show."""
        aval = named.eqn.outvars[0].aval
        reason = "an argument, or a result of a loop or branch"
        if named.op_name:
            reason = f"XLA's module has no single operation for {named.op_name}"
        return replace(
            _EMPTY_ROW,
            name=named.name,
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            spec=UNKNOWN,
            in_pass=_find_pass(str(named.eqn.source_info.name_stack)),
            source=equation_line(named.eqn, self.program),
            reason=reason,
        )

    def _describe_closest(self) -> InnerValueReport:
        """Return the row of a pattern that matches nothing, with the closest names."""
        pattern = self.watched.pattern.pattern
        names = dict.fromkeys(each.name for each in self._checkpoint_names)
        for instruction, op_name, _ in self._list_values():
            source = self.program.sources.line(instruction.frames)
            function = "" if source is None else source.function.rpartition(".")[2]
            names |= dict.fromkeys((*short_name(op_name).split("/"), function))
        known = [name for name in names if name]
        words = re.findall(r"\w+", pattern)
        close = [n for word in words for n in difflib.get_close_matches(word, known, cutoff=0.5)]
        listed = ", ".join(dict.fromkeys(close)) or ", ".join(known[:8])
        reason = f"no value has such a name; the closest are {listed}" if listed else "no values"
        return replace(_EMPTY_ROW, name=pattern, count=0, reason=reason)


_RUNNING = ("call", "conditional", "while")
"""Opcodes of instructions that run the operations of other computations as they are."""
_NO_VALUES = (*_RUNNING, "constant", "get-tuple-element", "opt-barrier", "parameter", "tuple")
"""Opcodes of arguments, and of instructions that pass on the values of others."""


def _is_value(opcode: str, op_name: str) -> bool:
    # A constant that an operation needs as a whole array has the operation's name.
    is_filler = opcode == "broadcast" and not op_name.endswith("/broadcast_in_dim")
    return "/" in op_name and opcode not in _NO_VALUES and not is_filler


def _find_pass(op_name: str) -> Pass:
    if is_rematerialized(op_name):
        return "rematerialized"
    return "backward" if "transpose(" in op_name else "forward"
