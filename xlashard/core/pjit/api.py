"""`pjit`: a Python function as one program over many devices; `reshard` and `shard_map`."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Protocol,
    Self,
    TypedDict,
    Unpack,
    overload,
)

import jax

from xlashard._jax import originals
from xlashard._jax.trace.tracing import is_batch_sharded
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.pjit.callables import make_callable
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.options import (
    DonationMode,
    PjitOptions,
    Selected,
    either,
    made_or_decorator,
    read_options,
)
from xlashard.core.pjit.shardings.resources import UNSPECIFIED, none_as_unspecified
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from xlashard.core.pjit.stages import traced as stages
else:
    stages = deferred("xlashard.core.pjit.stages.traced")


class Jitted[**P, R](Protocol):
    """A function compiled by `pjit`, called like the Python function and with the same result."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the program for these arguments, which the first call compiles."""
        ...

    @overload
    def __get__(self, instance: None, owner: Any = None, /) -> Self: ...
    @overload
    def __get__[S, **Q, T](
        self: "Jitted[Concatenate[S, Q], T]", instance: S, owner: Any = None, /
    ) -> Callable[Q, T]: ...

    @property
    def __wrapped__(self) -> Callable[P, R]:
        """Return the Python function."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> "stages.Lowered":
        """Return the module for arguments, or for shapes (`jax.ShapeDtypeStruct`) of them."""
        ...

    def trace(self, *args: Any, **kwargs: Any) -> "stages.Traced":
        """Return the jaxpr for arguments or shapes."""
        ...

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return shapes and dtypes of the result, as its tree of `jax.ShapeDtypeStruct`."""
        ...

    def clear_cache(self) -> None:
        """Drop every program that was compiled for the function."""
        ...


class _Decorator(Protocol):
    """Decorator that `pjit` returns without a function."""

    def __call__[**P, R](self, fun: Callable[P, R], /) -> Jitted[P, R]: ...


class _PjitOptions(TypedDict, total=False):
    """Keywords of `pjit`, for type checkers."""

    static_argnames: str | Sequence[str] | None
    donate_argnames: str | Sequence[str] | None
    keep_unused: bool
    device: Any
    backend: str | None
    inline: "bool | jax.Inline"
    compiler_options: dict[str, Any] | None
    donation: DonationMode
    share_binary: bool
    strict: bool | None
    in_axis_resources: Any
    out_axis_resources: Any


