"""Keyword arguments that functions of JAX have lost, and today's equivalents; without JAX.

The installer replaces each function by one that accepts them, the report lists their uses, and
`docs/reference/legacy_names.md` has a row for each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from xlashard.legacy.entries.entry import Entry, works

type Rewriting = Mapping[str, Any]
"""Today's keyword arguments and their values."""


@dataclass(frozen=True)
class RemovedKeyword:
    """Keyword argument that a function has lost.

    Attributes:
        gone: The release of JAX that removed it.
        code: Today's code; `{}` is the name of the function.
        to: Today's keyword of the same value, or its position; None for neither.
        values: Today's keyword arguments for each value that can be given back; without `to`, and
            without any values, every value had no effect and is dropped.
        note: The difference, or why other values are refused.
    """

    gone: str
    code: str
    to: str | int | None = None
    values: Mapping[Any, Rewriting] = field(default_factory=dict)
    note: str = ""

    def rewrite(self, value: Any) -> Rewriting | None:
        """Return today's keyword arguments for a value; None if it has no equivalent.

        Args:
            value: The value that the program passes.
        """
        if self.to is not None:
            return {str(self.to): value}
        if not self.values:
            return {}
        # An empty `named_shape` is the same as none.
        key = None if isinstance(value, dict | frozenset) and not value else value
        try:
            return self.values.get(key)
        except TypeError:  # unhashable
            return None

    def describe(self, function: str, name: str) -> Entry:
        """Return the entry for reports and for the documentation.

        Args:
            function: The full name of the function.
            name: The keyword.
        """
        entry = works(self.gone, self.code.format(function))
        entry = replace(entry, name=f"{function}({name}=)")
        return entry.but(self.note) if self.note else entry


@dataclass(frozen=True)
class EarlierSignature:
    """Arguments that a function accepted before.

    Attributes:
        keywords: The keywords that it has lost, by name.
        positional: Names of the parameters that were positional after those that still are.
        after: The number of parameters that are positional today.
        gone: The release since which `positional` are keywords.
    """

    keywords: Mapping[str, RemovedKeyword]
    positional: tuple[str, ...] = ()
    after: int = 0
    gone: str = ""

    def is_used(self, count: int, keywords: Mapping[str, Any]) -> bool:
        """Return True if a call has an argument that today's function does not take.

        Args:
            count: The number of its positional arguments.
            keywords: Its keyword arguments.
        """
        has_removed = not self.keywords.keys().isdisjoint(keywords)
        return has_removed or (count > self.after and bool(self.positional))

    def list_positional(self, count: int) -> tuple[str, ...]:
        """Return the names of positional arguments that are keywords today.

        Args:
            count: The number of positional arguments of a call.
        """
        return self.positional[: max(count - self.after, 0)]


def _rename(gone: str, to: str, code: str) -> RemovedKeyword:
    return RemovedKeyword(gone, code, to)


def _by_position(gone: str, code: str, *names: str) -> EarlierSignature:
    return EarlierSignature(
        {name: RemovedKeyword(gone, code, number) for number, name in enumerate(names)}
    )


_OUT = RemovedKeyword("0.4.28", "{}(...)", values={None: {}}, note="None alone is accepted")
_INTERPOLATION = EarlierSignature(
    {"interpolation": _rename("0.9.0", "method", "{}(x, q, method='lower')")}
)
_SORTED = EarlierSignature(
    {"kind": RemovedKeyword("0.4.28", "{}(x, stable=True)")}, ("kind",), 2, "0.4.28"
)
_METHOD_SORTED = replace(_SORTED, after=1)
_SOFTMAX = EarlierSignature(
    {"initial": RemovedKeyword("0.6.0", "{}(x, where=mask)")}, ("initial",), 3, "0.6.0"
)
_CHECKPOINTED = EarlierSignature(
    {
        "concrete": RemovedKeyword(
            "0.11.0",
            "{}(f, static_argnums=(1,))",
            values={False: {}, None: {}},
            note="values that Python branches on are static arguments, so True is refused",
        )
    }
)
_GENNORM = EarlierSignature({"p": _rename("0.4.28", "beta", "{}(x, beta)")})
_OUT_SHARDING = EarlierSignature(
    {"sharding": _rename("0.6.0", "out_sharding", "{}(x, ..., out_sharding=sharding)")}
)
_NAMED_SHAPE = RemovedKeyword(
    "0.4.34",
    "{}(shape, dtype)",
    values={None: {}},
    note="types lost their named axes with xmap, so axes are refused",
)
_VECTORIZED = EarlierSignature(
    {
        "vectorized": RemovedKeyword(
            "0.10.0",
            "{}(..., vmap_method='sequential')",
            values={
                True: {"vmap_method": "legacy_vectorized"},
                False: {"vmap_method": "sequential"},
                None: {},
            },
        )
    }
)

