"""Rules of a layout: regular expressions over paths, and mesh axes of logical axes."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xlashard.sharding import PartitionSpec

_KEYS = re.compile(r"^[^\[.]+|\[[^\]]*\]|\.\w+")


def path_rules(specs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    r"""Return rules of which the first that `re.search` finds in a path has its spec.

    They are as few as a greedy choice gives: each rule is the pattern that covers most of the
    remaining paths and is right for all that it matches.

    Args:
        specs: Spec of each path, as text.

    Example:
        >>> path_rules({"w[0]['up']": "P('x')", "w[1]['up']": "P('x')", "w[0]['b']": "P()"})
        (("\\['up'\\]$", "P('x')"), ('', 'P()'))
    """
    rules: list[tuple[str, str]] = []
    remaining = dict(specs)
    patterns = {path: _patterns(path) for path in specs}
    while len(set(remaining.values())) > 1:
        # The last rule takes what is left: the replicated values, if there are any.
        usual, _ = Counter(remaining.values()).most_common(1)[0]
        last = "P()" if "P()" in remaining.values() else usual
        counts = Counter(p for path, s in remaining.items() if s != last for p in patterns[path])
        for pattern in sorted(counts, key=lambda p: (-counts[p], len(p), p)):
            matching = {path for path in remaining if re.search(pattern, path)}
            specs_there = {remaining[path] for path in matching}
            if len(specs_there) == 1:
                rules.append((pattern, specs_there.pop()))
                remaining = {p: s for p, s in remaining.items() if p not in matching}
                break
    return (*rules, *(("", spec) for spec in set(remaining.values())))


def _patterns(path: str) -> set[str]:
    """Return patterns that match a path: its ends and its beginnings, with any layer's number."""
    keys = _KEYS.findall(path)
    if "".join(keys) != path:
        return {f"^{re.escape(path)}$"}
    escaped = [r"\[\d+\]" if re.fullmatch(r"\[\d+\]", key) else re.escape(key) for key in keys]
    ends = ["".join(escaped[n:]) + "$" for n in range(1, len(keys))]
    starts = ["^" + "".join(escaped[:n]) for n in range(1, len(keys))]
    both = [f"^{a}.*{''.join(escaped[n:])}$" for n in range(2, len(keys)) for a in escaped[:1]]
    return {*ends, *starts, *both, f"^{''.join(escaped)}$", f"^{re.escape(path)}$"}


def logical_axes(args: Any) -> dict[str, tuple[str | None, ...]]:
    """Return the names of the dimensions of arguments that carry them, by path below the root.

    Flax's boxes (`nn.Partitioned`) and variables name the dimensions of the array inside.

    Args:
        args: A pytree.
    """
    boxes, _ = jax.tree_util.tree_flatten_with_path(args, is_leaf=lambda v: bool(_names(v)))
    named = ((path, box) for path, box in boxes if _names(box))
    found: dict[str, tuple[str | None, ...]] = {}
    for path, box in named:
        for inner, _ in jax.tree_util.tree_flatten_with_path(box)[0]:
            found[jax.tree_util.keystr((*path, *inner))] = _names(box)
    return found


def _names(value: Any) -> tuple[Any, ...]:
    """Return the names of the dimensions of a box; empty for other values."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct | tuple | list | dict):
        return ()
    metadata = value.get_metadata() if hasattr(value, "get_metadata") else {}
    names = getattr(value, "names", None) or metadata.get("out_sharding")
    names = names or metadata.get("sharding_names")
    if not isinstance(names, tuple) or not any(names):
        return ()
    return names if all(name is None or isinstance(name, str) for name in names) else ()


def axis_rules(
    values: Sequence[tuple[tuple[str | None, ...], PartitionSpec, int]],
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the mesh axes of each logical axis: those that shard most of its bytes.

    Args:
        values: Names of the dimensions, spec and bytes of each value.
    """
    weights: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for names, spec, nbytes in values:
        dims = [*spec, *(None,) * (len(names) - len(spec))]
        for name, axes in zip(names, dims, strict=False):
            if name is not None:
                listed = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
                weights[name][tuple(map(str, listed))] += nbytes
    return tuple((name, found.most_common(1)[0][0]) for name, found in sorted(weights.items()))
