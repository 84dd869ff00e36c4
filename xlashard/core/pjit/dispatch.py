"""Run compiled programs for calls, make the dispatcher's entries, and explain forbidden NaNs."""

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from xlashard._jax.runtime import compiler, dispatch, run_checks
from xlashard._jax.runtime.transfer import HandleType
from xlashard._jax.trace import jaxprs
from xlashard.core.array import Array, device_put
from xlashard.core.array.array_class.deletion import DonationTracker
from xlashard.core.array.array_class.handles import KindOf, unwrapped, wrap_output
from xlashard.core.array.cross_process_check import process_copies
from xlashard.core.array.reshard.execute import with_device_order
from xlashard.core.pjit.arguments import (
    arguments_may_move,
    bare,
    bare_values,
    check_unshared,
)
from xlashard.core.pjit.lower import check_closed_alive
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.sharding import XLACompatibleSharding, from_jax
from xlashard.errors import NonFiniteError
from xlashard.support.lazily import dataclass, deferred

if TYPE_CHECKING:
    from xlashard._jax.trace import origins
    from xlashard.core.program.consistency.fingerprint import ValueNamer
else:
    origins = deferred("xlashard._jax.trace.origins")


@dataclass(frozen=True, eq=False)
class DonationInfo:
    """Arguments that a call donates.

    Attributes:
        donated: For each argument, True if its buffers may be reused.
        paths: The path of each argument.
        name: The function.
        tracker: Records the donated arrays, for errors about their use; None if none is donated.
        naming: Returns names of closed-over values.
    """

    donated: tuple[bool, ...]
    paths: tuple[str, ...]
    name: str
    tracker: DonationTracker | None
    naming: "ValueNamer | None" = None


@dataclass(frozen=True, eq=False)
class Results:
    """Tree and classes of the results that the caller gets.

    Attributes:
        tree: Their tree.
        kind_of: Returns the class of each array; None for `Array`.
    """

    tree: Any
    kind_of: KindOf | None = None

    def make_dispatch_tree(self) -> Any:
        """Return the tree by which jaxlib's dispatcher wraps the handles of a repeat call.

        None if it can't.
        """
        if self.kind_of is unwrapped:
            return self.tree
        return dispatch.output_tree(self.tree, self.kind_of)

    def wrap(self, handles: Sequence[Any]) -> Any:
        """Return the results over their handles; keys and tokens unchanged."""
        kind_of = self.kind_of
        if kind_of is unwrapped:
            return self.tree.unflatten(handles)
        return self.tree.unflatten(
            [wrap_output(kind_of, (h,)) if type(h) is HandleType else h for h in handles]
        )


def run_repeatably(
    compiled: CompiledProgram,
    values: Sequence[Any],
    results: Results,
    donation: DonationInfo,
    body: Any = None,
) -> tuple[Any, Any]:
    """Run a program for a call that missed the dispatcher's cache.

    Args:
        compiled: The compiled program.
        values: All arguments of the call, flat.
        results: Tree and classes of its results.
        donation: Paths of the arguments, and those that the call donates.
        body: The jaxpr of the arguments, to find the operation that made a forbidden NaN.

    Returns:
        The result, and the dispatcher's cache entry; None for a call that it can't repeat.
    """
    paths, name = donation.paths, donation.name
    kept_values = list(compress(values, compiled.kept))
    handles = bare_values(kept_values)
    typed = _typed(handles, compiled.in_avals[len(compiled.consts) :])
    repeatable = typed is handles and _is_repeatable(compiled, kept_values, handles)
    run_checks.check_may_run(name)
    check_closed_alive(compiled.consts, name, donation.naming)
    copies = partial(process_copies, handles, list(compress(paths, compiled.kept)))
    compiled.admit(donation.naming, copies)
    jax_shardings = compiled.in_jax_shardings[len(compiled.consts) :]
    try:
        with arguments_may_move(kept_values, compress(paths, compiled.kept), jax_shardings):
            out = _run(compiled, values, typed, paths, name)
    except NonFiniteError as error:
        raise explained_nan(error, name, body, values, paths) from None
    if donation.tracker is not None:
        _mark_donated(values, donation, donation.tracker)
    tree = None
    if repeatable and all([type(handle) is HandleType for handle in out]):
        tree = results.make_dispatch_tree()
    entry = None if tree is None else _fast_path(compiled, tree, out)
    return results.wrap(out), entry


def _run(
    compiled: CompiledProgram,
    values: Sequence[Any],
    kept_handles: Sequence[Any],
    paths: Sequence[str],
    name: str,
) -> list[Any]:
    """Place the arguments that a program takes, run it, and return the handles of its results.

    Args:
        compiled: The compiled program.
        values: All arguments of the call.
        kept_handles: The handles of those that the program takes.
        paths: The paths of all arguments.
        name: The function.
    """
    shardings = compiled.in_shardings[len(compiled.consts) :]
    handles = list(map(_resharded, kept_handles, shardings))
    placed = compiled.place([*bare_values(compiled.consts), *handles])
    argument_paths, donated = compiled.argument_paths(paths, name), compiled.plan.donated
    check_unshared(compiled.shared_pair(placed), argument_paths, donated, name)
    out: list[list[Any]] = []
    compiled.runner(out)(placed)
    results = compiled.results(out[0])
    if not compiled.written:
        return results
    first_written = len(results) - len(compiled.written)
    for ref, handle in zip(compiled.written, results[first_written:], strict=True):
        jaxprs.write(values[ref] if isinstance(ref, int) else ref, handle)
    return results[:first_written]


