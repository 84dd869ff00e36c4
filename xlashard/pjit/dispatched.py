"""The callable that a person gets: jaxlib's dispatcher, with the methods of a pjit-ed function."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from xlashard._jax import dispatch
from xlashard._jax.tracebacks import shorten
from xlashard._jax.tracing import FunctionTracer
from xlashard.pjit.parameters import Parameters


class Called(Protocol):
    """What stands behind the callable.

    Attributes:
        fun: The Python function.
        parameters: Its parameters.
        tracer: What traces it.
    """

    fun: Callable[..., Any]
    parameters: Parameters
    tracer: FunctionTracer

    @property
    def name(self) -> str:
        """The function's name."""
        ...

    def miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Runs a call that was not seen before, and says how to repeat it."""
        ...

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Says better than jaxlib why it refused a call, where this can."""
        ...

    def clear_cache(self) -> None:
        """Forgets what was traced and compiled."""
        ...


def dispatched(function: Called, methods: Mapping[str, Any]) -> Any:
    """The C++ callable over a function; its methods are attributes of the instance.

    Args:
        function: What is called for arguments that were not seen before.
        methods: The methods besides `clear_cache` and `_cache_size`.
    """
    tracer = function.tracer
    call = dispatch.new_dispatcher(
        function.name,
        function.fun,
        function.miss,
        (tracer.static_argnums, tracer.static_argnames),
        function.name,
    )
    clear_fast_paths = call._clear_cache
    cache_size = call._cache_size
    if tracer.static_argnums or tracer.static_argnames or function.parameters.donates:
        call = _explaining(call, function)
    functools.update_wrapper(call, function.fun)

    def clear_cache() -> None:
        clear_fast_paths()
        function.clear_cache()

    own = {**methods, "clear_cache": clear_cache, "_cache_size": cache_size}
    call.__dict__ = _Attributes(own, **call.__dict__)
    return call


class _Attributes(dict[str, Any]):
    """The attributes of a pjit-ed function, of which wrappers around it copy only the public face.

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


def _explaining(call: Any, function: Called) -> Any:
    """The dispatcher, where jaxlib may refuse an argument without naming it."""

    def explained(*args: Any, **kwargs: Any) -> Any:
        # Not by short_tracebacks, which costs something where nothing goes wrong.
        try:
            try:
                return call(*args, **kwargs)
            except (ValueError, jax.errors.JaxRuntimeError):
                function.explain(args, kwargs)
                raise
        except Exception as error:
            shorten(error)
            raise

    return explained
