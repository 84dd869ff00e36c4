"""Declared parameters, and the rules that shard them over a mesh.

A model declares each array once: shape, one logical axis name per dimension, initialisation.
`Layout` maps logical axes to shardings by the rules of the settings. The model itself never names
a mesh axis.

Letters in shapes: W width, H query heads, K key and value heads, D features of one head, M hidden
features of the feed-forward part, E experts, N layers, V tokens of the vocabulary.
"""

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils

import xlashard
from xlashard.errors import counted
from xlashard.train.config.schema import setting_line
from xlashard.train.config.settings import ModelSettings, Rules, Settings
from xlashard.train.errors import SettingsError

type Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Declaration:
    """Array of the model.

    Attributes:
        shape: Dimensions.
        axes: One logical axis name per dimension; ``None`` is never sharded.
        spread: Standard deviation of the initial values around 0; ``None``: all ones.
    """

    shape: tuple[int, ...]
    axes: Axes
    spread: float | None

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def initial(self, key: jax.Array) -> jax.Array:
        """Return the initial values, float32, drawn with `key`."""
        if self.spread is None:
            return jnp.ones(self.shape, jnp.float32)
        return self.spread * jax.random.normal(key, self.shape, jnp.float32)


@dataclass(frozen=True)
class Layout:
    """Mesh and the rules that map logical axes to mesh axes.

    Attributes:
        mesh: The mesh; None for a program without one.
        rules: The rules; of an automatic layout they hold inside of kernels.
        automatic: True if a search chooses shardings and constraints in place of the rules.
    """

    mesh: Any
    rules: Rules
    automatic: bool = False

    @classmethod
    def of(cls, settings: Settings, mesh: Any) -> Self:
        """Return the layout of settings on a mesh."""
        return cls(mesh, settings.sharding.rules, settings.sharding.is_auto)

    def spec(self, axes: Axes) -> Any:
        """Return the partition spec of an array with these logical axes.

        A mesh axis of several logical axes shards the last one: a batch that is sharded over the
        axis of the experts leaves the axis to the experts in arrays that have both.
        """
        requested = [() if axis is None else getattr(self.rules, axis) for axis in axes]
        later_axes = [
            {name for later in requested[i + 1 :] for name in later} for i in range(len(requested))
        ]
        names = [
            tuple(name for name in own if name not in later)
            for own, later in zip(requested, later_axes, strict=True)
        ]
        return xlashard.PartitionSpec(*(x[0] if len(x) == 1 else (x or None) for x in names))

    def sharding(self, axes: Axes = ()) -> Any:
        """Return the sharding of an array with these logical axes; without any it is replicated."""
        return xlashard.NamedSharding(self.mesh, self.spec(axes))

    def shardings(self, declarations: Any) -> Any:
        """Return the shardings of a tree of declarations."""
        return jax.tree.map(lambda x: self.sharding(x.axes), declarations)

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Constrain the sharding of an activation by the rules.

        Axes beyond the rank of `x` are dropped, but still occupy their mesh axes: tokens can get
        the sharding of the features that are looked up for them.
        """
        if self.automatic:
            return x
        spec = xlashard.PartitionSpec(*tuple(self.spec(axes))[: x.ndim])
        return xlashard.with_sharding_constraint(x, xlashard.NamedSharding(self.mesh, spec))

    @property
    def platform(self) -> str:
        """Return the platform of the devices, such as ``tpu``; empty without a mesh."""
        return "" if self.mesh is None else self.mesh.devices.flat[0].platform

    def ways(self, axis: str) -> int:
        """Return the number of shards of a logical axis."""
        if self.automatic:
            return 1
        return math.prod(self.mesh.shape[name] for name in getattr(self.rules, axis))


def placed(x: jax.Array, place: Layout, axes: Axes, back: Axes) -> jax.Array:
    """Constrain the sharding of an array, and separately that of its gradient.

    A constraint alone gives the gradient the sharding of the array: the gradient of a gathered
    weight would be all-reduced, though each device needs its own shard only.

    Args:
        x: Any array.
        place: Applies the constraint.
        axes: Logical axes for the array.
        back: Logical axes for its gradient.
    """
    if place.automatic:
        return x

    @jax.custom_vjp
    def forth(x: jax.Array) -> jax.Array:
        return place(x, axes)

    forth.defvjp(lambda x: (place(x, axes), None), lambda _, gradient: (place(gradient, back),))
    return forth(x)


unplaced = Layout(None, Rules(), automatic=True)
"""Layout of a program without a mesh, which constrains nothing."""


def initial_parameters(declarations: Any, key: jax.Array) -> Any:
    """Return the initial values of a tree of declarations.

    The key of an array derives from its path, so adding or removing an array does not change the
    others.
    """

    def draw(path: tuple[Any, ...], declared: Declaration) -> jax.Array:
        number = zlib.crc32(jax.tree_util.keystr(path).encode())
        return declared.initial(jax.random.fold_in(key, number))

    return jax.tree_util.tree_map_with_path(draw, declarations)


def path_name(path: Any) -> str:
    """Format a path in a tree of dicts as ``layers.mlp.up``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def build_mesh(axes: Mapping[str, int], devices: Sequence[Any]) -> Any:
    """Return a mesh with these axis sizes, neighbours close together in the topology.

    Raises:
        SettingsError: The product of the sizes is not the number of devices.
    """
    needed = math.prod(axes.values())
    if needed != len(devices):
        shown = " × ".join(f"{name}={size}" for name, size in axes.items())
        raise SettingsError(
            f"[mesh] {shown} takes {counted(needed, 'device')}, and there are {len(devices)}. "
            f"Write sizes whose product is {len(devices)}, such as:\n{_fitting(axes, len(devices))}"
        )
    grid = mesh_utils.create_device_mesh(tuple(axes.values()), list(devices))
    return xlashard.Mesh(np.asarray(grid), tuple(axes))


