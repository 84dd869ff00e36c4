"""What an `Array` is made of: one buffer handle and three slots, and the errors of empty ones."""

from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.runtime.transfer import HandleType
from xlashard.array.core.donation import deletion_cause
from xlashard.errors import ArgumentError, DeletedError
from xlashard.wording import typed

type Handle = Any
"""JAX's own array object: the PJRT buffers of one value, on all of this process's devices."""

# Slots that stay unset until somebody fills them; unset reads as None.
_OPTIONAL = frozenset({"_deleted_by", "_exclusive", "_own_sharding", "_value_cache"})


class ArrayBase(jax.Array):
    """Holds one buffer handle.

    Attributes:
        _buffers: The buffers. They carry one of JAX's own shardings.
        _handle: The same. Code that reads it may hand them to other arrays.
        _exclusive: True as long as no other array can hold the same buffers: from when a program
            has made them until `_handle` is read.
        _own_sharding: A sharding that a user wrote, where the array was placed by one.
        _value_cache: The value, once read.
        _deleted_by: What took the buffers, where it was donated.
    """

    # Unset slots cost nothing where outputs are wrapped; each is filled when somebody asks.
    __slots__ = (
        "__weakref__",
        "_buffers",
        "_deleted_by",
        "_exclusive",
        "_own_sharding",
        "_value_cache",
    )

    _buffers: Handle
    _exclusive: bool | None

    _deleted_by: Any
    _own_sharding: Any
    _value_cache: Any

    @property
    def _handle(self) -> Handle:
        self._exclusive = False
        return self._buffers

    @_handle.setter
    def _handle(self, handle: Handle) -> None:
        self._exclusive = False
        self._buffers = handle

    if TYPE_CHECKING:

        def __init__(self) -> None: ...

    else:
        # Not for type checkers, which would take every name for one that is there.

        def __getattr__(self, name: str) -> Any:
            """Reached only where the ordinary lookup found nothing."""
            if name in _OPTIONAL:
                return None
            if name in ("_buffers", "_handle"):
                raise ArgumentError(
                    "this Array has no buffers, for it was made by Array(): make one with "
                    "device_put(value), make_array_from_callback(...) or Array.from_jax(x)"
                )
            own = getattr(type(self), name, None)
            if isinstance(own, property):
                # Python comes here when a property raises AttributeError, and drops its text.
                return own.__get__(self)
            if name.startswith("_") and not name.startswith("__"):
                # JAX reaches for private members of its own class in places that take any array.
                return getattr(self._handle, name)
            kind = "an Array" if type(self).__name__ == "Array" else f"a {type(self).__name__}"
            raise AttributeError(f"{kind} has no attribute {name!r}", name=name, obj=self)


def type_text(x: Any) -> str:
    """Shape and dtype as in `float32[4,8]`."""
    return typed(x.dtype.name, x.shape)


def check_alive(*operands: Any) -> None:
    """Checks that no array among the operands is deleted.

    Raises:
        DeletedError: Naming the first that is.
    """
    for x in operands:
        if isinstance(x, ArrayBase):
            if x._buffers.is_deleted():
                raise DeletedError(_deleted_text(x._buffers, x._deleted_by)) from None
        elif type(x) is HandleType and x.is_deleted():
            raise DeletedError(_deleted_text(x, None)) from None


def _deleted_text(handle: Handle, taker: str | None) -> str:
    how = deletion_cause(handle, taker)
    advice = "use what that call returned instead" if "donated" in how else "make it anew"
    return f"an Array {type_text(handle)} has been deleted: {how}; {advice}"
