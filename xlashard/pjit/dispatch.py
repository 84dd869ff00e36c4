"""Run compiled programs for calls, and make the callable and entries of jaxlib's dispatcher."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from xlashard._jax.runtime import compiler, dispatch, execute
from xlashard._jax.runtime.tracebacks import shorten
from xlashard._jax.runtime.transfer import HandleType
from xlashard._jax.trace import jaxprs
from xlashard._jax.trace.tracing import FunctionTracer
from xlashard.array import Array, device_put, wrap_kinds, wrap_tree
from xlashard.array.core import base as array_base
from xlashard.array.core.base import DonationTracker
from xlashard.array.core.handles import KindOf, unwrapped, wrap_result
from xlashard.errors import NonFiniteError
from xlashard.lazily import dataclass, deferred
from xlashard.pjit.arguments import (
    arguments_may_move,
    bare,
    bare_values,
    check_unshared,
    may_share,
)
from xlashard.pjit.compile import CompiledProgram
from xlashard.pjit.signature import Parameters
from xlashard.sharding import XLACompatibleSharding, from_jax

if TYPE_CHECKING:
    from xlashard.pjit import nan_debug
    from xlashard.program.consistency.fingerprint import ValueNamer
else:
    nan_debug = deferred("xlashard.pjit.nan_debug")


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

    def kinds(self, handles: Sequence[Any]) -> tuple[type[Array], ...] | None:
        """Return the class of each result; None if all are Arrays. Keys and tokens have none."""
        if self.kind_of is None:
            return None
        return tuple([self.kind_of(h) if type(h) is HandleType else Array for h in handles])

    def dispatched(self, handles: Sequence[Any], kinds: tuple[type[Array], ...] | None) -> Any:
        """Return the tree by which jaxlib's dispatcher wraps the handles of a repeat call."""
        if self.kind_of is unwrapped:
            return self.tree
        return dispatch.output_tree(self.tree, handles, kinds)

    def wrapped(self, handles: Sequence[Any], kinds: tuple[type[Array], ...] | None) -> Any:
        """Return the results over their handles; keys and tokens unchanged."""
        if self.kind_of is not unwrapped and all([type(h) is HandleType for h in handles]):
            if kinds is None:
                return wrap_tree(self.tree, handles)
            return wrap_kinds((self.tree, kinds), handles)
        each = kinds or (Array,) * len(handles)
        return self.tree.unflatten(list(map(wrap_result, handles, each)))


def run_repeatably(
    compiled: CompiledProgram,
    values: Sequence[Any],
    results: Results,
    donation: DonationInfo | None,
    body: Any = None,
) -> tuple[Any, Any]:
    """Run a program for a call that missed the dispatcher's cache.

    Args:
        compiled: The program.
        values: All arguments of the call, flat.
        results: Tree and classes of its results.
        donation: Arguments that the call donates; None if none.
        body: The jaxpr of the arguments, to find the operation that made a forbidden NaN.

    Returns:
        The result, and the dispatcher's cache entry; None for a call that it can't repeat.
    """
    program = compiled.program
    paths = ("an argument",) * len(values) if donation is None else donation.paths
    name = program.name if donation is None else donation.name
    taken = list(compress(values, compiled.kept))
    handles = bare_values(taken)
    typed = _typed(handles, program.parts.in_avals[len(compiled.consts) :])
    repeatable = typed is handles and _is_repeatable(compiled, taken, handles)
    program.admit(None if donation is None else donation.naming)
    jax_shardings = program.in_jax_shardings[len(compiled.consts) :]
    try:
        with arguments_may_move(taken, compress(paths, compiled.kept), jax_shardings):
            out = _run(compiled, values, typed, paths, name)
    except NonFiniteError as error:
        raise nan_debug.explained(error, name, body, values, paths) from None
    if donation is not None and donation.tracker is not None:
        _mark_donated(values, donation, donation.tracker)
    kinds = results.kinds(out)
    entry = None
    if repeatable and all([type(handle) is HandleType for handle in out]):
        entry = _fast_path(compiled, results.dispatched(out, kinds), out)
    return results.wrapped(out, kinds), entry


