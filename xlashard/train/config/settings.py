"""Settings of a training run, with types, defaults and ranges, and their changes."""

import math
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path, PurePath
from typing import Any, Literal, cast

from xlashard.support.documents import LARGEST_SETTINGS, parse_toml, read_text
from xlashard.train.config.schema import Bounds, read, section, setting, toml_value
from xlashard.train.errors import SettingsError

_Float = Literal["float32", "bfloat16"]
_POSITIVE = Bounds(at_least=1)
_NOT_NEGATIVE = Bounds(at_least=0)
# Each emulated device has threads of its own: 4,096 take half a minute to start.
_EMULATED = Bounds(at_least=0, at_most=4096)
_LONGEST = 1e8  # Seconds; clocks and JAX's own timeouts take as many.
_FRACTION = Bounds(at_least=0, at_most=1)
_MOMENT = Bounds(at_least=0, below=1)

KEEPABLE = (
    *("input", "query", "key", "value", "attention", "out"),
    *("stream", "gate", "up", "down"),
)
"""Residuals of a layer that remat can keep or offload: the layer's input, the inputs and the output
of attention and its projection, the residual stream between both sublayers, and the products of the
feed-forward layer."""

_PROJECTIONS = ("query", "key", "value")
_PRODUCTS = (*_PROJECTIONS, "out", "gate", "up", "down")

REMAT_POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((), ()),
    "minimal": (_PRODUCTS, ()),
    "minimal_with_context": ((*_PRODUCTS, "attention"), ()),
    "minimal_offloaded": ((), _PRODUCTS),
    "save_dot_except_mlp": ((*_PROJECTIONS, "out"), ()),
    "save_dot_with_context_except_mlp": ((*_PROJECTIONS, "attention", "out"), ()),
    "save_dot_except_mlpwi": ((*_PROJECTIONS, "out", "down"), ()),
    "save_qkv_proj": (_PROJECTIONS, ()),
    "save_out_proj": (("out",), ()),
    "qkv_proj_offloaded": ((), _PROJECTIONS),
}
"""Residuals on the device and in host memory, by the names that MaxText gives the policies."""


@dataclass(frozen=True)
class RunSettings:
    """Name of the run folder, and random seed."""

    name: str = setting("", "folder below runs/; empty: stem of the settings file")
    seed: int = setting(
        0, "seed of parameters, batches and generated text", Bounds(at_least=0, at_most=2**32 - 1)
    )


@dataclass(frozen=True)
class DeviceSettings:
    """Devices of the run."""

    emulate: int = setting(0, "emulated CPU devices; 0: all real devices", _EMULATED)
    topology: str = setting(
        "", "TPU topology of the run, such as `v5p-64`; the default of preflight"
    )
    slices: int = setting(1, "slices of that topology", _POSITIVE)


@dataclass(frozen=True)
class Rules:
    """Mesh axes over which each logical axis is sharded; empty: replicated."""

    batch: tuple[str, ...] = setting((), "sequences of a batch")
    length: tuple[str, ...] = setting((), "positions of a sequence, in the residual stream")
    vocab: tuple[str, ...] = setting((), "vocabulary: embedding and output head")
    embed: tuple[str, ...] = setting((), "width of the model, in the parameters")
    heads: tuple[str, ...] = setting((), "query heads, in parameters and activations")
    kv_heads: tuple[str, ...] = setting((), "key and value heads, in the parameters")
    mlp: tuple[str, ...] = setting((), "hidden width of the feed-forward layer")
    experts: tuple[str, ...] = setting((), "experts of the feed-forward layer")
    layers: tuple[str, ...] = setting((), "layers, stacked in one array")


@dataclass(frozen=True)
class ShardingSettings:
    """Sharding of the model."""

    layout: Literal["rules", "auto"] = setting(
        "rules",
        "auto: specs and constraints by search, rules inside of kernels only; `sharding = "
        '"auto"` for short',
    )
    rules: Rules = section(Rules, "logical axis → mesh axes")

    @property
    def is_auto(self) -> bool:
        """Return True if a search chooses the layout."""
        return self.layout == "auto"


_DOWN_TILE = "the same of the experts' last product; 0: as of the first ones"