def check_mesh(settings: Settings) -> None:
    """Check mesh and emulated devices against each other, before JAX starts.

    Raises:
        SettingsError: The mesh has no axis, or another size than the number of emulated devices.
    """
    axes, emulated = settings.mesh, settings.devices.emulate
    if not axes:
        raise SettingsError("[mesh] has no axes. Write:\n  [mesh]\n  data = 8")
    needed = math.prod(axes.values())
    if emulated and needed != emulated:
        shown = " × ".join(f"{name}={size}" for name, size in axes.items())
        raise SettingsError(
            f"[mesh] {shown} takes {counted(needed, 'device')}, but devices.emulate is {emulated}. "
            f"Write:\n  [devices]\n  emulate = {needed}\nor:\n{_fitting(axes, emulated)}"
        )


def _fitting(axes: Mapping[str, int], count: int) -> str:
    """Return a mesh table with the same axes for `count` devices, near the requested sizes."""
    sizes, left = dict.fromkeys(axes, 1), count
    for name in reversed(list(axes)):
        sizes[name] = math.gcd(axes[name], left)
        left //= sizes[name]
    sizes[next(iter(axes))] *= left
    return setting_line("mesh", sizes)


HEAD = ("embed", "vocab")

type _Array = tuple[tuple[int, ...], Axes, float | None]
"""Shape, axes and spread of an array of one layer."""


def declare(model: ModelSettings) -> dict[str, Any]:
    """Return the tree of `Declaration` in the structure of the parameters.

    Args:
        model: The shape of the model.

    Returns:
        ``embedding`` [V, W], ``layers`` (dicts of arrays, each stacked over the layers that have
        it), ``norm`` [W] and ``head`` [W, V], unless the embedding is tied to it.
    """
    width = model.width
    stacks: dict[str, dict[str, _Array]] = {}
    sizes = Counter[str]()
    for kind, count in model.count_layer_kinds().items():
        names = name_stacks(model, kind)
        stacks |= zip(names, (_attention(kind), _feed_forward(kind)), strict=True)
        sizes.update(dict.fromkeys(names, count))

    def declare_stack(name: str) -> dict[str, Declaration]:
        return {
            array: Declaration((sizes[name], *shape), ("layers", *axes), spread)
            for array, (shape, axes, spread) in stacks[name].items()
        }

    head = {} if model.tied else {"head": Declaration((width, model.vocab), HEAD, width**-0.5)}
    return {
        "embedding": Declaration((model.vocab, width), ("vocab", "embed"), 1.0),
        "layers": {name: declare_stack(name) for name in stacks},
        "norm": Declaration((width,), (None,), None),
        **head,
    }


