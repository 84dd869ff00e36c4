"""Checks of model, batch and rules against each other and the mesh, before compilation."""

import difflib
import math
from collections.abc import Iterator

from xlashard.train.config.schema import setting_line, toml_value
from xlashard.train.config.settings import KEEPABLE, ModelSettings, Rules, Settings
from xlashard.train.errors import SettingsError
from xlashard.train.model.layout import check_mesh, declared_arrays

_ACTIVATIONS = (("batch", "heads"), ("batch", "mlp"), ("batch", "vocab"), ("batch", "length"))
"""Logical axes of one activation, which cannot share a mesh axis. Experts may share one with the
batch, and the vocabulary with the length."""


def check_settings(settings: Settings) -> None:
    """Check settings against each other.

    Args:
        settings: Any settings.

    Raises:
        SettingsError: Lists every misfit with the keys and values that fit.
    """
    check_mesh(settings)
    problems = [*_model(settings), *_pieces(settings)]
    # A search has no use for rules, except inside of kernels.
    if not settings.sharding.is_auto or _in_kernels(settings.model):
        problems += _rules(settings)
        if not problems:
            problems = [*_parameters(settings), *_length(settings), *_batch(settings)]
    if problems:
        raise SettingsError("\n".join(problems))


def _in_kernels(model: ModelSettings) -> bool:
    """Return True if parts of the model are computed inside of `shard_map`."""
    return model.kernel.attention != "none" or bool(model.experts and model.dropless)


def _model(settings: Settings) -> Iterator[str]:
    model = settings.model
    if not model.head_dim and model.width % model.heads:
        near = _near(model.width, 2 * model.heads)
        yield _misfit("model.width", model.width, "model.heads", model.heads, near)
    elif model.head_dim % 2:
        yield _describe_odd("model.head_dim", model.head_dim)
    elif model.head_size % 2:
        yield (
            f"model.width / model.heads = {model.width} / {model.heads} = {model.head_size} must "
            f"be even, for rotary positions turn pairs. Write:\n"
            f"  [model]\n  width = {_near(model.width, 2 * model.heads)}"
        )
    if model.heads % model.kv_heads:
        yield _misfit("model.heads", model.heads, "model.kv_heads", model.kv_heads)
    if settings.training.batch % settings.training.accumulate:
        yield _misfit(
            "training.batch",
            settings.training.batch,
            "training.accumulate",
            settings.training.accumulate,
        )


def _pieces(settings: Settings) -> Iterator[str]:
    """Check the blocks, the vocabulary, the experts and the residuals of the model."""
    model = settings.model
    if model.attention_block and model.length % model.attention_block:
        near = math.gcd(model.length, model.attention_block)
        yield (
            _misfit("model.length", model.length, "model.attention_block", model.attention_block)
            + f"\nor:\n  attention_block = {near}"
        )
    if model.vocab % model.vocab_parts:
        yield _misfit("model.vocab", model.vocab, "model.vocab_parts", model.vocab_parts)
    if 0 < model.experts < model.active_experts:
        yield (
            f"model.active_experts = {model.active_experts} of model.experts = {model.experts} "
            f"exceeds the number of experts. Write:\n  [model]\n  active_experts = {model.experts}"
        )
    if model.experts and not model.gated:
        yield (
            f"model.gated = false, but model.experts = {model.experts} have a gate. Write:\n"
            f"  [model]\n  gated = true"
        )
    if model.dropless and settings.sharding.rules.experts:
        experts = toml_value(settings.sharding.rules.experts)
        yield (
            f"model.dropless = true, but sharding.rules.experts = {experts} spreads the experts; "
            f"without a capacity a device has all of them. Write:\n"
            f"{setting_line('sharding.rules.experts', ())}"
        )
    yield from _kinds(model)
    yield from _residuals(model)
    yield from _latent(model)
    yield from _windows(model)
    yield from _kernel(model)
    yield from _automatic(settings)
    yield from _tokens(settings)


def _kinds(model: ModelSettings) -> Iterator[str]:
    """Check the heads of wide layers, and that a model with experts has layers with them."""
    if model.wide_head_dim % 2:
        yield _describe_odd("model.wide_head_dim", model.wide_head_dim)
    if model.wide_kv_heads and model.heads % model.wide_kv_heads:
        yield _misfit("model.heads", model.heads, "model.wide_kv_heads", model.wide_kv_heads)
    if model.latent and model.wide_kv_heads not in (0, model.heads):
        yield (
            f"model.wide_kv_heads = {model.wide_kv_heads}, but latent attention (model.latent = "
            f"{model.latent}) has a key for each of {model.heads} query heads. Write:\n"
            f"  [model]\n  wide_kv_heads = 0"
        )
    for key in ("dense_layers", "dense_mlp"):
        if getattr(model, key) and not model.experts:
            yield (
                f"model.{key} = {getattr(model, key)} has no effect: model.experts = 0 makes every "
                f"layer dense. Write:\n  [model]\n  {key} = 0"
            )
    if model.experts and not any(kind.experts for kind in model.count_layer_kinds()):
        yield (
            f"model.experts = {model.experts}, but none of model.layers = {model.layers} has them "
            f"with model.dense_layers = {model.dense_layers} and model.expert_cycle = "
            f"{model.expert_cycle}. Write:\n  [model]\n  dense_layers = 0\n  expert_cycle = 1"
        )


