"""Functions that accept the arguments which JAX's functions accepted before."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xlashard.errors import RefusedError
from xlashard.legacy.entries.keywords import SIGNATURES, keyword_entries
from xlashard.legacy.module_shims import resolve_source
from xlashard.support.tracebacks import short_tracebacks


class EarlierFunction:
    """Function of JAX that accepts its earlier arguments as well.

    Attributes and methods of the function, such as `lower` and `reduce`, are those of JAX's.

    Args:
        name: The full name of the function.
        function: Today's function.

    Example:
        >>> import jax.numpy as jnp
        >>> clip = EarlierFunction("jax.numpy.clip", jnp.clip)
        >>> clip(jnp.arange(4), a_max=2).tolist()
        [0, 1, 2, 2]
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._signature = SIGNATURES[name]
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with today's arguments."""
        with short_tracebacks:
            if self._signature.is_used(len(args), kwargs):
                args, kwargs = convert_arguments(self._name, args, kwargs)
            if self._signature.carry:
                args, kwargs = self._promote_carry(args, kwargs)
            return self._function(*args, **kwargs)

    def _promote_carry(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the arguments of a loop whose initial carry has the types of the body's results.

        JAX still promotes weakly typed numbers, but no longer Python's bools.
        """
        try:
            call = inspect.signature(self._function).bind(*args, **kwargs)
        except TypeError:
            return args, kwargs  # JAX names the argument.
        name = self._signature.carry
        before, tree = jax.tree.flatten(call.arguments[name])
        if bool not in map(type, before):
            return args, kwargs
        step = _LOOP_STEPS[self._function.__name__]
        results = jax.eval_shape(functools.partial(step, call.arguments), call.arguments[name])
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(results)]
        changes = {
            number: dtype
            for number, (leaf, dtype) in enumerate(zip(before, dtypes, strict=False))
            if type(leaf) is bool and jax.numpy.issubdtype(dtype, np.number)
        }
        if changes and jax.tree.structure(results) == tree:
            call.arguments[name] = convert_carry(self._name, before, tree, changes)
        return call.args, call.kwargs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce__(self) -> tuple[object, ...]:
        module, _, name = self._name.rpartition(".")
        return resolve_source, (f"{module}:{name}",)

    def __repr__(self) -> str:
        return repr(self._function)


def _step_scan(call: Mapping[str, Any], carry: Any) -> Any:
    xs = call.get("xs")
    return call["f"](carry, jax.tree.map(lambda x: x[0], xs))[0]


_LOOP_STEPS: Mapping[str, Callable[[Mapping[str, Any], Any], Any]] = {
    "fori_loop": lambda call, carry: call["body_fun"](jax.numpy.asarray(call["lower"]), carry),
    "scan": _step_scan,
    "while_loop": lambda call, carry: call["body_fun"](carry),
}
"""The next carry of each loop, from the arguments of its call and a carry."""


def convert_carry(name: str, leaves: Sequence[Any], tree: Any, dtypes: Mapping[int, Any]) -> Any:
    """Return the initial carry of a loop with numbers in place of Python's bools.

    Args:
        name: The full name of the loop, which reports read.
        leaves: The leaves of the carry.
        tree: Its structure.
        dtypes: The dtype of each changed leaf, by its position.
    """
    converted = [
        np.asarray(leaf, dtypes[number]) if number in dtypes else leaf
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, converted)


def convert_arguments(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as today's function takes them.

    Args:
        name: The full name of the function.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Raises:
        RefusedError: A keyword was removed from JAX, and its value has no equivalent.

    Example:
        >>> convert_arguments("jax.numpy.sort", ([2, 1], 0, "stable"), {})
        (([2, 1], 0), {})
    """
    signature = SIGNATURES[name]
    named = signature.list_positional(len(args))
    first, last = signature.after, signature.after + len(named)
    named_arguments = {**dict(zip(named, args[first:last], strict=True)), **kwargs}
    args = args[:first] + args[last:] if named else args
    converted: dict[str, Any] = {}
    for keyword, value in named_arguments.items():
        removed = signature.keywords.get(keyword)
        rewritten = {keyword: value} if removed is None else removed.rewrite(value)
        if rewritten is None:
            entry = keyword_entries()[name][keyword]
            raise RefusedError(
                f"{entry.name} was removed from JAX, and {keyword}={value!r} has no equivalent: "
                f"{entry.note}. Write: {entry.today}",
                name=entry.name,
            )
        converted.update(rewritten)
    # Keywords of parameters that are positional today.
    while str(len(args)) in converted:
        args = (*args, converted.pop(str(len(args))))
    return args, converted


def make_method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method or constructor that accepts its earlier arguments.

    Args:
        name: The full name of the method.
        function: Today's function, with the instance or class as its first argument.
    """
    signature = SIGNATURES[name]

    @functools.wraps(function)
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        with short_tracebacks:
            if signature.is_used(len(args), kwargs):
                args, kwargs = convert_arguments(name, args, kwargs)
            return function(owner, *args, **kwargs)

    return call
