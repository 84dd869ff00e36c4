"""jaxlib's C++ dispatcher, how it wraps results, and how JAX unwraps arguments.

The dispatcher flattens arguments by its own registry of pytree nodes, in which an `Array` is a node
with one child: its buffer handle. A repeat call therefore enters Python for nothing but to wrap its
results: each of few by a call of its own, many by one.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import jax

from xlashard._jax.private import (
    core,
    dtypes,
    jax_pjit,
    lib_jax,
    mlir,
    pxla,
    tree_util,
    try_steps,
    xc,
)
from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.transfer import (
    Tracer,
    any_deleted,
    any_lacks_buffer,
    base_handle,
    list_buffers,
)
from xlashard.support.tracebacks import shorten

type Handle = Any
type TreeDef = Any

_REGISTRY = jax.tree_util.default_registry


class _Node:
    """Node of a result tree, and data about the arrays in it."""

    __slots__ = ("children", "data")

    def __init__(self, children: Sequence[Any], data: Any) -> None:
        self.children = children
        self.data = data


class _Output(_Node):
    """Node of a result that is a single array; its data is the function that returns its class."""

    __slots__ = ()


class _Outputs(_Node):
    """Node of many results of the usual class; its data is the user's tree."""

    __slots__ = ()


class Wrappers(NamedTuple):
    """Functions that make arrays of handles. jaxlib calls them on every repeat call.

    Attributes:
        each: From a function that returns the class of an array, None for the usual class, and one
            handle in a tuple, to an array.
        tree: From a tree and its handles to the tree of arrays.
    """

    each: Callable[[Callable[[Handle], type] | None, Sequence[Handle]], Any]
    tree: Callable[[TreeDef, Sequence[Handle]], Any]


ARRAY_TYPES: set[type] = set()
"""The registered classes of arrays."""


def register_array_type(array_type: type) -> None:
    """Register a class of arrays with JAX.

    JAX looks classes up exactly, so each derived class has to be registered as well.

    Args:
        array_type: The class. Its instances hold their buffer handle in the slot `_buffers` and
            return it from the property `_handle`; `devices()` of a deleted one raises its error.
    """

    def aval_of(x: Any) -> Any:
        handle = x._buffers
        return core.pytype_aval_mappings[type(handle)](handle)

    def shard_arg(
        xs: Sequence[Any],
        shardings: Sequence[Any],
        layouts: Sequence[Any],
        semantics: Sequence[Any],
    ) -> Sequence[Any]:
        return pxla.shard_args(shardings, layouts, semantics, [x._handle for x in xs])

    def operand(x: Any) -> Any:
        # A trace may close over a deleted array: what runs the program names its variable.
        if x._buffers.is_deleted() and core.trace_state_clean():
            x.devices()  # raises an error with the call that donated the array, which JAX's lacks
        return x._handle

    def constant(val: Any, aval: Any) -> Any:
        return mlir.get_constant_handler(xc.ArrayImpl)(val._handle, aval)

    # The abstract value of an argument or a closed-over value.
    core.pytype_aval_mappings[array_type] = aval_of
    # Operators of JAX compute with the handle.
    dtypes.register_canonicalize_value_handler(array_type, operand)
    # Placement of arguments of jax.jit.
    pxla.shard_arg_handlers[array_type] = shard_arg
    # Closed-over values of traced functions.
    try_steps(lambda: mlir.register_constant_handler(array_type, constant))
    # Arguments of jaxlib's dispatcher.
    tree_util.dispatch_registry.register_dataclass_node(array_type, ["_buffers"], [])
    ARRAY_TYPES.add(array_type)


def register_wrapping(wrappers: Wrappers) -> None:
    """Register the functions that wrap results, which the dispatcher calls directly."""
    for node, wrap in zip((_Output, _Outputs), wrappers, strict=True):
        _REGISTRY.register_node(node, attrgetter("children", "data"), wrap)


# One function over all results has to call back for the user's tree, which takes 0.6 µs; another
# call per result takes 60 ns.
_FEW_RESULTS = 10


