"""Internals of `jax.experimental.pjit` that programs call: checks and conversions of shardings."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xlashard._jax.legacy_api import util
from xlashard._jax.runtime.shardings import JaxGSPMDSharding, JaxSharding, Mesh, hlo_from_text
from xlashard.core.array.placement.tree_prefix import TreeNode, spread_prefix
from xlashard.core.sharding import (
    GSPMDSharding,
    NamedSharding,
    Sharding,
    XLACompatibleSharding,
    from_jax,
)
from xlashard.errors import GeometryError, MeshError, ShardingError
from xlashard.geometry import TileAssignment
from xlashard.legacy.modes.config_flags import PositionalSemantics, current_array_mode
from xlashard.legacy.modules import maps
from xlashard.legacy.shardings.op_shardings import parse_flatten_op_sharding
from xlashard.legacy.shardings.parsed_specs import get_array_mapping, mesh_sharding
from xlashard.legacy.shardings.partition_spec import is_unspecified_or_from_gda_or_auto


class _OnFakeDevices(GSPMDSharding):
    """`GSPMDSharding` over objects other than devices, such as mocks of a test.

    Args:
        devices: The objects.
        assignment: The tile assignment.
    """

    def __init__(self, devices: Sequence[Any], assignment: TileAssignment) -> None:
        JaxGSPMDSharding.__init__(self, devices, hlo_from_text(assignment.to_text()))
        self._assignment = assignment


def to_op_sharding_sharding(s: JaxSharding | Sharding, ndim: int) -> GSPMDSharding:
    """Return a sharding as an equivalent `GSPMDSharding` with an `_original_sharding`.

    Args:
        s: A sharding of this package or of JAX.
        ndim: The rank of the arrays.

    Raises:
        RankError: The rank is too low.
        ShardingError: The tiles depend on more than the rank.
    """
    own = from_jax(s)
    if isinstance(own, GSPMDSharding):
        sharding: Any = own
    elif not isinstance(own, XLACompatibleSharding):
        raise ShardingError(
            f"the tiles of a {type(own).__name__} depend on the shape: pass its tiling(shape) to "
            "GSPMDSharding"
        )
    elif isinstance(own, NamedSharding) and not isinstance(own.devices[0], jax.Device):
        sharding = _OnFakeDevices(own.devices, own.rank_tiling(ndim).to_tile_assignment())
    else:
        tiles = own.rank_tiling(ndim).to_tile_assignment()
        sharding = GSPMDSharding(own.devices, tiles, memory_kind=own.memory_kind)
    if sharding is not s:
        sharding._original_sharding = s
    return sharding


def create_sharding_for_array(mesh: Mesh, x: Any) -> Any:
    """Return the sharding of a resource on a mesh.

    Args:
        mesh: The mesh.
        x: A leaf that `prepare_axis_resources` returned; shardings and markers are returned
            unchanged.

    Raises:
        MeshError: `x` is a spec, and the mesh is empty.
    """
    if isinstance(x, JaxSharding | Sharding) or is_unspecified_or_from_gda_or_auto(x):
        return x
    if mesh.empty:
        raise MeshError(
            f"{x.get_partition_spec()} requires a mesh, and no mesh is in force: call inside "
            "`with mesh:`, or pass NamedSharding(mesh, P(...))"
        )
    return mesh_sharding(mesh, x)


def hashable_pytree(pytree: Any) -> Callable[[], Any]:
    """Return a hashable callable that returns a tree; callables of equal trees are equal.

    Args:
        pytree: A tree whose leaves have hashes.

    Example:
        >>> hashable_pytree({"w": 1}) == hashable_pytree({"w": 1}), hashable_pytree({"w": 1})()
        (True, {'w': 1})
    """
    leaves, treedef = jax.tree.flatten(pytree)
    leaves = tuple(leaves)
    return util.HashableFunction(lambda: treedef.unflatten(leaves), (treedef, leaves))


def flatten_axis_resources(
    what: str, tree: Any, shardings: Any, tupled_args: bool
) -> tuple[Any, ...]:
    """Broadcast a prefix of a tree to its leaves.

    Args:
        what: The name of the prefix in errors.
        tree: The structure of the tree.
        shardings: The prefix. With `tupled_args`, a list at its top is taken as a tuple.
        tupled_args: True if the tree is the tuple of a call's arguments.

    Raises:
        ArgumentError: `shardings` is not a prefix of the tree, with the path.

    Example:
        >>> tree = jax.tree.structure(({"w": 1, "b": 2}, 3))
        >>> flatten_axis_resources("in_axis_resources", tree, ("P(x)", None), True)
        ('P(x)', 'P(x)', None)
    """
    if tupled_args and type(shardings) is list:
        shardings = tuple(shardings)
    prefix = TreeNode.of(shardings, lambda x: x is None)
    full = TreeNode(tree, range(tree.num_leaves))
    return tuple(spread_prefix(prefix, full, what, "args" if tupled_args else "result"))


def check_aval_shardings(
    shardings: Sequence[Any],
    flat_avals: Sequence[Any],
    what_aval: str,
    allow_uneven_sharding: bool,
) -> None:
    """Check that shardings fit the shapes of arrays.

    Args:
        shardings: One sharding for each type; markers such as `AUTO` are skipped.
        flat_avals: The types.
        what_aval: The name of the arrays in errors: `pjit arguments`.
        allow_uneven_sharding: True if the last tiles of a dimension may be smaller.

    Raises:
        ShardingError: A sharding does not fit; names the first one, with the numbers.
    """
    for number, (sharding, aval) in enumerate(zip(shardings, flat_avals, strict=True)):
        if is_unspecified_or_from_gda_or_auto(sharding):
            continue
        own = from_jax(sharding)
        try:
            if allow_uneven_sharding:
                own.check_compatible_aval(aval.shape)
            else:
                own.is_compatible_aval(aval.shape)
        except GeometryError as error:
            raise ShardingError(
                f"number {number} of {what_aval}, of shape {tuple(aval.shape)}, does not fit "
                f"{sharding}: {error}"
            ) from None


def _mapping(sharding: Any, mesh: Mesh) -> Any:
    own = from_jax(sharding)
    if isinstance(own, NamedSharding):
        return get_array_mapping(own.spec)
    return get_array_mapping(parse_flatten_op_sharding(own, mesh)[0])


def _scaled(
    convert: Callable[[Mesh, Any, Any], Any],
    semantics: Any,
    avals: Sequence[Any],
    shardings: Sequence[Any],
    mesh: Mesh,
) -> Sequence[Any]:
    if current_array_mode().jax_array:
        return avals
    if isinstance(semantics, PositionalSemantics):
        semantics = [semantics] * len(shardings)
    out = []
    for meaning, aval, sharding in zip(semantics, avals, shardings, strict=True):
        axes = {} if meaning is PositionalSemantics.GLOBAL else _mapping(sharding, mesh)
        out.append(convert(mesh, axes, aval) if axes else aval)
    return out


def global_to_local(
    positional_semantics: Any, avals: Sequence[Any], shardings: Sequence[Any], mesh: Mesh
) -> Sequence[Any]:
    """Return the host-local types of global arrays; with `jax_array` on, the types unchanged.

    Args:
        positional_semantics: One for all, or one for each; `GLOBAL` types stay unchanged.
        avals: The types of the arrays.
        shardings: Their shardings.
        mesh: The mesh of all processes.
    """
    return _scaled(maps.global_to_local, positional_semantics, avals, shardings, mesh)


def local_to_global(
    positional_semantics: Any, avals: Sequence[Any], shardings: Sequence[Any], mesh: Mesh
) -> Sequence[Any]:
    """Return the global types of host-local arrays; see `global_to_local`."""
    return _scaled(maps.local_to_global, positional_semantics, avals, shardings, mesh)


def check_gda_or_array_xla_sharding_match(
    args: Sequence[Any], in_xla_shardings: Sequence[Any]
) -> None:
    """Check that global arrays have the input shardings of a compiled program.

    Args:
        args: The arguments; only committed arrays are checked.
        in_xla_shardings: The input sharding of each argument.

    Raises:
        ShardingError: A sharding differs; names the first argument and both shardings.
    """
    for number, (x, request) in enumerate(zip(args, in_xla_shardings, strict=True)):
        if not isinstance(x, jax.Array) or not x.committed:
            continue
        if is_unspecified_or_from_gda_or_auto(request):
            continue
        actual, expected = from_jax(x.sharding), from_jax(request)
        if not actual.is_equivalent_to(expected, x.ndim):
            raise ShardingError(
                f"args[{number}] has the sharding {actual}, but the compiled program takes "
                f"{expected}: write jax.device_put(args[{number}], sharding)"
            )
