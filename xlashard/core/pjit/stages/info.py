"""Names, trees and types that all stages of a function share, and checks of calls by them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlashard._jax.lowering import aval_text
from xlashard._jax.trace.tracing import Tracer, abstractify, is_token, struct_of
from xlashard._jax.tree_definitions import find_tree_difference, outline
from xlashard.core.array.array_class.handles import KindOf
from xlashard.core.pjit.arguments import Argument, check_concrete, check_values
from xlashard.core.pjit.trace import Call
from xlashard.core.sharding import XLACompatibleSharding
from xlashard.core.sharding.sharding_texts import as_code, described
from xlashard.errors import ArgumentError, ResourceError
from xlashard.support.lazily import dataclass


@dataclass(frozen=True, eq=False)
class StageInfo:
    """Names, trees and types of a traced, lowered or compiled function.

    Attributes:
        name: The function's name.
        in_tree: The tree of `(args, kwargs)`, static arguments taken out.
        out_tree: The tree of the result.
        in_avals: The abstract values of the arguments, flat.
        out_avals: The abstract values of the results, flat.
        paths: The path of each argument: `state['params']['w']`.
        donated: For each argument, True if its buffers may be reused.
        kind_of: Returns the class of a result; None for `Array`.
        moves_arguments: True if committed arguments move to where the program takes them, as under
            `pjit(device=...)` and `AUTO`.
    """

    name: str
    in_tree: Any
    out_tree: Any
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    paths: tuple[str, ...]
    donated: tuple[bool, ...]
    kind_of: KindOf | None = None
    moves_arguments: bool = False

    @classmethod
    def of(cls, call: Call, *, moves_arguments: bool = False) -> "StageInfo":
        """Return the names, trees and types of a traced call."""
        traced = call.traced
        return cls(
            name=traced.name,
            in_tree=traced.in_tree,
            out_tree=traced.out_tree,
            in_avals=traced.in_avals,
            out_avals=tuple(traced.jaxpr.out_avals),
            paths=traced.arg_names,
            donated=call.donated,
            kind_of=call.kind_of,
            moves_arguments=moves_arguments,
        )

    def checked(self, args: tuple[Any, ...], kwargs: dict[str, Any], verb: str) -> list[Any]:
        """Return the flat arguments of a call, if structure, shapes and dtypes fit.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            verb: `"traced"` or `"compiled"`.

        Raises:
            ArgumentError: With the path of the first argument that does not fit.
        """
        values, tree = jax.tree_util.tree_flatten((args, kwargs))
        self.check_tree(tree, verb)
        check_values(values, self.paths, static=False)
        if verb == "compiled":
            self.check_concrete(values, f"call the pjit-ed function {self.name} itself there")
        text = f"was {verb} for {{}}, but was called with {{}}"
        self.check_types(values, text, self._otherwise(verb))
        return values

    def check_tree(self, tree: Any, verb: str) -> None:
        """Refuse arguments of another structure.

        Args:
            tree: The tree of `(args, kwargs)` of a call.
            verb: `"traced"` or `"compiled"`.

        Raises:
            ArgumentError: With the argument that differs.
        """
        if tree == self.in_tree:
            return
        expected, actual = _parts(self.in_tree), _parts(tree)
        if expected.keys() != actual.keys():
            raise ArgumentError(
                f"{self.name} was {verb} for arguments of the structure ({', '.join(expected)}), "
                f"but was called with ({', '.join(actual)}): leave static arguments out, which are "
                "part of the program already, and pass the others by position or name as before"
            )
        part = next(part for part in expected if expected[part] != actual[part])
        path, before, after = find_tree_difference(part, expected[part], actual[part])
        raise ArgumentError(
            f"{self.name} was {verb} for {path} with {before}, but was called with {after}: "
            f"{self._otherwise(verb)}"
        )

    def _otherwise(self, verb: str) -> str:
        """Return advice for arguments of other types."""
        again = {"traced": "trace it", "compiled": "lower and compile it"}[verb]
        return f"{again} for that too, or call the pjit-ed function {self.name} itself"

    def check_concrete(self, values: Sequence[Any], instead: str) -> None:
        """Refuse arguments without a value, on which no compiled program can run.

        Args:
            values: The arguments.
            instead: The advice for a tracer.

        Raises:
            ArgumentError: With the path of the first such argument.
        """
        for value, path in zip(values, self.paths, strict=True):
            if isinstance(value, Tracer):
                raise ArgumentError(
                    f"{path} is a tracer: a compiled program can't be part of another one: "
                    f"{instead}"
                )
        check_concrete(values, self.paths)

    def check_types(self, values: Sequence[Any], text: str, otherwise: str) -> None:
        """Refuse arguments of another shape or dtype.

        Args:
            values: The arguments.
            text: The error, with places for the expected and the actual type.
            otherwise: The advice if a cast does not help.

        Raises:
            ArgumentError: With the path of the first such argument.
        """
        for value, path, aval in zip(values, self.paths, self.in_avals, strict=True):
            check_type(value, path, aval, f"{self.name} {text}", otherwise)


def _parts(in_tree: Any) -> dict[str, Any]:
    """Return the tree of each argument."""
    args, kwargs = in_tree.children()
    names = kwargs.node_data()[1]
    parts = {f"args[{i}]": tree for i, tree in enumerate(args.children())}
    return parts | {f"{n}=": t for n, t in zip(names, kwargs.children(), strict=True)}


class Stage:
    """Properties that all stages of a function share."""

    _info: StageInfo
    _known_out_shardings: Sequence[Any] = ()

    def __repr__(self) -> str:
        info = self._info
        return f"{type(self).__name__}({info.name}: {info.in_tree} -> {info.out_tree})"

    def __getattr__(self, name: str) -> Any:
        # The stages are instances of JAX's classes, whose private slots stay empty.
        kind = type(self).__name__
        raise AttributeError(
            f"xlashard's {kind} has no {name!r}: it answers the public interface of "
            f"jax.stages.{kind}; for what only JAX's own has write jax.jit(f), which takes a "
            "pjit-ed function"
        )

    @property
    def fun_name(self) -> str:
        """Return the function's name."""
        return self._info.name

    @property
    def in_tree(self) -> Any:
        """Return the tree of `(args, kwargs)`, static arguments taken out."""
        return self._info.in_tree

    @property
    def out_tree(self) -> Any:
        """Return the tree of the result."""
        return self._info.out_tree

    @property
    def in_avals(self) -> Any:
        """Return the abstract values of `(args, kwargs)`, as their tree."""
        return outline(self._info.in_tree, self._info.in_avals)

    @property
    def out_avals(self) -> Any:
        """Return the abstract values of the result, as its tree."""
        return outline(self._info.out_tree, self._info.out_avals)

    @property
    def args_info(self) -> Any:
        """Return for each argument its abstract value and donation, as their tree."""
        info = self._info
        infos = list(map(jax.stages.ArgInfo, info.in_avals, info.donated))
        return outline(info.in_tree, infos)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Return the positions of donated leaves, counted over all arguments."""
        return tuple(i for i, donated in enumerate(self._info.donated) if donated)

    @property
    def out_info(self) -> Any:
        """Return the result's shapes, dtypes and known shardings, as `jax.ShapeDtypeStruct`s."""
        return outline(self._info.out_tree, self._list_results())

    def _list_results(self) -> list[Any]:
        """Return shape, dtype and known sharding of each result."""
        avals = self._info.out_avals
        return list(map(struct, avals, self._known_out_shardings or (None,) * len(avals)))


