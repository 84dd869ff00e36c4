"""Every setting of a training run, with its type, default and range."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from xlashard.documents import read_toml
from xlashard.train.config.schema import Bounds, read, section, setting
from xlashard.train.errors import SettingsError

_POSITIVE = Bounds(at_least=1)
_NOT_NEGATIVE = Bounds(at_least=0)
_FRACTION = Bounds(at_least=0, at_most=1)
_MOMENT = Bounds(at_least=0, below=1)

KEEPABLE = ("query", "key", "value", "attention", "stream", "gate", "up")
"""What the backward pass may find kept of a layer: queries, keys and values as attention takes
them, what attention gives, the stream between both parts, the two products of the feed-forward
part."""


@dataclass(frozen=True)
class RunSettings:
    """Where the results go, and the seed of everything random."""

    name: str = setting("", "folder below runs/; empty: the settings file's own name")
    seed: int = setting(0, "seed of parameters, batches and generated text", _NOT_NEGATIVE)


@dataclass(frozen=True)
class DeviceSettings:
    """What the program runs on."""

    emulate: int = setting(
        0, "emulated CPU devices; 0: all real devices that are found", _NOT_NEGATIVE
    )
    topology: str = setting(
        "", "TPU topology that the run is meant for, `v5p-64`; preflight takes it by default"
    )
    slices: int = setting(1, "slices of that topology", _POSITIVE)


@dataclass(frozen=True)
class Rules:
    """Which mesh axes each named axis of the model is spread over; empty: over none."""

    batch: tuple[str, ...] = setting((), "the sequences of a batch")
    length: tuple[str, ...] = setting((), "the positions of a sequence, between the layers' parts")
    vocab: tuple[str, ...] = setting((), "the vocabulary: embedding and output head")
    embed: tuple[str, ...] = setting((), "the width of the model, in the parameters")
    heads: tuple[str, ...] = setting((), "the query heads, in parameters and activations")
    kv_heads: tuple[str, ...] = setting((), "the key and value heads, in the parameters")
    mlp: tuple[str, ...] = setting((), "the hidden width of the feed-forward part")
    experts: tuple[str, ...] = setting((), "the experts of the feed-forward part")
    layers: tuple[str, ...] = setting((), "the layers, which are stacked in one array")


@dataclass(frozen=True)
class ShardingSettings:
    """How the model lies on the mesh."""

    rules: Rules = section(Rules, "logical axis → mesh axes")


@dataclass(frozen=True)
class ModelSettings:
    """The transformer's shape and arithmetic."""

    layers: int = setting(4, "transformer layers", _POSITIVE)
    width: int = setting(128, "features per position", _POSITIVE)
    heads: int = setting(4, "query heads; width / heads is the size of a head", _POSITIVE)
    kv_heads: int = setting(2, "key and value heads, each shared by heads / kv_heads", _POSITIVE)
    mlp: int = setting(384, "hidden features of the feed-forward part", _POSITIVE)
    vocab: int = setting(256, "tokens that there are; of text as bytes 256", Bounds(at_least=2))
    length: int = setting(128, "tokens of context", Bounds(at_least=2))
    rope_base: float = setting(10000.0, "longest rotary wavelength / 2π", Bounds(above=1))
    compute: Literal["float32", "bfloat16"] = setting(
        "float32", "type of the layers' arithmetic; parameters and loss keep theirs"
    )
    parameters: Literal["float32", "bfloat16"] = setting(
        "float32", "type in which the parameters are kept; bfloat16 loses updates below 1/256"
    )
    remat: bool = setting(False, "recompute each layer in the backward pass to save memory")
    kept: tuple[str, ...] = setting(
        (), f"what remat keeps of a layer besides its input: {', '.join(KEEPABLE)}"
    )
    attention_block: int = setting(
        0,
        "positions whose attention is computed at once; 0: all, which takes length² scores",
        _NOT_NEGATIVE,
    )
    vocab_parts: int = setting(
        1, "parts of the vocabulary whose scores are computed one after the other", _POSITIVE
    )
    experts: int = setting(0, "experts of each feed-forward part; 0: it is one", _NOT_NEGATIVE)
    active_experts: int = setting(2, "experts that each token goes to", _POSITIVE)
    capacity: float = setting(
        1.25,
        "room of an expert, by its share of a sequence's tokens; others pass by it",
        Bounds(above=0),
    )
    balance: float = setting(
        0.01, "weight of the loss that keeps the experts equally busy", _NOT_NEGATIVE
    )

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.width // self.heads


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its warm-up and its cosine decay."""

    learning_rate: float = setting(3e-3, "peak learning rate", Bounds(above=0))
    warmup: int = setting(20, "steps of linear rise from 0", _NOT_NEGATIVE)
    final: float = setting(0.1, "last learning rate as a fraction of the peak", _FRACTION)
    b1: float = setting(0.9, "decay of the mean of gradients", _MOMENT)
    b2: float = setting(0.95, "decay of the mean of squared gradients", _MOMENT)
    eps: float = setting(1e-8, "added to the root of the second mean", Bounds(above=0))
    weight_decay: float = setting(0.1, "decoupled decay of the matrices", _NOT_NEGATIVE)
    clip: float = setting(1.0, "largest global norm of the gradient", Bounds(above=0))
    moments: Literal["float32", "bfloat16"] = setting(
        "float32", "type in which both means are kept"
    )


@dataclass(frozen=True)
class TrainingSettings:
    """How long, how much at once, and how often it is reported."""

    steps: int = setting(300, "optimiser steps", _POSITIVE)
    batch: int = setting(32, "sequences per step, over all devices", _POSITIVE)
    accumulate: int = setting(1, "parts a batch is computed in, one after the other", _POSITIVE)
    eval_every: int = setting(100, "steps between evaluations; 0: at the end only", _NOT_NEGATIVE)
    eval_batches: int = setting(4, "batches of one evaluation", _POSITIVE)
    log_every: int = setting(10, "steps between lines where output is not a terminal", _POSITIVE)


@dataclass(frozen=True)
class CheckpointSettings:
    """What a run leaves behind so that another one can go on from there."""

    every: int = setting(
        100, "steps between checkpoints; 0: only at a stop and at the end", _NOT_NEGATIVE
    )
    keep: int = setting(3, "newest checkpoints that are kept; 0: none is made", _NOT_NEGATIVE)


@dataclass(frozen=True)
class PodSettings:
    """What concerns runs of several processes."""

    heartbeat: float = setting(
        100.0, "seconds of silence after which a process is taken for dead", Bounds(at_least=1)
    )
    watchdog: float = setting(
        300.0, "seconds without a step after which all stacks are shown; 0: never", _NOT_NEGATIVE
    )


@dataclass(frozen=True)
class DataSettings:
    """The text."""

    paths: tuple[str, ...] = setting(
        (), "text files or folders; empty: the prose that ships with Python"
    )
    eval_fraction: float = setting(
        0.05, "part at the end of the text kept for evaluation", Bounds(above=0, below=1)
    )
    tokens: Literal["bytes", "uint16", "uint32"] = setting(
        "bytes", "what the files hold: text as bytes, or tokens: .bin of this type, or .npy"
    )


@dataclass(frozen=True)
class GenerationSettings:
    """The text written at the end of a run."""

    prompt: str = setting("The ", "how the generated text begins")
    bytes: int = setting(200, "bytes to generate; 0: none", _NOT_NEGATIVE)
    temperature: float = setting(0.8, "0: always the likeliest byte", _NOT_NEGATIVE)


@dataclass(frozen=True)
class Settings:
    """A whole run. The mesh is a table of axis names and sizes."""

    run: RunSettings = section(RunSettings, "the run")
    devices: DeviceSettings = section(DeviceSettings, "devices")
    mesh: dict[str, int] = setting({"data": 1}, "mesh axes and their sizes", _POSITIVE)
    sharding: ShardingSettings = section(ShardingSettings, "sharding")
    model: ModelSettings = section(ModelSettings, "model")
    optimizer: OptimizerSettings = section(OptimizerSettings, "optimiser")
    training: TrainingSettings = section(TrainingSettings, "training")
    checkpoint: CheckpointSettings = section(CheckpointSettings, "checkpoints")
    pod: PodSettings = section(PodSettings, "processes")
    data: DataSettings = section(DataSettings, "data")
    generation: GenerationSettings = section(GenerationSettings, "generation")


def load_settings(path: str | os.PathLike[str], words: Iterable[str] = ()) -> Settings:
    """Reads a settings file and applies ``key=value`` words to it.

    Args:
        path: A TOML file.
        words: Overrides such as ``"model.layers=4"``.

    Returns:
        The settings; ``run.name`` is the file's own name where none is given.

    Raises:
        SettingsError: The file is missing or no TOML, or a key or value is wrong; the text names
            the file, the key's full path and what to write.

    Example:
        >>> settings = load_settings("configs/tiny.toml", ["model.layers=2"])
        >>> settings.model.layers
        2
    """
    path = Path(path)
    try:
        table = read_toml(path)
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


def _missing(path: Path) -> str:
    others = sorted(str(x) for x in path.parent.glob("*.toml"))[:8]
    there = f"; in {path.parent} there are: {', '.join(others)}" if others else ""
    return f"there is no settings file {path}{there}. Write the path of an existing file."
