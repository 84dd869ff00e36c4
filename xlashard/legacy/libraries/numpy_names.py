"""Names that NumPy 1.24 and 2.0 removed, and that have no equal there today."""

import ast
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

NINF = -np.inf
"""Negative infinity."""

PZERO, NZERO = 0.0, -0.0
"""Positive and negative zero."""

safe_eval = ast.literal_eval
loads = pickle.loads

_KINDS = {"int": "i", "uint": "u", "float": "f", "complex": "c"}
# One type per kind and size: `longlong` is `int64` on most platforms.
_SIZED = {
    (np.dtype(code).kind, np.dtype(code).itemsize): np.dtype(code).type
    for code in "qlihbQLIHBefdgFDG"
}

sctypes = {
    **{
        name: [_SIZED[kind, size] for kind, size in sorted(_SIZED) if kind == letter]
        for name, letter in _KINDS.items()
    },
    "others": [bool, object, bytes, str, np.void],
}
"""The scalar types of each kind, from the smallest to the largest."""

nbytes = {
    kind: np.dtype(kind).itemsize for kind in np.sctypeDict.values() if isinstance(kind, type)
}
"""The bytes of an element of each scalar type."""

_RANKS = "?bBhHiIlLqQefdgFDGO"
"""The type codes that `find_common_type` tried, from the lowest to the highest."""

_KIND_ORDER = "buifcSUVOMm"


class _Cast(dict[Any, Any]):
    """Conversions to a scalar type, by the type or its name: `np.cast["float32"](x)`."""

    def __missing__(self, dtype: Any) -> Any:
        return lambda x: np.asarray(x).astype(dtype)


cast = _Cast()


def in1d(
    ar1: Any,
    ar2: Any,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    kind: Any = None,
) -> np.ndarray:
    """Return for each element of the flattened `ar1` whether `ar2` contains it.

    Args:
        ar1: The elements.
        ar2: The values to look for.
        assume_unique: True if neither has an element twice.
        invert: True to return whether it does not.
        kind: The algorithm, as in `np.isin`.
    """
    return np.isin(np.ravel(ar1), ar2, assume_unique, invert, kind=kind)


def asfarray(a: Any, dtype: Any = np.float64) -> np.ndarray:
    """Return an array of a floating-point or complex type.

    Args:
        a: The values.
        dtype: The type; any other than an inexact one is read as `float64`.
    """
    return np.asarray(a, dtype if np.issubdtype(dtype, np.inexact) else np.float64)


def asscalar(a: Any) -> Any:
    """Return the only element of an array as a scalar of Python."""
    return a.item()


def alen(a: Any) -> int:
    """Return the length of the first dimension, which is 1 for a scalar."""
    return len(np.atleast_1d(a))


def msort(a: Any) -> np.ndarray:
    """Return a copy, sorted along the first dimension."""
    return np.sort(a, axis=0)


def issubclass_(arg1: Any, arg2: Any) -> bool:
    """Return `issubclass(arg1, arg2)`, and False where one is no class."""
    try:
        return issubclass(arg1, arg2)
    except TypeError:
        return False


def obj2sctype(rep: Any, default: Any = None) -> Any:
    """Return the scalar type of an array, a dtype, a type or its name.

    Args:
        rep: The object.
        default: The value for an object without a scalar type.
    """
    if isinstance(rep, type) and issubclass(rep, np.generic):
        return rep
    if isinstance(rep, np.ndarray):
        return rep.dtype.type
    try:
        return np.dtype(rep).type
    except (TypeError, ValueError):
        return default


def issctype(rep: Any) -> bool:
    """Return whether an object is a scalar type or a dtype of one, other than `object_`."""
    if not isinstance(rep, type | np.dtype):
        return False
    return obj2sctype(rep) not in (None, np.object_)


def issubsctype(arg1: Any, arg2: Any) -> bool:
    """Return whether the scalar type of one object is a subclass of another's."""
    return issubclass(obj2sctype(arg1), obj2sctype(arg2))


def sctype2char(sctype: Any) -> str:
    """Return the character of a scalar type: `f` for `float32`.

    Raises:
        ValueError: The object has no scalar type.
    """
    kind = obj2sctype(sctype)
    if kind is None:
        raise ValueError(  # no-catalogue: the class that NumPy raised
            f"sctype2char: sctype {sctype!r} is no type of NumPy: write a dtype, such as 'float32'"
        )
    return np.dtype(kind).char


def maximum_sctype(t: Any) -> Any:
    """Return the largest scalar type of the same kind."""
    kind = np.dtype(obj2sctype(t)).kind
    largest = [types[-1] for name, types in sctypes.items() if _KINDS.get(name) == kind]
    return largest[0] if largest else obj2sctype(t)


def find_common_type(array_types: Sequence[Any], scalar_types: Sequence[Any]) -> Any:
    """Return the type of an operation on arrays and scalars, by the rules before NumPy 2.

    Scalars count only if their kind is above those of all arrays.

    Args:
        array_types: The types of the arrays.
        scalar_types: The types of the scalars.

    Returns:
        The type; None if the types have none in common.
    """
    arrays = _largest([np.dtype(each) for each in array_types])
    scalars = _largest([np.dtype(each) for each in scalar_types])
    if arrays is None or scalars is None:
        return scalars if arrays is None else arrays
    order = _KIND_ORDER.index
    if order(scalars.kind) <= order(arrays.kind):
        return arrays
    if np.can_cast(arrays, scalars):
        return scalars
    return _largest([scalars, arrays], _RANKS.find(scalars.char))


def _largest(dtypes: Sequence[np.dtype], first: int = 0) -> np.dtype | None:
    """Return the lowest type to which all can be cast; None for no types.

    Args:
        dtypes: The types.
        first: The position in `_RANKS` of the lowest result; negative for no result.
    """
    if len(dtypes) < 2 or first < 0:
        return dtypes[0] if dtypes and first >= 0 else None
    return next(
        np.dtype(code) for code in _RANKS[first:] if all(np.can_cast(each, code) for each in dtypes)
    )