def name_stacks(model: ModelSettings, kind: ModelSettings) -> tuple[str, str]:
    """Return the names of the arrays of a kind of layer: those of attention and feed-forward layer.

    Args:
        model: The model.
        kind: One of its `count_layer_kinds`. Kinds whose arrays have the same shapes share them.
    """
    is_narrow = (kind.head_size, kind.kv_heads) == (model.head_size, model.kv_heads)
    has_same = bool(kind.experts) == bool(model.experts)
    return "attention" if is_narrow else "wide_attention", "mlp" if has_same else "dense"


def declared_arrays(model: ModelSettings) -> dict[str, Declaration]:
    """Return the declarations of a model by path, such as `layers.mlp.up`."""
    return {path_name(path): x for path, x in jax.tree.leaves_with_path(declare(model))}


def _attention(model: ModelSettings) -> dict[str, _Array]:
    width, heads, kv_heads, size = model.width, model.heads, model.kv_heads, model.head_size
    inward = width**-0.5
    arrays: dict[str, _Array] = {
        "norm": ((width,), (None,), None),
        "query": ((width, heads, size), ("embed", "heads", None), inward),
        "key": ((width, kv_heads, size), ("embed", "kv_heads", None), inward),
        "value": ((width, kv_heads, size), ("embed", "kv_heads", None), inward),
        "out": ((heads, size, width), ("heads", None, "embed"), _quiet(model) * inward),
    }
    if model.latent:
        rank, turned = model.query_rank or width, model.rope_size
        outward = model.latent**-0.5
        arrays |= {
            "query": ((rank, heads, size + turned), ("embed", "heads", None), rank**-0.5),
            "latent": ((width, model.latent + turned), ("embed", None), inward),
            "latent_norm": ((model.latent,), (None,), None),
            "key": ((model.latent, heads, size), ("embed", "heads", None), outward),
            "value": ((model.latent, heads, size), ("embed", "heads", None), outward),
        }
    if model.latent and model.query_rank:
        arrays |= {
            "query_down": ((width, model.query_rank), ("embed", None), inward),
            "query_norm": ((model.query_rank,), (None,), None),
        }
    return arrays


def _feed_forward(model: ModelSettings) -> dict[str, _Array]:
    width, inward = model.width, model.width**-0.5
    many, named = ((model.experts,), ("experts",)) if model.experts else ((), ())

    def layer(prefix: str, hidden: int, many: tuple[int, ...], named: Axes) -> dict[str, _Array]:
        into = ((*many, width, hidden), (*named, "embed", "mlp"), inward)
        spread = _quiet(model) * hidden**-0.5
        down = ((*many, hidden, width), (*named, "mlp", "embed"), spread)
        arrays = {"gate": into, "up": into, "down": down}
        return {prefix + name: array for name, array in arrays.items()}

    arrays: dict[str, _Array] = {"norm": ((width,), (None,), None)}
    arrays |= layer("", model.mlp, many, named)
    if not model.gated:
        del arrays["gate"]
    if model.parallel:
        del arrays["norm"]
    if model.experts:
        arrays["router"] = ((width, model.experts), ("embed", None), inward)
    if model.experts and model.shared_mlp:
        arrays |= layer("shared_", model.shared_mlp, (), ())
    return arrays


def _quiet(model: ModelSettings) -> float:
    """Return the factor that compensates the growth of the residual stream with the depth."""
    return (2 * model.layers) ** -0.5
