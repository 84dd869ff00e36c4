"""Protocols of Python and NumPy: conversions, text, pickling and DLPack."""

import operator
from contextlib import nullcontext
from typing import Any, Self

import numpy as np

from xlashard._jax.runtime.tracebacks import short_tracebacks, shortened
from xlashard._jax.runtime.transfer import (
    HandleType,
    default_device,
    first_replica,
    make_aval,
    put,
    with_sharding,
)
from xlashard.array.core.base import ArrayBase, check_alive, type_text
from xlashard.array.core.repr import array_format, array_html, array_repr, array_str
from xlashard.array.core.unwrap import wrap_results
from xlashard.array.host.read import read_value
from xlashard.array.placement.transfer_guard import Transfer, active_guards, guarded
from xlashard.errors import ArgumentError, DLPackError
from xlashard.sharding import SingleDeviceSharding


class HostProtocols(ArrayBase):
    """Members that read the value or export the memory."""

    __slots__ = ()

    @property
    def _value(self) -> np.ndarray:
        return read_value(self)

    def __len__(self) -> int:
        if not self.ndim:
            raise ArgumentError(
                f"len() of an Array without dimensions, {type_text(self)}: write x.size for the "
                "number of elements"
            )
        return self.shape[0]

    @shortened
    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                f"an Array {type_text(self)} of {self.size} elements has no truth value: write "
                "x.any(), x.all() or x.size > 0"
            )
        return bool(read_value(self))

    @shortened
    def __int__(self) -> int:
        return int(self._scalar("int"))

    @shortened
    def __float__(self) -> float:
        return float(self._scalar("float"))

    @shortened
    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    @shortened
    def __index__(self) -> int:
        return self._integer("an index")

    @shortened
    def __hex__(self) -> str:
        return hex(self._integer("hex()"))

    @shortened
    def __oct__(self) -> str:
        return oct(self._integer("oct()"))

    def _scalar(self, kind: str) -> Any:
        if self.ndim:
            raise ArgumentError(
                f"only an Array without dimensions converts to a Python {kind}, this one is "
                f"{type_text(self)}: write {kind}(x[index]) or x.tolist()"
            )
        return read_value(self)[()]

    def _integer(self, use: str) -> int:
        if self.ndim or not np.issubdtype(self.dtype, np.integer):
            raise ArgumentError(
                f"only an integer Array without dimensions serves as {use}, this one is "
                f"{type_text(self)}: write x[index].astype(int)"
            )
        return operator.index(read_value(self)[()])

    def _repr_html_(self) -> str | None:
        return array_html(self)

    def __repr__(self) -> str:
        return array_repr(self)

    def __str__(self) -> str:
        return array_str(self)

    def __format__(self, spec: str) -> str:
        return array_format(self, spec)

    @shortened
    def tolist(self) -> Any:
        """Return the value as nested lists of Python numbers."""
        return read_value(self).tolist()

    @shortened
    def tobytes(self, order: str = "C") -> bytes:
        """Return the elements as bytes, in row-major (`"C"`) or column-major (`"F"`) order."""
        return read_value(self).tobytes(order)  # pyright: ignore[reportArgumentType]

    @shortened
    def item(self, *args: int) -> Any:
        """Return one element as a Python number; the position is optional if there is only one."""
        handle = self._handle
        if not args and handle.size == 1 and active_guards() is None:
            try:
                return handle.item()
            except RuntimeError:
                pass  # deleted, or not in this process: handled below
        return read_value(self).item(*args)

    @shortened
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = read_value(self)
        if copy:
            return np.array(value, dtype)
        if dtype is None or value.dtype == dtype:
            return value
        if copy is False:
            wanted = np.dtype(dtype)
            raise ValueError(
                f"an Array {type_text(self)} can't be read as {wanted} without a copy: write "
                f"np.asarray(x, {wanted.name!r})"
            )
        return value.astype(dtype)

    def __buffer__(self, flags: int, /) -> memoryview:
        handle = self._handle
        if handle.sharding.num_devices > 1:
            whole = handle.is_fully_replicated and handle.is_fully_addressable
            handle = first_replica(handle) if whole else None
        if handle is not None:
            try:
                return memoryview(handle)
            except (BufferError, RuntimeError):
                pass  # memory that the host can't read, or deleted memory
        try:
            return memoryview(read_value(self))
        except ValueError:
            raise BufferError(
                f"the buffer protocol does not support {self.dtype.name}: write x.tobytes()"
            ) from None

    def __array_module__(self, types: Any) -> Any:
        check_alive(self)
        bare = tuple(HandleType if issubclass(kind, ArrayBase) else kind for kind in types)
        return HandleType.__array_module__(self._handle, bare)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return HandleType.__array_namespace__(self._handle, api_version=api_version)

    @property
    def __numpy_dtype__(self) -> Any:
        return self.dtype

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule, read-only where the consumer requests it by `max_version`.

        The memory lives as long as the consumer holds it; a program that the Array is donated to
        meanwhile uses other memory.

        Raises:
            DLPackError: The array is on several devices, or DLPack lacks its dtype or the requested
                device.
        """
        with short_tracebacks:
            if dl_device is not None and tuple(dl_device) == self.__dlpack_device__():
                # NumPy requests the first CPU device for the memory of every CPU device.
                dl_device = None
            handle = self._on_one_device()
            try:
                return handle.__dlpack__(
                    stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
                )
            except (RuntimeError, ValueError) as error:
                raise DLPackError(_export_text(handle, dl_device, error)) from None

    def __dlpack_device__(self) -> tuple[Any, int]:
        with short_tracebacks:
            return self._on_one_device().__dlpack_device__()

    def _on_one_device(self) -> Any:
        check_alive(self)
        handle = self._handle
        count = len(handle.sharding.device_set)
        if count > 1:
            whole = "each of which holds all of it" if handle.is_fully_replicated else "in pieces"
            raise DLPackError(
                f"DLPack describes memory of one device, this Array {type_text(self)} is on "
                f"{count}, {whole}: give x.addressable_shards[i].data instead"
            )
        return handle

    @property
    def __cuda_array_interface__(self) -> Any:
        check_alive(self)
        return self._handle.__cuda_array_interface__

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), np.asarray(read_value(self)), bool(self.weak_type))

    def clone(self) -> Self:
        """Return another Array over the same buffers."""
        check_alive(self)
        handle = self._handle
        same = (
            handle.clone()
            if handle.is_fully_addressable
            else with_sharding(handle, handle.sharding)
        )
        return wrap_results(type(self), same, ())


def _export_text(handle: Any, dl_device: Any, error: Exception) -> str:
    """Describe why DLPack cannot export the array."""
    where = "" if dl_device is None else f" on the DLPack device {tuple(dl_device)}"
    advice = (
        "write x.astype('int8') for one of fewer bits, or np.asarray(x)"
        if dl_device is None
        else "omit the device, or put the array there first by device_put(x, device)"
    )
    return f"DLPack cannot export an Array {type_text(handle)}{where} ({error}): {advice}"


def host_to_handle(value: np.ndarray, weak_type: bool = False) -> Any:
    """Return an uncommitted handle of a value on the default device."""
    device = default_device()
    jax_sharding = SingleDeviceSharding(device).jax_sharding(value.shape)
    aval = make_aval(value.shape, value.dtype, jax_sharding, weak_type)
    return put(aval, jax_sharding, [value], [device], committed=False)


def _unpickle(kind: type[ArrayBase], value: np.ndarray, weak_type: bool) -> ArrayBase:
    array = kind()
    guards = active_guards()
    what = f"a pickled Array {type_text(value)}"
    with nullcontext() if guards is None else guarded(guards, Transfer.HOST_TO_DEVICE, what):
        array._handle = host_to_handle(value, weak_type)
    return array
