"""Hints for avoiding repeated compilations."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from xlashard.errors import counted
from xlashard.pjit.recompile.call_differences import CallDifference
from xlashard.pjit.recompile.explanation import Explanation
from xlashard.pjit.recompile.history import MissRecord

_NUMBERS = ("int", "float", "bool", "complex")
_SHOWN = 6


def hints(
    explained: Sequence[Explanation], records: Sequence[MissRecord], num_functions: int = 1
) -> tuple[str, ...]:
    """Return distinct hints for some cache misses.

    Args:
        explained: The explanations of the cache misses.
        records: All records of the function, to count the distinct values of what changed.
        num_functions: Number of pjit-ed functions of the same source with a cache miss.
    """
    found: dict[str, None] = {}
    if any(explanation.reason == "recreated" for explanation in explained):
        hint = (
            f"{num_functions} pjit-ed functions were made of this source: write pjit(f) once, "
            "outside of the loop or function that runs repeatedly, and pass varying values as "
            "arguments"
        )
        found[hint] = None
    for difference in (d for explanation in explained for d in explanation.differences):
        for hint in _hints_of(difference, records):
            found[hint] = None
    return tuple(found)


def _hints_of(difference: CallDifference, records: Sequence[MissRecord]) -> Iterator[str]:
    path = difference.path
    if difference.part == "shape":
        yield from _about_shapes(path, records)
    elif difference.part in ("dtype", "weak type"):
        yield from _about_scalars(path, records)
    elif difference.part == "static argument":
        yield from _about_statics(path, records)
    elif difference.part == "mesh in force" and "none" in (difference.before, difference.after):
        yield (
            "some calls have a mesh in force and others do not: enter the mesh around all calls, "
            "or write NamedSharding(mesh, P(...)) in place of P(...) and enter no mesh"
        )
    elif difference.part in ("commitment", "sharding", "layout"):
        yield (
            f"the placement of {path} changes between calls: before the first call, write "
            "device_put(x, sharding) with the sharding that later calls have"
        )
    elif difference.part == "setting":
        yield f"{path} changes between calls: set it once, before the first"
    elif difference.part == "structure" and "absent" in (difference.before, difference.after):
        yield f"{path} is absent in some calls: pass the same tree at every call"
    elif difference.part == "structure" and difference.before.startswith("passed by"):
        yield f"{path} is passed by position in some calls and by name in others: use one of them"


def _about_shapes(path: str, records: Sequence[MissRecord]) -> Iterator[str]:
    shapes = list(dict.fromkeys(tuple(a.aval.shape) for a in _arguments(path, records)))
    if len({len(shape) for shape in shapes}) != 1:
        return
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        different = list(dict.fromkeys(sizes))
        if len(different) > 1:
            yield (
                f"dimension {dim} of {path} had {counted(len(different), 'size')} "
                f"({_listed(different)}): pad it to one size, or to a few, so that calls share "
                "their programs"
            )


def _about_scalars(path: str, records: Sequence[MissRecord]) -> Iterator[str]:
    arguments = list(_arguments(path, records))
    if any(a.aval.shape for a in arguments) or not any(a.aval.weak_type for a in arguments):
        return
    yield (
        f"{path} is a Python number of varying type in some calls: always pass the same type, such "
        f"as jnp.float32({path})"
    )


def _arguments(path: str, records: Sequence[MissRecord]) -> Iterable:
    return (a for record in records for a in record.key.arguments if a.path == path)


def _about_statics(name: str, records: Sequence[MissRecord]) -> Iterator[str]:
    values = [s for record in records for s in record.key.statics if s.name == name]
    different = list(dict.fromkeys(replace(value, by_name=False) for value in values))
    texts = list(dict.fromkeys(value.text for value in different))
    kinds = list(dict.fromkeys(value.kind for value in different))
    if len(texts) < len(different):
        yield (
            f"values of the static argument {name} have the same repr but are not equal: define "
            f"__eq__ and __hash__ of {kinds[0]} by value, such as with @dataclass(frozen=True)"
        )
    elif any(kind in ("function", "method", "partial") for kind in kinds):
        yield (
            f"the static argument {name} is a new function object in each call: define it once, "
            "outside of the loop"
        )
    elif any(" at 0x" in text for text in texts):
        yield (
            f"the static argument {name} is a new object in each call: make it once, or define "
            f"__eq__ and __hash__ of {kinds[0]} by value"
        )
    elif all(kind in _NUMBERS for kind in kinds) and len(different) > 1:
        yield (
            f"the static argument {name} had {counted(len(different), 'value')} "
            f"({_listed(texts)}), each with its own program: if it is only computed with, remove "
            "it from static_argnums and static_argnames"
        )


def _listed(values: Sequence[object]) -> str:
    shown = [str(value) for value in values[:_SHOWN]]
    return ", ".join([*shown, "..."] if len(values) > _SHOWN else shown)
