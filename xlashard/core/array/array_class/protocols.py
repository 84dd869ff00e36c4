"""Protocols of Python and NumPy: conversions, text, pickling and DLPack."""

import operator
from contextlib import suppress
from typing import Any, Self

import numpy as np

from xlashard._jax.runtime.global_state import Transfer, active_guards, guarded
from xlashard._jax.runtime.transfer import (
    HandleType,
    default_device,
    first_replica,
    make_aval,
    put,
    with_sharding,
)
from xlashard.core.array.array_class.base import ArrayBase, check_alive, type_text
from xlashard.core.array.array_class.wrappers import wrap_results
from xlashard.core.array.placement.read import (
    distinct_here,
    holds_value,
    is_unreduced,
    may_read,
    read_value,
)
from xlashard.core.sharding import (
    GSPMDSharding,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    from_jax,
)
from xlashard.errors import ArgumentError, DLPackError, counted
from xlashard.support import hooks
from xlashard.support.formatting import format_axes
from xlashard.support.tracebacks import short_tracebacks, shorten, shortened


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

    def __bool__(self) -> bool:
        try:
            if self._buffers.size != 1:
                raise ValueError(
                    f"an Array {type_text(self)} of {self.size} elements has no truth value: write "
                    "x.any(), x.all() or x.size > 0"
                )
            return bool(read_value(self))
        except BaseException as error:
            shorten(error)
            raise

    # These are called once a step: `shortened` is written out, as its call takes a tenth of theirs.

    def __int__(self) -> int:
        try:
            return int(self._real_scalar("int"))
        except BaseException as error:
            shorten(error)
            raise

    def __float__(self) -> float:
        try:
            return float(self._real_scalar("float"))
        except BaseException as error:
            shorten(error)
            raise

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

    def _real_scalar(self, kind: str) -> np.ndarray:
        if self._buffers.dtype.kind == "c":
            raise ArgumentError(
                f"a complex Array, {type_text(self)}, does not convert to a Python {kind}: write "
                f"{kind}(x.real) or complex(x)"
            )
        return self._scalar(kind)

    def _scalar(self, kind: str) -> np.ndarray:
        if self._buffers.shape:
            raise ArgumentError(
                f"only an Array without dimensions converts to a Python {kind}, this one is "
                f"{type_text(self)}: write {kind}(x[index]) or x.tolist()"
            )
        # As an array of NumPy, which refuses NaN: the numbers of ml_dtypes convert it to an int.
        return read_value(self)

    def _integer(self, use: str) -> int:
        if self.ndim or not np.issubdtype(self.dtype, np.integer):
            raise ArgumentError(
                f"only an integer Array without dimensions serves as {use}, this one is "
                f"{type_text(self)}: write x[index].astype(int)"
            )
        return operator.index(read_value(self)[()])

    def __repr__(self) -> str:
        return _array_repr(self)

    def __str__(self) -> str:
        if self._handle.is_deleted() or not _is_printable(self):
            return _array_repr(self)
        return str(read_value(self))

    def __format__(self, spec: str) -> str:
        if not isinstance(spec, str):
            return format("", spec)
        if self._handle.is_deleted() or not holds_value(self._handle):
            return _array_repr(self)
        if not self.ndim:
            return format(read_value(self)[()], spec)
        return format(read_value(self), spec) if spec else HostProtocols.__str__(self)

    def _repr_html_(self) -> str | None:
        """Return the picture that a notebook shows of an array in several tiles, or None.

        For None the notebook shows the text. It requests the text first, which caches the value of
        a small array; the cached value stands above the picture, and nothing is read for it.
        """
        if self._handle.is_deleted():
            return None
        value = "" if self._value_cache is None else _array_repr(self)
        try:
            return hooks.pictures.html_of(self, value)
        except Exception:  # the text remains
            return None

    @shortened
    def tolist(self) -> Any:
        """Return the value as nested lists of Python numbers."""
        return read_value(self).tolist()

    @shortened
    def tobytes(self, order: str = "C") -> bytes:
        """Return the elements as bytes, in row-major (`"C"`) or column-major (`"F"`) order."""
        return read_value(self).tobytes(order)  # pyright: ignore[reportArgumentType]

    def item(self, *args: int) -> Any:
        """Return one element as a Python number; the position is optional if there is only one."""
        try:
            return read_value(self).item(*args)
        except BaseException as error:
            shorten(error)
            raise

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        try:
            value = read_value(self)
        except BaseException as error:
            shorten(error)
            raise
        if dtype is None and not copy:
            return value
        if copy:
            return np.array(value, dtype, copy=copy)
        if dtype is None:
            return value
        target = np.dtype(dtype)
        if value.dtype == target:
            return value
        if copy is False:
            raise ValueError(
                f"an Array {type_text(self)} can't be read as {target} without a copy: write "
                f"np.asarray(x, {target.name!r})"
            )
        return value.astype(target)

    def __buffer__(self, flags: int, /) -> memoryview:
        handle = self._handle
        try:
            return memoryview(handle)
        except (BufferError, RuntimeError, ValueError):
            pass  # several shards, memory that the host can't read, or deleted memory
        if (
            handle.sharding.num_devices > 1
            and handle.is_fully_replicated
            and handle.is_fully_addressable
        ):
            with suppress(BufferError, RuntimeError):
                return memoryview(first_replica(handle))
        try:
            return memoryview(read_value(self))
        except ValueError:
            raise BufferError(
                f"the buffer protocol does not support {self.dtype.name}: write x.tobytes()"
            ) from None

    def __jax_array__(self) -> Self:
        """Return the array itself, which JAX takes as it is.

        JAX's functions look for this method on every operand: a missing one takes longer to report
        than this one to call.
        """
        return self

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