@overload
def pjit[**P, R](
    fun: Callable[P, R],
    in_shardings: Any = ...,
    out_shardings: Any = ...,
    static_argnums: int | Sequence[int] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    **options: Unpack[_PjitOptions],
) -> Jitted[P, R]: ...
@overload
def pjit(
    *,
    in_shardings: Any = ...,
    out_shardings: Any = ...,
    static_argnums: int | Sequence[int] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    **options: Unpack[_PjitOptions],
) -> _Decorator: ...
def pjit(
    fun: Any = UNSPECIFIED,
    in_shardings: Any = UNSPECIFIED,
    out_shardings: Any = UNSPECIFIED,
    static_argnums: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    *,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: "bool | jax.Inline" = False,
    compiler_options: dict[str, Any] | None = None,
    donation: DonationMode = "warn",
    share_binary: bool = False,
    strict: bool | None = None,
    in_axis_resources: Any = UNSPECIFIED,
    out_axis_resources: Any = UNSPECIFIED,
) -> Any:
    """Compile a function into one program that runs over many devices.

    Args:
        fun: A function of pytrees of arrays. Without it comes a decorator with these options:
            `@pjit(donate_argnums=0)`.
        in_shardings: Shardings of the arguments: a prefix of the tuple of arguments with the leaves
            None (replicated over the devices of the program; unspecified under `jit`), a
            PartitionSpec on the mesh in force at the call, a Sharding, `UNSPECIFIED` (keep the
            argument's own), `FROM_GDA` (likewise, for arrays only), or `AUTO` (found by a search,
            with those of results and of values inside; the mesh has automatic axes).
        out_shardings: Shardings of the results, as a prefix of the result; the partitioner chooses
            those that are unspecified, a search those under `AUTO`.
        static_argnums: Positions of hashable arguments that are part of the program.
        donate_argnums: Positions of arguments whose buffers the results may reuse.
        static_argnames: Names of arguments that are part of the program.
        donate_argnames: Names of arguments whose buffers the results may reuse.
        keep_unused: Keep arguments that no result needs.
        device: Run on this one device.
        backend: Run on this platform.
        inline: Inside another program, leave no function of its own; also a `jax.Inline`.
        compiler_options: Options of XLA.
        donation: `"warn"` or, to raise where a donated argument can't be reused, `"strict"`.
        share_binary: In a program over several processes, let one compile, and the others load its
            machine code; all must compile their programs in the same order.
        strict: Raise an `UnmetRequestError` instead of a warning: for a constraint by which a
            dimension does not divide, a sharding that the program does not follow, a donated
            argument that no result can reuse, and a large argument without a sharding that is
            replicated; None for `XLASHARD_STRICT`.
        in_axis_resources: An older name of `in_shardings`.
        out_axis_resources: An older name of `out_shardings`.

    Returns:
        A function of the same arguments, with `lower`, `trace`, `eval_shape` and `clear_cache`.

    Raises:
        ArgumentError: If an option is of the wrong kind.
        ResourceError: If a sharding is invalid, or (at the call) does not fit its argument.
        DeviceMismatchError: At the call, if its arguments live on different devices.
        MeshError: At the call, for a spec without a mesh in force, or `AUTO` without a mesh of
            automatic axes.

    Example:
        >>> import jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> double = pjit(lambda x: x * 2, out_shardings=jax.sharding.PartitionSpec("data"))
        >>> with jax.set_mesh(mesh):
        ...     print(double(np.arange(4)))
        [0 2 4 6]
    """
    with short_tracebacks:
        options = read_options(
            either(("in_shardings", in_shardings), ("in_axis_resources", in_axis_resources)),
            either(("out_shardings", out_shardings), ("out_axis_resources", out_axis_resources)),
            (donate_argnums, donate_argnames),
            (device, backend),
            {
                "keep_unused": keep_unused,
                "inline": inline,
                "compiler_options": compiler_options,
                "donation": donation,
                "share_binary": share_binary,
                "strict": strict,
            },
        )
        static = Selected.of(static_argnums, static_argnames, "static")
        return made_or_decorator(fun, lambda f: callable_of(Function(f, options, static)))


def _with_signature_of[F](function: F) -> Callable[[Callable[..., Any]], F]:
    """Give a function the parameters of another one, for callers and for type checkers."""

    def decorate(wrapper: Any) -> F:
        wrapper.__signature__ = _PARAMETERS
        return wrapper

    return decorate


_PARAMETERS = inspect.signature(pjit)


@_with_signature_of(pjit)
def jit(*args: Any, **kwargs: Any) -> Any:
    """Compile a function as `pjit` does, with None in shardings read as `jax.jit` reads it.

    None is `UNSPECIFIED`: an argument keeps its sharding, and the partitioner chooses that of a
    result. Under `pjit` None means replicated, as in JAX before 2023.

    Args:
        *args: The positional arguments of `pjit`.
        **kwargs: The keyword arguments of `pjit`.

    Returns:
        A function of the same arguments, with `lower`, `trace`, `eval_shape` and `clear_cache`.

    Example:
        >>> import numpy as np
        >>> double = jit(lambda x: x * 2, out_shardings=None)
        >>> print(double(np.arange(4)))
        [0 2 4 6]
    """
    if len(args) == 1 and not kwargs:
        with short_tracebacks:
            return made_or_decorator(args[0], lambda f: callable_of(Function(f, *_read_defaults())))
    if len(args) > 1:  # the shardings come second and third
        args = *args[:1], *map(none_as_unspecified, args[1:3]), *args[3:]
    for name in kwargs.keys() & _RESOURCES:
        kwargs[name] = none_as_unspecified(kwargs[name])
    return pjit(*args, **kwargs)


