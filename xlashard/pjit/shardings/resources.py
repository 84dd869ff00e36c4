"""Resources: where a person says that arguments and results go, as prefixes of their trees."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax

from xlashard._jax.runtime.shardings import UNSPECIFIED as JAX_UNSPECIFIED
from xlashard._jax.runtime.shardings import Format, JaxSharding, UnspecifiedValue
from xlashard._jax.trace import tracing
from xlashard.errors import (
    GeometryError,
    MeshError,
    ResourceError,
    ResourceTypeError,
    ShardingError,
    counted,
)
from xlashard.geometry import validate_spec
from xlashard.lazily import dataclass
from xlashard.pjit.shardings.unassigned import REPLICATED
from xlashard.sharding import (
    AbstractMesh,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    XLACompatibleSharding,
    from_jax,
    grid_of,
    spec_of,
)

UNSPECIFIED = JAX_UNSPECIFIED
"""Leaves an argument where it is, and a result where the partitioner puts it."""


@dataclass(frozen=True)
class Auto:
    """Leaves a sharding wholly to the compiler; `AUTO` is the one to use."""

    def __repr__(self) -> str:
        return "AUTO"


AUTO = Auto()


class FromGda:
    """Takes the sharding of the array that is passed; `FROM_GDA` is the one to use.

    Every instance means the same, for a pickled one comes back as another.
    """

    def __repr__(self) -> str:
        return "FROM_GDA"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FromGda)

    def __hash__(self) -> int:
        return hash(FromGda)


FROM_GDA = FromGda()


@dataclass(frozen=True)
class Resource:
    """One leaf of a tree of resources.

    Attributes:
        given: None, a PartitionSpec, a Sharding, `AUTO`, `FROM_GDA` or `UNSPECIFIED`.
        layout: The layout that came with it in a `Format`, or None.
    """

    given: Any
    layout: Any = None

    @property
    def is_unspecified(self) -> bool:
        """True if it says nothing."""
        return isinstance(self.given, UnspecifiedValue | Auto | FromGda)

    def __reduce__(self) -> tuple[object, ...]:
        if isinstance(self.given, UnspecifiedValue):
            return _unspecified_with, (self.layout,)
        return Resource, (self.given, self.layout)


def _unspecified_with(layout: Any) -> Resource:
    return Resource(UNSPECIFIED, layout)


@dataclass(frozen=True)
class ResourceTree:
    """A checked tree of resources.

    Attributes:
        what: The name of the keyword it was given as.
        leaves: Its leaves in order.
        treedef: Its structure, with `Resource`s as leaves.
    """

    what: str
    leaves: tuple[Resource, ...]
    treedef: Any

    @property
    def is_unspecified(self) -> bool:
        """True if it says nothing of anything."""
        return all(r.is_unspecified and r.layout is None for r in self.leaves)

    def tree(self) -> Any:
        """The tree itself."""
        return self.treedef.unflatten(self.leaves)

    def text(self) -> str:
        """The tree as it was given."""
        return repr(self.treedef.unflatten([leaf.given for leaf in self.leaves]))

    def __reduce__(self) -> tuple[object, ...]:
        return _tree_of, (self.what, self.tree())


def _tree_of(what: str, tree: Any) -> ResourceTree:
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=lambda x: isinstance(x, Resource))
    return ResourceTree(what, tuple(leaves), treedef)


_LEAVES = (
    *(PartitionSpec, Sharding, JaxSharding, Format),
    *(UnspecifiedValue, Auto, FromGda, Resource),
)


def _is_leaf(x: object) -> bool:
    return x is None or isinstance(x, _LEAVES)


def check_from_gda(
    resources: Sequence[Resource], values: Sequence[Any], paths: Sequence[str], what: str
) -> None:
    """Refuses arguments that bring no sharding where `FROM_GDA` says to take theirs.

    Raises:
        ResourceError: With the first such argument.
    """
    for resource, value, path in zip(resources, values, paths, strict=True):
        if not isinstance(resource.given, FromGda) or isinstance(value, jax.Array):
            continue
        if getattr(value, "sharding", None) is None:
            raise ResourceError(
                f"{what} of {path} is FROM_GDA, but a {type(value).__name__} has no sharding "
                f"to take: give P(...) for it, or pass {path} as a global array, made by "
                f"multihost.host_local_array_to_global_array({path}, mesh, P(...))",
                path=path,
            )


def refuse_from_gda(resources: ResourceTree) -> None:
    """Refuses `FROM_GDA` among what is said of results.

    Raises:
        ResourceError: If it is there.
    """
    if any(isinstance(leaf.given, FromGda) for leaf in resources.leaves):
        raise ResourceError(
            f"{resources.what} holds FROM_GDA, which takes the sharding of an argument; a result "
            "has none before it is made: give None (replicated), P(...), or UNSPECIFIED"
        )


def refuse_unconstrained(resources: ResourceTree) -> None:
    """Refuse specs with `UNCONSTRAINED`, which only constraints inside a function may have.

    Raises:
        ResourceError: With the path of the first such spec.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(resources.tree())[0]:
        spec = leaf.given.spec if isinstance(leaf.given, NamedSharding) else leaf.given
        if isinstance(spec, PartitionSpec) and PartitionSpec.UNCONSTRAINED in spec.partitions:
            name = resources.what + jax.tree_util.keystr(path)
            raise ResourceError(
                f"{name} is {leaf.given}, which leaves a dimension UNCONSTRAINED: pass "
                "UNSPECIFIED, and call with_sharding_constraint with that spec inside the function",
                path=name,
            )


