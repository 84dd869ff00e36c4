"""Resources: the shardings that users request, as prefixes of trees and as code."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime import coordination
from xlashard._jax.runtime.shardings import UNSPECIFIED as JAX_UNSPECIFIED
from xlashard._jax.runtime.shardings import (
    Format,
    JaxSharding,
    UnspecifiedValue,
    is_compile_only,
)
from xlashard._jax.tree_definitions import make_node, outline, split_leaves
from xlashard.core.array.placement.tree_prefix import PrefixMismatch, TreeNode, spread_prefix
from xlashard.core.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    from_jax,
)
from xlashard.core.sharding.replicated import names_devices
from xlashard.core.sharding.sharding_texts import as_code, described
from xlashard.errors import ResourceError, ResourceTypeError, counted
from xlashard.support.lazily import dataclass

UNSPECIFIED = JAX_UNSPECIFIED
"""Leave an argument where it is, and a result where the partitioner puts it."""


@dataclass(frozen=True)
class Auto:
    """Marker of a sharding that a search over the function's program chooses; write `AUTO`.

    The first call with arguments of some types takes seconds to minutes: it compiles the best few
    layouts for the mesh. Arrays that are placed otherwise are resharded. Inside another program,
    that program's layout decides.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import AUTO, Mesh, pjit
        >>> with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        ...     pjit(lambda x: x * 2, in_shardings=AUTO)(np.ones(2, np.float32))
        Array([2., 2.], dtype=float32)
    """

    def __repr__(self) -> str:
        return "AUTO"


AUTO = Auto()


@dataclass(frozen=True)
class FromGda:
    """Marker that takes the sharding of the array that is passed; write `FROM_GDA`.

    Example:
        >>> import numpy as np
        >>> from xlashard import FROM_GDA, device_put, pjit
        >>> pjit(lambda x: x * 2, in_shardings=FROM_GDA)(device_put(np.ones(2, np.float32)))
        Array([2., 2.], dtype=float32)
    """

    def __repr__(self) -> str:
        return "FROM_GDA"


FROM_GDA = FromGda()


@dataclass(frozen=True)
class Resource:
    """One leaf of a tree of resources.

    Attributes:
        value: The value that the user wrote: None, a PartitionSpec, a Sharding, `AUTO`, `FROM_GDA`
            or `UNSPECIFIED`.
        layout: The layout that came with it in a `Format`, or None.
    """

    value: Any
    layout: Any = None

    @property
    def names_nothing(self) -> bool:
        """Return True if neither a sharding nor a layout is requested."""
        return self.value is UNSPECIFIED and self.layout is None

    def __reduce__(self) -> tuple[object, ...]:
        if isinstance(self.value, UnspecifiedValue):
            return _unspecified_with, (self.layout,)
        return Resource, (self.value, self.layout)


def _unspecified_with(layout: Any) -> Resource:
    return Resource(UNSPECIFIED, layout)


@dataclass(frozen=True)
class ResourceTree:
    """A checked tree of resources.

    Attributes:
        what: The keyword: `in_shardings`.
        leaves: Its leaves in order.
        treedef: Its structure, with `Resource`s as leaves.
        matches_lists: True if a list as the root fits a tuple, and a tuple a list.
    """

    what: str
    leaves: tuple[Resource, ...]
    treedef: Any
    matches_lists: bool = True

    def text(self) -> str:
        """Return the tree as code."""
        return repr(outline(self.treedef, [leaf.value for leaf in self.leaves]))

    @cached_property
    def named_shardings(self) -> tuple[jax.sharding.NamedSharding, ...]:
        """Return the leaves that are named shardings."""
        values = [leaf.value for leaf in self.leaves]
        return tuple([v for v in values if isinstance(v, jax.sharding.NamedSharding)])

    @cached_property
    def names_nothing(self) -> bool:
        """Return True if every value has the one resource that requests nothing."""
        return self.is_leaf and self.leaves[0].names_nothing

    @property
    def is_leaf(self) -> bool:
        """Return True for a single resource, which is for every value."""
        return self.treedef == _LEAF

    @property
    def children(self) -> "list[ResourceTree]":
        """Return the trees one level below the root; none for a leaf."""
        parts = split_leaves(self.treedef, self.leaves)
        return [replace(self, leaves=tuple(leaves), treedef=tree) for tree, leaves in parts]


INFERRED = (UnspecifiedValue, Auto, FromGda)
_RESOURCES = (PartitionSpec, Sharding, *INFERRED)
_LEAVES = (*_RESOURCES, JaxSharding, Format, Resource)


def _is_leaf(x: object) -> bool:
    return x is None or isinstance(x, _LEAVES)


def refuse_from_gda(resources: ResourceTree) -> None:
    """Refuse `FROM_GDA` among the resources of results.

    Raises:
        ResourceError: If one is `FROM_GDA`.
    """
    if any([isinstance(leaf.value, FromGda) for leaf in resources.leaves]):
        raise ResourceError(
            f"{resources.what} holds FROM_GDA, which takes the sharding of an argument; a result "
            "has none before it is made: give None (replicated), P(...), or UNSPECIFIED"
        )


def refuse_unconstrained(resources: ResourceTree) -> None:
    """Refuse specs with `UNCONSTRAINED`, which only constraints inside a function may have.

    Raises:
        ResourceError: With the path of the first such spec.
    """
    for i, leaf in enumerate(resources.leaves):
        spec = leaf.value.spec if isinstance(leaf.value, NamedSharding) else leaf.value
        if isinstance(spec, PartitionSpec) and PartitionSpec.UNCONSTRAINED in spec.partitions:
            tree = outline(resources.treedef, resources.leaves)
            path, _ = jax.tree_util.tree_flatten_with_path(tree)[0][i]
            name = resources.what + jax.tree_util.keystr(path)
            raise ResourceError(
                f"{name} is {leaf.value}, which leaves a dimension UNCONSTRAINED: pass "
                "UNSPECIFIED, and call with_sharding_constraint with that spec inside the function",
                path=name,
            )


def read_resources(tree: Any, what: str) -> ResourceTree:
    """Read a tree of resources, and check it as far as possible without a mesh.

    Raises:
        ResourceError: With the path of a leaf that is no resource.
    """
    if _is_leaf(tree):
        return ResourceTree(what, (_read_leaf(tree, what),), _LEAF)
    flat, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_is_leaf)
    if all([isinstance(leaf, Sharding) for leaf in flat]):
        return ResourceTree(what, tuple(map(Resource, flat)), treedef)
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    leaves = [_read_leaf(leaf, what + jax.tree_util.keystr(path)) for path, leaf in flat]
    return ResourceTree(what, tuple(leaves), treedef)


_LEAF = jax.tree_util.tree_structure(0)


def _read_leaf(leaf: Any, path: str) -> Resource:
    if isinstance(leaf, Format):
        requested = UNSPECIFIED if leaf.sharding is None else leaf.sharding
        return Resource(_read_leaf(requested, path).value, leaf.layout)
    if leaf is None or isinstance(leaf, _RESOURCES):
        return Resource(leaf)
    if isinstance(leaf, JaxSharding):
        return Resource(from_jax(leaf))
    raise ResourceTypeError(_wrong_leaf(leaf, path), path=path)


def _wrong_leaf(leaf: Any, path: str) -> str:
    advice = (
        "give None (replicated), a PartitionSpec such as P('x'), a Sharding, AUTO or UNSPECIFIED"
    )
    if isinstance(leaf, str):
        advice = f"write P({leaf!r})"
    elif isinstance(leaf, jax.Device):
        advice = "write SingleDeviceSharding(device)"
    elif isinstance(leaf, Mesh):
        advice = "write NamedSharding(mesh, P(...))"
    return f"{path} is {leaf!r} ({type(leaf).__name__}), which is no sharding: {advice}"


def misfit(
    what: str,
    path: str,
    kind: str,
    sharding: Sharding,
    problem: object,
    *,
    also: type[Exception] | None = None,
) -> ResourceError:
    """Return the error for a sharding that does not fit its value.

    Args:
        what: The keyword of the sharding, or `the sharding`.
        path: The path of the value.
        kind: The type of the value: `float32[8,16]`.
        sharding: The sharding.
        problem: What does not fit, and what to write.
        also: The class of the error that reported it, if any.
    """
    return ResourceError(
        f"{what} of {path} ({kind}) is {described(sharding)}: {problem}", path=path, also=also
    )


def is_split(sharding: Sharding) -> bool:
    """Return True if several processes hold different pieces of an array with this sharding."""
    if coordination.process_count() < 2 or sharding.is_fully_replicated:
        return False
    if not names_devices(sharding):
        return True
    if is_compile_only(sharding.devices[0]):
        return False
    return len({device.process_index for device in sharding.devices}) > 1


def check_whole(
    values: Iterable[Any], paths: Iterable[str], shardings: Iterable[Sharding | None]
) -> None:
    """Refuse NumPy arrays that a sharding over several processes splits, as JAX does.

    Each process would take its devices' pieces from its own array. Where that is the batch of the
    process, the rest of it would be lost.

    Args:
        values: The arguments of a call.
        paths: The path of each.
        shardings: The sharding that was requested for each; None if none was.

    Raises:
        ResourceError: With the path of the first of them.
    """
    for value, path, sharding in zip(values, paths, shardings, strict=True):
        if sharding is None or not isinstance(value, np.ndarray) or not is_split(sharding):
            continue
        code = as_code(sharding)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else "spec"
        raise ResourceError(  # no-catalogue: needs several processes
            f"{path} is a NumPy array, which {described(sharding)} splits between processes that "
            "may each have another one: if it is the part of this process, pass multihost."
            f"host_local_array_to_global_array({path}, mesh, {spec}) or make_array_from_"
            f"process_local_data({code}, {path}); if it is equal in all, pass device_put({path}, "
            f"{code})",
            path=path,
        )


def none_as_unspecified(tree: Any) -> Any:
    """Return a tree of resources with `UNSPECIFIED` for each None, as `jax.jit` reads it."""
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_is_leaf)
    if not any([leaf is None for leaf in leaves]):
        return tree
    return treedef.unflatten([UNSPECIFIED if leaf is None else leaf for leaf in leaves])


def expand(resources: ResourceTree, treedef: Any, name: str) -> list[Resource]:
    """Return one resource for each leaf of a tree, from a prefix of the tree.

    Args:
        resources: The prefix.
        treedef: The structure of the full tree.
        name: The path of the full tree as code: `state['params']`.

    Raises:
        ResourceError: With the first place where the prefix does not fit, and why.
    """
    if resources.is_leaf:
        return list(resources.leaves) * treedef.num_leaves
    if treedef == resources.treedef:
        return list(resources.leaves)
    full = TreeNode(treedef, range(treedef.num_leaves))
    prefix = TreeNode(resources.treedef, resources.leaves)
    sequences = tuple, list
    if resources.matches_lists and full.kind in sequences and prefix.kind in sequences:
        same_kind = make_node(treedef.node_data(), prefix.definition.children())
        prefix = TreeNode(same_kind, resources.leaves)
    return spread_prefix(prefix, full, resources.what, name, _mismatch)


# flax returned FrozenDicts until 0.7.1, which old programs match by `freeze(specs)`.
_FREEZE = {
    "FrozenDict": "write flax.config.update('flax_return_frozendict', True) before the model "
    "returns it, run the program by xlashard legacy --libraries, or pass flax.core.unfreeze(specs)",
    "dict": "pass flax.core.freeze(specs)",
}


def _mismatch(at: PrefixMismatch) -> ResourceError:
    """Return the error for a node of a prefix that does not fit a node of the full tree."""
    what, place = at.name, at.tree_name + at.steps
    kind, expected = at.prefix.kind.__name__, at.tree.kind.__name__
    if at.tree.is_leaf:
        problem = f"{what} has a {kind} for {place}, which is an array: give one sharding there"
    elif {kind, expected} == {"dict", "FrozenDict"}:
        problem = f"{what} has a {kind} where {place} is a {expected}: {_FREEZE[kind]}"
    elif at.prefix.kind is not at.tree.kind:
        problem = (
            f"{what} has a {kind} where {place} is a {expected}: give a {expected} of the same "
            "structure, or one sharding for all of it"
        )
    else:
        keys, others = (list(map(str, node.keys)) for node in (at.prefix, at.tree))
        problem = _key_mismatch(what, place, keys, others, expected)
    return ResourceError(problem, path=place)


def _key_mismatch(
    what: str, place: str, keys: Sequence[str], expected: Sequence[str], kind: str
) -> str:
    if kind in ("tuple", "list"):
        return (
            f"{what} has {counted(len(keys), 'entry', 'entries')} for {place}, which has "
            f"{len(expected)}: give one for each, or one sharding for all"
        )
    missing = [k for k in expected if k not in keys]
    surplus = [k for k in keys if k not in expected]
    parts, advice = [], []
    if missing:
        parts.append(f"lacks {', '.join(missing)}")
        advice.append(f"give a sharding for {', '.join(missing)}, or one for all of {place}")
    if surplus:
        parts.append(f"has {', '.join(surplus)} too many")
        advice.append(f"leave {', '.join(surplus)} out")
    return (
        f"{what} does not fit {place}: it {' and '.join(parts) or 'differs in order'}: "
        f"{'; '.join(advice) or 'give them in the order ' + ', '.join(expected)}"
    )
