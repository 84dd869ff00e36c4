"""Differences between two calls of a function that need different programs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from xlashard._jax.lowering import dtype_name, memory_kind_of
from xlashard._jax.runtime.global_state import changed_settings
from xlashard._jax.runtime.shardings import Device
from xlashard.lazily import dataclass
from xlashard.pjit.arguments import Argument
from xlashard.pjit.recompile.history import CallKey, StaticValue, shortened
from xlashard.pjit.shardings.resolve import described
from xlashard.sharding import Mesh, Sharding, XLACompatibleSharding

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
    "in_shardings",
    "out_shardings",
    "donation",
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
    """List all parts in which two calls differ, the most common causes first."""
    found = [*_structure(before, after), *_statics(before.statics, after.statics)]
    olds = {argument.path: argument for argument in before.arguments}
    both = [(olds[a.path], a) for a in after.arguments if a.path in olds]
    for old, new in both:
        found += _types(old, new)
    if before.mesh != after.mesh:
        texts = _mesh_texts(before.mesh, after.mesh)
        found.append(CallDifference("mesh in force", "", *texts))
    placed = before.devices is not None and after.devices is not None
    if placed:
        for old, new in both:
            found += _placements(old, new)
    if before.mesh == after.mesh:
        found += _resources(before, after)
    if before.donated != after.donated and before.in_tree == after.in_tree:
        found += _donations(before, after)
    if placed and not found and before.devices != after.devices:
        texts = _device_text(before.devices), _device_text(after.devices)
        found.append(CallDifference("device", "", *texts))
    found += _options(before.options, after.options)
    for name, old, new in changed_settings(before.context, after.context):
        found.append(CallDifference("setting", name, shortened(repr(old)), shortened(repr(new))))
    return tuple(found)


def _structure(before: CallKey, after: CallKey) -> Iterator[CallDifference]:
    if before.in_tree == after.in_tree:
        return
    olds, news = ({a.path: a for a in key.arguments} for key in (before, after))
    lost = [path for path in olds if path not in news]
    gained = [path for path in news if path not in olds]
    for path in lost:
        yield CallDifference("structure", path, dtype_name(olds[path].aval), "absent")
    for path in gained:
        yield CallDifference("structure", path, "absent", dtype_name(news[path].aval))
    if lost or gained:
        return
    olds, news = (_keywords(key.in_tree) for key in (before, after))
    for name in sorted(olds ^ news):
        yield _passed_by(name, by_name=(name in olds, name in news))
    if olds == news:
        yield CallDifference("structure", "", *_different_subtrees(before.in_tree, after.in_tree))


def _passed_by(name: str, *, by_name: tuple[bool, bool]) -> CallDifference:
    texts = [f"passed by {'name' if named else 'position'}" for named in by_name]
    return CallDifference("structure", name, texts[0], texts[1])


def _keywords(in_tree: Any) -> set[str]:
    data = in_tree.children()[1].node_data()
    return set() if data is None else set(data[1])


def _different_subtrees(before: Any, after: Any) -> tuple[str, str]:
    """Return the trees of the first argument that differs in structure, else those of the call."""
    for olds, news in zip(before.children(), after.children(), strict=True):
        for old, new in zip(olds.children(), news.children(), strict=False):
            if old != new:
                return shortened(str(old)), shortened(str(new))
    return shortened(str(before)), shortened(str(after))


def _statics(
    before: tuple[StaticValue, ...], after: tuple[StaticValue, ...]
) -> Iterator[CallDifference]:
    olds, news = ({value.name: value for value in values} for values in (before, after))
    for name in [*olds, *(n for n in news if n not in olds)]:
        old, new = olds.get(name), news.get(name)
        if old == new:
            continue
        texts = [value.text if value else "its default" for value in (old, new)]
        if old and new and replace(old, by_name=new.by_name) == new:
            yield _passed_by(name, by_name=(old.by_name, new.by_name))
            continue
        if texts[0] == texts[1] and old and new:
            other = "an unequal value with the same repr"
            texts[1] = other if old.kind == new.kind else f"{new.text} ({new.kind})"
        yield CallDifference("static argument", name, texts[0], texts[1])


def _types(old: Argument, new: Argument) -> Iterator[CallDifference]:
    if old.aval == new.aval:
        return
    texts = dtype_name(old.aval), dtype_name(new.aval)
    if _shape(old) != _shape(new):
        yield CallDifference("shape", new.path, *texts)
    elif old.aval.dtype != new.aval.dtype:
        yield CallDifference("dtype", new.path, *texts)
    elif _is_weak(old) != _is_weak(new):
        words = ["weakly typed" if _is_weak(a) else "not weakly typed" for a in (old, new)]
        yield CallDifference(
            "weak type", new.path, f"{texts[0]} {words[0]}", f"{texts[1]} {words[1]}"
        )
    else:
        yield CallDifference("type", new.path, _type_text(old.aval), _type_text(new.aval))


def _type_text(aval: Any) -> str:
    """Format a type with its spec, mesh, manual axes and memory kind."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return shortened(repr(aval))
    mesh, spec = sharding.mesh, sharding.spec
    axes = (f"{n}={s} {t.name.lower()}" for n, s, t in _axes(mesh))
    text = f"{dtype_name(aval)} as {spec} on " + (", ".join(axes) or "no mesh")
    manual = ", ".join(sorted(map(str, getattr(aval, "vma", ()) or ())))
    if manual:
        text += f", varying over {manual}"
    memory = memory_kind_of(aval)
    return text if memory is None else f"{text} in {memory}"


