"""Running a prepared program on the arguments of a call, and how that is repeated."""

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from xlashard._jax.runtime import compiler, dispatch, execute
from xlashard._jax.trace import jaxprs
from xlashard.array import Array, device_put, wrap_kinds, wrap_tree
from xlashard.array.core.donation import DonationTracker
from xlashard.array.core.handles import KindOf, is_handle, unwrapped, wrap_result
from xlashard.array.placement.transfer_guard import active_guards
from xlashard.errors import NonFiniteError
from xlashard.lazily import dataclass, deferred
from xlashard.pjit.arguments import bare
from xlashard.pjit.compile import CompiledProgram
from xlashard.pjit.shared_buffers import check_unshared
from xlashard.pjit.transfers import arguments_may_move
from xlashard.sharding import XLACompatibleSharding, from_jax

if TYPE_CHECKING:
    from xlashard.pjit import nan_debug
    from xlashard.program.consistency import Naming
else:
    nan_debug = deferred("xlashard.pjit.nan_debug")


@dataclass(frozen=True, eq=False)
class DonationInfo:
    """What a call gives away.

    Attributes:
        donated: For each argument whether its buffers may be reused.
        paths: Each argument as a person would write it.
        taker: Who takes the buffers.
        naming: Names the values that the function closes over.
    """

    donated: tuple[bool, ...]
    paths: tuple[str, ...]
    taker: DonationTracker
    naming: "Naming | None" = None


@dataclass(frozen=True, eq=False)
class Results:
    """How the results of a program reach the caller.

    Attributes:
        tree: Their tree.
        kind_of: Which class of arrays each is; None for `Array`.
    """

    tree: Any
    kind_of: KindOf | None = None

    def kinds(self, handles: Sequence[Any]) -> tuple[type[Array], ...] | None:
        """The class of each; None where all are Arrays. It says nothing of keys and tokens."""
        if self.kind_of is None:
            return None
        return tuple(self.kind_of(h) if is_handle(h) else Array for h in handles)

    def dispatched(self, handles: Sequence[Any], kinds: tuple[type[Array], ...] | None) -> Any:
        """Return the tree by which jaxlib's dispatcher wraps the handles of a repeat call."""
        if self.kind_of is unwrapped:
            return self.tree
        return dispatch.output_tree(self.tree, handles, kinds)

    def wrapped(self, handles: Sequence[Any], kinds: tuple[type[Array], ...] | None) -> Any:
        """The results over their handles; keys and tokens stay what they are."""
        if all(map(is_handle, handles)):
            if kinds is None:
                return wrap_tree(self.tree, handles)
            if self.kind_of is unwrapped:
                return self.tree.unflatten(handles)
            return wrap_kinds((self.tree, kinds), handles)
        each = kinds or (Array,) * len(handles)
        return self.tree.unflatten(list(map(wrap_result, handles, each)))


def run_repeatably(
    compiled: CompiledProgram,
    values: Sequence[Any],
    results: Results,
    given: DonationInfo | None,
    body: Any = None,
) -> tuple[Any, Any]:
    """Runs a program for a call that the dispatcher has not seen.

    Args:
        compiled: The program.
        values: All arguments of the call, flat.
        results: How its results reach the caller.
        given: What the call gives away; None for nothing.
        body: The jaxpr of the arguments, to look for what made a result that is forbidden.

    Returns:
        The result, and how the dispatcher may repeat the call: None if it can't.
    """
    repeatable = _are_laid_out(compiled, values) and _are_in_place(compiled, values)
    paths = ("an argument",) * len(values) if given is None else given.paths
    label = compiled.program.name.removeprefix("pjit_")
    name = label if given is None else given.taker.name
    compiled.program.admit(None if given is None else given.naming)
    try:
        handles = _run_guarded(compiled, values, paths, name)
    except NonFiniteError as error:
        raise nan_debug.explained(error, name, nan_debug.Run(body, tuple(values), paths)) from None
    if given is not None:
        _mark_donated(values, given)
    kinds = results.kinds(handles)
    path = None
    if repeatable and all(map(is_handle, handles)):
        path = _fast_path(compiled, results.dispatched(handles, kinds), handles)
    return results.wrapped(handles, kinds), path


def _run_guarded(
    compiled: CompiledProgram, values: Sequence[Any], paths: Sequence[str], name: str
) -> list[Any]:
    """Runs, if the transfer guards let the arguments go where the program takes them."""
    guards = active_guards()
    if guards is None:
        return _run(compiled, values, paths, name)
    kept = list(compress(values, compiled.kept)), list(compress(paths, compiled.kept))
    twins = compiled.program.in_twins[len(compiled.consts) :]
    with arguments_may_move(guards, *kept, twins):
        return _run(compiled, values, paths, name)


