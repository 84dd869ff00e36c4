"""`jax.util`."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from xlashard._jax.compat.legacy_api import util
from xlashard.legacy.modules.entry import Entry, members

HashableFunction = util.HashableFunction
cache = util.cache
prod = math.prod
safe_map = util.safe_map
safe_zip = util.safe_zip
split_list = util.split_list
subvals = util.subvals
toposort = util.toposort
unzip2 = util.unzip2
wrap_name = util.wrap_name
wraps = util.wraps


def as_hashable_function(closure: Any) -> Any:
    """Return a decorator that makes functions with equal keys equal.

    Args:
        closure: The key.
    """
    return lambda f: HashableFunction(f, closure)


def split_dict(dct: Mapping[Any, Any], names: Iterable[Any]) -> list[Any]:
    """Return the values of all keys of a mapping, in a given order.

    Args:
        dct: The mapping.
        names: The keys.

    Raises:
        KeyError: A key is missing in `dct` or in `names`.
    """
    rest = dict(dct)
    values = [rest.pop(name) for name in names]
    if rest:
        raise KeyError(next(iter(rest)))  # no-catalogue: the era's own error: the key alone
    return values


def split_merge(predicate: Any, xs: Iterable[Any]) -> Any:
    """Partition a sequence, and return both parts and a function that merges such parts.

    Args:
        predicate: True for elements of the first part.
        xs: The elements.
    """
    xs = list(xs)
    chosen = [bool(predicate(x)) for x in xs]
    yes = [x for x, c in zip(xs, chosen, strict=True) if c]
    no = [x for x, c in zip(xs, chosen, strict=True) if not c]
    return yes, no, functools.partial(_merged, chosen)


def _merged(chosen: list[bool], new_yes: Iterable[Any], new_no: Iterable[Any]) -> list[Any]:
    yes, no = iter(new_yes), iter(new_no)
    return [next(yes if c else no) for c in chosen]


ENTRIES: tuple[Entry, ...] = (
    Entry("jax.util", "0.8.0", "works", __name__, "import functools"),
    *members(
        "jax.util",
        "0.7.0",
        __name__,
        {
            "HashableFunction": "functools.partial",
            "as_hashable_function": "functools.partial",
            "cache": "functools.lru_cache",
            "safe_map": "[f(x, y) for x, y in zip(xs, ys, strict=True)]",
            "safe_zip": "zip(xs, ys, strict=True)",
            "split_dict": "[mapping[name] for name in names]",
            "split_list": "xs[:n], xs[n:]",
            "split_merge": "[x for x in xs if predicate(x)]",
            "subvals": "[new.get(n, x) for n, x in enumerate(xs)]",
            "toposort": "graphlib.TopologicalSorter",
            "unzip2": "tuple(zip(*pairs, strict=True))",
            "wrap_name": "f'{transform}({name})'",
            "wraps": "functools.wraps",
        },
    ),
    *members("jax._src.util", "0.4.14", __name__, {"prod": "math.prod"}),
)