def _residuals(model: ModelSettings) -> Iterator[str]:
    """Check the names of residuals that remat keeps or offloads."""
    for key in ("kept", "offloaded"):
        names = getattr(model, key)
        unknown = [name for name in names if name not in KEEPABLE]
        if unknown:
            yield (
                f"model.{key} names {', '.join(map(repr, unknown))}, and a layer has: "
                f"{', '.join(KEEPABLE)}. Write, for example:\n"
                f"  [model]\n  {key} = {toml_value(tuple(x for x in names if x in KEEPABLE))}"
            )
        elif names and not model.remat:
            yield (
                f"model.{key} lists values that rematerialisation keeps, but model.remat = false. "
                "Write:\n  [model]\n  remat = true"
            )
        elif names and model.remat_policy != "custom":
            yield (
                f"model.{key} lists values that rematerialisation keeps, but model.remat_policy = "
                f'"{model.remat_policy}" lists others. Write:\n  [model]\n  {key} = []'
            )
    both = [name for name in model.kept if name in model.offloaded]
    if both:
        rest = tuple(name for name in model.kept if name not in both)
        yield (
            f"model.kept and model.offloaded both name {', '.join(map(repr, both))}. Write:\n"
            f"  [model]\n  kept = {toml_value(rest)}"
        )


def _latent(model: ModelSettings) -> Iterator[str]:
    """Check that latent attention has a key for each query head, and even rotary features."""
    if not model.latent:
        return
    if model.kv_heads != model.heads:
        yield (
            f"model.kv_heads = {model.kv_heads}, but latent attention (model.latent = "
            f"{model.latent}) has a key for each of {model.heads} query heads. Write:\n"
            f"  [model]\n  kv_heads = {model.heads}"
        )
    if model.rope_size % 2:
        yield _describe_odd("model.rope_size", model.rope_size)
    if model.attention_block or model.kernel.attention in ("flash", "cudnn"):
        yield (
            f"model.latent = {model.latent} makes keys longer than values, which only plain "
            f"attention and the splash kernel take. Write:\n"
            f'  [model]\n  attention_block = 0\n  [model.kernel]\n  attention = "splash"'
        )


def _windows(model: ModelSettings) -> Iterator[str]:
    """Check that windows have layers and attention for them, and the heads of wide layers."""
    if model.window and model.window_cycle == 1:
        yield (
            f"model.window = {model.window} has no effect: model.window_cycle = 1 makes every "
            f"layer the last one of a cycle, which sees all positions. Write:\n"
            f"  [model]\n  window_cycle = 2"
        )
    if model.window and model.attention_block:
        yield (
            f"model.window = {model.window}, but attention in blocks (model.attention_block = "
            f"{model.attention_block}) has no windows. Write:\n  [model]\n  attention_block = 0"
        )
    if model.window and model.kernel.attention == "flash":
        yield (
            f"model.window = {model.window}, but the flash kernel has no windows. Write:\n"
            f'  [model.kernel]\n  attention = "splash"'
        )


def _kernel(model: ModelSettings) -> Iterator[str]:
    """Check that the blocks of the attention kernel divide the length."""
    if model.kernel.attention in ("none", "cudnn"):
        return
    for key, block in vars(model.kernel).items():
        if not isinstance(block, int) or not key.startswith("block_"):
            continue
        block = min(block, model.length)
        if model.length % block:
            near = math.gcd(model.length, block)
            yield (
                f"model.kernel.{key} = {block} does not divide model.length = {model.length}. "
                f"Write:\n  [model.kernel]\n  {key} = {near}"
            )


def _automatic(settings: Settings) -> Iterator[str]:
    """Check that kernels have rules, which no search replaces."""
    sharding = settings.sharding
    if sharding.is_auto and _in_kernels(settings.model) and not any(vars(sharding.rules).values()):
        axes = tuple(settings.mesh)[:1]
        yield (
            f'sharding.layout = "auto", but inside of kernels and of dropless experts the rules '
            f"hold, and sharding.rules has none: each device would compute the whole batch. "
            f"Write:\n{setting_line('sharding.rules.batch', axes)}"
        )


def _tokens(settings: Settings) -> Iterator[str]:
    """Check the vocabulary against the data and the generated text."""
    vocab = settings.model.vocab
    if settings.data.tokens == "bytes" and vocab < 256:
        yield (
            f"model.vocab = {vocab} is less than 256, the number of bytes that "
            f'data.tokens = "bytes" reads. Write:\n  [model]\n  vocab = 256'
        )
    if settings.generation.bytes and (settings.data.tokens != "bytes" or vocab != 256):
        yield (
            f"generation.bytes = {settings.generation.bytes} requires a model of bytes "
            f'(model.vocab = 256, data.tokens = "bytes"). Write:\n'
            f"  [generation]\n  bytes = 0"
        )