_UNARY = (
    *("abs", "absolute", "arccosh", "conj", "conjugate", "deg2rad", "degrees", "exp2", "frexp"),
    *("isfinite", "isinf", "isnan", "isneginf", "isposinf", "log10", "log2", "modf", "positive"),
    *("rad2deg", "radians", "reciprocal", "rint", "sign", "signbit", "sinc", "square"),
)
_BINARY = (
    *("copysign", "divide", "divmod", "floor_divide", "fmod", "heaviside", "hypot", "ldexp"),
    *("logaddexp", "logaddexp2", "mod", "power", "remainder", "right_shift", "true_divide"),
)

SIGNATURES: Mapping[str, EarlierSignature] = {
    "jax.numpy.clip": EarlierSignature(
        {
            "a": RemovedKeyword("0.10.0", "jax.numpy.clip(x, 0, 1)", 0),
            "a_min": _rename("0.10.0", "min", "jax.numpy.clip(x, min=0)"),
            "a_max": _rename("0.10.0", "max", "jax.numpy.clip(x, max=1)"),
            "out": _OUT,
        }
    ),
    "jax.Array.clip": EarlierSignature(
        {
            "a_min": _rename("0.10.0", "min", "x.clip(min=0)"),
            "a_max": _rename("0.10.0", "max", "x.clip(max=1)"),
            "out": _OUT,
        }
    ),
    "jax.numpy.sort": _SORTED,
    "jax.numpy.argsort": _SORTED,
    "jax.Array.sort": _METHOD_SORTED,
    "jax.Array.argsort": _METHOD_SORTED,
    **dict.fromkeys(
        [
            f"jax.numpy.{name}"
            for name in ("quantile", "percentile", "nanquantile", "nanpercentile")
        ],
        _INTERPOLATION,
    ),
    "jax.numpy.where": _by_position(
        "0.4.28", "jax.numpy.where(condition, x, y)", "condition", "x", "y"
    ),
    "jax.numpy.reshape": EarlierSignature(
        {"newshape": _rename("0.6.0", "shape", "jax.numpy.reshape(x, shape=(8,))")}
    ),
    "jax.numpy.array": EarlierSignature({}, ("copy", "order", "ndmin"), 2, "0.11.0"),
    "jax.numpy.from_dlpack": _by_position("0.4.28", "jax.numpy.from_dlpack(x)", "x"),
    **{f"jax.numpy.{name}": _by_position("0.4.1", f"jax.numpy.{name}(x)", "x") for name in _UNARY},
    **{
        f"jax.numpy.{name}": _by_position("0.4.1", f"jax.numpy.{name}(x, y)", "x1", "x2")
        for name in _BINARY
    },
    **{
        f"jax.numpy.{name}": _by_position("0.4.1", f"jax.numpy.{name}(x)", "val")
        for name in ("real", "imag")
    },
    "jax.nn.softmax": _SOFTMAX,
    "jax.nn.log_softmax": _SOFTMAX,
    "jax.checkpoint": _CHECKPOINTED,
    "jax.remat": _CHECKPOINTED,
    "jax.pmap": EarlierSignature(
        {
            "global_arg_shapes": RemovedKeyword(
                "0.10.0",
                "jax.pmap(f)",
                values={None: {}},
                note="None alone is accepted: the shapes of all processes are equal",
            )
        }
    ),
    "jax.scipy.linalg.solve": EarlierSignature(
        {
            "sym_pos": RemovedKeyword(
                "0.4.24",
                "jax.scipy.linalg.solve(a, b, assume_a='pos')",
                values={False: {}, True: {"assume_a": "pos"}},
                note="as the third argument, without its keyword, it is today's `lower`",
            )
        }
    ),
    "jax.scipy.special.betaln": EarlierSignature(
        {
            name: _rename("0.4.1", today, "jax.scipy.special.betaln(a, b)")
            for name, today in (("x", "a"), ("y", "b"))
        }
    ),
    "jax.scipy.special.exp1": EarlierSignature(
        {"module": RemovedKeyword("0.4.28", "jax.scipy.special.exp1(x)")}
    ),
    **dict.fromkeys(
        [f"jax.scipy.stats.gennorm.{name}" for name in ("cdf", "logpdf", "pdf")], _GENNORM
    ),
    "jax.lax.dot": EarlierSignature({}, ("precision", "preferred_element_type"), 2, "0.7.2"),
    "jax.lax.random_gamma_grad": _by_position(
        "0.11.0", "jax.lax.random_gamma_grad(a, x)", "a", "x"
    ),
    "jax.lax.with_sharding_constraint": EarlierSignature(
        {
            "axis_resources": _rename(
                "0.4.13", "shardings", "jax.lax.with_sharding_constraint(x, shardings)"
            )
        }
    ),
    **dict.fromkeys(
        [
            f"jax.lax.{name}"
            for name in ("reshape", "broadcast", "broadcast_in_dim", "broadcasted_iota")
        ],
        _OUT_SHARDING,
    ),
    "jax.make_mesh": EarlierSignature(
        {"axis_shapes": _rename("0.11.0", "axis_sizes", "jax.make_mesh(axis_sizes, axis_names)")}
    ),
    "jax.pure_callback": _VECTORIZED,
    "jax.ffi.ffi_call": _VECTORIZED,
    "jax.dtypes.canonicalize_dtype": EarlierSignature(
        {
            "allow_opaque_dtype": _rename(
                "0.4.24",
                "allow_extended_dtype",
                "jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)",
            )
        }
    ),
    "jax.experimental.checkify.checkify": EarlierSignature(
        {"fun": _rename("0.4.13", "f", "jax.experimental.checkify.checkify(f)")}
    ),
    "jax.ShapeDtypeStruct.__init__": EarlierSignature(
        {"named_shape": _NAMED_SHAPE}, ("named_shape", "sharding"), 2, "0.4.34"
    ),
    "jax.core.ShapedArray.__new__": EarlierSignature({"named_shape": _NAMED_SHAPE}),
}
"""The earlier signatures, by the full names of functions, methods and constructors."""


@lru_cache(maxsize=1)
def keyword_entries() -> Mapping[str, Mapping[str, Entry]]:
    """Return the entries of removed arguments, by the name of the function and the argument.

    Example:
        >>> keyword_entries()["jax.numpy.clip"]["a_min"].today
        'jax.numpy.clip(x, min=0)'
        >>> keyword_entries()["jax.lax.dot"]["precision"].name
        'jax.lax.dot(..., precision)'
    """
    return {name: _describe(name, signature) for name, signature in SIGNATURES.items()}


def _describe(function: str, signature: EarlierSignature) -> Mapping[str, Entry]:
    shown = function.removesuffix(".__init__").removesuffix(".__new__")
    positional = {
        name: works(signature.gone, f"{shown}(..., {name}={name})") for name in signature.positional
    }
    return {
        **{name: replace(each, name=f"{shown}(..., {name})") for name, each in positional.items()},
        **{name: keyword.describe(shown, name) for name, keyword in signature.keywords.items()},
    }


def list_keyword_entries() -> Iterator[Entry]:
    """Yield all entries of removed arguments."""
    for entries in keyword_entries().values():
        yield from entries.values()
