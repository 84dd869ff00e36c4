"""Pad arrays so that every dimension divides by its mesh axes, and take the padding off again."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax.runtime.shardings import AbstractMesh
from xlashard._jax.trace import tracing
from xlashard._jax.tree_definitions import leaf_paths
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.array.placement.tree_prefix import broadcast_prefix
from xlashard.core.pjit.shardings.resolve import to_sharding
from xlashard.core.pjit.shardings.resources import expand, misfit, read_resources
from xlashard.core.program.uneven_shardings import uneven_dimensions
from xlashard.core.sharding import Mesh, PartitionSpec, XLACompatibleSharding
from xlashard.core.sharding.replicated import REPLICATED
from xlashard.errors import ArgumentError, GeometryError, ResourceError
from xlashard.support.formatting import typed
from xlashard.support.tracebacks import short_tracebacks

type _Fill = bool | int | float | complex


@overload
def pad_to_mesh[T](
    tree: T,
    shardings: Any,
    *,
    mesh: Mesh | AbstractMesh | None = ...,
    fill_value: Any = ...,
    return_mask: Literal[False] = ...,
) -> T: ...
@overload
def pad_to_mesh[T](
    tree: T,
    shardings: Any,
    *,
    mesh: Mesh | AbstractMesh | None = ...,
    fill_value: Any = ...,
    return_mask: Literal[True],
) -> tuple[T, Any]: ...
def pad_to_mesh(
    tree: Any,
    shardings: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    fill_value: Any = 0,
    return_mask: bool = False,
) -> Any:
    """Pad each array at the end of the dimensions that do not divide by their mesh axes.

    Arrays are padded where they are, not moved: NumPy arrays on the host, arrays on their devices,
    traced values inside of a program. Apply the shardings afterwards, with `device_put` or
    `with_sharding_constraint`.

    Args:
        tree: A pytree of arrays, NumPy arrays, traced values, or `jax.ShapeDtypeStruct`s.
        shardings: A prefix of it, with a Sharding or a PartitionSpec at each leaf. None
            (replicated) and `UNSPECIFIED` pad nothing.
        mesh: Mesh of the PartitionSpecs; the mesh in force if None.
        fill_value: Value of the padding, or a prefix of the tree with one for each leaf. It must
            be a value of the leaf's dtype.
        return_mask: Return masks too.

    Returns:
        The padded tree. With `return_mask` a second tree of boolean arrays of the padded shapes,
        which are True where the elements are those of `tree`.

    Raises:
        ResourceError: With the leaf's path, if a sharding does not fit.
        ArgumentError: With the leaf's path, for a leaf that is no array, or a `fill_value` that its
            dtype lacks.
        MeshError: For a PartitionSpec without a mesh.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import AbstractMesh
        >>> from xlashard import P, pad_to_mesh
        >>> mesh = AbstractMesh((4,), ("data",))
        >>> x, mask = pad_to_mesh(np.arange(6), P("data"), mesh=mesh, return_mask=True)
        >>> x
        array([0, 1, 2, 3, 4, 5, 0, 0])
        >>> int(x.sum(where=mask)) / int(mask.sum())
        2.5
    """
    with short_tracebacks:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        paths = leaf_paths(tree, "tree")
        resources = expand(read_resources(shardings, "shardings"), treedef, "tree")
        name = "fill_value of pad_to_mesh"
        fills = broadcast_prefix(fill_value, tree, lambda _: False, name, "tree")
        chosen: Any = tracing.mesh_in_force() if mesh is None else mesh
        padded, masks = [], []
        for leaf, resource, path, fill in zip(leaves, resources, paths, fills, strict=True):
            aval = _checked(leaf, path)
            on = chosen if isinstance(resource.value, PartitionSpec) else None
            sharding = to_sharding(resource, on, "the sharding", path)
            shape = _padded_shape(sharding, aval, path)
            _check_fill(fill, aval, path)
            padded.append(_padded(leaf, aval, shape, fill))
            if return_mask:
                masks.append(_mask(leaf, aval.shape, shape))
        result = treedef.unflatten(padded)
        return (result, treedef.unflatten(masks)) if return_mask else result


def unpad[T](tree: T, shapes: Any) -> T:
    """Take off the padding that `pad_to_mesh` has added.

    Args:
        tree: A pytree of padded arrays, or of values of their shapes.
        shapes: The tree before it was padded, or a tree of its shapes: at each leaf an array, a
            `jax.ShapeDtypeStruct` or a tuple of ints.

    Returns:
        The leading part of each array, of its shape before.

    Raises:
        ArgumentError: With the leaf's path, for a leaf that is no array, a shape that is larger or
            of another rank, or trees of different structure.

    Example:
        >>> import numpy as np
        >>> from xlashard import unpad
        >>> unpad({"x": np.arange(8)}, {"x": (6,)})
        {'x': array([0, 1, 2, 3, 4, 5])}
    """
    with short_tracebacks:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        try:
            originals = treedef.flatten_up_to(shapes)
        except ValueError as error:
            raise ArgumentError(
                f"shapes of unpad is no tree like that of the padded arrays: {error}; pass the "
                "tree that pad_to_mesh was given"
            ) from None
        return treedef.unflatten(map(_unpadded, leaves, originals, leaf_paths(tree, "")))


def _checked(leaf: Any, path: str) -> Any:
    """Return the abstract value of a leaf.

    Raises:
        ArgumentError: If it is no array.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray):
        return leaf
    try:
        return tracing.shaped(tracing.abstractify(leaf))
    except TypeError:
        raise ArgumentError(
            f"{path} is of type {type(leaf).__name__}: expected an array, such as np.asarray(x)"
        ) from None


