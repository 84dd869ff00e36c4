"""Deferred start-up work: modules that few programs need, and the methods of dataclasses."""

import copy
import dataclasses
import inspect
import pickle
import sys
import threading
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar

import pytest

import xlashard
from xlashard.support import lazily


def test_a_deferred_module_is_imported_when_a_name_is_read() -> None:
    name = "tests.documents"
    before = sys.modules.pop(name, None)
    try:
        module = lazily.deferred(name)
        assert name not in sys.modules
        assert module.__name__ == name
        assert name in sys.modules
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = module.nothing
    finally:
        if before is not None:
            sys.modules[name] = before


PLACEHOLDER = "placeholder"


def is_written(cls: type) -> bool:
    return cls.__init__.__name__ != PLACEHOLDER


@lazily.dataclass(frozen=True)
class Kept:
    """Class in a module, for pickle."""

    number: int
    text: str = ""


def family(dataclass: Any) -> dict[str, Any]:
    """Return classes of all kinds in the package, made by either decorator."""

    @dataclass(frozen=True)
    class Base:
        """Base."""

        count: ClassVar[int] = 3
        number: int
        names: tuple[str, ...] = ()
        found: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "names", tuple(self.names))

    @dataclass(frozen=True)
    class Derived(Base):
        """Derived."""

        flag: bool = field(default=False, kw_only=True)

    @dataclass
    class Open:
        """Open."""

        values: list[int] = field(default_factory=list)

    @dataclass(frozen=True, eq=False)
    class ByIdentity:
        """By identity."""

        number: int

    @dataclass(frozen=True, repr=False)
    class Own:
        """With methods of its own."""

        number: int
        text: str = ""

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and other.number == self.number

        def __repr__(self) -> str:
            return "own"

    @dataclass(frozen=True, slots=True)
    class Slotted:
        """Slotted."""

        number: int = 1

    @dataclass
    class Undocumented:
        number: int = 1

    class Plain(Base):
        """No dataclass itself."""

        def __init__(self, number: int) -> None:
            super().__init__(number, ("plain",))

    return {k: v for k, v in locals().items() if isinstance(v, type)}


CALLS = {
    "Base": lambda c: c(2, ["a"]),
    "Derived": lambda c: c(2, flag=True),
    "Open": lambda c: c([1]),
    "ByIdentity": lambda c: c(1),
    "Own": lambda c: c(1, "b"),
    "Slotted": lambda c: c(),
    "Undocumented": lambda c: c(),
    "Plain": lambda c: c(4),
}


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def described(cls: type, value: Any) -> dict[str, Any]:
    """Return all properties in which the two decorators are compared."""
    other = copy.copy(value)

    def change() -> None:
        value.number = 5

    def remove() -> None:
        del value.number

    return {
        "repr": repr(value) if cls.__name__ != "ByIdentity" else "",
        "equal": value == other,
        "unequal": value == 1,
        "hash": outcome(lambda: hash(value)) if cls.__name__ != "ByIdentity" else 0,
        "hash is None": cls.__hash__ is None,
        "fields": [(f.name, f.type, f.default, f.kw_only) for f in dataclasses.fields(cls)],
        "match": cls.__match_args__,
        "signature": str(inspect.signature(cls)),
        "doc": cls.__doc__,
        "replaced": repr(dataclasses.replace(value)) if cls.__name__ not in PLAIN else "",
        "new attribute": outcome(lambda: setattr(other, "other", 1)),
        "change": outcome(change),
        "removal": outcome(remove),
        "defaults": {n: getattr(cls, n, "missing") for n in ("text", "names", "found", "values")},
        "own": sorted(set(vars(cls)) - {"__firstlineno__", "__static_attributes__"}),
        "qualname": cls.__init__.__qualname__,
        "module": cls.__init__.__module__,
    }


PLAIN = ("Plain", "ByIdentity")


@pytest.mark.parametrize("name", CALLS)
def test_lazy_dataclasses_equal_standard_dataclasses(name: str) -> None:
    ours, theirs = family(lazily.dataclass)[name], family(dataclasses.dataclass)[name]
    mine, other = (CALLS[name](cls) for cls in (ours, theirs))
    assert described(ours, mine) == described(theirs, other)


@pytest.mark.parametrize(
    "use",
    [
        lambda c: c(1),
        lambda c: hash(object.__new__(c)),
        lambda c: object.__new__(c) == 1,
        lambda c: repr(object.__new__(c)),
        dataclasses.fields,
        inspect.signature,
        lambda c: c.__match_args__,
    ],
)
def test_any_use_writes_the_methods(use: Any) -> None:
    cls = family(lazily.dataclass)["Base"]
    assert not is_written(cls)
    outcome(lambda: use(cls))
    assert is_written(cls)


def test_unpickled_instance_works_before_the_first_constructor_call() -> None:
    text = pickle.dumps(Kept(3, "x"))
    fresh = lazily.dataclass(frozen=True)(type("Kept", (), dict(KEPT_BEFORE)))
    value = object.__new__(fresh)
    value.__dict__.update(pickle.loads(text).__dict__)
    copied = object.__new__(fresh)
    copied.__dict__.update(vars(value))
    assert not is_written(fresh)
    assert hash(value) == hash((3, "x"))
    assert value == copied
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'number'"):
        value.number = 1


KEPT_BEFORE = {
    "__module__": __name__,
    "__annotations__": {"number": int, "text": str},
    "__doc__": "",
    "text": "",
}


@pytest.mark.slow
def test_concurrent_first_calls_return_complete_instances() -> None:
    for _ in range(20):
        classes = family(lazily.dataclass)
        ready, made = threading.Barrier(8), []

        def make(classes: Any = classes, ready: Any = ready, made: Any = made) -> None:
            ready.wait()
            made.append((classes["Derived"](1, ("a",)), hash(classes["Base"](1))))

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 8
        assert all(value == made[0][0] for value, _ in made)


def test_all_classes_of_the_package_can_be_written() -> None:
    assert xlashard.pjit
    modules = [m for name, m in sys.modules.items() if name.startswith("xlashard.")]
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
    found = [c for c in classes if c.__module__.startswith("xlashard.") and is_record(c)]
    assert len(found) > 20
    for cls in found:
        assert dataclasses.fields(cls) is not None, cls


def is_record(cls: type) -> bool:
    return "__dataclass_fields__" in vars(cls)