def _axes(mesh: Any) -> Iterator[tuple[str, int, Any]]:
    return zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)


def _shape(argument: Argument) -> tuple[int, ...]:
    return tuple(getattr(argument.aval, "shape", ()))


def _is_weak(argument: Argument) -> bool:
    return bool(getattr(argument.aval, "weak_type", False))


def _placements(old: Argument, new: Argument) -> Iterator[CallDifference]:
    if _shape(old) != _shape(new):
        # The sharding of another shape always differs.
        return
    before, after = (a.sharding if a.committed else None for a in (old, new))
    if (before is None) != (after is None):
        yield CallDifference(
            "commitment", new.path, _committed_text(before), _committed_text(after)
        )
    elif before is not None and after is not None:
        if not after.is_equivalent_to(before, len(_shape(new))):
            part = "sharding" if before.memory_kind == after.memory_kind else "memory kind"
            yield CallDifference(part, new.path, *_sharding_texts(before, after))
        elif old.layout != new.layout:
            texts = [str(a.layout) if a.layout else "the default layout" for a in (old, new)]
            yield CallDifference("layout", new.path, texts[0], texts[1])


def _committed_text(sharding: XLACompatibleSharding | None) -> str:
    return "not committed" if sharding is None else f"committed as {described(sharding)}"


def _sharding_texts(before: Sharding, after: Sharding) -> tuple[str, str]:
    texts = described(before), described(after)
    if texts[0] != texts[1]:
        return texts
    devices = (_device_text(tuple(s.devices)) for s in (before, after))
    first, second = (f"{text} on {its}" for text, its in zip(texts, devices, strict=True))
    return first, second


def _mesh_texts(before: Mesh | None, after: Mesh | None) -> tuple[str, str]:
    texts = [_mesh_text(mesh) for mesh in (before, after)]
    if texts[0] == texts[1] and before is not None and after is not None:
        for i, mesh in enumerate((before, after)):
            texts[i] += f" on {_device_text(mesh._flat_devices_tuple)}"
    return texts[0], texts[1]


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


def _resources(before: CallKey, after: CallKey) -> Iterator[CallDifference]:
    """Compare requested shardings, under an equal mesh in force."""
    olds = dict(zip((a.path for a in before.arguments), before.in_shardings, strict=True))
    for argument, new in zip(after.arguments, after.in_shardings, strict=True):
        if argument.path in olds and not _same(olds[argument.path], new):
            texts = _request_texts(olds[argument.path], new)
            yield CallDifference("in_shardings", argument.path, *texts)
    olds = dict(zip(before.result_paths, before.out_shardings, strict=True))
    for path, new in zip(after.result_paths, after.out_shardings, strict=True):
        if path in olds and not _same(olds[path], new):
            yield CallDifference("out_shardings", path, *_request_texts(olds[path], new))


def _same(old: Sharding | None, new: Sharding | None) -> bool:
    return old is new or old == new


def _request_texts(before: Sharding | None, after: Sharding | None) -> tuple[str, str]:
    if before is not None and after is not None:
        return _sharding_texts(before, after)
    first, second = ("unspecified" if s is None else described(s) for s in (before, after))
    return first, second


def _donations(before: CallKey, after: CallKey) -> Iterator[CallDifference]:
    words = {True: "donated", False: "not donated"}
    donated = zip(after.arguments, before.donated, after.donated, strict=True)
    for argument, old, new in donated:
        if old != new:
            yield CallDifference("donation", argument.path, words[old], words[new])


def _options(
    before: tuple[tuple[str, Any], ...], after: tuple[tuple[str, Any], ...]
) -> Iterator[CallDifference]:
    olds, news = dict(before), dict(after)
    for name in sorted(olds.keys() | news.keys()):
        old, new = (repr(d[name]) if name in d else "not set" for d in (olds, news))
        if old != new:
            yield CallDifference("compiler option", name, old, new)
