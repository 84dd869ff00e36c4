"""`PartitionSpec` as a tuple that JAX accepts as its own, and markers such as `AUTO`."""

from typing import Any, Self

import jax

from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard.core.pjit.shardings.resources import AUTO, FROM_GDA

_Today = jax.sharding.PartitionSpec


class _SpecType(type):
    """Metaclass that counts today's specs as instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, _Today)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls, subclass) or subclass is _Today


class PartitionSpec(tuple[Any, ...], metaclass=_SpecType):
    """Tuple with the mesh axes of each dimension: None, an axis name, or a tuple of names.

    It compares, adds, slices, hashes and unpacks as a tuple, and is a leaf of pytrees. JAX and this
    package accept it as a `jax.sharding.PartitionSpec`: it is an instance of that class, has its
    attributes, and is equal to the spec with the same entries. The hashes of the two classes
    differ, so sets and dicts do not match them; `spec.today` is today's spec.

    Args:
        *partitions: The entries, stored unchanged.

    Example:
        >>> spec = PartitionSpec("data", None)
        >>> spec == ("data", None), spec + ("model",), spec == jax.sharding.PartitionSpec(*spec)
        (True, ('data', None, 'model'), True)
    """

    __slots__ = ()

    UNCONSTRAINED = _Today.UNCONSTRAINED
    """Entry of a dimension whose sharding the partitioner chooses."""

    def __new__(cls, *partitions: Any) -> Self:
        """Make the tuple of the entries."""
        return super().__new__(cls, partitions)

    # JAX, libraries and this package test `isinstance(x, jax.sharding.PartitionSpec)`. That class
    # cannot be subclassed, but `isinstance` reads `__class__`.
    @property
    def __class__(self) -> Any:
        return _Today

    @property
    def today(self) -> jax.sharding.PartitionSpec:
        """The equal `jax.sharding.PartitionSpec`."""
        return _Today(*self)

    def __getattr__(self, name: str) -> Any:
        # Attributes of today's specs: `partitions`, `unreduced` and those that JAX reads.
        if name.startswith("__"):
            return super().__getattribute__(name)  # raises AttributeError
        return getattr(self.today, name)

    def __eq__(self, other: object) -> bool:
        # Not `isinstance`, which is True for this class too.
        if type(other) is _Today:
            return self.today is other
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # Programs write a list for several axes of one dimension; hash it as a tuple.
        return hash(tuple(tuple(e) if isinstance(e, list) else e for e in self))

    def __add__(self, other: Any) -> Any:
        return tuple.__add__(self, tuple(other) if type(other) is _Today else other)

    def __radd__(self, other: Any) -> Any:
        return tuple(other) + tuple(self) if type(other) is tuple else NotImplemented

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), tuple(self)

    def __repr__(self) -> str:
        return f"PartitionSpec{tuple.__repr__(self)}"


AutoAxisResource = type(AUTO)
FromGdaSingleton = type(FROM_GDA)


class AutoOnMesh(AutoAxisResource):
    """`AUTO`, which `AUTO(mesh)` returns too: the mesh is the one in force at the call."""

    def __call__(self, mesh: Any) -> "AutoOnMesh":
        """Return itself."""
        return self


AUTO_ON_MESH = AutoOnMesh()


def is_auto(x: Any) -> bool:
    """Return True for `AUTO`."""
    return isinstance(x, type(AUTO))


def is_unspecified(x: Any) -> bool:
    """Return True for the unspecified value."""
    return isinstance(x, UnspecifiedValue)


def is_from_gda(x: Any) -> bool:
    """Return True for `FROM_GDA`."""
    return isinstance(x, type(FROM_GDA))


def is_unspecified_or_from_gda_or_auto(x: Any) -> bool:
    """Return True for `AUTO`, `FROM_GDA` and the unspecified value."""
    return is_from_gda(x) or is_auto(x) or is_unspecified(x)
