"""`jax.util`, `jax.tree_util`, and the tree functions of `jax`."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from xlashard._jax.legacy_api import util
from xlashard.legacy.modules.entry import EntryTable, differs, works

prod = math.prod


def as_hashable_function(closure: Any) -> Any:
    """Return a decorator that makes functions with equal keys equal.

    Args:
        closure: The key.
    """
    return lambda f: util.HashableFunction(f, closure)


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


def tree_multimap(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Map a function over the leaves of several pytrees.

    Args:
        f: The function.
        tree: The first pytree, which determines the structure.
        *rest: The other pytrees.
        is_leaf: Returns True for nodes of the first pytree to treat as leaves.

    Returns:
        A tree of the results.
    """
    return jax.tree.map(f, tree, *rest, is_leaf=is_leaf)


def build_tree(treedef: Any, xs: Any) -> Any:
    """Return the pytree of a structure and a nested sequence of its leaves.

    Args:
        treedef: The structure.
        xs: The leaves, nested like the structure.
    """
    return treedef.from_iterable_tree(xs)


class GetitemKeyPathEntry(NamedTuple):
    """Key path entry of the child `node[key]`.

    Example:
        >>> GetitemKeyPathEntry("w").pprint()
        "['w']"
    """

    key: Any

    def pprint(self) -> str:
        """Return the entry as code."""
        return f"[{self.key!r}]"


class AttributeKeyPathEntry(NamedTuple):
    """Key path entry of the child `node.key`.

    Example:
        >>> AttributeKeyPathEntry("weight").pprint()
        '.weight'
    """

    key: str

    def pprint(self) -> str:
        """Return the entry as code."""
        return f".{self.key}"


KEY_PATHS: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""The registered handlers, by node type."""


def register_keypaths(ty: type, handler: Callable[[Any], Sequence[Any]]) -> None:
    """Register the key path entries of a node type.

    JAX registers key paths together with the type, so its messages keep using child numbers.

    Args:
        ty: The type of the nodes.
        handler: Returns for a node one key path entry per child.
    """
    KEY_PATHS[ty] = handler


_UTIL = "xlashard._jax.legacy_api:util."

ENTRIES: EntryTable = {
    "jax": {
        "tree_flatten": works("0.6.0", "jax.tree.flatten", "jax.tree_util"),
        "tree_leaves": works("0.6.0", "jax.tree.leaves", "jax.tree_util"),
        "tree_map": works("0.6.0", "jax.tree.map", "jax.tree_util"),
        "tree_structure": works("0.6.0", "jax.tree.structure", "jax.tree_util"),
        "tree_transpose": works("0.6.0", "jax.tree.transpose", "jax.tree_util"),
        "tree_unflatten": works("0.6.0", "jax.tree.unflatten", "jax.tree_util"),
        "treedef_is_leaf": works("0.6.0", "jax.tree_util.treedef_is_leaf"),
        "tree_multimap": works("0.3.16", "jax.tree.map", __name__),
    },
    "jax.tree_util": {
        "tree_multimap": works("0.3.16", "jax.tree.map", __name__),
        "build_tree": works("0.7.0", "jax.tree.unflatten", __name__),
        "AttributeKeyPathEntry": works("0.4.26", "jax.tree_util.GetAttrKey", __name__),
        "GetitemKeyPathEntry": works("0.4.26", "jax.tree_util.DictKey", __name__),
        "register_keypaths": differs(
            "0.4.26",
            "jax.tree_util.register_pytree_with_keys",
            __name__,
            "JAX's messages use the keys only if they are registered with today's function.",
        ),
    },
    "jax.util": {
        "": works("0.8.0", "import functools", __name__),
        "as_hashable_function": works("0.7.0", "functools.partial", __name__),
        "split_dict": works("0.7.0", "[mapping[name] for name in names]", __name__),
        "split_merge": works("0.7.0", "[x for x in xs if predicate(x)]", __name__),
        "HashableFunction": works("0.7.0", "functools.partial", _UTIL),
        "cache": works("0.7.0", "functools.lru_cache", _UTIL),
        "safe_map": works("0.7.0", "[f(x, y) for x, y in zip(xs, ys, strict=True)]", _UTIL),
        "safe_zip": works("0.7.0", "zip(xs, ys, strict=True)", _UTIL),
        "split_list": works("0.7.0", "xs[:n], xs[n:]", _UTIL),
        "subvals": works("0.7.0", "[new.get(n, x) for n, x in enumerate(xs)]", _UTIL),
        "toposort": works("0.7.0", "graphlib.TopologicalSorter", _UTIL),
        "unzip2": works("0.7.0", "tuple(zip(*pairs, strict=True))", _UTIL),
        "wrap_name": works("0.7.0", "f'{transform}({name})'", _UTIL),
        "wraps": works("0.7.0", "functools.wraps", _UTIL),
    },
    "jax._src.util": {"prod": works("0.4.14", "math.prod")},
}
