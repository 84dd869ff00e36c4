"""The callable that users call: jaxlib's dispatcher, with the methods of a pjit-ed function."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.tracebacks import shorten
from xlashard._jax.trace.tracing import FunctionTracer
from xlashard.array.core import donation
from xlashard.pjit.shared_buffers import may_share
from xlashard.pjit.signature import Parameters


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
    call = dispatcher = _dispatcher(function)
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


def _dispatcher(function: DispatchTarget) -> Any:
    """Return jaxlib's dispatcher of a function."""
    static = function.tracer.static_argnums, function.tracer.static_argnames
    call = dispatch.new_dispatcher(
        function.name, function.fun, function.cache_miss, static, function.name
    )
    call.__dict__["__reduce_ex__"] = lambda protocol: (_dispatcher, (function,))
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
                if donates and donation.SHARDS:
                    donation.release_shards(donated_leaves(args, kwargs)[0], function.name)
        except Exception as error:
            shorten(error)
            raise

    return checked