def _run(
    compiled: CompiledProgram,
    values: Sequence[Any],
    taken: Sequence[Any],
    paths: Sequence[str],
    name: str,
) -> list[Any]:
    """Place the arguments that a program takes, run it, and return the handles of its results.

    Args:
        compiled: The program.
        values: All arguments of the call.
        taken: The handles of those that the program takes.
        paths: The paths of all arguments.
        name: The function.
    """
    program, first = compiled.program, len(compiled.consts)
    shardings = program.parts.in_shardings[first:]
    handles = list(map(_resharded, taken, shardings))
    placed = program.place([*bare_values(compiled.consts), *handles])
    argument_paths, donated = compiled.argument_paths(paths, name), program.parts.plan.donated
    check_unshared(program.shared_pair(placed), argument_paths, donated, name)
    out: list[list[Any]] = []
    program.runner(out)(placed)
    results = program.results(out[0])
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
    """Return a handle as a program takes it, if JAX can't place it: unreduced, or of peers too."""
    is_concrete = type(handle) is HandleType
    if not sharding.is_unreduced and (not is_concrete or handle.is_fully_addressable):
        return handle
    if is_concrete and sharding.is_equivalent_to(handle.sharding, handle.ndim):
        return handle
    return bare(device_put(handle, sharding))


def _mark_donated(values: Sequence[Any], donation: DonationInfo, tracker: DonationTracker) -> None:
    """Record the donated arrays that the program deleted, for errors about their use."""
    for value, path, donated in zip(values, donation.paths, donation.donated, strict=True):
        handle = bare(value) if donated else None
        if not isinstance(handle, jax.Array) or not handle.is_deleted():
            continue
        cause = tracker.note(path, handle)
        if isinstance(value, Array):
            value._deleted_by = cause


def _is_repeatable(
    compiled: CompiledProgram, values: Sequence[Any], handles: Sequence[Any]
) -> bool:
    """Return True if jaxlib's dispatcher can place the arguments of a call like this one.

    It changes no layouts, and moves only uncommitted arguments and those on a single device.

    Args:
        compiled: The program.
        values: The arguments that it takes.
        handles: Their handles.
    """
    program, first = compiled.program, len(compiled.consts)
    layouts, jax_shardings = program.in_layouts[first:], program.in_jax_shardings[first:]
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
    program = compiled.program
    if compiled.stateful or program.parts.body.has_effects or execute.checks_results():
        return None
    return dispatch.FastPath(
        xla_executable=program.executable,
        out_pytree_def=wrapping,
        in_shardings=program.physical_in_shardings,
        out_shardings=program.out_jax_shardings,
        out_avals=[h.aval for h in handles],
        out_committed=[h._committed for h in handles],
        kept_var_bitvec=[True] * len(compiled.consts) + list(compiled.kept),
        in_device_local_layouts=program.in_layouts,
        const_args=compiled.consts,
    )