def _typed(aval: Any) -> str:
    return typed(aval.dtype, aval.shape)


def _padded_shape(sharding: Any, aval: Any, path: str) -> tuple[int, ...]:
    """Return the shape of a leaf after padding.

    Raises:
        ResourceError: If the sharding does not fit.
    """
    shape: tuple[int, ...] = tuple(aval.shape)
    if sharding is None or sharding is REPLICATED:
        return shape
    if not isinstance(sharding, XLACompatibleSharding):
        raise ResourceError(
            f"the sharding of {path} is a {type(sharding).__name__}, which has no number of tiles "
            "to pad to: write NamedSharding(mesh, P(...))",
            path=path,
        )
    try:
        sharding.check_compatible_aval(shape)
    except GeometryError as error:
        kind = _typed(aval)
        raise misfit("the sharding", path, kind, sharding, error, also=type(error)) from None
    sizes = {uneven.dim: uneven.padded_size for uneven in uneven_dimensions(sharding, shape)}
    return tuple([sizes.get(dim, size) for dim, size in enumerate(shape)])


def _check_fill(fill: Any, aval: Any, path: str) -> None:
    """Check that a dtype has a fill value.

    Raises:
        ArgumentError: If not.
    """
    if tracing.is_extended(aval):
        return
    value, fits = np.asarray(fill), False
    if value.ndim == 0 and value.dtype.kind in "biufc":
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            cast = value.astype(aval.dtype)
        if value.dtype.kind == "c" and not jnp.issubdtype(aval.dtype, np.complexfloating):
            fits = False
        elif jnp.issubdtype(aval.dtype, np.inexact):
            fits = bool(np.isfinite(value) == np.isfinite(cast))
        else:
            fits = bool(cast == value)
    if not fits:
        raise ArgumentError(
            f"fill_value={fill!r} is no value of {path} ({_typed(aval)}): write one of its "
            "dtype, such as fill_value=0"
        )


def _padded(leaf: Any, aval: Any, shape: Sequence[int], fill: _Fill) -> Any:
    if tuple(aval.shape) == shape:
        return leaf
    widths = [(0, after - before) for before, after in zip(aval.shape, shape, strict=True)]
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=tuple(shape))
    if not isinstance(leaf, jax.Array):
        return np.pad(leaf, widths, constant_values=np.asarray(fill).astype(aval.dtype))
    if tracing.is_extended(aval):
        data = jax.random.key_data(leaf)
        widths += [(0, 0)] * (data.ndim - leaf.ndim)
        return wrap_result(
            jax.random.wrap_key_data(jnp.pad(data, widths), impl=jax.random.key_impl(leaf))
        )
    return wrap_result(jnp.pad(leaf, widths, constant_values=fill))


def _mask(leaf: Any, before: Sequence[int], shape: Sequence[int]) -> Any:
    """Return the mask of a padded leaf: True for the elements that it had before."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(tuple(shape), np.dtype(bool))
    own = (jnp if isinstance(leaf, jax.Array) else np).ones(before, bool)
    return wrap_result(_padded(own, own, tuple(shape), False))


def _unpadded(leaf: Any, original: Any, path: str) -> Any:
    aval = _checked(leaf, f"tree{path}")
    shape = getattr(original, "shape", original)
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ArgumentError(
            f"shapes{path} is of type {type(original).__name__}: expected an array, a "
            "jax.ShapeDtypeStruct or a tuple of ints"
        )
    before = tuple(aval.shape)
    if len(shape) != len(before) or any(
        size > padded for size, padded in zip(shape, before, strict=True)
    ):
        raise ArgumentError(
            f"shapes{path} is {shape}, which is no part of tree{path} ({_typed(aval)}): pass "
            "the shape before padding"
        )
    if before == shape:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=shape)
    return leaf[tuple(slice(size) for size in shape)]