def _typed(handles: list[Any], avals: Sequence[Any]) -> list[Any]:
    """Return the same list, or a new one with 64-bit handles cast to the types of a program.

    Such handles come from a caller with `jax_enable_x64`.
    """
    pairs = list(zip(handles, avals, strict=True))
    if all([type(h) is not HandleType or h.dtype == aval.dtype for h, aval in pairs]):
        return handles
    return [jnp.asarray(h, aval.dtype) if type(h) is HandleType else h for h, aval in pairs]


def _resharded(handle: Any, sharding: XLACompatibleSharding) -> Any:
    """Return a handle as a program takes it, if JAX can't place it: unreduced, or of peers too.

    A replicated one lists its devices in the program's order: nothing moves.
    """
    is_concrete = type(handle) is HandleType
    if is_concrete and handle.committed and handle.is_fully_replicated:
        handle = with_device_order(handle, sharding.devices)
    if not sharding.is_unreduced and (not is_concrete or handle.is_fully_addressable):
        return handle
    if is_concrete and sharding.is_equivalent_to(handle.sharding, handle.ndim):
        return handle
    return bare(device_put(handle, sharding))


def _mark_donated(values: Sequence[Any], donation: DonationInfo, tracker: DonationTracker) -> None:
    """Record the donated arrays that the program deleted, for errors about their use."""
    donated = list(compress(values, donation.donated))
    paths = compress(donation.paths, donation.donated)
    for value, handle, path in zip(donated, bare_values(donated), paths, strict=True):
        if not isinstance(handle, jax.Array) or not handle.is_deleted():
            continue
        cause = tracker.record(path, handle)
        if isinstance(value, Array):
            value._deleted_by = cause


def _is_repeatable(
    compiled: CompiledProgram, values: Sequence[Any], handles: Sequence[Any]
) -> bool:
    """Return True if jaxlib's dispatcher can place the arguments of a call like this one.

    It changes no layouts, and moves only uncommitted arguments and those on a single device.

    Args:
        compiled: The compiled program.
        values: The arguments that it takes.
        handles: Their handles.
    """
    first = len(compiled.consts)
    layouts, jax_shardings = compiled.in_layouts[first:], compiled.in_jax_shardings[first:]
    for value, handle, layout, jax_sharding in zip(
        values, handles, layouts, jax_shardings, strict=True
    ):
        if layout is None and compiler.custom_layout(handle) is not None:
            return False
        is_concrete = type(handle) is HandleType
        if is_concrete and type(value) is HandleType and handle is not value:
            return False  # a replicated copy of a callback's result
        if not is_concrete or not handle.committed:
            if from_jax(jax_sharding).is_unreduced:
                return False
            continue
        current = handle.sharding
        if current == jax_sharding or current.num_devices == jax_sharding.num_devices == 1:
            continue
        if not current.is_equivalent_to(jax_sharding, handle.ndim):
            return False
    return True


def _fast_path(compiled: CompiledProgram, wrapping: Any, handles: Sequence[Any]) -> Any:
    """Return the dispatcher's cache entry, or None for a program that it can't run."""
    if compiled.stateful or compiled.body.has_effects or run_checks.checks_runs():
        return None
    return dispatch.FastPath(
        xla_executable=compiled.executable,
        out_pytree_def=wrapping,
        in_shardings=compiled.physical_in_shardings,
        out_shardings=compiled.out_jax_shardings,
        out_avals=[h.aval for h in handles],
        out_committed=[h._committed for h in handles],
        kept_var_bitvec=[True] * len(compiled.consts) + list(compiled.kept),
        in_device_local_layouts=compiled.in_layouts,
        const_args=compiled.consts,
    )


def explained_nan(
    error: NonFiniteError, name: str, body: Any, values: Sequence[Any], paths: Sequence[str]
) -> NonFiniteError:
    """Return the error with the function's name, and with the operation if it can be found.

    Args:
        error: The error of the run.
        name: The function.
        body: The jaxpr of its arguments; None if it was not kept.
        values: Its arguments, which are not donated.
        paths: Their paths.
    """
    kind = error.kind
    flag, origin = run_checks.debug_flag(kind), _nan_origin(body, values, paths)
    return NonFiniteError(
        f"{error.result} of {name} holds {kind}, which {flag} forbids: {origin}; "
        f"`with jax.{flag.removeprefix('jax_')}(False):` lets it pass",
        result=error.result,
        kind=kind,
    )


def _nan_origin(body: Any, values: Sequence[Any], paths: Sequence[str]) -> str:
    """Describe the origin of the value."""
    forbidden = run_checks.NonFinite()
    args = [bare(value) for value in values]
    for arg, path in zip(args, paths, strict=True):
        kind = forbidden.find_kind(arg)
        if kind is not None:
            return f"{path} holds {kind} already"
    arrays = [arg for arg in args if isinstance(arg, jax.Array)]
    is_local = all(array.is_fully_addressable for array in arrays)
    if body is None or body.effects or not is_local:
        return (
            "call the function inside `with jax.disable_jit():` to stop at the operation that "
            "makes it"
        )
    try:
        with run_checks.skip_result_checks():
            origin = origins.find_nan_origin(body, args, lambda x: forbidden.find_kind(bare(x)))
    except Exception as error:  # an error of this second run; the first one counts
        return (
            f"the operation that makes it is unknown, since operations run one by one fail: {error}"
        )
    if origin is None:
        return (
            "its operations make no such value when run one by one, so that it comes from XLA's "
            "fusion of them, or from a constant"
        )
    source = f" at {origin.source}" if origin.source else ""
    rounds = "".join(f", in round {count} of a {loop}" for loop, count in origin.rounds)
    return f"`{origin.primitive}` makes {origin.kind}{source}{rounds}"
