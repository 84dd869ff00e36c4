"""`GlobalDeviceArray`: an Array with the name and the face that it had before there were any."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import jax
import numpy as np

from xlashard import Array, Mesh, NamedSharding, device_put
from xlashard._jax.frames import is_called_by_jax
from xlashard._jax.install import install_array_type
from xlashard._jax.pmap import refuse_in_pmap
from xlashard._jax.tracebacks import short_tracebacks, shortened
from xlashard._jax.transfer import dressed, split
from xlashard.array.handles import as_kind
from xlashard.array.holder import check_alive, type_text
from xlashard.array.text import sharding_text
from xlashard.errors import ArgumentError, MeshError, RefusedError, ResourceError
from xlashard.legacy.arrays import gda_constructors as making
from xlashard.legacy.arrays.device_arrays import DeviceArray, as_device_array
from xlashard.legacy.arrays.shards import Device, Index, Shard
from xlashard.legacy.shardings.partition_spec import PartitionSpec


class GlobalDeviceArray(Array):
    """An array over the devices of a mesh, of which each process sees its own devices' part.

    It is an Array, so whatever takes one takes it too; an operation on it gives another one. It is
    made of buffers, by a `from_...` function, of an Array (`from_array`), or by a `pjit`-ed
    function where the flags ask for it. In new programs use Arrays: `to_array` gives the Array
    over the same buffers.

    Args:
        global_shape: Of the whole array, in elements.
        global_mesh: The mesh; it may have devices of other processes.
        mesh_axes: For each dimension None, an axis of the mesh by its name, or several in a tuple:
            a `PartitionSpec`, or a plain tuple.
        device_buffers: An array on each of `global_mesh.local_devices`, in that order. NumPy arrays
            are on no device: `device_put(value, device)` makes them such arrays.
        _gda_fast_path_args: Has no use any more.
        _enable_checks: Has no use any more: what is checked costs next to nothing.

    Raises:
        PlacementError: Buffers that are on other devices or in another order, too few or too many,
            or with another shape or dtype; named by their number.
        GeometryError: The axes don't fit the mesh, or don't divide the shape.
        ArgumentError: Something that is no array on one device.

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

    __slots__ = ("_pieces",)

    _pieces: tuple[Shard, ...]

    # Those that wrap the results of programs call it with nothing, and put a handle in.
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
                    "a GlobalDeviceArray needs a mesh and buffers: write GlobalDeviceArray("
                    "global_shape, global_mesh, mesh_axes, device_buffers)"
                )
            made = making.from_buffers((global_shape, global_mesh, mesh_axes), device_buffers)
        self._handle, self._own_sharding = made._handle, made._own_sharding

    @classmethod
    @shortened
    def from_callback(
        cls,
        global_shape: Sequence[int],
        global_mesh: Mesh,
        mesh_axes: Any,
        data_callback: Callable[[Index], Any],
    ) -> Self:
        """Makes one of the pieces that a function gives, asked for each local device by itself.

        Args:
            global_shape: Of the whole array, in elements.
            global_mesh: The mesh.
            mesh_axes: As for the class.
            data_callback: Takes an index of the whole array and gives the piece there: a NumPy
                array or an array on any device. It is called once per device of
                `global_mesh.local_devices`, in that order, also for copies of one piece.

        Raises:
            PlacementError: A piece with another shape or dtype, with its index.
            GeometryError: The axes don't fit the mesh, or don't divide the shape.
        """
        made = making.from_callback_pieces((global_shape, global_mesh, mesh_axes), data_callback)
        return as_kind(made, cls)

    @classmethod
    @shortened
    def from_batched_callback(
        cls,
        global_shape: Sequence[int],
        global_mesh: Mesh,
        mesh_axes: Any,
        data_callback: Callable[[Sequence[Index]], Sequence[Any]],
    ) -> Self:
        """Makes one of the pieces that a function gives all at once.

        Args:
            global_shape: Of the whole array, in elements.
            global_mesh: The mesh.
            mesh_axes: As for the class.
            data_callback: Takes the indices of `global_mesh.local_devices`, in that order, and
                gives the pieces there in the same order. It is called once. The pieces of the
                array are not committed to their devices.

        Raises:
            PlacementError: Too few or too many pieces, or one with another shape or dtype.
            GeometryError: The axes don't fit the mesh, or don't divide the shape.
        """
        target = (global_shape, global_mesh, mesh_axes)
        made = making.from_batched_callback_pieces(target, data_callback)
        out = as_kind(made, cls)
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
        """Makes one of arrays that a function has put on the devices.

        Args:
            global_shape: Of the whole array, in elements.
            global_mesh: The mesh.
            mesh_axes: As for the class.
            data_callback: Takes each distinct index with the local devices that hold it, and gives
                an array on each of those devices, in any order. It is called once.

        Raises:
            PlacementError: Arrays that are not on exactly those devices, or don't fit.
            GeometryError: The axes don't fit the mesh, or don't divide the shape.
        """
        given = (global_shape, global_mesh, mesh_axes)
        made = making.from_device_pieces(given, data_callback)
        return as_kind(made, cls)

    @classmethod
    def from_array(
        cls, array: jax.Array, global_mesh: Mesh | None = None, mesh_axes: Any = None
    ) -> Self:
        """One over the buffers of an array, which stays good.

        Args:
            array: An Array, or an array of JAX.
            global_mesh: The mesh on which to name what it holds; the array's own if None.
            mesh_axes: How it lies on that mesh.

        Raises:
            PlacementError: It does not lie so: nothing is moved here.
            ArgumentError: It is no array with buffers.
        """
        with short_tracebacks:
            given = array if isinstance(array, Array) else Array.from_jax(array)
            check_alive(given)
            if global_mesh is not None:
                given = making.named(given, global_mesh, mesh_axes)
            return as_kind(given, cls)

    def to_array(self) -> Array:
        """The Array over the same buffers.

        Example:
            >>> import jax, numpy as np
            >>> from xlashard import device_put
            >>> gda = GlobalDeviceArray.from_array(device_put(np.arange(3), jax.devices()[0]))
            >>> gda.to_array()
            Array([0, 1, 2], dtype=int32)
        """
        return as_kind(self, Array)

    @property
    def mesh(self) -> Any:
        """The mesh.

        Raises:
            MeshError: Its sharding has none.
        """
        return self._named("mesh").mesh

    @property
    def mesh_axes(self) -> PartitionSpec:
        """For each dimension the mesh axes that cut it.

        Raises:
            MeshError: Its sharding has no mesh.
        """
        return PartitionSpec(*self._named("mesh_axes").spec)

    def _named(self, wanted: str) -> NamedSharding:
        sharding = self.sharding
        if isinstance(sharding, NamedSharding):
            return sharding
        raise MeshError(
            f"a GlobalDeviceArray {type_text(self)} lies as {sharding_text(sharding)}, which names "
            f"no axes of a mesh, and so it has no {wanted}: ask for x.sharding, or give it a mesh "
            "by GlobalDeviceArray.from_array(x, mesh, P(...))"
        )

    @property
    def local_shards(self) -> Sequence[Shard]:
        """The pieces on this process's devices, in the order of `mesh.local_devices`."""
        try:
            pieces = self._pieces
        except AttributeError:
            pieces = None
        if pieces is None:
            check_alive(self)
            pieces = self._pieces = self._shards_here()
        elif self._handle.is_deleted() and all(s.data.is_deleted() for s in pieces):
            # One piece after the other may be deleted by itself: only then is it all gone.
            check_alive(self)
        return list(pieces)

    def _shards_here(self, *, committed: bool = True) -> tuple[Shard, ...]:
        sharding, shape = self.sharding, self.shape
        positions, tiling = sharding.addressable_positions, sharding.tiling(shape)
        indices = tiling.indices(shape, positions)
        copies = tiling.replica_ids(positions).tolist()
        pieces = split(self._handle)
        if not committed:
            pieces = [dressed(piece, piece.sharding, committed=False) for piece in pieces]
        data = map(as_device_array, pieces)
        devices = [sharding.devices[position] for position in positions]
        return tuple(map(Shard, devices, indices, copies, data))

    @property
    def addressable_shards(self) -> Any:
        """The same as `local_shards`, by the name of today."""
        return self.local_shards

    @property
    def global_shards(self) -> Any:
        """The pieces on all devices of the mesh; the data of other processes' is None."""
        here = self.local_shards
        sharding, shape = self.sharding, self.shape
        if len(here) == sharding.num_devices:
            return here
        tiling = sharding.tiling(shape)
        copies = tiling.replica_ids().tolist()
        by_device = {shard.device: shard for shard in here}
        places = zip(sharding.devices, tiling.indices(shape), copies, strict=True)
        return [by_device.get(d) or Shard(d, index, copy) for d, index, copy in places]

    def local_data(self, index: int) -> DeviceArray:
        """The data on one of this process's devices.

        Args:
            index: Which of them, in the order of `mesh.local_devices`.

        Raises:
            IndexError: This process has not so many of the array's devices.
        """
        pieces = self.local_shards
        if not -len(pieces) <= index < len(pieces):
            with short_tracebacks:
                super().addressable_data(index)  # says what is wrong with it
        return pieces[index].data

    def addressable_data(self, index: int) -> DeviceArray:
        """The same as `local_data`, by the name of today."""
        return self.local_data(index)

    # JAX's own functions compare what they are given: jnp.nonzero(x) asks for x != 0.

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
        """By value and mesh: who reads it must have those devices."""
        sharding = self.sharding
        if not isinstance(sharding, NamedSharding):
            return super().__reduce__()
        return _unpickle, (type(self), np.asarray(self._value), sharding)