@functools.lru_cache(maxsize=1)
def _read_defaults() -> tuple[PjitOptions, Selected]:
    """Return the options of a function without any, which most have, and its static parameters."""
    default: Any = pjit(lambda: None)
    return default._function.options, default._function.static


_RESOURCES = {"in_shardings", "out_shardings", "in_axis_resources", "out_axis_resources"}


def callable_of(function: Function) -> Any:
    """Return the callable of a function, with its methods.

    Args:
        function: The function.
    """

    def trace(*args: Any, **kwargs: Any) -> "stages.Traced":
        with short_tracebacks:
            return stages.Traced(function, function.trace(args, kwargs))

    def lower(*args: Any, **kwargs: Any) -> "stages.Lowered":
        with short_tracebacks:
            return trace(*args, **kwargs).lower()

    def eval_shape(*args: Any, **kwargs: Any) -> Any:
        with short_tracebacks:
            return stages.eval_shape(function, args, kwargs)

    methods = {"lower": lower, "trace": trace, "eval_shape": eval_shape, "_function": function}
    return make_callable(function, methods, callable_of)


def reshard[T](xs: T, out_shardings: Any) -> T:
    """Reshard arrays as `jax.sharding.reshard` does, with `Array`s as results.

    Inside a program it changes the sharding in the type of a value, for explicit mesh axes;
    outside of one it moves the data.

    Args:
        xs: A pytree of arrays.
        out_shardings: A prefix of it: a Sharding, or a PartitionSpec on the mesh in force.

    Returns:
        The same values with these shardings.

    Raises:
        ValueError: For a PartitionSpec without a mesh in force, or a dimension that does not
            divide.

    Example:
        >>> import jax, numpy as np
        >>> import xlashard as xs
        >>> mesh = xs.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> with xs.set_mesh(mesh):
        ...     x = xs.reshard(np.arange(4.0), xs.P("data"))
        >>> x.sharding.spec
        P('data',)
    """
    return jax.tree.map(wrap_result, originals.reshard(xs, out_shardings))


def shard_map(f: Any = None, /, **options: Any) -> Any:
    """Map a function over shards as `jax.shard_map` does, with `Array`s as results.

    Args:
        f: A function of shards. Without it comes a decorator with these options.
        **options: Those of `jax.shard_map`: `in_specs`, `out_specs`, `mesh` (the mesh in force if
            left out), `axis_names` (the manual axes; all if left out), `check_vma`.

    Returns:
        A function of whole arrays.

    Raises:
        ValueError: At the call, if a spec does not fit its argument or result.

    Example:
        >>> import jax, numpy as np
        >>> import xlashard as xs
        >>> mesh = xs.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> @xs.shard_map(mesh=mesh, in_specs=xs.P("data"), out_specs=xs.P())
        ... def total(x):
        ...     return jax.lax.psum(x.sum(), "data")
        >>> total(np.arange(4.0, dtype=np.float32))
        Array(6., dtype=float32)
    """
    if f is None:
        return functools.partial(shard_map, **options)
    mapped = originals.shard_map(f, **options)

    @functools.wraps(f)
    def over_shards(*args: Any, **kwargs: Any) -> Any:
        # As a program, closed-over values become arguments. Without one, `vmap` takes those of its
        # batch for values of a single shard, and repeats their rows once per shard.
        call = originals.jit(mapped, inline=True) if is_batch_sharded() else mapped
        return jax.tree.map(wrap_result, call(*args, **kwargs))

    return over_shards


shard_map.__signature__ = inspect.signature(originals.shard_map)
