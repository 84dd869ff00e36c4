"""The operators and methods of an `Array`, with parameters and results, for type checkers.

Each result is of the class of the array that it is asked of. The tests compare parameters with
those of JAX's own methods.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, SupportsIndex

import numpy as np
from jax.lax import GatherScatterMode, PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike

from xlashard._jax.runtime.shardings import Device

type _Axis = int | Sequence[int] | None
type _Size = SupportsIndex | Sequence[SupportsIndex]
type _Scalar = np.bool_ | np.number | bool | int | float | complex
type _Spec = NamedSharding | PartitionSpec | None

class Typed:
    def __neg__(self) -> Self: ...
    def __pos__(self) -> Self: ...
    def __abs__(self) -> Self: ...
    def __invert__(self) -> Self: ...
    def __round__(self, ndigits: int | None = None, /) -> Self: ...
    def __eq__(self, other: ArrayLike, /) -> Self: ...
    def __ne__(self, other: ArrayLike, /) -> Self: ...
    def __lt__(self, other: ArrayLike, /) -> Self: ...
    def __le__(self, other: ArrayLike, /) -> Self: ...
    def __gt__(self, other: ArrayLike, /) -> Self: ...
    def __ge__(self, other: ArrayLike, /) -> Self: ...
    def __add__(self, other: ArrayLike, /) -> Self: ...
    def __radd__(self, other: ArrayLike, /) -> Self: ...
    def __sub__(self, other: ArrayLike, /) -> Self: ...
    def __rsub__(self, other: ArrayLike, /) -> Self: ...
    def __mul__(self, other: ArrayLike, /) -> Self: ...
    def __rmul__(self, other: ArrayLike, /) -> Self: ...
    def __truediv__(self, other: ArrayLike, /) -> Self: ...
    def __rtruediv__(self, other: ArrayLike, /) -> Self: ...
    def __floordiv__(self, other: ArrayLike, /) -> Self: ...
    def __rfloordiv__(self, other: ArrayLike, /) -> Self: ...
    def __mod__(self, other: ArrayLike, /) -> Self: ...
    def __rmod__(self, other: ArrayLike, /) -> Self: ...
    def __pow__(self, other: ArrayLike, /) -> Self: ...
    def __rpow__(self, other: ArrayLike, /) -> Self: ...
    def __matmul__(self, other: ArrayLike, /) -> Self: ...
    def __rmatmul__(self, other: ArrayLike, /) -> Self: ...
    def __and__(self, other: ArrayLike, /) -> Self: ...
    def __rand__(self, other: ArrayLike, /) -> Self: ...
    def __or__(self, other: ArrayLike, /) -> Self: ...
    def __ror__(self, other: ArrayLike, /) -> Self: ...
    def __xor__(self, other: ArrayLike, /) -> Self: ...
    def __rxor__(self, other: ArrayLike, /) -> Self: ...
    def __lshift__(self, other: ArrayLike, /) -> Self: ...
    def __rlshift__(self, other: ArrayLike, /) -> Self: ...
    def __rshift__(self, other: ArrayLike, /) -> Self: ...
    def __rrshift__(self, other: ArrayLike, /) -> Self: ...
    def __divmod__(self, other: ArrayLike, /) -> tuple[Self, Self]: ...
    def __rdivmod__(self, other: ArrayLike, /) -> tuple[Self, Self]: ...
    def __contains__(self, item: ArrayLike, /) -> bool: ...
    def __getitem__(self, index: Any, /) -> Self: ...
    def __iter__(self) -> Iterator[Self]: ...
    def __reversed__(self) -> Iterator[Self]: ...
    @property
    def T(self) -> Self: ...
    @property
    def mT(self) -> Self: ...
    @property
    def real(self) -> Self: ...
    @property
    def imag(self) -> Self: ...
    @property
    def at(self) -> _Updates[Self]: ...
    def all(
        self,
        axis: _Axis = None,
        out: None = None,
        keepdims: bool = False,
        *,
        where: ArrayLike | None = None,
    ) -> Self:
        """Return True where all elements are true, along axes or altogether."""
    def any(
        self,
        axis: _Axis = None,
        out: None = None,
        keepdims: bool = False,
        *,
        where: ArrayLike | None = None,
    ) -> Self:
        """Return True where any element is true, along axes or altogether."""
    def argmax(
        self, axis: int | None = None, out: None = None, keepdims: bool | None = None
    ) -> Self:
        """The positions of the greatest elements."""
    def argmin(
        self, axis: int | None = None, out: None = None, keepdims: bool | None = None
    ) -> Self:
        """The positions of the least elements."""
    def argpartition(self, kth: int, axis: int = -1) -> Self:
        """The positions of the elements, dealt out around the kth."""
    def argsort(
        self,
        axis: int | None = -1,
        *,
        kind: None = None,
        order: None = None,
        stable: bool = True,
        descending: bool = False,
    ) -> Self:
        """The positions of the elements in sorted order."""
    def astype(
        self, dtype: DTypeLike | None, copy: bool = False, device: Device | Sharding | None = None
    ) -> Self:
        """The elements as another dtype."""
    def byteswap(self) -> Self:
        """The elements with their bytes in reverse order."""
    def choose(self, choices: Sequence[ArrayLike], out: None = None, mode: str = "raise") -> Self:
        """From each of several arrays the elements that this one numbers."""
    def clip(self, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Self:
        """The elements, none less or greater than the bounds."""
    def compress(
        self,
        condition: ArrayLike,
        axis: int | None = None,
        *,
        out: None = None,
        size: int | None = None,
        fill_value: ArrayLike = 0,
    ) -> Self:
        """The slices along an axis for which a condition holds."""
    def conj(self) -> Self:
        """The complex conjugate."""
    def conjugate(self) -> Self:
        """The complex conjugate."""
    def copy(self) -> Self:
        """The same values in buffers of their own."""
    def cumprod(
        self, axis: int | None = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Self:
        """The products of all elements so far, along an axis."""
    def cumsum(
        self, axis: int | None = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Self:
        """The sums of all elements so far, along an axis."""
    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Self:
        """The diagonals of the planes of two axes."""
    def dot(
        self,
        b: ArrayLike,
        *,
        precision: PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Self:
        """The dot product with another array."""
    def flatten(self, order: str = "C", *, out_sharding: _Spec = None) -> Self:
        """All elements in one dimension."""
    def max(
        self,
        axis: _Axis = None,
        out: None = None,
        keepdims: bool = False,
        initial: ArrayLike | None = None,
        where: ArrayLike | None = None,
    ) -> Self:
        """The greatest element, along axes or altogether."""
    def mean(
        self,
        axis: _Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        keepdims: bool = False,
        *,
        where: ArrayLike | None = None,
    ) -> Self:
        """The mean, along axes or altogether."""
    def min(
        self,
        axis: _Axis = None,
        out: None = None,
        keepdims: bool = False,
        initial: ArrayLike | None = None,
        where: ArrayLike | None = None,
    ) -> Self:
        """The least element, along axes or altogether."""
    def nonzero(
        self,
        *,
        fill_value: ArrayLike | tuple[ArrayLike, ...] | None = None,
        size: int | None = None,
    ) -> tuple[Self, ...]:
        """The positions of the elements that aren't zero, an array for each axis."""
    def prod(
        self,
        axis: _Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: ArrayLike | None = None,
        where: ArrayLike | None = None,
        promote_integers: bool = True,
    ) -> Self:
        """The product, along axes or altogether."""
    def ptp(self, axis: _Axis = None, out: None = None, keepdims: bool = False) -> Self:
        """Return the difference of the greatest and the least element."""
    def ravel(self, order: str = "C", *, out_sharding: _Spec = None) -> Self:
        """All elements in one dimension."""
    def repeat(
        self,
        repeats: ArrayLike,
        axis: int | None = None,
        *,
        total_repeat_length: int | None = None,
        out_sharding: _Spec = None,
    ) -> Self:
        """Each element several times."""
    def reshape(self, *args: _Size, order: str = "C", out_sharding: _Spec = None) -> Self:
        """The same elements in another shape."""
    def round(self, decimals: int = 0, out: None = None) -> Self:
        """The elements rounded to so many decimals."""
    def searchsorted(
        self,
        v: ArrayLike,
        side: str = "left",
        sorter: ArrayLike | None = None,
        *,
        method: str = "scan",
    ) -> Self:
        """Return the positions of values in this sorted array."""
    def sort(
        self,
        axis: int | None = -1,
        *,
        kind: None = None,
        order: None = None,
        stable: bool = True,
        descending: bool = False,
    ) -> Self:
        """The elements in sorted order."""
    def squeeze(self, axis: _Axis = None) -> Self:
        """Without the axes of size one."""
    def std(
        self,
        axis: _Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        ddof: int = 0,
        keepdims: bool = False,
        *,
        where: ArrayLike | None = None,
        correction: int | float | None = None,
    ) -> Self:
        """The standard deviation, along axes or altogether."""
    def sum(
        self,
        axis: _Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: ArrayLike | None = None,
        where: ArrayLike | None = None,
        promote_integers: bool = True,
    ) -> Self:
        """The sum, along axes or altogether."""
    def swapaxes(self, axis1: int, axis2: int) -> Self:
        """With two axes in each other's place."""
    def take(
        self,
        indices: ArrayLike,
        axis: int | None = None,
        out: None = None,
        mode: str | None = None,
        unique_indices: bool = False,
        indices_are_sorted: bool = False,
        fill_value: _Scalar | None = None,
    ) -> Self:
        """The elements or slices at positions along an axis."""
    def to_device(self, device: Device | Sharding, *, stream: int | Any | None = None) -> Self:
        """On another device, or dealt out otherwise."""
    def trace(
        self,
        offset: int | ArrayLike = 0,
        axis1: int = 0,
        axis2: int = 1,
        dtype: DTypeLike | None = None,
        out: None = None,
    ) -> Self:
        """The sum of a diagonal."""
    def transpose(self, *args: _Size | None) -> Self:
        """With the axes in another order: reversed, if none is given."""
    def var(
        self,
        axis: _Axis = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        ddof: int = 0,
        keepdims: bool = False,
        *,
        where: ArrayLike | None = None,
        correction: int | float | None = None,
    ) -> Self:
        """The variance, along axes or altogether."""
    def view(self, dtype: DTypeLike | None = None, type: None = None) -> Self:
        """The same bytes as another dtype."""

class _Updates[A]:
    def __getitem__(self, index: Any, /) -> _PartUpdates[A]: ...

class _PartUpdates[A]:
    def get(
        self,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        fill_value: ArrayLike | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
        strategy: str = "auto",
    ) -> A:
        """The part itself, with a say in what happens beyond the edges."""
    def set(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with other values in that part."""
    def add(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with values added to that part."""
    def subtract(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with values subtracted from that part."""
    def mul(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with that part multiplied."""
    def multiply(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with that part multiplied."""
    def divide(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with that part divided."""
    def power(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with that part raised to powers."""
    def min(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with the lesser of values and that part."""
    def max(
        self,
        values: ArrayLike,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        out_sharding: _Spec = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with the greater of values and that part."""
    def apply(
        self,
        func: Callable[[Any], Any],
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
        wrap_negative_indices: bool = True,
    ) -> A:
        """The array with a function of each element in that part."""