def _describe_odd(key: str, size: int) -> str:
    line = setting_line(key, size + 1)
    return f"{key} = {size} must be even, for rotary positions turn pairs. Write:\n{line}"


def _misfit(key: str, size: int, by: str, count: int, near: int | None = None) -> str:
    line = setting_line(key, near or _near(size, count))
    return f"{key} = {size} does not divide by {by} = {count}. Write:\n{line}"


def _near(size: int, count: int) -> int:
    """Return the multiple of `count` next to `size`."""
    return max(round(size / count), 1) * count


def _rules(settings: Settings) -> Iterator[str]:
    """Check that rules name axes of the mesh, each once per array."""
    mesh, rules = settings.mesh, settings.sharding.rules
    for name, axes in vars(rules).items():
        key, unknown = f"sharding.rules.{name}", [axis for axis in axes if axis not in mesh]
        if unknown:
            meant = [x for axis in axes for x in difflib.get_close_matches(axis, mesh, n=1)]
            yield (
                f"{key} names {', '.join(map(repr, unknown))}, but [mesh] has only "
                f"{', '.join(map(repr, mesh))}. Write:\n"
                f"{setting_line(key, list(dict.fromkeys(meant)))}"
            )
        elif len(set(axes)) < len(axes):
            yield (
                f"{key} = {toml_value(axes)} names an axis twice. Write:\n"
                f"{setting_line(key, list(dict.fromkeys(axes)))}"
            )
    reported: set[frozenset[str]] = set()
    for named in [*_ACTIVATIONS, *(x.axes for x in declared_arrays(settings.model).values())]:
        yield from _collisions(tuple(axis for axis in named if axis), rules, reported)


def _collisions(
    named: tuple[str, ...], rules: Rules, reported: set[frozenset[str]]
) -> Iterator[str]:
    """Report dimensions of one array that share a mesh axis, each pair once."""
    used: dict[str, str] = {}
    for name in named:
        for axis in getattr(rules, name):
            other = used.setdefault(axis, name)
            pair = frozenset((name, other))
            if other == name or pair in reported:
                continue
            reported.add(pair)
            rest = tuple(x for x in getattr(rules, name) if x != axis)
            yield (
                f"sharding.rules.{other} and sharding.rules.{name} both use the mesh axis "
                f"{axis!r}, and some arrays have both dimensions. Write, for example:\n"
                f"{setting_line(f'sharding.rules.{name}', rest)}"
            )


def _parameters(settings: Settings) -> Iterator[str]:
    reported: set[str] = set()
    for path, declared in declared_arrays(settings.model).items():
        for size, name in zip(declared.shape, declared.axes, strict=True):
            if name is None or name in reported or size % _ways(name, settings) == 0:
                continue
            reported.add(name)
            key = "model.width" if name == "embed" else f"model.{_key_prefix(path)}{name}"
            problem = _uneven(f"{key} = {size}", name, settings)
            yield (
                f"{problem} (parameter {path}, shape {declared.shape}). Write:\n"
                f"{setting_line(key, _near(size, _ways(name, settings)))}\nor:\n"
                f"{setting_line(f'sharding.rules.{name}', ())}"
            )


def _key_prefix(path: str) -> str:
    """Return the prefix of the settings for the sizes of a parameter, such as `wide_`."""
    prefixes = {"layers.wide_attention": "wide_", "layers.dense": "dense_"}
    return prefixes.get(path.rpartition(".")[0], "")


def _length(settings: Settings) -> Iterator[str]:
    length, ways = settings.model.length, _ways("length", settings)
    if length % ways:
        problem = _uneven(f"model.length = {length}", "length", settings)
        yield f"{problem}. Write:\n{setting_line('model.length', _near(length, ways))}"


def _batch(settings: Settings) -> Iterator[str]:
    training, ways = settings.training, _ways("batch", settings)
    part = training.batch // training.accumulate
    if part % ways == 0:
        return
    split = f" / training.accumulate = {part}" if training.accumulate > 1 else ""
    problem = _uneven(f"training.batch = {training.batch}{split}", "batch", settings)
    near = _near(training.batch, ways * training.accumulate)
    yield f"{problem}. Write:\n{setting_line('training.batch', near)}"


def _ways(name: str, settings: Settings) -> int:
    """Return the number of devices over which a rule shards its dimension."""
    return math.prod(settings.mesh[axis] for axis in getattr(settings.sharding.rules, name))


def _uneven(value: str, name: str, settings: Settings) -> str:
    """Describe a value that does not divide over the devices of a rule."""
    axes = getattr(settings.sharding.rules, name)
    sizes = " × ".join(f"{axis}={settings.mesh[axis]}" for axis in axes)
    devices = f"{sizes} = {_ways(name, settings)}" if len(axes) > 1 else sizes
    return (
        f"{value} does not divide over {devices} devices, as sharding.rules.{name} = "
        f"{toml_value(axes)} requires"
    )
