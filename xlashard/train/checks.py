"""Do the shapes of the model and the batch fit each other and the mesh? Asked before compiling."""

import difflib
import math
from collections.abc import Iterator
from typing import Any

import jax

from xlashard.train.errors import SettingsError
from xlashard.train.layout import Declaration, check_mesh, path_name
from xlashard.train.model import declare
from xlashard.train.settings import Rules, Settings

_KEYS = {
    "embed": "model.width",
    "heads": "model.heads",
    "kv_heads": "model.kv_heads",
    "mlp": "model.mlp",
    "layers": "model.layers",
}
"""The setting behind each logical axis; the byte values have none, their number is fixed."""

_ACTIVATIONS = (("batch", "heads"), ("batch", "mlp"), ("batch", "vocab"))
"""Logical axes that stand together in an activation."""


def check_settings(settings: Settings) -> None:
    """Checks what no single setting shows.

    Args:
        settings: Any settings.

    Raises:
        SettingsError: With every misfit, each with the keys of the settings and sizes that fit.
    """
    check_mesh(settings)
    problems = [*_model(settings), *_rules(settings)]
    if not problems:
        problems = [*_parameters(settings), *_batch(settings)]
    if problems:
        raise SettingsError("\n".join(problems))


def _model(settings: Settings) -> Iterator[str]:
    model = settings.model
    if model.width % model.heads:
        near = _near(model.width, 2 * model.heads)
        yield _misfit("model.width", model.width, "model.heads", model.heads, near)
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


def _misfit(key: str, size: int, by: str, count: int, near: int | None = None) -> str:
    table, _, name = key.partition(".")
    return (
        f"{key} = {size} does not divide by {by} = {count}. Write:\n"
        f"  [{table}]\n  {name} = {near or _near(size, count)}"
    )


def _near(size: int, count: int) -> int:
    """The multiple of `count` next to `size`."""
    return max(round(size / count), 1) * count


def _rules(settings: Settings) -> Iterator[str]:
    """Rules that name an axis the mesh lacks, or one axis twice in one array."""
    mesh, rules = settings.mesh, settings.sharding.rules
    for name, axes in vars(rules).items():
        unknown = [axis for axis in axes if axis not in mesh]
        if unknown:
            meant = [x for axis in axes for x in difflib.get_close_matches(axis, mesh, n=1)]
            yield (
                f"sharding.rules.{name} names {', '.join(map(repr, unknown))}, but [mesh] has only "
                f"{', '.join(map(repr, mesh))}. Write:\n{_rule(name, tuple(dict.fromkeys(meant)))}"
            )
        elif len(set(axes)) < len(axes):
            yield (
                f"sharding.rules.{name} = {_list(axes)} names an axis twice. Write:\n"
                f"{_rule(name, tuple(dict.fromkeys(axes)))}"
            )
    reported: set[frozenset[str]] = set()
    for named in [*_ACTIVATIONS, *(x.axes for _, x in _declarations(settings))]:
        yield from _collisions(tuple(axis for axis in named if axis), rules, reported)


def _collisions(
    named: tuple[str, ...], rules: Rules, reported: set[frozenset[str]]
) -> Iterator[str]:
    """Two dimensions of one array that go over the same mesh axis; each pair is told once."""
    taken: dict[str, str] = {}
    for name in named:
        for axis in getattr(rules, name):
            other = taken.setdefault(axis, name)
            pair = frozenset((name, other))
            if other == name or pair in reported:
                continue
            reported.add(pair)
            rest = tuple(x for x in getattr(rules, name) if x != axis)
            yield (
                f"sharding.rules.{other} and sharding.rules.{name} both use the mesh axis "
                f"{axis!r}, and some arrays have both dimensions. Write, for example:\n"
                f"{_rule(name, rest)}"
            )


def _parameters(settings: Settings) -> Iterator[str]:
    rules, reported = settings.sharding.rules, set()
    for path, declared in _declarations(settings):
        for size, name in zip(declared.shape, declared.axes, strict=True):
            axes = getattr(rules, name) if name else ()
            ways = math.prod(settings.mesh[axis] for axis in axes)
            if size % ways == 0 or name in reported:
                continue
            reported.add(name)
            key = _KEYS.get(name or "")
            shown = f"{key} = {size}" if key else f"the number of byte values, {size},"
            table, _, field = (key or "").partition(".")
            change = f"  [{table}]\n  {field} = {_near(size, ways)}\nor:\n" if key else ""
            yield (
                f"{shown} does not divide over {_product(axes, settings)} devices, as "
                f"sharding.rules.{name} = {_list(axes)} asks (parameter {path}, shape "
                f"{declared.shape}). Write:\n{change}{_rule(str(name), ())}"
            )


def _batch(settings: Settings) -> Iterator[str]:
    training, axes = settings.training, settings.sharding.rules.batch
    ways = math.prod(settings.mesh[axis] for axis in axes)
    part = training.batch // training.accumulate
    if part % ways == 0:
        return
    split = f" / training.accumulate = {part}" if training.accumulate > 1 else ""
    yield (
        f"training.batch = {training.batch}{split} does not divide over "
        f"{_product(axes, settings)} devices, as sharding.rules.batch = {_list(axes)} asks. Write:"
        f"\n  [training]\n  batch = {_near(training.batch, ways * training.accumulate)}"
    )


def _declarations(settings: Settings) -> list[tuple[str, Declaration]]:
    pairs: list[tuple[Any, Declaration]] = jax.tree_util.tree_leaves_with_path(
        declare(settings.model)
    )
    return [(path_name(path), declared) for path, declared in pairs]


def _product(axes: tuple[str, ...], settings: Settings) -> str:
    sizes = " × ".join(f"{axis}={settings.mesh[axis]}" for axis in axes)
    total = math.prod(settings.mesh[axis] for axis in axes)
    return f"{sizes} = {total}" if len(axes) > 1 else sizes


def _rule(name: str, axes: tuple[str, ...]) -> str:
    return f"  [sharding.rules]\n  {name} = {_list(axes)}"


def _list(axes: tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{axis}"' for axis in axes) + "]"
