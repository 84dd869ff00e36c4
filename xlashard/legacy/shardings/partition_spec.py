"""The era's `PartitionSpec`: a tuple, and a partition spec of today all the same."""

from typing import Any, Self

import jax

from xlashard._jax.shardings import UnspecifiedValue
from xlashard.pjit import AUTO, FROM_GDA

_Today = jax.sharding.PartitionSpec


class _SpecType(type):
    """Today's specs count as instances of the era's: programs ask `isinstance` of both."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, _Today)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls, subclass) or subclass is _Today


class PartitionSpec(tuple[Any, ...], metaclass=_SpecType):
    """A tuple that says of each dimension which axes of a mesh cut it: None, a name, or several.

    It compares, adds, slices, hashes and unpacks as the tuple that it is, and is one leaf to JAX's
    tree functions. Wherever today's `jax.sharding.PartitionSpec` may stand, in JAX and in this
    package, it may stand too: it passes for an instance of that class, answers what is asked of
    one, and is equal to the one that says the same. Their hashes differ, so a set or a dict that
    holds specs of one class does not find those of the other; `spec.today` is the one of today.

    Args:
        *partitions: The entries, kept as they are written.

    Example:
        >>> spec = PartitionSpec("data", None)
        >>> spec == ("data", None), spec + ("model",), spec == jax.sharding.PartitionSpec(*spec)
        (True, ('data', None, 'model'), True)
    """

    __slots__ = ()

    UNCONSTRAINED = _Today.UNCONSTRAINED
    """As an entry: the partitioner may choose for this dimension."""

    def __new__(cls, *partitions: Any) -> Self:
        """The tuple of the entries."""
        return super().__new__(cls, partitions)

    # JAX, libraries on it and this package ask `isinstance(x, jax.sharding.PartitionSpec)`. That
    # class can't be derived from, but `isinstance` believes what an object says of itself.
    @property
    def __class__(self) -> Any:
        return _Today

    @property
    def today(self) -> jax.sharding.PartitionSpec:
        """The same as a spec of today, which JAX keeps one instance of."""
        return _Today(*self)

    def __getattr__(self, name: str) -> Any:
        # What today's specs have besides: `partitions`, `unreduced` and what JAX asks of them.
        if name.startswith("__"):
            return super().__getattribute__(name)  # which says that there is none
        return getattr(self.today, name)

    def __eq__(self, other: object) -> bool:
        # Not `isinstance`, which this class answers as today's does.
        if type(other) is _Today:
            return self.today is other
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # Programs write a list for several axes of one dimension; a tuple hashes as a tuple does.
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
    """`AUTO`, and what `AUTO(mesh)` gives: the mesh is the one in force at the call."""

    def __call__(self, mesh: Any) -> "AutoOnMesh":
        """Itself."""
        return self


AUTO_ON_MESH = AutoOnMesh()


def is_auto(x: Any) -> bool:
    """Whether it leaves a sharding to the compiler."""
    return isinstance(x, type(AUTO))


def is_unspecified(x: Any) -> bool:
    """Whether it says nothing."""
    return isinstance(x, UnspecifiedValue)


def is_from_gda(x: Any) -> bool:
    """Whether it says to take the argument's sharding."""
    return isinstance(x, type(FROM_GDA))


def is_unspecified_or_from_gda_or_auto(x: Any) -> bool:
    """Whether it is none of those that say a placement."""
    return is_from_gda(x) or is_auto(x) or is_unspecified(x)