def read_resources(tree: Any, what: str) -> ResourceTree:
    """Checks a tree of resources as far as it can be without a mesh.

    Raises:
        ResourceError: With the leaf's path, if it is nothing that says where a value goes.
    """
    if _is_leaf(tree):
        return ResourceTree(what, (_read_leaf(tree, what),), _LEAF)
    flat, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_is_leaf)
    if all(isinstance(leaf, Sharding) for leaf in flat):
        return ResourceTree(what, tuple(map(Resource, flat)), treedef)
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    leaves = [_read_leaf(leaf, what + jax.tree_util.keystr(path)) for path, leaf in flat]
    return ResourceTree(what, tuple(leaves), treedef)


_LEAF = jax.tree_util.tree_structure(0)


def _read_leaf(leaf: Any, path: str) -> Resource:
    if isinstance(leaf, Format):
        given = UNSPECIFIED if leaf.sharding is None else leaf.sharding
        return Resource(_read_leaf(given, path).given, leaf.layout)
    if leaf is None or isinstance(leaf, PartitionSpec | UnspecifiedValue | Auto | FromGda):
        return Resource(leaf)
    if isinstance(leaf, Sharding):
        return Resource(leaf)
    if isinstance(leaf, JaxSharding):
        return Resource(from_jax(leaf))
    raise ResourceTypeError(_wrong_leaf(leaf, path), path=path)


def _wrong_leaf(leaf: Any, path: str) -> str:
    said = f"{path} is {leaf!r} ({type(leaf).__name__}), which says nothing of where a value goes: "
    if isinstance(leaf, str):
        return said + f"write P({leaf!r})"
    if isinstance(leaf, jax.Device):
        return said + "write SingleDeviceSharding(device)"
    if isinstance(leaf, Mesh):
        return said + "write NamedSharding(mesh, P(...))"
    return said + (
        "give None (replicated), a PartitionSpec such as P('x'), a Sharding, AUTO or UNSPECIFIED"
    )


