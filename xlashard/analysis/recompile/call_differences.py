"""Differences between two calls of a function that need different programs."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from xlashard._jax.lowering import aval_text, memory_kind_of
from xlashard._jax.runtime.global_state import changed_settings, entered_meshes
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.tree_definitions import outline
from xlashard.core.pjit.arguments import Argument
from xlashard.core.pjit.cache_miss import LONGEST_TEXT, CallKey, StaticValue
from xlashard.core.program.wrapper_paths import LEAF, static_parts
from xlashard.core.sharding import Sharding, XLACompatibleSharding
from xlashard.core.sharding.sharding_texts import described
from xlashard.support.formatting import shortened, sizes_text
from xlashard.support.lazily import dataclass

type Part = Literal[
    "structure",
    "static field",
    "static argument",
    "shape",
    "dtype",
    "weak type",
    "type",
    "sharding",
    "commitment",
    "memory kind",
    "layout",
    "mesh in force",
    "device",
    "compiler option",
    "setting",
]


FUNCTIONS = ("function", "method", "partial", "custom_jvp", "custom_vjp", "PjitFunction")
"""Names of types whose values are functions."""


@dataclass(frozen=True)
class CallDifference:
    """One part in which two calls differ.

    Attributes:
        part: The part.
        path: Path of the argument (`batch['tokens']`) or result, or name of the setting or option;
            empty for a part of the whole call.
        before: Value in the earlier call, as text.
        after: Value in the later call, as text.
    """

    part: Part
    path: str
    before: str
    after: str

    def __str__(self) -> str:
        change = f"{self.before} → {self.after}"
        return f"{self.path}: {change} ({self.part})" if self.path else f"{self.part}: {change}"


def differences(before: CallKey, after: CallKey) -> tuple[CallDifference, ...]:
    """List all parts in which two calls differ, the most common causes first.

    Requested shardings and donation are options of the function: they differ only with the mesh or
    with the structure of the arguments.
    """
    changes = [*_structure(before, after), *_statics(before.statics, after.statics)]
    olds = {argument.path: argument for argument in before.arguments}
    both = [(olds[a.path], a) for a in after.arguments if a.path in olds]
    for old, new in both:
        changes += _types(old, new)
    entered = entered_meshes(before.context), entered_meshes(after.context)
    if before.mesh != after.mesh or entered[0] != entered[1]:
        changes.append(CallDifference("mesh in force", "", *_mesh_texts(before, after)))
    placed = before.devices is not None and after.devices is not None
    if placed:
        for old, new in both:
            changes += _placements(old, new)
    if placed and not changes and before.devices != after.devices:
        changes.append(_difference("device", "", (before.devices, after.devices), _device_text))
    changes += _options(before.options, after.options)
    for name, *values in changed_settings(before.context, after.context):
        changes.append(
            _difference("setting", name, values, lambda value: shortened(repr(value), LONGEST_TEXT))
        )
    return tuple(changes)


def _difference(
    part: Part, path: str, values: Sequence[Any], text: Callable[[Any], str]
) -> CallDifference:
    before, after = map(text, values)
    return CallDifference(part, path, before, after)


def _structure(before: CallKey, after: CallKey) -> Iterator[CallDifference]:
    if before.in_tree == after.in_tree:
        return
    olds, news = ({a.path: a for a in key.arguments} for key in (before, after))
    lost = [path for path in olds if path not in news]
    gained = [path for path in news if path not in olds]
    for path in lost:
        yield CallDifference("structure", path, aval_text(olds[path].aval), "absent")
    for path in gained:
        yield CallDifference("structure", path, "absent", aval_text(news[path].aval))
    if lost or gained:
        return
    olds, news = (set(key.in_tree.children()[1].node_data()[1]) for key in (before, after))
    for name in sorted(olds ^ news):
        yield _difference("structure", name, (name in olds, name in news), _passing_text)
    if olds != news:
        return
    olds, news = map(_static_parts, (before, after))
    changed = [path for path in news if path in olds and olds[path] != news[path]]
    for path in changed:
        yield CallDifference("static field", path, *_static_texts(olds[path], news[path]))
    # The tree of eqx.filter_jit's own function, if its static arguments differ.
    if not changed and before.statics == after.statics:
        trees = _different_subtrees(before.in_tree, after.in_tree)
        yield _difference("structure", "", trees, lambda tree: shortened(str(tree), LONGEST_TEXT))


def _passing_text(by_name: bool) -> str:
    return f"passed by {'name' if by_name else 'position'}"


def _static_parts(key: CallKey) -> dict[str, StaticValue]:
    """Return the static fields of the arguments' nodes, by path."""
    args, kwargs = outline(key.in_tree, [LEAF] * key.in_tree.num_leaves)
    roots = dict(zip(_positional_names(key), args, strict=True)) | kwargs
    parts = (part for root, value in roots.items() for part in static_parts(value, root))
    return {path: StaticValue.of(path, part, False) for path, part in parts}


def _positional_names(key: CallKey) -> Iterator[str]:
    """Yield the name of each positional argument, with which its arrays' paths begin."""
    paths = iter([argument.path for argument in key.arguments])
    for position, tree in enumerate(key.in_tree.children()[0].children()):
        own = list(islice(paths, tree.num_leaves))
        yield re.split(r"[.\[]", own[0])[0] if own else f"argument {position}"


def _different_subtrees(before: Any, after: Any) -> tuple[Any, Any]:
    """Return the trees of the first argument that differs in structure, else those of the call."""
    for olds, news in zip(before.children(), after.children(), strict=True):
        for old, new in zip(olds.children(), news.children(), strict=False):
            if old != new:
                return old, new
    return before, after


