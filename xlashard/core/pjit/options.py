"""The options of `pjit`, checked once and frozen."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal

import jax

from xlashard.core.array.array_class.handles import KindOf
from xlashard.core.pjit.shardings.resources import (
    UNSPECIFIED,
    ResourceTree,
    read_resources,
    refuse_from_gda,
    refuse_unconstrained,
)
from xlashard.core.program.plan import option_items
from xlashard.core.sharding import SingleDeviceSharding
from xlashard.errors import ArgumentError, ResourceError
from xlashard.support.lazily import dataclass
from xlashard.support.tracebacks import short_tracebacks

type DonationMode = Literal["warn", "strict"]


@dataclass(frozen=True, eq=False)
class PjitOptions:
    """The options of one `pjit`-ed function.

    Attributes:
        in_resources: Resources of the arguments, as a prefix of their tuple.
        out_resources: Resources of the results, as a prefix of their tree.
        donate: Positions and names of arguments whose buffers may be reused.
        keep_unused: Keep arguments that no result needs.
        device: Run on this one device.
        backend: Run on this platform.
        inline: Leave no function of its own in an outer program.
        compiler_options: Options of XLA, sorted by name.
        donation: Warn about a donated argument that no result can reuse, or raise.
        share_binary: Let one process compile for all.
        strict: Raise where a sharding is not met; None for the setting of the environment.
        kind_of: Returns the class of a result; None for `Array`.
    """

    in_resources: ResourceTree
    out_resources: ResourceTree
    donate: "Selected"
    keep_unused: bool
    device: Any
    backend: str | None
    inline: bool
    compiler_options: tuple[tuple[str, Any], ...]
    donation: DonationMode
    share_binary: bool = False
    strict: bool | None = None
    kind_of: KindOf | None = None

    @property
    def cache_key(self) -> Hashable:
        """Return a key of equal options; its hash fails where a node of a tree has none."""
        # 1 and True are equal, but not the same text for XLA.
        kinds = [type(value) for _, value in self.compiler_options]
        return *self.__dict__.values(), *kinds

    def __reduce__(self) -> tuple[object, ...]:
        where = None if self.device is None else SingleDeviceSharding(self.device)
        return _options_at, (where, {**self.__dict__, "device": None, "kind_of": None})


def _options_at(where: SingleDeviceSharding | None, fields: dict[str, Any]) -> PjitOptions:
    device = None if where is None else where.devices[0]
    return PjitOptions(**{**fields, "device": device})


@dataclass(frozen=True)
class Selected:
    """Parameters selected by position, by name, or by both.

    Attributes:
        argnums: Positions; None to take them from the names.
        argnames: Names; None to take them from the positions.
    """

    argnums: tuple[int, ...] | None = None
    argnames: tuple[str, ...] | None = None

    @classmethod
    def of(cls, argnums: Any, argnames: Any, what: str) -> "Selected":
        """Check `static_argnums` and `static_argnames`, or those of `donate`.

        Raises:
            ArgumentError: If one is no int or no name.
        """
        return cls(
            None if argnums is None else index_tuple(argnums, f"{what}_argnums"),
            None if argnames is None else _name_tuple(argnames, f"{what}_argnames"),
        )


@dataclass(frozen=True)
class Named:
    """A value, and the keyword by which the user passed it."""

    name: str
    value: Any


def read_options(
    ins: Named,
    outs: Named,
    donated: tuple[Any, Any],
    device: tuple[Any, str | None],
    rest: Mapping[str, Any],
) -> PjitOptions:
    """Check the options of `pjit`.

    Raises:
        ArgumentError: If an option has the wrong type, or two contradict each other.
        ResourceError: If a sharding is invalid, or has an unconstrained dimension.
    """
    # The arguments are a tuple, so that a list of resources for them is taken as a tuple.
    in_shardings = tuple(ins.value) if isinstance(ins.value, list) else ins.value
    chosen, backend = device
    if chosen is not None and backend is not None:
        raise ArgumentError(
            f"pjit got both device={chosen} and backend={backend!r}: give one of them"
        )
    if (chosen is not None or backend is not None) and not (
        in_shardings is UNSPECIFIED and outs.value is UNSPECIFIED
    ):
        raise ArgumentError(
            "pjit got a device or backend together with shardings: give the shardings alone, "
            "for one device SingleDeviceSharding(device)"
        )
    if rest["donation"] not in ("warn", "strict"):
        raise ArgumentError(f"donation must be 'warn' or 'strict', not {rest['donation']!r}")
    if chosen is not None and not isinstance(chosen, jax.Device):
        raise ArgumentError(
            f"device must be a jax.Device such as jax.devices()[0], not {chosen!r}; for a platform "
            "write backend='cpu'"
        )
    in_resources = read_resources(in_shardings, ins.name)
    out_resources = read_resources(outs.value, outs.name)
    refuse_unconstrained(in_resources)
    refuse_unconstrained(out_resources)
    refuse_from_gda(out_resources)
    return PjitOptions(
        in_resources=in_resources,
        out_resources=out_resources,
        donate=Selected.of(*donated, "donate"),
        keep_unused=_flag(rest, "keep_unused"),
        device=chosen,
        backend=backend,
        inline=_is_inlined(rest["inline"]),
        compiler_options=compiler_option_items(rest["compiler_options"]),
        donation=rest["donation"],
        share_binary=_flag(rest, "share_binary"),
        strict=None if rest.get("strict") is None else _flag(rest, "strict"),
        kind_of=rest.get("kind_of"),
    )


def either(first: tuple[str, Any], second: tuple[str, Any]) -> Named:
    """Return the value of an argument with two names, and the name that the user wrote.

    Without a value it is the first name.

    Raises:
        ResourceError: If both names have a value.
    """
    (name, value), (other_name, other) = first, second
    if value is not UNSPECIFIED and other is not UNSPECIFIED:
        raise ResourceError(
            f"pjit got both {name} and {other_name}, which mean the same: give {name} alone"
        )
    return Named(name, value) if other is UNSPECIFIED else Named(other_name, other)


def made_or_decorator(fun: Any, make: Callable[[Any], Any]) -> Any:
    """Return the wrapper of a function; without a function a decorator.

    Raises:
        ArgumentError: If it is no function.
    """

    def decorate(fun: Any) -> Any:
        with short_tracebacks:
            check_callable(fun)
            return make(fun)

    return decorate if fun is UNSPECIFIED else decorate(fun)


def _flag(options: Mapping[str, Any], name: str) -> bool:
    try:
        return bool(options[name])
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{name} must be True or False, not {type(options[name]).__name__}: write {name}=True"
        ) from None


def _is_inlined(inline: Any) -> bool:
    """Return True if a nested call leaves no function of its own in the module."""
    if isinstance(inline, bool):
        return inline
    kinds = getattr(jax, "Inline", None)  # absent before JAX 0.11
    if kinds is not None and isinstance(inline, kinds):
        return inline in (kinds.JAX_EARLY, kinds.JAX_LATE)
    raise ArgumentError(f"inline={inline!r} is invalid: write inline=True or inline=False")


def compiler_option_items(options: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """Return compiler options as items, sorted by name.

    Raises:
        ArgumentError: If they are no mapping from names to plain values.
    """
    if options is None:
        return ()
    if not isinstance(options, Mapping):
        raise ArgumentError(
            f"compiler_options must be a dict of names and values, not {type(options).__name__}: "
            "write compiler_options={'xla_embed_ir_in_executable': True}"
        )
    levels = getattr(jax, "CompilerEffortLevel", ())  # absent before JAX 0.11
    options = {k: v.name if isinstance(v, levels) else v for k, v in options.items()}
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float):
            raise ArgumentError(
                "compiler_options maps names to texts, bools or numbers, such as "
                f"{{'xla_embed_ir_in_executable': True}}; it holds {name!r}: {value!r}"
            )
    return option_items(options)


def index_tuple(positions: int | Sequence[int] | None, what: str) -> tuple[int, ...]:
    """Return positions as a tuple.

    Args:
        positions: The positions.
        what: Their keyword: `"static_argnums"`.

    Raises:
        ArgumentError: If they are no ints.
    """
    items = () if positions is None else _as_tuple(positions)
    for item in items:
        if not _is_int(item):
            is_name = isinstance(item, str) and item.isidentifier()
            kind = what.removesuffix("_argnums")
            raise ArgumentError(
                f"{what} must be an int or a tuple of ints such as {what}=(0, 1); it holds {item!r}"
                + (f": for a name write {kind}_argnames={item!r}" if is_name else "")
            )
    return items


def _name_tuple(names: str | Sequence[str], what: str) -> tuple[str, ...]:
    items = _as_tuple(names)
    for item in items:
        if not isinstance(item, str):
            kind = what.removesuffix("_argnames")
            raise ArgumentError(
                f"{what} must be a name or a tuple of names such as {what}=('state',); it holds "
                f"{item!r}"
                + (f": for a position write {kind}_argnums={item!r}" if _is_int(item) else "")
            )
    return items


def _as_tuple(value: Any) -> tuple[Any, ...]:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(value) if is_sequence else (value,)


def _is_int(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def check_callable(fun: Callable[..., Any]) -> None:
    """Refuse an object that can't be traced as a function.

    Raises:
        ArgumentError: If `fun` is not callable, or a generator or coroutine function.
    """
    lazy = inspect.CO_GENERATOR | inspect.CO_COROUTINE
    if type(fun) is FunctionType and not (fun.__code__.co_flags & lazy or fun.__dict__):
        return
    if isinstance(fun, staticmethod):
        raise ArgumentError(
            "pjit takes a function, not a staticmethod, whose function is "
            f"{fun.__func__.__name__}: write @staticmethod above @pjit"
        )
    if not callable(fun):
        raise ArgumentError(
            f"pjit takes a function, not {type(fun).__name__}: write pjit(fun)(args), not "
            "pjit(fun(args))"
        )
    for kind, is_lazy, advice in _LAZY_KINDS:
        if is_lazy(fun):
            raise ArgumentError(
                f"pjit can't compile the {kind} function {getattr(fun, '__name__', fun)!s}, whose "
                f"call computes nothing yet: {advice}"
            )


_LAZY_KINDS = (
    ("generator", inspect.isgeneratorfunction, "return the values in a tuple instead"),
    (
        "coroutine",
        inspect.iscoroutinefunction,
        "write def instead of async def, and await around the call",
    ),
)
