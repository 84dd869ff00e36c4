"""`GlobalDeviceArray`: an Array with the interface of JAX 0.2.25 to 0.4.7."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import jax
import numpy as np

from xlashard._jax.legacy_api import refuse_in_pmap
from xlashard._jax.runtime.dispatch import register_array_type
from xlashard._jax.runtime.tracebacks import is_called_by_jax
from xlashard._jax.runtime.transfer import split
from xlashard.core.array import Array, device_put
from xlashard.core.array.array_class.base import check_alive, type_text
from xlashard.core.array.array_class.handles import as_class
from xlashard.core.array.array_class.protocols import sharding_text
from xlashard.core.array.reshard.execute import uncommit
from xlashard.core.sharding import Mesh, NamedSharding
from xlashard.errors import ArgumentError, MeshError, RefusedError, ResourceError
from xlashard.legacy.arrays import shards as making
from xlashard.legacy.arrays.device_arrays import DeviceArray, as_device_array
from xlashard.legacy.arrays.shards import Device, Index, Shard
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.support.formatting import format_axes, format_devices
from xlashard.support.tracebacks import short_tracebacks, shortened


class GlobalDeviceArray(Array):
    """Global array over the devices of a mesh, of which each process holds its addressable shards.

    It is an Array, so every function that takes Arrays takes it; operations on it return Arrays.
    Constructors are the class itself (from buffers), `from_callback` and its variants, and
    `from_array`; `pjit` returns it with `jax_array` off and `jax_parallel_functions_output_gda` on.
    New programs use Arrays: `to_array` returns the Array over the same buffers.

    Args:
        global_shape: The shape of the global array.
        global_mesh: The mesh; it may contain devices of other processes.
        mesh_axes: A `PartitionSpec`, or a tuple with None, an axis name or a tuple of axis names
            for each dimension.
        device_buffers: An array on each of `global_mesh.local_devices`, in that order. Put NumPy
            arrays there with `device_put(value, device)`.
        _gda_fast_path_args: Ignored.
        _enable_checks: Ignored: the checks are always on.

    Raises:
        PlacementError: Buffers are on other devices or in another order, too few or too many, or
            have another shape or dtype; names their numbers.
        GeometryError: The axes do not fit the mesh, or do not divide the shape.
        ArgumentError: A buffer is not an array on one device.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh
        >>> from xlashard.legacy.shardings.partition_spec import PartitionSpec as P
        >>> mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
        >>> whole = np.arange(16, dtype=np.int32).reshape(8, 2)
        >>> gda = GlobalDeviceArray.from_callback((8, 2), mesh, P("x", "y"), lambda i: whole[i])
        >>> print(gda)
        GlobalDeviceArray(shape=(8, 2), dtype=int32)
        >>> gda.addressable_shards[0].data.shape
        (8, 2)
    """

    __slots__ = ("_mesh_axes", "_pieces")

    _mesh_axes: tuple[Any, ...] | None
    _pieces: tuple[Shard, ...]

    # Results of programs are wrapped by calling the class without arguments and setting the handle.
    def __init__(
        self,
        global_shape: Sequence[int] | None = None,
        global_mesh: Mesh | None = None,
        mesh_axes: Any = None,
        device_buffers: Any = None,
        _gda_fast_path_args: Any = None,
        _enable_checks: bool = True,
    ) -> None:
        if global_shape is None:
            return
        with short_tracebacks:
            if global_mesh is None or device_buffers is None:
                raise ArgumentError(
                    "GlobalDeviceArray requires a mesh and buffers: write GlobalDeviceArray("
                    "global_shape, global_mesh, mesh_axes, device_buffers)"
                )
            array = making.from_buffers((global_shape, global_mesh, mesh_axes), device_buffers)
        self._handle, self._own_sharding = array._handle, array._own_sharding
        self._mesh_axes = mesh_axes

    @classmethod
    @shortened
    def from_callback(
        cls,
        global_shape: Sequence[int],
        global_mesh: Mesh,
        mesh_axes: Any,
        data_callback: Callable[[Index], Any],
    ) -> Self:
        """Make an array from a callback that is called once per local device.

        Args:
            global_shape: The shape of the global array.
            global_mesh: The mesh.
            mesh_axes: As for the class.
            data_callback: Takes an index of the global array and returns the shard there: a NumPy
                array or an array on any device. It is called once per device of
                `global_mesh.local_devices`, in that order, also for replicas of a shard.

        Raises:
            PlacementError: A shard has the wrong shape or dtype; names its index.
            GeometryError: The axes do not fit the mesh, or do not divide the shape.
        """
        array = making.from_callback_pieces((global_shape, global_mesh, mesh_axes), data_callback)
        return _with_axes(as_class(array, cls), mesh_axes)

    @classmethod
    @shortened
    def from_batched_callback(
        cls,
        global_shape: Sequence[int],
        global_mesh: Mesh,
        mesh_axes: Any,
        data_callback: Callable[[Sequence[Index]], Sequence[Any]],
    ) -> Self:
        """Make an array from one call of a callback.

        Args:
            global_shape: The shape of the global array.
            global_mesh: The mesh.
            mesh_axes: As for the class.
            data_callback: Takes the indices of `global_mesh.local_devices`, in that order, and
                returns the shards in the same order. The shards of the array are uncommitted.

        Raises:
            PlacementError: Too few or too many shards, or a shard with the wrong shape or dtype.
            GeometryError: The axes do not fit the mesh, or do not divide the shape.
        """
        target = (global_shape, global_mesh, mesh_axes)
        array = making.from_batched_callback_pieces(target, data_callback)
        out = _with_axes(as_class(array, cls), mesh_axes)
        out._pieces = out._shards_here(committed=False)
        return out

    @classmethod
    @shortened
    def from_batched_callback_with_devices(
        cls,
        global_shape: Sequence[int],
        global_mesh: Mesh,
        mesh_axes: Any,
        data_callback: Callable[[Sequence[tuple[Index, tuple[Device, ...]]]], Sequence[Any]],
    ) -> Self:
        """Make an array from one call of a callback that places the shards itself.

        Args:
            global_shape: The shape of the global array.
            global_mesh: The mesh.
            mesh_axes: As for the class.
            data_callback: Takes each distinct index with the local devices that hold it, and
                returns an array on each of these devices, in any order.

        Raises:
            PlacementError: The arrays are on other devices, or do not fit.
            GeometryError: The axes do not fit the mesh, or do not divide the shape.
        """
        target = (global_shape, global_mesh, mesh_axes)
        array = making.from_device_pieces(target, data_callback)
        return _with_axes(as_class(array, cls), mesh_axes)

    @classmethod
    def from_array(
        cls, array: jax.Array, global_mesh: Mesh | None = None, mesh_axes: Any = None
    ) -> Self:
        """Return a GlobalDeviceArray over the buffers of an array, which stays valid.

        Args:
            array: An Array, or an array of JAX.
            global_mesh: The mesh of the result; None for the array's own.
            mesh_axes: The spec of the result on `global_mesh`.

        Raises:
            PlacementError: The array has another sharding; `from_array` does not move data.
            ArgumentError: `array` is not a concrete array.
        """
        with short_tracebacks:
            source = array if isinstance(array, Array) else Array.from_jax(array)
            check_alive(source)
            if global_mesh is not None:
                source = making.named(source, global_mesh, mesh_axes)
            gda = as_class(source, cls)
            return gda if global_mesh is None else _with_axes(gda, mesh_axes)

    def to_array(self) -> Array:
        """Return the Array over the same buffers.

        Example:
            >>> import jax, numpy as np
            >>> from xlashard import device_put
            >>> gda = GlobalDeviceArray.from_array(device_put(np.arange(3), jax.devices()[0]))
            >>> gda.to_array()
            Array([0, 1, 2], dtype=int32)
        """
        return as_class(self, Array)

    @property
    def mesh(self) -> Any:
        """The mesh.

        Raises:
            MeshError: The sharding has no mesh.
        """
        return self._named("mesh").mesh

    @property
    def mesh_axes(self) -> PartitionSpec:
        """The `PartitionSpec`, with the entries that its constructor was given.

        Raises:
            MeshError: The sharding has no mesh.
        """
        # The spec of the sharding is today's, which changes `()` to None and `('x',)` to `'x'`.
        axes = getattr(self, "_mesh_axes", None)
        return PartitionSpec(*(self._named("mesh_axes").spec if axes is None else axes))

    def _named(self, attribute: str) -> NamedSharding:
        sharding = self.sharding
        if isinstance(sharding, NamedSharding):
            return sharding
        raise MeshError(
            f"{attribute} requires a NamedSharding, but the GlobalDeviceArray {type_text(self)} "
            f"has {sharding_text(sharding)}: read x.sharding, or write "
            "GlobalDeviceArray.from_array(x, mesh, P(...))"
        )

    @property
    def local_shards(self) -> Sequence[Shard]:
        """The addressable shards, in the order of `mesh.local_devices`."""
        pieces = getattr(self, "_pieces", None)
        if pieces is None:
            check_alive(self)
            pieces = self._pieces = self._shards_here()
        elif self._handle.is_deleted() and all(s.data.is_deleted() for s in pieces):
            # Shards can be deleted one by one: the array is deleted once all of them are.
            check_alive(self)
        return list(pieces)

    def _shards_here(self, *, committed: bool = True) -> tuple[Shard, ...]:
        sharding, shape = self.sharding, self.shape
        positions, tiling = sharding.addressable_positions, sharding.tiling(shape)
        indices = tiling.indices(shape, positions)
        copies = tiling.replica_ids(positions).tolist()
        pieces = split(self._handle)
        if not committed:
            pieces = list(map(uncommit, pieces))
        data = map(as_device_array, pieces)
        devices = [sharding.devices[position] for position in positions]
        return tuple(map(Shard, devices, indices, copies, data))

    @property
    def addressable_shards(self) -> Any:
        """The same as `local_shards`, under today's name."""
        return self.local_shards

    @property
    def global_shards(self) -> Any:
        """The shards on all devices of the mesh; `data` is None on other processes' devices."""
        local = self.local_shards
        sharding, shape = self.sharding, self.shape
        if len(local) == sharding.num_devices:
            return local
        tiling = sharding.tiling(shape)
        copies = tiling.replica_ids().tolist()
        by_device = {shard.device: shard for shard in local}
        places = zip(sharding.devices, tiling.indices(shape), copies, strict=True)
        return [by_device.get(d) or Shard(d, index, copy) for d, index, copy in places]

    def local_data(self, index: int) -> DeviceArray:
        """Return the data on one addressable device.

        Args:
            index: The number of the device, in the order of `mesh.local_devices`.

        Raises:
            IndexError: `index` is out of range.
        """
        pieces = self.local_shards
        with short_tracebacks:
            return pieces[self._check_shard_number(index, len(pieces))].data

    def addressable_data(self, index: int) -> DeviceArray:
        """Return the same as `local_data`, under today's name."""
        return self.local_data(index)

    # JAX's own functions compare arrays: jnp.nonzero(x) evaluates x != 0.

    def __eq__(self, other: Any) -> Any:
        if is_called_by_jax():
            return super().__eq__(other)
        with short_tracebacks:
            raise _not_compared("==", self)

    def __ne__(self, other: Any) -> Any:
        if is_called_by_jax():
            return super().__ne__(other)
        with short_tracebacks:
            raise _not_compared("!=", self)

    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def __repr__(self) -> str:
        sharding = self.sharding
        where = f"sharding={sharding_text(sharding)}"
        if isinstance(sharding, NamedSharding):
            where = f"global_mesh_shape={dict(self.mesh.shape)}, mesh_axes={self.mesh_axes}"
        return f"{str(self)[:-1]}, {where})"

    def __str__(self) -> str:
        return f"GlobalDeviceArray(shape={self.shape}, dtype={self.dtype.name})"

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the value and the mesh; unpickling requires the same devices."""
        sharding = self.sharding
        if not isinstance(sharding, NamedSharding):
            return super().__reduce__()
        return _unpickle, (type(self), np.asarray(self._value), sharding)


def _with_axes[G: GlobalDeviceArray](gda: G, mesh_axes: Any) -> G:
    gda._mesh_axes = mesh_axes
    return gda


def _unpickle(
    kind: type[GlobalDeviceArray], value: np.ndarray, sharding: NamedSharding
) -> GlobalDeviceArray:
    return kind.from_array(device_put(value, sharding))


def _not_compared(operator: str, x: GlobalDeviceArray) -> RefusedError:
    return RefusedError(
        f"{operator} is ambiguous for the GlobalDeviceArray {type_text(x)}: write x.to_array() "
        f"{operator} y.to_array() to compare values, or "
        "x.sharding.is_equivalent_to(y.sharding, x.ndim) to compare shardings",
        name="GlobalDeviceArray.__eq__",
    )


def _refused_by_pmap(x: GlobalDeviceArray) -> NoReturn:
    raise RefusedError(
        f"pmap does not take the GlobalDeviceArray {type_text(x)}: write "
        "pjit(fun, in_axis_resources=FROM_GDA, ...)(x), or pass "
        "device_put(x.to_array(), PmapSharding.default(x.shape))",
        name="jax.pmap",
    )


register_array_type(GlobalDeviceArray)
refuse_in_pmap(GlobalDeviceArray, _refused_by_pmap)


def gda_class(handle: Any) -> type[Array]:
    """Return `GlobalDeviceArray`, for every result.

    Args:
        handle: The result's buffers.
    """
    return GlobalDeviceArray


def check_gda_mesh(values: Sequence[Any], paths: Sequence[str], mesh: Mesh) -> None:
    """Check that GlobalDeviceArrays are on the mesh in force, under `jax_enable_checks`.

    Args:
        values: The arguments of a call.
        paths: The path of each argument.
        mesh: The mesh in force.

    Raises:
        ResourceError: A GlobalDeviceArray is on another mesh; names the first one.
    """
    for value, path in zip(values, paths, strict=True):
        if type(value) is not GlobalDeviceArray or not isinstance(value.sharding, NamedSharding):
            continue
        if value.mesh != mesh:
            raise ResourceError(
                f"{path} is a GlobalDeviceArray on {_mesh_text(value.mesh)}, but the mesh in force "
                f"is {_mesh_text(mesh)}: call inside `with {path}.mesh:`, or pass "
                f"device_put({path}, NamedSharding(mesh, {path}.mesh_axes))",
                path=path,
            )


def _mesh_text(mesh: Mesh) -> str:
    devices = format_devices(list(mesh.devices.flat))
    return f"a mesh ({format_axes(mesh.shape)}) of {devices}"