def _statics(
    before: tuple[StaticValue, ...], after: tuple[StaticValue, ...]
) -> Iterator[CallDifference]:
    olds, news = ({value.name: value for value in values} for values in (before, after))
    for name in olds | news:
        old, new = olds.get(name), news.get(name)
        if old == new:
            continue
        if old and new and replace(old, by_name=new.by_name) == new:
            yield _difference("structure", name, (old.by_name, new.by_name), _passing_text)
            continue
        yield CallDifference("static argument", name, *_static_texts(old, new))


def _static_texts(old: StaticValue | None, new: StaticValue | None) -> tuple[str, str]:
    """Return the texts of two static values, and how they differ if the texts don't."""
    before, after = (value.text if value else "its default" for value in (old, new))
    if old and new and before == after:
        other = "an unequal value with the same repr"
        if old.kind in FUNCTIONS:
            other = f"another {old.kind} of this name"
        after = other if old.kind == new.kind else f"{after} ({new.kind})"
    return before, after


def _types(old: Argument, new: Argument) -> Iterator[CallDifference]:
    avals = old.aval, new.aval
    if old.aval == new.aval:
        return
    if _shape(old) != _shape(new):
        yield _difference("shape", new.path, avals, aval_text)
    elif old.aval.dtype != new.aval.dtype:
        yield _difference("dtype", new.path, avals, aval_text)
    elif _is_weak(old.aval) != _is_weak(new.aval):
        yield _difference("weak type", new.path, avals, _weak_text)
    else:
        yield _difference("type", new.path, avals, _type_text)


def _weak_text(aval: Any) -> str:
    return f"{aval_text(aval)} {'weakly' if _is_weak(aval) else 'not weakly'} typed"


def _is_weak(aval: Any) -> bool:
    return bool(getattr(aval, "weak_type", False))


def _type_text(aval: Any) -> str:
    """Format a type with its spec, mesh, manual axes and memory kind."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return shortened(repr(aval), LONGEST_TEXT)
    mesh = sharding.mesh
    sizes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    axes = ", ".join([f"{name}={size} {kind.name.lower()}" for name, size, kind in sizes])
    text = f"{aval_text(aval)} as {sharding.spec} on {axes or 'no mesh'}"
    manual = ", ".join(sorted(map(str, getattr(aval, "vma", ()) or ())))
    if manual:
        text += f", varying over {manual}"
    memory = memory_kind_of(aval)
    return text if memory is None else f"{text} in {memory}"


def _shape(argument: Argument) -> tuple[int, ...]:
    return tuple(getattr(argument.aval, "shape", ()))


def _placements(old: Argument, new: Argument) -> Iterator[CallDifference]:
    if _shape(old) != _shape(new):
        # The sharding of another shape always differs.
        return
    shardings = before, after = [a.sharding if a.committed else None for a in (old, new)]
    if before is None or after is None:
        if before is not after:
            yield _difference("commitment", new.path, shardings, _committed_text)
    elif not after.is_equivalent_to(before, len(_shape(new))):
        part = "sharding" if before.memory_kind == after.memory_kind else "memory kind"
        yield CallDifference(part, new.path, *_sharding_texts(before, after))
    elif old.layout != new.layout:
        layouts = old.layout, new.layout
        yield _difference("layout", new.path, layouts, lambda x: str(x or "the default layout"))


def _committed_text(sharding: XLACompatibleSharding | None) -> str:
    return "not committed" if sharding is None else f"committed as {described(sharding)}"


def _sharding_texts(before: Sharding, after: Sharding) -> tuple[str, str]:
    first, second = described(before), described(after)
    if first == second:
        first += f" on {_device_text(tuple(before.devices))}"
        second += f" on {_device_text(tuple(after.devices))}"
    return first, second


def _mesh_texts(before: CallKey, after: CallKey) -> tuple[str, str]:
    olds, news = map(_describe_mesh, (before, after))
    # The mesh alone where the two differ in it.
    shown = [i for i in (0, 1, 2) if i == 0 or (olds[0] == news[0] and olds[i] != news[i])]
    return " ".join(olds[i] for i in shown), " ".join(news[i] for i in shown)


def _entered_text(key: CallKey) -> str:
    """Return the contexts that put the mesh in force."""
    old, abstract = entered_meshes(key.context)
    contexts = [*["`with mesh:`"] * len(old), *["jax.set_mesh"] * (abstract is not None)]
    return f"by {' and '.join(contexts) or 'no context'}"


def _describe_mesh(key: CallKey) -> tuple[str, str, str]:
    """Return the mesh in force, what put it there, and its devices."""
    if key.mesh is None:
        return "none", _entered_text(key), "on no device"
    devices = _device_text(key.mesh._flat_devices_tuple)
    return sizes_text(key.mesh.shape.items()), _entered_text(key), f"on {devices}"


def _device_text(devices: tuple[Device, ...] | None) -> str:
    if not devices:
        return "no device"
    ids = [str(device.id) for device in devices]
    shown = ids if len(ids) <= 8 else [*ids[:4], "...", ids[-1]]
    return f"{devices[0].platform} device{'s' * (len(ids) > 1)} {', '.join(shown)}"


def _options(
    before: tuple[tuple[str, Any], ...], after: tuple[tuple[str, Any], ...]
) -> Iterator[CallDifference]:
    olds, news = dict(before), dict(after)
    for name in sorted(olds.keys() | news.keys()):
        old, new = (repr(d[name]) if name in d else "not set" for d in (olds, news))
        if old != new:
            yield CallDifference("compiler option", name, old, new)