class FastPath(NamedTuple):
    """Data of a repeat call: jaxlib reads these fields by name."""

    xla_executable: Any
    out_pytree_def: Any
    in_shardings: Sequence[Any]
    out_shardings: Sequence[Any]
    out_avals: Sequence[Any]
    out_committed: Sequence[bool]
    kept_var_bitvec: Sequence[bool]
    in_device_local_layouts: Sequence[Any]
    const_args: Sequence[Any]


def output_tree(treedef: TreeDef, kind_of: Callable[[Handle], type] | None) -> TreeDef | None:
    """Return the dispatcher's tree of a result; None if jaxlib can't wrap it.

    Args:
        treedef: The user's tree.
        kind_of: Function from the handle of an array to its class; None for the usual class.
    """
    if kind_of is not None or treedef.num_leaves <= _FEW_RESULTS:
        # A tree with a node that only JAX's internal registry has can't be composed.
        with suppress(ValueError):
            return treedef.compose(_REGISTRY.flatten(_Output((0,), kind_of))[1])
    if kind_of is not None:
        return None
    return _REGISTRY.flatten(_Outputs((0,) * treedef.num_leaves, treedef))[1]


class SeenCalls:
    """The calls that the dispatchers of one function have seen, and how to repeat them.

    Attributes:
        fast: jaxlib's cache of the calls that it repeats itself.
        checked: That of the calls with arrays to check.
        closed: The closed-over arrays of the programs of checked calls, by id.
        is_spread: True once a program of the function runs on several devices.
    """

    def __init__(self) -> None:
        self.fast = lib_jax.PjitFunctionCache()
        self.checked = lib_jax.PjitFunctionCache()
        self.closed: dict[int, Handle] = {}
        self.is_spread = False
        _ALL_SEEN_CALLS.add(self)

    def beside(self) -> "SeenCalls":
        """Return a record of other calls, of programs that close over the same arrays."""
        others = SeenCalls()
        others.closed = self.closed
        return others

    def clear(self) -> None:
        """Drop all calls."""
        self.fast.clear()
        self.clear_checked()

    def clear_checked(self) -> None:
        """Drop the calls with arrays to check."""
        self.checked.clear()
        self.closed.clear()


