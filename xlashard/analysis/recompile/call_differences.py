"""Differences between two calls of a function that need different programs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from xlashard._jax.lowering import aval_text, memory_kind_of
from xlashard._jax.runtime.global_state import changed_settings
from xlashard._jax.runtime.shardings import Device
from xlashard.core.pjit.arguments import Argument
from xlashard.core.pjit.cache_miss import LONGEST_TEXT, CallKey, StaticValue
from xlashard.core.pjit.shardings.resources import described
from xlashard.core.sharding import Mesh, Sharding, XLACompatibleSharding
from xlashard.support.formatting import shortened
from xlashard.support.lazily import dataclass

type Part = Literal[
    "structure",
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
    if before.mesh != after.mesh:
        changes.append(CallDifference("mesh in force", "", *_mesh_texts(before.mesh, after.mesh)))
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
    if olds == news:
        trees = _different_subtrees(before.in_tree, after.in_tree)
        yield _difference("structure", "", trees, lambda tree: shortened(str(tree), LONGEST_TEXT))


def _passing_text(by_name: bool) -> str:
    return f"passed by {'name' if by_name else 'position'}"


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
        texts = [value.text if value else "its default" for value in (old, new)]
        if old and new and replace(old, by_name=new.by_name) == new:
            yield _difference("structure", name, (old.by_name, new.by_name), _passing_text)
            continue
        if texts[0] == texts[1] and old and new:
            other = "an unequal value with the same repr"
            texts[1] = other if old.kind == new.kind else f"{new.text} ({new.kind})"
        yield CallDifference("static argument", name, texts[0], texts[1])


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


def _mesh_texts(before: Mesh | None, after: Mesh | None) -> tuple[str, str]:
    first, second = _mesh_text(before), _mesh_text(after)
    if first == second and before is not None and after is not None:
        first += f" on {_device_text(before._flat_devices_tuple)}"
        second += f" on {_device_text(after._flat_devices_tuple)}"
    return first, second


def _mesh_text(mesh: Mesh | None) -> str:
    if mesh is None:
        return "none"
    return f"Mesh({', '.join(f'{name}={size}' for name, size in mesh.shape.items())})"


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
