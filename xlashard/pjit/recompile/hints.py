"""What to do about programs that are made again and again."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from xlashard.errors import counted
from xlashard.pjit.recompile.difference import Difference
from xlashard.pjit.recompile.explanation import Explanation
from xlashard.pjit.recompile.history import Record

_NUMBERS = ("int", "float", "bool", "complex")
_SHOWN = 6


def hints(
    explained: Sequence[Explanation], records: Sequence[Record], makers: int = 1
) -> tuple[str, ...]:
    """Advice on some compilations and tracings, each said once.

    Args:
        explained: What was made, and why.
        records: Everything that is remembered, to tell how often something changed.
        makers: How many pjit-ed functions of the same source had something to make.
    """
    found: dict[str, None] = {}
    if any(explanation.why == "made anew" for explanation in explained):
        again = (
            f"{makers} pjit-ed functions were made of this source: write pjit(f) once, outside of "
            "the loop or function that is run again and again, and pass as arguments what differs"
        )
        found[again] = None
    for difference in (d for explanation in explained for d in explanation.differences):
        for hint in _hints_of(difference, records):
            found[hint] = None
    return tuple(found)


def _hints_of(difference: Difference, records: Sequence[Record]) -> Iterator[str]:
    path = difference.path
    if difference.part == "shape":
        yield from _about_shapes(path, records)
    elif difference.part in ("dtype", "weak type"):
        yield from _about_scalars(path, records)
    elif difference.part == "static argument":
        yield from _about_statics(path, records)
    elif difference.part == "mesh in force" and "none" in (difference.before, difference.after):
        yield (
            "it is called with a mesh in force and without one: enter the mesh around all calls, "
            "or write NamedSharding(mesh, P(...)) in place of P(...) and enter none"
        )
    elif difference.part in ("commitment", "sharding", "layout"):
        yield (
            f"{path} does not always lie in the same place: put it there once, before the first "
            "call, by device_put(x, sharding) under the sharding that later calls have"
        )
    elif difference.part == "setting":
        yield f"{path} changes between calls: set it once, before the first"
    elif difference.part == "structure" and "not there" in (difference.before, difference.after):
        yield f"{path} is only sometimes there: pass the same tree at every call"
    elif difference.part == "structure" and difference.before.startswith("passed by"):
        yield f"{path} is passed by position in some calls and by name in others: keep to one"


def _about_shapes(path: str, records: Sequence[Record]) -> Iterator[str]:
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


def _about_scalars(path: str, records: Sequence[Record]) -> Iterator[str]:
    arguments = list(_arguments(path, records))
    if any(a.aval.shape for a in arguments) or not any(a.aval.weak_type for a in arguments):
        return
    yield (
        f"{path} is a Python number in some calls, of one type or another: always pass the same "
        f"type, such as jnp.float32({path})"
    )


def _arguments(path: str, records: Sequence[Record]) -> Iterable:
    return (a for record in records for a in record.key.arguments if a.path == path)


def _about_statics(name: str, records: Sequence[Record]) -> Iterator[str]:
    values = [s for record in records for s in record.key.statics if s.name == name]
    different = list(dict.fromkeys(replace(value, by_name=False) for value in values))
    texts = list(dict.fromkeys(value.text for value in different))
    kinds = list(dict.fromkeys(value.kind for value in different))
    if len(texts) < len(different):
        yield (
            f"values of the static argument {name} look alike but are not equal: give {kinds[0]} "
            "an __eq__ and a __hash__ that go by value, for example by @dataclass(frozen=True)"
        )
    elif any(kind in ("function", "method", "partial") for kind in kinds):
        yield (
            f"the static argument {name} is another function object each time: define it once, "
            "outside of the loop"
        )
    elif any(" at 0x" in text for text in texts):
        yield (
            f"the static argument {name} is another object each time: make it once, or give "
            f"{kinds[0]} an __eq__ and a __hash__ that go by value"
        )
    elif all(kind in _NUMBERS for kind in kinds) and len(different) > 1:
        yield (
            f"the static argument {name} had {counted(len(different), 'value')} "
            f"({_listed(texts)}), each a program of its own: if it is only computed with, take it "
            "out of static_argnums and static_argnames"
        )


def _listed(values: Sequence[object]) -> str:
    shown = [str(value) for value in values[:_SHOWN]]
    return ", ".join([*shown, "..."] if len(values) > _SHOWN else shown)
