"""Declared parameters, and the rules that lay them over a mesh.

A model declares each of its arrays once: shape, one logical axis name per dimension, first values.
`Layout` holds the mesh and the rules of the settings, and turns names into shardings. The model
itself never mentions a mesh axis.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils

import xlashard
from xlashard.train.config.settings import Rules, Settings
from xlashard.train.errors import SettingsError

type Axes = tuple[str | None, ...]
type Place = Layout | Unplaced
"""Fixes how an activation lies on the mesh, given its logical axes, and tells what it takes."""


@dataclass(frozen=True)
class Declaration:
    """One array of the model.

    Attributes:
        shape: Its dimensions.
        axes: One logical axis name per dimension; ``None`` is never spread.
        spread: Standard deviation of the first values around 0; ``None``: all ones.
    """

    shape: tuple[int, ...]
    axes: Axes
    spread: float | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def initial(self, key: jax.Array) -> jax.Array:
        """The first values, float32, drawn with `key`."""
        if self.spread is None:
            return jnp.ones(self.shape, jnp.float32)
        return self.spread * jax.random.normal(key, self.shape, jnp.float32)


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules that map logical axes to its axes."""

    mesh: Any
    rules: Rules

    def spec(self, axes: Axes) -> Any:
        """The partition spec of an array with these logical axes.

        A mesh axis that several of them name goes to the last one: sequences that are spread over
        the axis of the experts leave it to the experts where an array has both.
        """
        asked = [() if axis is None else getattr(self.rules, axis) for axis in axes]
        taken = [{name for later in asked[i + 1 :] for name in later} for i in range(len(asked))]
        names = [
            tuple(name for name in own if name not in later)
            for own, later in zip(asked, taken, strict=True)
        ]
        return xlashard.PartitionSpec(*(x[0] if len(x) == 1 else (x or None) for x in names))

    def sharding(self, axes: Axes = ()) -> Any:
        """The sharding of an array with these logical axes; with none: one copy per device."""
        return xlashard.NamedSharding(self.mesh, self.spec(axes))

    def shardings(self, declarations: Any) -> Any:
        """The shardings of a tree of declarations."""
        return jax.tree.map(lambda x: self.sharding(x.axes), declarations)

    def place(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Lays an activation out by the rules (a `Place`).

        Axes beyond those of `x` are left out, but what they take of the mesh they keep: tokens can
        lie as the features do that are looked up for them.
        """
        spec = xlashard.PartitionSpec(*tuple(self.spec(axes))[: x.ndim])
        return xlashard.with_sharding_constraint(x, xlashard.NamedSharding(self.mesh, spec))

    def ways(self, axis: str) -> int:
        """Over how many devices the rules spread a logical axis."""
        return math.prod(self.mesh.shape[name] for name in getattr(self.rules, axis))

    __call__ = place


def placed(x: jax.Array, place: Place, axes: Axes, back: Axes) -> jax.Array:
    """Lays an array out, and its gradient in another way.

    A constraint alone would lay the gradient out as the array itself: a gathered weight would have
    a gradient that is summed on every device, of which each then needs only its own part.

    Args:
        x: Any array.
        place: Lays it out.
        axes: Logical axes for the array.
        back: Logical axes for its gradient.
    """
    if place is unplaced:
        return x

    @jax.custom_vjp
    def forth(x: jax.Array) -> jax.Array:
        return place(x, axes)

    forth.defvjp(lambda x: (place(x, axes), None), lambda _, gradient: (place(gradient, back),))
    return forth(x)


class Unplaced:
    """The `Place` of a program without a mesh."""

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Leaves an activation as it is."""
        del axes
        return x

    def ways(self, axis: str) -> int:
        """One device has all of each axis."""
        del axis
        return 1


unplaced = Unplaced()


def initial_parameters(declarations: Any, key: jax.Array) -> Any:
    """First values for a tree of declarations.

    Each array draws with a key of its own path, so an array that is added or taken away leaves
    all others as they were.
    """

    def draw(path: tuple[Any, ...], declared: Declaration) -> jax.Array:
        number = zlib.crc32(jax.tree_util.keystr(path).encode())
        return declared.initial(jax.random.fold_in(key, number))

    return jax.tree_util.tree_map_with_path(draw, declarations)


def path_name(path: Any) -> str:
    """A path in a tree of dicts as ``layers.mlp.up``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def build_mesh(axes: Mapping[str, int], devices: Sequence[Any]) -> Any:
    """A mesh with these axis sizes over these devices, neighbours close together.

    Raises:
        SettingsError: The product of the sizes is not the number of devices.
    """
    needed = math.prod(axes.values())
    if needed != len(devices):
        shown = " × ".join(f"{name}={size}" for name, size in axes.items())
        raise SettingsError(
            f"[mesh] {shown} takes {needed} devices, and there are {len(devices)}. "
            f"Write sizes whose product is {len(devices)}, such as:\n{_fitting(axes, len(devices))}"
        )
    grid = mesh_utils.create_device_mesh(tuple(axes.values()), list(devices))
    return xlashard.Mesh(np.asarray(grid), tuple(axes))


def check_mesh(settings: Settings) -> None:
    """Checks mesh and emulated devices against each other, before JAX starts.

    Raises:
        SettingsError: There is no axis, or the sizes do not multiply to the emulated devices.
    """
    axes, emulated = settings.mesh, settings.devices.emulate
    if not axes:
        raise SettingsError("[mesh] names no axis. Write:\n  [mesh]\n  data = 8")
    needed = math.prod(axes.values())
    if emulated and needed != emulated:
        shown = " × ".join(f"{name}={size}" for name, size in axes.items())
        raise SettingsError(
            f"[mesh] {shown} takes {needed} devices, but devices.emulate is {emulated}. Write:\n"
            f"  [devices]\n  emulate = {needed}\nor:\n{_fitting(axes, emulated)}"
        )


def _fitting(axes: Mapping[str, int], count: int) -> str:
    """A mesh table with the same axes for `count` devices, near to the asked sizes."""
    sizes, left = dict.fromkeys(axes, 1), count
    for name in reversed(list(axes)):
        sizes[name] = math.gcd(axes[name], left)
        left //= sizes[name]
    sizes[next(iter(axes))] *= left
    return "  [mesh]\n" + "\n".join(f"  {name} = {size}" for name, size in sizes.items())