class _AllSeenCalls:
    """The calls that live dispatchers have seen, which `jax.clear_caches()` drops.

    jaxlib's own list of dispatchers misses some after a few hundred have been created and deleted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: weakref.WeakSet[SeenCalls] = weakref.WeakSet()

    def add(self, calls: SeenCalls) -> None:
        """Include the calls of a function from now on."""
        with self._lock:
            self._alive.add(calls)

    def cache_clear(self) -> None:
        """Drop the calls that any dispatcher has seen."""
        with self._lock:
            alive = list(self._alive)
        for calls in alive:
            calls.clear()


_ALL_SEEN_CALLS = cleared_with_jax(_AllSeenCalls())


def forget_calls() -> None:
    """Drop the calls that dispatchers have seen, of JAX and of this package; programs are kept."""
    jax_pjit._cpp_pjit_cache_fun_only.clear()
    jax_pjit._cpp_pjit_cache_explicit_attributes.clear()
    lib_jax.PjitFunctionCache.clear_all()
    _ALL_SEEN_CALLS.cache_clear()


def new_dispatcher(
    name: str,
    fun: Callable[..., Any] | None,
    cache_miss: Callable[..., tuple[Any, FastPath | None, bool]],
    static: tuple[Sequence[int], Sequence[str]] = ((), ()),
    calls: SeenCalls | None = None,
) -> Any:
    """Return a callable that calls `cache_miss` for new signatures of arguments.

    Args:
        name: The name in profiles, which also identifies the dispatcher to jaxlib.
        fun: The function to call under `jax.disable_jit`.
        cache_miss: Function of the call's arguments that returns its result, the fast path for
            calls of the same signature (or None), and False.
        static: The positions and names of static arguments.
        calls: The calls that other dispatchers of `fun`, which do the same, have seen; None
            without such. jaxlib finds them by a weak reference to `fun`.
    """
    argnums, argnames = static
    calls = SeenCalls() if calls is None else calls

    def dispatcher(miss: Any, cache: Any) -> Any:
        registry, shard = tree_util.dispatch_registry, pxla.cc_shard_arg
        return lib_jax.pjit(name, fun, miss, argnums, argnames, name, registry, shard, cache)

    return dispatcher(_Checked(cache_miss, dispatcher, calls), calls.fast)


class _Checked:
    """Handles the calls that a dispatcher has not seen, and those with arrays to check.

    If a shard of an array was deleted or donated alone, the runtime starts a program on the other
    devices, which wait for the missing one. An `Array` is deleted as a whole then. Arrays of JAX
    over several devices, and arrays that a program closes over, are checked before each call: their
    dispatcher has no fast path, and a second one is called once they are checked.

    Args:
        miss: Handles a call that was not seen before.
        dispatcher: Makes a dispatcher from a function like `miss` and the cache of its calls.
        calls: The calls that were seen.
    """

    def __init__(
        self,
        miss: Callable[..., Any],
        dispatcher: Callable[[Callable[..., Any], Any], Any],
        calls: SeenCalls,
    ) -> None:
        self._calls = calls
        self._closed = calls.closed
        self._bind = miss
        self._miss = _recording_closed(miss, calls.closed)
        self._dispatcher = dispatcher

    @cached_property
    def _inner(self) -> Any:
        return self._dispatcher(self._miss, self._calls.checked)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if not core.trace_state_clean():  # the call runs no program
                return self._bind(*args, **kwargs)[0], None, False
            if self._check(args, kwargs):
                return self._inner(*args, **kwargs), None, False
            result, path, _ = self._miss(*args, **kwargs)
            return result, None if path is not None and path.const_args else path, False
        except BaseException as error:
            shorten(error)
            raise

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if there were arrays to check, and all have their buffers.

        A lost one is left to the miss, whose errors name the argument.
        """
        if self._closed and any_lacks_buffer(list(self._closed.values())):
            # The call may need other arrays than the lost one: the miss decides.
            self._calls.clear_checked()
        leaves = jax.tree_util.tree_leaves((args, kwargs) if kwargs else args)
        buffers = list_buffers(_find_handles(leaves))
        # A deleted handle has no shards.
        if not self._closed and all(len(shards) < 2 for shards in buffers):
            return False
        return not any_deleted(buffers)


def _recording_closed(miss: Callable[..., Any], closed: dict[int, Handle]) -> Callable[..., Any]:
    """Return a function like `miss` that keeps the closed-over arrays of the programs it ran.

    A function of its own: a method would be in a cycle with the second dispatcher.
    """

    # Python evaluates the annotations of each new function.
    def miss_and_record(*args: Any, **kwargs: Any) -> Any:
        result, path, is_traced = miss(*args, **kwargs)
        if path is not None:
            closed.update((id(handle), handle) for handle in path.const_args)
        return result, path, is_traced

    return miss_and_record


def _find_handles(values: Sequence[Any]) -> list[Handle]:
    """Return the handles of arrays and key arrays of JAX among values."""
    kinds = set(map(type, values))
    if kinds == {xc.ArrayImpl}:
        return list(values)
    handles = [value for value in values if type(value) is xc.ArrayImpl]
    others = kinds - ARRAY_TYPES - {xc.ArrayImpl}
    if others:
        keys = [v for v in values if type(v) in others and not isinstance(v, Tracer)]
        handles += [base for base in map(base_handle, keys) if base is not None]
    return handles


def place(values: Sequence[Any], shardings: Sequence[Any], layouts: Sequence[Any]) -> Any:
    """Return handles of values under shardings; a handle with the requested sharding is reused."""
    semantics = [xc.ArrayCopySemantics.REUSE_INPUT] * len(shardings)
    return pxla.shard_args(shardings, layouts, semantics, values)


def handles_of_keys(values: Sequence[Any]) -> list[Handle]:
    """Return the values, with every key array replaced by the handle of its integers."""
    return [v if type(v) is xc.ArrayImpl else v._base_array for v in values]