@dataclass(frozen=True)
class KernelSettings:
    """Kernels, with positions per block of the passes of attention on TPU."""

    attention: Literal["none", "fused", "splash", "flash", "cudnn"] = setting(
        "none",
        "kernel of attention: splash and flash of Pallas on TPU, cudnn on GPU, fused for the best "
        "one of the devices; other devices compute it without the kernel",
    )
    block_q: int = setting(512, "queries per block, forward", _POSITIVE)
    block_kv: int = setting(512, "keys per block, forward", _POSITIVE)
    block_kv_compute: int = setting(512, "keys per product, forward", _POSITIVE)
    block_q_dkv: int = setting(512, "queries per block, gradients of keys and values", _POSITIVE)
    block_kv_dkv: int = setting(512, "keys per block, gradients of keys and values", _POSITIVE)
    block_kv_dkv_compute: int = setting(
        512, "keys per product, gradients of keys and values", _POSITIVE
    )
    block_q_dq: int = setting(512, "queries per block, gradient of queries", _POSITIVE)
    block_kv_dq: int = setting(512, "keys per block, gradient of queries", _POSITIVE)
    fused_backward: bool = setting(False, "splash: all gradients in one kernel")
    experts: Literal["none", "gmm"] = setting(
        "none", "Pallas kernel of ragged products on TPU; others use `jax.lax.ragged_dot`"
    )
    tile_rows: int = setting(512, "tokens per tile of a ragged product", _POSITIVE)
    tile_inner: int = setting(1024, "summed features per tile of a ragged product", _POSITIVE)
    tile_columns: int = setting(1024, "resulting features per tile of a ragged product", _POSITIVE)
    tile_rows_dw: int = setting(512, "tokens per tile, gradient of the weights", _POSITIVE)
    tile_inner_dw: int = setting(1024, "rows of the gradient of the weights per tile", _POSITIVE)
    tile_columns_dw: int = setting(1024, "its columns per tile", _POSITIVE)
    down_tile_rows: int = setting(0, _DOWN_TILE, _NOT_NEGATIVE)
    down_tile_inner: int = setting(0, _DOWN_TILE, _NOT_NEGATIVE)
    down_tile_columns: int = setting(0, _DOWN_TILE, _NOT_NEGATIVE)
    down_tile_rows_dw: int = setting(0, _DOWN_TILE, _NOT_NEGATIVE)
    down_tile_inner_dw: int = setting(0, _DOWN_TILE, _NOT_NEGATIVE)
    down_tile_columns_dw: int = setting(0, _DOWN_TILE, _NOT_NEGATIVE)

    @property
    def down_kernel(self) -> "KernelSettings":
        """Return the settings with the tiles of the experts' last product as those of the first."""
        down = {n.removeprefix("down_"): x for n, x in vars(self).items() if n.startswith("down_")}
        return replace(self, **{name: size for name, size in down.items() if size})

    def blocks(self, length: int) -> dict[str, int]:
        """Return the positions per block of attention, by their names, at most `length`."""
        sizes = vars(self).items()
        return {name: min(size, length) for name, size in sizes if name.startswith("block_")}