def _run(
    compiled: CompiledProgram, values: Sequence[Any], paths: Sequence[str], name: str
) -> list[Any]:
    """Places the arguments that the program takes, and runs it: the handles of the results."""
    program, first = compiled.program, len(compiled.consts)
    parts = program.parts
    taken = map(
        _placed, compress(values, compiled.kept), parts.in_avals[first:], parts.in_shardings[first:]
    )
    placed = program.place([*map(bare, compiled.consts), *taken])
    check_unshared(program, placed, compiled.argument_paths(paths, name), name)
    out: list[list[Any]] = []
    program.runner(out)(placed)
    handles = program.results(out[0])
    if not compiled.written:
        return handles
    results = len(handles) - len(compiled.written)
    for ref, handle in zip(compiled.written, handles[results:], strict=True):
        jaxprs.write(values[ref] if isinstance(ref, int) else ref, handle)
    return handles[:results]


def _placed(value: Any, aval: Any, sharding: XLACompatibleSharding) -> Any:
    """The handle of an argument; of one that the program takes unreduced, its partial results."""
    handle = _typed(value, aval)
    if not sharding.is_unreduced:
        return handle
    if is_handle(handle) and sharding.is_equivalent_to(handle.sharding, handle.ndim):
        return handle
    return bare(device_put(value, sharding))


def _typed(value: Any, aval: Any) -> Any:
    """The handle of an argument; of 64 bits and met without `jax_enable_x64`, as one of 32 bits."""
    handle = bare(value)
    if is_handle(handle) and handle.dtype != aval.dtype:
        return jnp.asarray(handle, aval.dtype)
    return handle


def _mark_donated(values: Sequence[Any], given: DonationInfo) -> None:
    """Leaves word of who took which donated arrays, for errors about their use.

    Those that the program had no use for are whole, and are not marked.
    """
    taken = (compress(side, given.donated) for side in (values, given.paths))
    for value, path in zip(*taken, strict=True):
        handle = bare(value)
        if not isinstance(handle, jax.Array) or not handle.is_deleted():
            continue
        taker = given.taker.note(path, handle)
        if isinstance(value, Array):
            value._deleted_by = taker


def _are_laid_out(compiled: CompiledProgram, values: Sequence[Any]) -> bool:
    """Whether all arguments of a call lie in memory as the program wants them.

    Others are made so, which jaxlib's dispatcher wouldn't do.
    """
    first = len(compiled.consts)
    layouts, avals = compiled.program.in_layouts[first:], compiled.program.parts.in_avals[first:]
    return all(
        (layout is not None or compiler.custom_layout(bare(value)) is None)
        and _typed(value, aval) is bare(value)
        for value, layout, aval in zip(compress(values, compiled.kept), layouts, avals, strict=True)
    )


def _are_in_place(compiled: CompiledProgram, values: Sequence[Any]) -> bool:
    """Whether no argument that is bound to other places than the program's lies on many devices.

    Such ones are moved, which jaxlib's dispatcher does of those on a single device alone.
    """
    twins = compiled.program.in_twins[len(compiled.consts) :]
    for value, twin in zip(compress(values, compiled.kept), twins, strict=True):
        handle = bare(value)
        if is_handle(value) and handle is not value:
            return False  # a replicated copy of a callback's result
        if not is_handle(handle) or not handle.committed:
            if from_jax(twin).is_unreduced:
                return False
            continue
        there = handle.sharding
        if there.num_devices == twin.num_devices == 1 or there == twin:
            continue
        if not there.is_equivalent_to(twin, handle.ndim):
            return False
    return True


def _fast_path(compiled: CompiledProgram, wrapping: Any, handles: Sequence[Any]) -> Any:
    """What jaxlib's dispatcher needs to repeat a call, or None if it can't."""
    program = compiled.program
    if compiled.stateful or program.parts.body.has_effects or execute.checks_results():
        return None
    return dispatch.FastPath(
        xla_executable=program.executable,
        out_pytree_def=wrapping,
        in_shardings=program.physical_in_twins,
        out_shardings=program.out_twins,
        out_avals=[h.aval for h in handles],
        out_committed=[h._committed for h in handles],
        kept_var_bitvec=compiled.bitvec,
        in_device_local_layouts=program.in_layouts,
        const_args=compiled.consts,
    )