def _unpickle(kind: type[ArrayBase], value: np.ndarray, weak_type: bool) -> ArrayBase:
    """Return an uncommitted array on the default device."""
    array = kind()
    what = f"a pickled Array {type_text(value)}"
    device = default_device()
    jax_sharding = SingleDeviceSharding(device).jax_sharding()
    aval = make_aval(value.shape, value.dtype, jax_sharding, weak_type)
    with guarded(active_guards(), Transfer.HOST_TO_DEVICE, what):
        array._handle = put(aval, jax_sharding, [value], [device], committed=False)
    return array


# Bytes above which a value is not read for its repr.
_PRINTED_BYTES = 1 << 20


def _is_printable(array: ArrayBase) -> bool:
    return array.nbytes <= _PRINTED_BYTES and holds_value(array._handle) and may_read(array)


def _array_repr(array: ArrayBase) -> str:
    """Return `Array([1, 2], dtype=int32)`; without the value if large or in other processes."""
    handle = array._handle
    if handle.is_deleted():
        return f"{type(array).__name__}({type_text(handle)}, deleted)"
    suffix = f"dtype={handle.dtype.name}"
    if handle.weak_type:
        suffix += ", weak_type=True"
    prefix = f"{type(array).__name__}("
    if is_unreduced(handle):
        where = sharding_text(from_jax(handle.sharding))
        return f"{prefix}shape={handle.shape}, {suffix}, sharding={where})"
    if not holds_value(handle):
        tiling, distinct = distinct_here(handle)
        local = f"{len(distinct.buffers)} of {tiling.num_tiles} pieces here"
        where = sharding_text(from_jax(handle.sharding))
        return f"{prefix}shape={handle.shape}, {suffix}, sharding={where}, {local})"
    if not _is_printable(array):
        return f"{prefix}shape={handle.shape}, {suffix})"
    if array.size == 0:
        return f"{prefix}[], shape={handle.shape}, {suffix})"
    width = np.get_printoptions()["linewidth"]
    body = np.array2string(
        read_value(array), prefix=prefix, suffix=",", separator=", ", max_line_width=width
    )
    last_line = len(prefix) + len(body) - (body.rfind("\n") + 1)
    gap = " " if last_line + len(suffix) + len(", )") <= width else "\n" + " " * len(prefix)
    return f"{prefix}{body},{gap}{suffix})"


def sharding_text(sharding: Sharding) -> str:
    """Return a one-line description of a sharding: `P('data') on 8 devices (data=8)`."""
    count = len(sharding.devices)
    devices = counted(count, "device")
    if isinstance(sharding, NamedSharding):
        axes = format_axes(sharding.mesh.shape)
        return f"{sharding.normal_spec.describe()} on {devices} ({axes})"
    if isinstance(sharding, GSPMDSharding):
        return f"{sharding.tile_assignment.to_text()} on {devices}"
    if count == 1:
        return f"device {sharding.devices[0].id}"
    return f"{sharding._describe()} on {devices}"
