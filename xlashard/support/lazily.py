"""Start-up work that waits for its first use: imports, and the methods of dataclasses.

A program that draws no report should not wait for the modules that draw it: they take as long to
import as all others together. Nor should it wait for the methods of a hundred dataclasses: writing
and compiling them takes Python 0.4 ms for each, which was half of the import.
"""

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any


def on_demand(
    package: str, members: dict[str, Any], homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package.

    Args:
        package: Its name.
        members: What it has already; what is imported is kept there.
        homes: By module the names that come from it. A module of the package itself may stand for
            its own name.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def member(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        module = importlib.import_module(home)
        value = members[name] = module if home == f"{package}.{name}" else getattr(module, name)
        return value

    def listing() -> list[str]:
        return sorted({*members, *home_of})

    return member, listing


def deferred(name: str) -> Any:
    """Return a stand-in for a module, which imports it when one of its names is first read.

    A type checker and the test of the layers see the import beside it:

        if TYPE_CHECKING:
            from xlashard.core.array import retile
        else:
            retile = deferred("xlashard.core.array.reshard.compiled")

    Args:
        name: Full name of the module.
    """
    return _DeferredModule(name)


class _DeferredModule:
    """Stand-in for a module that is imported by the first attribute that is read."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[object, ...]:
        return deferred, (self._name,)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """Return a dataclass as `dataclasses.dataclass` does, with methods written at first use.

        A class with options other than `frozen`, `eq` and `repr`, with slots, with a metaclass or
        with bases that act on their subclasses is completed at once.
        """
        # Not at the top: the command line starts without it.
        import dataclasses

        if cls is None:
            return lambda cls: dataclass(cls, **options)
        acting = any("__init_subclass__" in base.__dict__ for base in cls.__mro__[:-1])
        plain = type(cls) is type and not acting and "__slots__" not in cls.__dict__
        if not plain or not {"frozen", "eq", "repr"}.issuperset(options):
            return dataclasses.dataclass(cls, **options)
        _Placeholders(cls, **options)
        return cls


def copy_with[T](value: T, **fields: Any) -> T:
    """Return a dataclass with other fields, as `dataclasses.replace` does in five times the time.

    Args:
        value: An instance of a class without slots, `__post_init__` and values that it caches.
        **fields: The new values.
    """
    assert fields.keys() <= value.__dict__.keys()
    copied = object.__new__(type(value))
    copied.__dict__.update(value.__dict__, **fields)
    return copied


_WRITING = threading.RLock()


class _Placeholders:
    """Placeholders for the methods of a dataclass until one of them is used.

    The methods are written on a copy of the class and then replace the placeholders one by one, so
    that every thread finds either the placeholder or the method.
    """

    def __init__(
        self, cls: type, *, frozen: bool = False, eq: bool = True, repr: bool = True
    ) -> None:
        self.cls = cls
        self.options = {"frozen": frozen, "eq": eq, "repr": repr}
        self.defined = {
            name: value
            for name, value in cls.__dict__.items()
            if name not in ("__dict__", "__weakref__")
        }
        if eq and self.defined.get("__hash__") is None:
            # None stands there if the class defines __eq__ alone; dataclasses decide anew.
            self.defined.pop("__hash__", None)
        names = [
            "__init__",
            *["__repr__"] * repr,
            *["__eq__"] * eq,
            *["__hash__"] * (eq and frozen),
        ]
        self.waiting = {name: self._method(name) for name in names}
        self.waiting |= {name: _Attribute(self, name) for name in _ATTRIBUTES}
        self.waiting = {k: v for k, v in self.waiting.items() if k not in self.defined}
        placed = dict(self.waiting)
        if eq and not frozen and "__hash__" not in self.defined:
            placed |= {"__hash__": None}
        if frozen:
            placed |= {k: v for k, v in _freezing(cls).items() if k not in self.defined}
        for name, value in placed.items():
            setattr(cls, name, value)

    def _method(self, name: str) -> Callable[..., Any]:
        def placeholder(*args: Any, **keywords: Any) -> Any:
            self.replace()
            return getattr(self.cls, name)(*args, **keywords)

        return placeholder

    def replace(self) -> None:
        """Write the methods and put them in place, unless another thread has."""
        import dataclasses

        with _WRITING:
            if not self.waiting:
                return
            cls = self.cls
            copy = type(cls.__name__, cls.__bases__, self.defined)
            copy.__qualname__ = cls.__qualname__
            written = dataclasses.dataclass(copy, **self.options).__dict__
            # A field with a default leaves that default in the class, or nothing.
            for name in (*written["__dataclass_fields__"], "__doc__", *self.waiting):
                if name in written:
                    setattr(cls, name, written[name])
                elif name in cls.__dict__:
                    delattr(cls, name)
            self.waiting = ()


_ATTRIBUTES = (
    "__dataclass_fields__",
    "__dataclass_params__",
    "__match_args__",
    "__replace__",
    # Read by inspect.signature, which would otherwise show that of the placeholder.
    "__signature__",
)


class _Attribute:
    """Attribute of a dataclass that is there once the methods are written."""

    def __init__(self, placeholders: _Placeholders, name: str) -> None:
        self.placeholders = placeholders
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        """Return the attribute as the finished class gives it."""
        self.placeholders.replace()
        return getattr(owner if instance is None else instance, self.name)


def _freezing(cls: type) -> dict[str, Callable[..., None]]:
    """Return the methods by which instances refuse to be changed."""
    from dataclasses import FrozenInstanceError

    def refuses(self: object, name: str) -> bool:
        return type(self) is cls or name in cls.__dataclass_fields__

    def __setattr__(self: object, name: str, value: object) -> None:
        if refuses(self, name):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:
        if refuses(self, name):
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}