class DispatchTarget(Protocol):
    """Implementation behind the callable.

    Attributes:
        fun: The Python function.
        parameters: Its parameters.
        tracer: Traces it.
    """

    fun: Callable[..., Any]
    parameters: Parameters
    tracer: FunctionTracer

    @property
    def name(self) -> str:
        """Return the function's name."""
        ...

    def cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Run a call that missed the dispatcher's cache, and return its entry for that cache."""
        ...

    @property
    def is_spread(self) -> bool:
        """Return True once a program of the function runs on several devices."""
        ...

    def donated_leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the leaves of donated arguments, and all other arrays that a call passes."""
        ...

    def clear_cache(self) -> None:
        """Drop everything that was traced and compiled."""
        ...


def dispatched[F: DispatchTarget](
    function: F, methods: Mapping[str, Any], remake: Callable[[F], Any]
) -> Any:
    """Return the C++ callable over a function; its methods are attributes of the instance.

    A deep copy of it is the callable itself, as of a Python function. A pickle holds its name where
    it stands in a module, and otherwise the function.

    Args:
        function: What is called for arguments that were not seen before.
        methods: The methods besides `clear_cache` and `_cache_size`.
        remake: Makes the callable from `function`; a pickle calls it.
    """
    call = dispatcher = dispatcher_of(function)
    tracer = function.tracer
    if tracer.static_argnums or tracer.static_argnames or function.parameters.donates:
        call = _checking(call, function)
    functools.update_wrapper(call, function.fun)

    def clear_cache() -> None:
        dispatch.clear_cache(dispatcher)
        function.clear_cache()

    own = {
        **methods,
        "clear_cache": clear_cache,
        "_cache_size": lambda: type(dispatcher)._cache_size(dispatcher),
        "__deepcopy__": lambda memo: call,
        "__reduce_ex__": lambda protocol: _named(call) or (remake, (function,)),
    }
    call.__dict__ = _Attributes(own, **call.__dict__)
    return call


def dispatcher_of(function: DispatchTarget) -> Any:
    """Return jaxlib's dispatcher of a function."""
    static = function.tracer.static_argnums, function.tracer.static_argnames
    call = dispatch.new_dispatcher(function.name, function.fun, function.cache_miss, static)
    call.__dict__["__reduce_ex__"] = lambda protocol: (dispatcher_of, (function,))
    return call


def _named(call: Any) -> str | None:
    """Return the name under which a module other than `__main__` has a callable, or None."""
    module, name = getattr(call, "__module__", None), getattr(call, "__qualname__", "")
    found = None if module == "__main__" else sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is call else None


class _Attributes(dict[str, Any]):
    """The attributes of a pjit-ed function, of which wrappers around it copy only the public info.

    `functools.wraps`, and `jax.jit` and `jax.vmap` with their own, copy the attributes of what they
    wrap. Without this `jax.jit(f).lower` would be that of `f`. Looking an attribute up doesn't come
    here.
    """

    def __init__(self, own: dict[str, Any], **copied: Any) -> None:
        super().__init__(copied)
        self.update(own)
        self._own = frozenset(own)

    def keys(self) -> Any:
        return [key for key in dict.keys(self) if key not in self._own]

    def __iter__(self) -> Any:
        return iter(self.keys())


def _checking(call: Any, function: DispatchTarget) -> Any:
    """Return the dispatcher for a function with static or donated arguments.

    Where a donated argument may share its buffers with another one, the function compares them once
    they are placed as its program takes them: before the call if other devices could start, and
    otherwise for the error. A static argument that jaxlib refuses gets its name.
    """
    donates, check_call = function.parameters.donates, function.parameters.check_call
    donated_leaves, miss = function.donated_leaves, function.cache_miss

    def shares(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return may_share(*donated_leaves(args, kwargs))

    def checked(*args: Any, **kwargs: Any) -> Any:
        # Not by short_tracebacks, which costs something where nothing goes wrong.
        try:
            try:
                compares = donates and function.is_spread
                if compares and shares(args, kwargs) and not jax.config.jax_disable_jit:
                    return miss(*args, **kwargs)[0]
                return call(*args, **kwargs)
            except ValueError as error:
                check_call(args, kwargs)
                if donates and type(error) is ValueError and shares(args, kwargs):
                    return miss(*args, **kwargs)[0]
                raise
            finally:
                # Read from the module: a pickle of this function must not hold the records.
                if donates and array_base.SHARDS:
                    donated = donated_leaves(args, kwargs)[0]
                    array_base.release_shards(donated, function.name)
        except Exception as error:
            shorten(error)
            raise

    return checked