def _unpickle(
    kind: type[GlobalDeviceArray], value: np.ndarray, sharding: NamedSharding
) -> GlobalDeviceArray:
    return kind.from_array(device_put(value, sharding))


def _not_compared(operator: str, x: GlobalDeviceArray) -> RefusedError:
    return RefusedError(
        f"a GlobalDeviceArray is not compared by {operator}, here one {type_text(x)}, for that "
        f"might mean its value or its place: write x.to_array() {operator} y.to_array() for the "
        "values, or x.sharding.is_equivalent_to(y.sharding, x.ndim) for the place",
        name="GlobalDeviceArray.__eq__",
    )


def _refused_by_pmap(x: GlobalDeviceArray) -> NoReturn:
    raise RefusedError(
        f"pmap takes what lies on this process's devices one beside the other, not a "
        f"GlobalDeviceArray {type_text(x)}: write pjit(fun, in_axis_resources=FROM_GDA, ...)(x), "
        "or bring it there by device_put(x.to_array(), PmapSharding.default(x.shape))",
        name="jax.pmap",
    )


install_array_type(GlobalDeviceArray)
refuse_in_pmap(GlobalDeviceArray, _refused_by_pmap)


def gda_class(handle: Any) -> type[Array]:
    """`GlobalDeviceArray`, whatever the result: those of no mesh say so when asked for it.

    Args:
        handle: The result's buffers.
    """
    return GlobalDeviceArray


def check_gda_mesh(values: Sequence[Any], paths: Sequence[str], mesh: Mesh) -> None:
    """Checks that arguments are on the mesh of the function that they are given to.

    The era checked it under `jax_enable_checks`: the axes of two meshes may have the same names and
    other devices.

    Args:
        values: The arguments.
        paths: Each as a person would write it.
        mesh: Of the function.

    Raises:
        ResourceError: With the first GlobalDeviceArray on another.
    """
    for value, path in zip(values, paths, strict=True):
        if type(value) is not GlobalDeviceArray or not isinstance(value.sharding, NamedSharding):
            continue
        if value.mesh != mesh:
            raise ResourceError(
                f"{path} is a GlobalDeviceArray on {_mesh_text(value.mesh)}, and the mesh in force "
                f"is {_mesh_text(mesh)}: call inside `with {path}.mesh:`, or bring it over by "
                f"device_put({path}, NamedSharding(mesh, {path}.mesh_axes))",
                path=path,
            )


def _mesh_text(mesh: Mesh) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    ids = [device.id for device in mesh.devices.flat]
    shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
    return f"a mesh ({axes}) of the devices {shown}"
