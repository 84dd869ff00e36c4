"""Running a prepared program on the arguments of a call."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

from xlashard._jax import compiling, dispatch
from xlashard.array import Array
from xlashard.array.handles import is_handle
from xlashard.pjit.prepare import Prepared


def run_prepared(prepared: Prepared, values: Sequence[Any]) -> list[Any]:
    """Places the arguments that the program takes, and runs it.

    Args:
        prepared: The program.
        values: All arguments of the call, flat.

    Returns:
        The handles of the results.
    """
    return prepared.program([*prepared.consts, *compress(values, prepared.kept)])


def mark_donated(values: Sequence[Any], donated: Sequence[bool], name: str) -> None:
    """Leaves word on donated arrays of who took them, for errors about their use."""
    for value in compress(values, donated):
        if isinstance(value, Array):
            value._deleted_by = name


def fast_path(prepared: Prepared, out_tree: Any, handles: Sequence[Any]) -> Any:
    """What jaxlib's dispatcher needs to repeat the call, or None if it can't."""
    program = prepared.program
    if program.parts.body.has_effects or compiling.checks_results():
        return None
    if not all(map(is_handle, handles)):
        return None
    return dispatch.FastPath(
        xla_executable=program.executable,
        out_pytree_def=dispatch.output_tree(out_tree, handles),
        in_shardings=program.physical_in_twins,
        out_shardings=program.out_twins,
        out_avals=[h.aval for h in handles],
        out_committed=[h._committed for h in handles],
        kept_var_bitvec=prepared.bitvec,
        in_device_local_layouts=program.in_layouts,
        const_args=prepared.consts,
    )