def struct(aval: Any, sharding: Any = None) -> Any:
    """Return the shape, dtype and place of an abstract value; that of a token as it is."""
    return aval if is_token(aval) else struct_of(aval, sharding)


def checked_dialect(dialect: object) -> str:
    """Return the dialect of a module's text.

    Raises:
        ArgumentError: If it is unknown.
    """
    if isinstance(dialect, str) and dialect in ("stablehlo", "hlo"):
        return dialect
    raise ArgumentError(f"dialect must be 'hlo' or 'stablehlo', not {dialect!r}")


def check_type(value: Any, path: str, aval: Any, text: str, otherwise: str) -> None:
    """Refuse a value of another shape or dtype.

    Args:
        value: The value.
        path: Its path.
        aval: The expected abstract value.
        text: The error, with places for the expected type with its path, and the actual type.
        otherwise: The advice if a cast does not help.

    Raises:
        ArgumentError: If its type differs.
    """
    actual = abstractify(value)
    if is_token(actual) or is_token(aval):
        if is_token(actual) and is_token(aval):
            return
        hint = otherwise
    elif (actual.shape, actual.dtype) == (aval.shape, aval.dtype):
        return
    else:
        hint = _type_hint(actual, aval, otherwise)
    expected = f"{path} as {aval_text(aval)}"
    raise ArgumentError(f"{text.format(expected, aval_text(actual))}: {hint}")


def _type_hint(actual: Any, expected: Any, otherwise: str) -> str:
    """Return advice for an array of another type than a program takes.

    Args:
        actual: The abstract value of the array.
        expected: The abstract value of the program's argument.
        otherwise: The advice if no cast of the array helps.
    """
    if actual.shape == expected.shape and np.can_cast(actual.dtype, expected.dtype, "same_kind"):
        return f"pass x.astype({expected.dtype.name!r})"
    return otherwise


def check_place(argument: Argument, expected: XLACompatibleSharding, text: str) -> None:
    """Refuse an array that is committed to another sharding.

    Args:
        argument: The array.
        expected: Its expected sharding.
        text: The beginning of the error, with a place for the array.

    Raises:
        ResourceError: If it is committed to other devices or tiles.
    """
    actual = argument.sharding
    if actual is None or not argument.committed:
        return
    if expected.is_equivalent_to(actual, argument.aval.ndim):
        return
    raise ResourceError(
        f"{text.format(argument.describe())} as {described(expected)}, but it is committed "
        f"as {described(actual)}: move it first with device_put(x, {as_code(expected)})",
        path=argument.path,
    )
