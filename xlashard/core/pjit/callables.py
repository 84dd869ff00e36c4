"""The callable over a pjit-ed function: jaxlib's dispatcher, with methods and checks."""

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from xlashard._jax.runtime import dispatch
from xlashard._jax.trace import tracing
from xlashard.core.array.array_class import deletion
from xlashard.core.pjit.arguments import may_share
from xlashard.core.pjit.parameters import Parameters
from xlashard.support.tracebacks import shorten


class DispatchTarget(Protocol):
    """Implementation behind the callable.

    Attributes:
        fun: The Python function.
        parameters: Its parameters.
        tracer: Traces it.
        calls: The calls that its dispatchers have seen.
    """

    fun: Callable[..., Any]
    parameters: Parameters
    tracer: tracing.FunctionTracer
    calls: dispatch.SeenCalls

    @property
    def name(self) -> str:
        """Return the function's name."""
        ...

    def cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Run a call that missed the dispatcher's cache, and return its entry for that cache."""
        ...

    def clear_cache(self) -> None:
        """Drop everything that was traced and compiled."""
        ...


def make_callable[F: DispatchTarget](
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
    call = dispatcher = make_dispatcher(function)
    tracer, calls = function.tracer, function.calls
    if tracer.static_argnums or tracer.static_argnames or function.parameters.donates:
        call = _wrap_in_checks(call, function)
    functools.update_wrapper(call, function.fun)
    kind = type(dispatcher)
    # A cycle would keep the arrays that the function closes over until a garbage collection. A
    # function around the dispatcher makes none, and its pickle can't hold a weak reference.
    find_dispatcher = weakref.ref(call) if call is dispatcher else lambda: dispatcher

    def clear_cache() -> None:
        calls.clear()
        function.clear_cache()

    own = {
        **methods,
        "clear_cache": clear_cache,
        "_cache_size": lambda: kind._cache_size(find_dispatcher()),
    }
    if call is dispatcher:  # Python copies and pickles functions itself.
        own["__deepcopy__"] = lambda memo: find_dispatcher()
        own["__reduce_ex__"] = lambda protocol: (
            _find_import_name(find_dispatcher()) or (remake, (function,))
        )
    call.__dict__ = _UncopiedAttributes(own, **call.__dict__)
    return call


def make_dispatcher(function: DispatchTarget, calls: dispatch.SeenCalls | None = None) -> Any:
    """Return jaxlib's dispatcher of a function.

    Args:
        function: The function.
        calls: Its calls, if they are others than those of the function.
    """
    static = function.tracer.static_argnums, function.tracer.static_argnames
    calls = calls or function.calls
    call = dispatch.new_dispatcher(function.name, function.fun, function.cache_miss, static, calls)
    call.__dict__["__reduce_ex__"] = lambda protocol: (make_dispatcher, (function,))
    return call


def _find_import_name(call: Any) -> str | None:
    """Return the name under which a module other than `__main__` has a callable, or None."""
    module, name = getattr(call, "__module__", None), getattr(call, "__qualname__", "")
    value = None if module == "__main__" else sys.modules.get(module or "")
    for part in name.split("."):
        value = getattr(value, part, None)
    return name if value is call else None


class _UncopiedAttributes(dict[str, Any]):
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


def _wrap_in_checks(call: Any, function: DispatchTarget) -> Any:
    """Return the dispatcher for a function with static or donated arguments.

    Where a donated argument may share its buffers with another one, the function compares them once
    they are placed as its program takes them: before the call if other devices could start, and
    otherwise for the error. A static argument that jaxlib refuses gets its name.
    """
    parameters = function.parameters
    donates, check_call = parameters.donates, parameters.check_call
    are_exclusive, donated_leaves = parameters.are_exclusive, parameters.donated_leaves
    miss = function.cache_miss

    def shares(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        donated, others = donated_leaves(args, kwargs)
        return may_share(donated, [*others, *function.calls.closed.values()])

    def checked(*args: Any, **kwargs: Any) -> Any:
        # Not by short_tracebacks, which costs something where nothing goes wrong.
        try:
            try:
                if (
                    donates
                    and function.calls.is_spread
                    and not are_exclusive(args, kwargs)
                    and shares(args, kwargs)
                    and not jax.config.jax_disable_jit
                ):
                    return miss(*args, **kwargs)[0]
                return call(*args, **kwargs)
            except ValueError as error:
                check_call(args, kwargs)
                if donates and type(error) is ValueError and shares(args, kwargs):
                    return miss(*args, **kwargs)[0]
                raise
            finally:
                # Read from the module: a pickle of this function must not hold the records.
                if donates and deletion.SHARDS:
                    donated = donated_leaves(args, kwargs)[0]
                    deletion.release_shards(donated, function.name)
        except Exception as error:
            shorten(error)
            raise

    return checked