@lru_cache(maxsize=4096)
def named(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The sharding of a spec on the mesh in force."""
    return NamedSharding(mesh, spec)


def to_sharding(resource: Resource, mesh: Mesh | None, path: str) -> Sharding | None:
    """The sharding that a resource means under a mesh; None if that is left open.

    `None` as a resource (replicated) needs devices: without a mesh it is resolved later, when the
    program's devices are known (`REPLICATED`).

    Raises:
        MeshError: For a spec without a mesh.
        ResourceError: For a spec that does not fit the mesh, or over axes that `shard_map` around
            the call deals out by hand.
    """
    if resource.is_unspecified:
        return None
    sharding = _as_sharding(resource, mesh, path)
    manual = tracing.manual_axes()
    if manual and isinstance(sharding, NamedSharding):
        for axis in sharding.normal_spec.axes:
            if axis in manual:
                raise ResourceError(
                    f"{path} is {sharding.spec}, but shard_map around it has dealt {axis!r} out "
                    "already: each value there is one shard; leave that axis out",
                    path=path,
                )
    return sharding


def _as_sharding(resource: Resource, mesh: Mesh | None, path: str) -> Sharding | None:
    given = resource.given
    if isinstance(given, NamedSharding) and isinstance(given.mesh, AbstractMesh):
        return given if mesh is None else _on_devices(given, mesh, path)
    if isinstance(given, Sharding):
        return given
    if given is None:
        return named(mesh, PartitionSpec()) if mesh is not None else REPLICATED
    if mesh is None:
        raise MeshError(
            f"{path} is {given}, but no mesh is in force to say what its axes are: call inside "
            f"`with jax.set_mesh(mesh):`, or give NamedSharding(mesh, {given})"
        )
    try:
        validate_spec(spec_of(given), grid_of(mesh))
        return named(mesh, given)
    except (GeometryError, ShardingError) as error:
        raise ResourceError(f"{path} is {given}: {error}", path=path) from None


def _on_devices(sharding: NamedSharding, mesh: Mesh, path: str) -> NamedSharding:
    """A sharding on an abstract mesh, on the devices of the mesh in force."""
    if _axes(mesh) != _axes(sharding.mesh):
        raise MeshError(
            f"{path} stands on {sharding.mesh}, which has no devices, and the mesh in force is "
            f"{mesh}: call inside `with jax.set_mesh(mesh):` of a mesh with those axes, sizes and "
            "types"
        )
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _axes(mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """What an abstract mesh says of a mesh besides the kind of its devices."""
    return mesh.axis_names, mesh.axis_sizes, mesh.axis_types


def as_tiles(said: Sharding, shape: Sequence[int]) -> XLACompatibleSharding:
    """A sharding that XLA can be told of, for arrays of a shape.

    Raises:
        GeometryError: If it can't be said as tiles of equal size.
        ShardingError: If it has no place for one of its devices.
    """
    if isinstance(said, XLACompatibleSharding):
        return said
    tiles = said.tiling(tuple(shape)).to_tile_assignment()
    return GSPMDSharding(said.devices, tiles, memory_kind=said.memory_kind)


def none_as_unspecified(tree: Any) -> Any:
    """Return a tree of resources with `UNSPECIFIED` for each None, as `jax.jit` reads it."""
    return jax.tree_util.tree_map(
        lambda leaf: UNSPECIFIED if leaf is None else leaf, tree, is_leaf=_is_leaf
    )


def expand(
    resources: ResourceTree, treedef: Any, path_of: Callable[[Sequence[Any]], str]
) -> list[Resource]:
    """One resource for each leaf of a tree, from a prefix of the tree.

    Args:
        resources: The prefix.
        treedef: The structure of the full tree.
        path_of: How a person would write the place of a subtree.

    Raises:
        ResourceError: With the first place where the prefix does not fit, and why.
    """
    if treedef == resources.treedef:
        return list(resources.leaves)
    full = treedef.unflatten([_FullLeaf()] * treedef.num_leaves)
    prefix = resources.tree()
    if type(full) in (tuple, list) and type(prefix) in (tuple, list):
        # At the top people write one for the other.
        prefix = type(full)(prefix)
    out: list[Resource] = []
    _expand(prefix, full, (), out, _Naming(resources.what, path_of))
    return out


class _FullLeaf:
    """Stands for an array in a full tree."""


@dataclass(frozen=True)
class _Naming:
    what: str
    path_of: Callable[[Sequence[Any]], str]


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """`(key, child)` of a node that is no leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node or isinstance(x, _FullLeaf | Resource)
    )
    if len(flat) == 1 and not flat[0][0]:
        return None
    return [(path[0] if path else None, child) for path, child in flat]


def _expand(
    prefix: Any, full: Any, path: tuple[Any, ...], out: list[Resource], naming: _Naming
) -> None:
    if isinstance(prefix, Resource):
        out.extend([prefix] * len(jax.tree_util.tree_leaves(full)))
        return
    if isinstance(full, _FullLeaf):
        raise ResourceError(
            f"{naming.what} has a {_kind(prefix)} for {naming.path_of(path)}, which is an array: "
            "give one sharding there",
            path=naming.path_of(path),
        )
    if type(prefix) is not type(full):
        raise ResourceError(
            f"{naming.what} has a {_kind(prefix)} where {naming.path_of(path)} is a {_kind(full)}: "
            f"give a {_kind(full)} of the same structure, or one sharding for all of it",
            path=naming.path_of(path),
        )
    theirs, ours = _children(prefix), _children(full)
    ours, theirs = ours or [], theirs or []
    keys_given = [str(k) for k, _ in theirs]
    keys_there = [str(k) for k, _ in ours]
    if keys_given != keys_there:
        raise ResourceError(
            _key_mismatch(naming, path, (keys_given, keys_there), _kind(full)),
            path=naming.path_of(path),
        )
    for (key, sub), (_, target) in zip(theirs, ours, strict=True):
        _expand(sub, target, (*path, key), out, naming)


def _key_mismatch(
    naming: _Naming, path: tuple[Any, ...], keys: tuple[list[str], list[str]], kind: str
) -> str:
    given, there = keys
    place = naming.path_of(path)
    if kind in ("tuple", "list"):
        return (
            f"{naming.what} has {counted(len(given), 'entry', 'entries')} for {place}, which has "
            f"{len(there)}: give one for each, or one sharding for all"
        )
    missing = [k for k in there if k not in given]
    surplus = [k for k in given if k not in there]
    parts, advice = [], []
    if missing:
        parts.append(f"lacks {', '.join(missing)}")
        advice.append(f"give a sharding for {', '.join(missing)}, or one for all of {place}")
    if surplus:
        parts.append(f"has {', '.join(surplus)} too many")
        advice.append(f"leave {', '.join(surplus)} out")
    return (
        f"{naming.what} does not fit {place}: it {' and '.join(parts) or 'differs in order'}: "
        f"{'; '.join(advice) or 'give them in the order ' + ', '.join(there)}"
    )


def _kind(node: Any) -> str:
    return type(node).__name__