@dataclass(frozen=True)
class ModelSettings:
    """Shape and arithmetic of the transformer."""

    layers: int = setting(4, "transformer layers", _POSITIVE)
    width: int = setting(128, "features per position", _POSITIVE)
    heads: int = setting(4, "query heads", _POSITIVE)
    head_dim: int = setting(0, "features of a head; 0: width / heads", _NOT_NEGATIVE)
    kv_heads: int = setting(2, "key and value heads, each shared by heads / kv_heads", _POSITIVE)
    latent: int = setting(0, "rank of keys and values in latent attention; 0: none", _NOT_NEGATIVE)
    query_rank: int = setting(0, "rank of queries in latent attention; 0: full", _NOT_NEGATIVE)
    rope_size: int = setting(
        64, "features of queries and keys with rotary positions in latent attention", _POSITIVE
    )
    mlp: int = setting(384, "hidden features of the feed-forward layer", _POSITIVE)
    activation: Literal["silu", "gelu", "relu"] = setting(
        "silu", "function between the products of the feed-forward layer"
    )
    gated: bool = setting(True, "gate in the feed-forward layer: three matrices, else two")
    parallel: bool = setting(False, "attention and feed-forward layer of the same input")
    one_hot: bool = setting(False, "look tokens up by a product of one-hot rows")
    tied: bool = setting(False, "the embedding is the output head too")
    vocab: int = setting(256, "size of the vocabulary; 256 for bytes", Bounds(at_least=2))
    length: int = setting(128, "tokens of context", Bounds(at_least=2))
    window: int = setting(0, "last positions that a position sees; 0: all before it", _NOT_NEGATIVE)
    window_cycle: int = setting(
        1, "layers of a cycle, whose last one sees all positions before it", _POSITIVE
    )
    wide_head_dim: int = setting(
        0,
        "features of a head in the last layer of such a cycle; 0: as in the others",
        _NOT_NEGATIVE,
    )
    wide_kv_heads: int = setting(
        0, "key and value heads of that layer; 0: as in the others", _NOT_NEGATIVE
    )
    rope_base: float = setting(10000.0, "longest rotary wavelength / 2π", Bounds(above=1))
    compute: _Float = setting(
        "float32", "type of the layers' arithmetic; not of parameters and loss"
    )
    parameters: _Float = setting(
        "float32", "type of the parameters; bfloat16 loses updates below 1/256"
    )
    quantized: Literal["none", "int8", "fp8"] = setting(
        "none", "type of the products with weights of the layers; none: that of `compute`"
    )
    remat: bool = setting(False, "recompute each layer in the backward pass to save memory")
    kept: tuple[str, ...] = setting(
        (), f"residuals that remat keeps besides the input of a layer: {', '.join(KEEPABLE)}"
    )
    offloaded: tuple[str, ...] = setting((), "residuals that remat moves to host memory and back")
    remat_policy: Literal[
        "custom",
        "full",
        "minimal",
        "minimal_with_context",
        "minimal_offloaded",
        "save_dot_except_mlp",
        "save_dot_with_context_except_mlp",
        "save_dot_except_mlpwi",
        "save_qkv_proj",
        "save_out_proj",
        "qkv_proj_offloaded",
    ] = setting("custom", "residuals by the name of a policy; custom: `kept` and `offloaded`")
    kernel: KernelSettings = section(KernelSettings, "kernels")
    attention_block: int = setting(
        0, "positions per block of attention; 0: one block with length² scores", _NOT_NEGATIVE
    )
    scores: _Float = setting(
        "float32", "type in which attention stores its scores without a kernel and in one block"
    )
    logits: _Float = setting(
        "float32", "type in which the logits are stored, with one part of the vocabulary"
    )
    vocab_parts: int = setting(
        1, "parts of the vocabulary, computed one after the other", _POSITIVE
    )
    experts: int = setting(0, "experts of a feed-forward layer; 0: dense", _NOT_NEGATIVE)
    dense_layers: int = setting(0, "first layers, which have no experts", _NOT_NEGATIVE)
    expert_cycle: int = setting(
        1, "layers of a cycle after them, of which the last one has experts", _POSITIVE
    )
    dense_mlp: int = setting(
        0, "hidden features of the layers without experts; 0: as mlp", _NOT_NEGATIVE
    )
    active_experts: int = setting(2, "experts per token", _POSITIVE)
    shared_mlp: int = setting(
        0, "hidden features of a layer beside the experts for all tokens; 0: none", _NOT_NEGATIVE
    )
    dropless: bool = setting(False, "ragged products of the experts, without a capacity")
    capacity: float = setting(
        1.25, "capacity factor: slots of an expert per equal share of the tokens", Bounds(above=0)
    )
    balance: float = setting(0.01, "weight of the load-balancing loss", _NOT_NEGATIVE)

    @property
    def head_size(self) -> int:
        """Return the number of features of a head."""
        return self.head_dim or self.width // self.heads

    def derive_layer(self, number: int) -> "ModelSettings":
        """Return the settings of a model of which every layer is as one of this model.

        Args:
            number: Number of the layer from 0.
        """
        wide = number % self.window_cycle == self.window_cycle - 1
        head_dim, kv_heads = (self.wide_head_dim, self.wide_kv_heads) if wide else (0, 0)
        later = number - self.dense_layers
        dense = later < 0 or later % self.expert_cycle < self.expert_cycle - 1
        experts = 0 if dense else self.experts
        return replace(
            self,
            window=0 if wide else self.window,
            window_cycle=1,
            head_dim=head_dim or self.head_size,
            wide_head_dim=0,
            kv_heads=kv_heads or self.kv_heads,
            wide_kv_heads=0,
            experts=experts,
            dense_layers=0,
            expert_cycle=1,
            mlp=self.mlp if experts else self.dense_mlp or self.mlp,
            dense_mlp=0,
        )

    def count_layer_kinds(self) -> "dict[ModelSettings, int]":
        """Return the number of layers of each kind, by the `derive_layer` of the kind."""
        kinds = Counter["ModelSettings"]()
        for start, size, count in self.list_scans():
            for number in range(start, start + size):
                kinds[self.derive_layer(number)] += count
        return dict(kinds)

    def list_scans(self) -> Iterator[tuple[int, int, int]]:
        """Yield first layer, layers of a cycle and number of cycles of each scan over layers."""
        dense = min(self.dense_layers, self.layers) if self.experts else 0
        expert_cycle = self.expert_cycle if self.experts else 1
        for start, end, cycle in (
            (0, dense, self.window_cycle),
            (dense, self.layers, math.lcm(self.window_cycle, expert_cycle)),
        ):
            count, rest = divmod(end - start, cycle)
            if count:
                yield start, cycle, count
            if rest:
                yield end - rest, rest, 1

    @property
    def residuals(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the residuals that remat keeps on the device, and those in host memory."""
        return REMAT_POLICIES.get(self.remat_policy, (self.kept, self.offloaded))


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with warm-up and cosine decay."""

    learning_rate: float = setting(3e-3, "peak learning rate", Bounds(above=0))
    warmup: int = setting(20, "steps of linear rise from 0", _NOT_NEGATIVE)
    final: float = setting(0.1, "last learning rate as a fraction of the peak", _FRACTION)
    b1: float = setting(0.9, "decay of the mean of gradients", _MOMENT)
    b2: float = setting(0.95, "decay of the mean of squared gradients", _MOMENT)
    eps: float = setting(1e-8, "added to the root of the second mean", Bounds(above=0))
    weight_decay: float = setting(0.1, "decoupled decay of the matrices", _NOT_NEGATIVE)
    clip: float = setting(1.0, "largest global norm of the gradient", Bounds(above=0))
    moments: _Float = setting("float32", "type of both moments")
    mean: Literal["moments", "float32", "bfloat16"] = setting(
        "moments", "type of the first moment; moments: that of both"
    )

    @property
    def first_moment(self) -> str:
        """Return the type of the first moment."""
        return self.moments if self.mean == "moments" else self.mean


@dataclass(frozen=True)
class TrainingSettings:
    """Duration, batch size, evaluation and logging."""

    steps: int = setting(300, "optimiser steps", _POSITIVE)
    batch: int = setting(32, "sequences per step, over all devices", _POSITIVE)
    accumulate: int = setting(1, "gradient accumulation: parts of a batch", _POSITIVE)
    eval_every: int = setting(100, "steps between evaluations; 0: at the end only", _NOT_NEGATIVE)
    eval_batches: int = setting(4, "batches of one evaluation", _POSITIVE)
    log_every: int = setting(10, "steps between log lines, without a terminal", _POSITIVE)


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints of a run."""

    every: int = setting(
        100, "steps between checkpoints; 0: at a stop and at the end only", _NOT_NEGATIVE
    )
    keep: int = setting(3, "newest checkpoints to keep; 0: no checkpoints", _NOT_NEGATIVE)


@dataclass(frozen=True)
class PodSettings:
    """Settings of runs with several processes."""

    heartbeat: float = setting(
        100.0,
        "heartbeat timeout of a process in seconds",
        Bounds(at_least=1, at_most=_LONGEST),
    )
    watchdog: float = setting(
        300.0,
        "seconds without a step after which all stacks are printed; 0: never",
        Bounds(at_least=0, at_most=_LONGEST),
    )


@dataclass(frozen=True)
class DataSettings:
    """Training text."""

    paths: tuple[str, ...] = setting((), "text files or folders; empty: Python's own documentation")
    eval_fraction: float = setting(
        0.05, "fraction at the end of the text held out for evaluation", Bounds(above=0, below=1)
    )
    tokens: Literal["bytes", "uint16", "uint32"] = setting(
        "bytes", "contents of the files: bytes of text, or tokens (.bin of this type, or .npy)"
    )


@dataclass(frozen=True)
class GenerationSettings:
    """Text generated at the end of a run."""

    prompt: str = setting("The ", "beginning of the generated text")
    bytes: int = setting(200, "bytes to generate; 0: none", _NOT_NEGATIVE)
    temperature: float = setting(0.8, "0: always the most likely byte", _NOT_NEGATIVE)


@dataclass(frozen=True)
class Settings:
    """Settings of a run. The mesh is a table of axis names and sizes."""

    run: RunSettings = section(RunSettings, "the run")
    devices: DeviceSettings = section(DeviceSettings, "devices")
    mesh: dict[str, int] = setting({"data": 1}, "mesh axes and their sizes", _POSITIVE)
    sharding: ShardingSettings = section(ShardingSettings, "sharding", short="layout")
    model: ModelSettings = section(ModelSettings, "model")
    optimizer: OptimizerSettings = section(OptimizerSettings, "optimiser")
    training: TrainingSettings = section(TrainingSettings, "training")
    checkpoint: CheckpointSettings = section(CheckpointSettings, "checkpoints")
    pod: PodSettings = section(PodSettings, "processes")
    data: DataSettings = section(DataSettings, "data")
    generation: GenerationSettings = section(GenerationSettings, "generation")


def load_settings(
    path: str | os.PathLike[str],
    words: Iterable[str] = (),
    parse: Callable[[str], dict[str, Any]] = parse_toml,
) -> Settings:
    """Read a settings file and apply ``key=value`` overrides.

    Args:
        path: A TOML file. ``configs/NAME.toml`` and ``NAME.toml`` are files that come with xlashard
            where the working directory has none of that name.
        words: Overrides such as ``"model.layers=4"``.
        parse: Returns the tables of the file's text.

    Returns:
        The settings; ``run.name`` defaults to the stem of the file.

    Raises:
        SettingsError: The file is missing or invalid TOML, or a key or value is invalid; the
            message has the file, the key's full path and the remedy.

    Example:
        >>> settings = load_settings("configs/tiny.toml", ["model.layers=2"])
        >>> settings.model.layers
        2
    """
    # A URL of an object store has a class of its own.
    path = cast(Path, path) if isinstance(path, PurePath) else Path(path)
    try:
        table = parse(read_text(_find_settings_file(path), LARGEST_SETTINGS))
    except FileNotFoundError:
        raise SettingsError(_missing(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as a settings file: {error}") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    try:
        settings = read(Settings, table, words)
    except SettingsError as error:
        raise SettingsError(f"in {path}:\n{error}") from None
    if settings.run.name:
        return settings
    return replace(settings, run=replace(settings.run, name=path.stem))


def list_shipped_files() -> dict[str, Path]:
    """Return the settings files that come with xlashard, by their names."""
    # A link in a checkout, a folder in a wheel.
    folder = Path(__file__).parents[2] / "configs"
    return {path.name: path for path in sorted(folder.glob("*.toml"))}


def _find_settings_file(path: Path) -> Path:
    """Return the file, or the one that comes with xlashard if the file does not exist."""
    if path.parent in (Path(), Path("configs")) and not os.path.exists(path):
        return list_shipped_files().get(path.name, path)
    return path


def _list_by_closeness(paths: Iterable[Path], name: str) -> str:
    def distance(path: Path) -> tuple[float, Path]:
        return -SequenceMatcher(None, path.name, name).ratio(), path

    return ", ".join(map(str, sorted(paths, key=distance)[:8]))


def _missing(path: Path) -> str:
    others = list(path.parent.glob("*.toml"))
    shipped = list_shipped_files().keys() - {other.name for other in others}
    listed = f"; {path.parent} has: {_list_by_closeness(others, path.name)}" if others else ""
    if shipped:
        files = (Path("configs", name) for name in shipped)
        listed += f"; xlashard has: {_list_by_closeness(files, path.name)}"
    return f"the settings file {path} does not exist{listed}. Write the path of an existing file."


type Changes = dict[str, tuple[str | None, str | None]]
"""Old and new value by key; None for a missing one."""


def setting_changes(was: str, now: str) -> Changes:
    r"""Return the settings that differ between two TOML documents, in TOML notation.

    Example:
        >>> setting_changes("[model]\nwidth = 64", "[model]\nwidth = 128")
        {'model.width': ('64', '128')}
    """
    return differences(*({key: toml_value(x) for key, x in _flat(text)} for text in (was, now)))


def change_text(key: str, old: str | None, new: str | None) -> str:
    """Describe a setting that differs: `model.width = 64 is 128`."""
    return f"{key} = {old or '(not set)'} is {new or 'not set'}"


def _flat(text: str) -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [("", tomllib.loads(text))]
    while waiting:
        path, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}" if path else key, x) for key, x in value.items()]
        else:
            yield path, value


def differences(was: Mapping[str, str], now: Mapping[str, str]) -> Changes:
    """Return the keys whose values differ, with the old and the new value of each."""
    pairs = {key: (was.get(key), now.get(key)) for key in [*was, *now]}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}
