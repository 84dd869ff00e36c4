"""Every exception class of the project.

Each one is also the built-in exception that fits (`ValueError`, `TypeError`, `RuntimeError`), so
code that knows nothing of this module still catches it, and carries the facts behind its text as
attributes, so that an upper layer can say them again with the argument's path in front.
"""

from collections.abc import Mapping, Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 entry`, `2 entries`.

    Args:
        number: How many.
        noun: What one is called.
        plural: What several are called, if not `noun` with an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


class XlashardError(Exception):
    """Every exception that this project raises; each is a built-in exception besides."""

    def __reduce__(self) -> tuple[object, ...]:
        # The attributes are keyword arguments, which an exception's own pickling would lose.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(
    cls: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]
) -> BaseException:
    error = cls.__new__(cls, *args)
    error.__dict__.update(attributes)
    return error


class ConfigError(XlashardError, ValueError):
    """An environment variable or flag with a value that it can't have."""


class GeometryError(XlashardError, ValueError):
    """A mesh, spec, tiling or shape that does not fit."""


class GridError(GeometryError):
    """A mesh grid that can't exist, or device positions that aren't in it."""


class BoxError(GridError):
    """Device positions that don't form one contiguous box of their mesh."""


class SpecEntryError(GeometryError, TypeError):
    """A partition spec with an entry that is no axis name.

    Attributes:
        dim: The dimension whose entry is wrong.
        entry: The entry.
    """

    def __init__(self, message: str, *, dim: int, entry: object) -> None:
        super().__init__(message)
        self.dim = dim
        self.entry = entry


class UnknownAxisError(GeometryError):
    """A partition spec names an axis that the mesh lacks.

    Attributes:
        axis: The name.
        dim: The dimension it was given for; None for an axis of `unreduced` or `reduced`.
        mesh_axes: The names that the mesh has.
    """

    def __init__(
        self, message: str, *, axis: str, dim: int | None, mesh_axes: Sequence[str]
    ) -> None:
        super().__init__(message)
        self.axis = axis
        self.dim = dim
        self.mesh_axes = tuple(mesh_axes)


class DuplicateAxisError(GeometryError):
    """A partition spec uses one mesh axis more than once.

    Attributes:
        axis: The name.
        dims: Every dimension that uses it, once per use.
    """

    def __init__(self, message: str, *, axis: str, dims: Sequence[int]) -> None:
        super().__init__(message)
        self.axis = axis
        self.dims = tuple(dims)


class RankError(GeometryError):
    """An array with fewer (or other) dimensions than its partitioning speaks of.

    Attributes:
        ndim: The array's rank.
        needed: The rank that the partitioning needs.
    """

    def __init__(self, message: str, *, ndim: int, needed: int) -> None:
        super().__init__(message)
        self.ndim = ndim
        self.needed = needed


class DivisibilityError(GeometryError):
    """A dimension that can't be cut into equal tiles.

    Attributes:
        dim: The dimension.
        size: Its size.
        tiles: Into how many tiles it should have been cut.
        shape: The whole shape.
        axes: `(name, size)` of the mesh axes behind the cut, where they are known.
    """

    def __init__(
        self,
        message: str,
        *,
        dim: int,
        tiles: int,
        shape: Sequence[int],
        axes: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(message)
        self.dim = dim
        self.size = shape[dim]
        self.tiles = tiles
        self.shape = tuple(shape)
        self.axes = tuple(axes)


class TilingError(GeometryError):
    """A placement that equal tiles cannot express, or not on the mesh at hand."""


class ShardingTextError(GeometryError):
    """Text that is not an HLO sharding.

    Attributes:
        text: The whole text.
        offset: Where in it reading failed, in characters.
    """

    def __init__(self, message: str, *, text: str, offset: int) -> None:
        super().__init__(message)
        self.text = text
        self.offset = offset


class GroupTextError(GeometryError):
    """Text that is no list of device groups, or one whose numbers don't fit each other."""


class ShardingError(XlashardError, ValueError):
    """A sharding that can't be made or used as asked."""


class PlacementError(XlashardError, ValueError):
    """Buffers, shapes, dtypes or devices given to a constructor of arrays that don't fit."""


class ArgumentError(XlashardError, TypeError, ValueError):
    """An argument of a kind that the call can't take."""


class DLPackError(XlashardError, BufferError, ValueError):
    """Memory that can't be shared between libraries as asked."""


class DeletedError(XlashardError, RuntimeError):
    """An array whose buffers are gone: deleted, or donated to a program."""


class NotAddressableError(XlashardError, RuntimeError):
    """A value that is not wholly in this process."""


class UnreducedError(XlashardError, RuntimeError):
    """A use of an unreduced array for which its partial results would have to be reduced first."""


class TransferGuardError(XlashardError, RuntimeError):
    """A transfer that `jax_transfer_guard` or one of its kind forbids."""


class ProcessesError(XlashardError, RuntimeError):
    """Something that processes must do together, and some did not do, or did otherwise.

    Attributes:
        processes: The indices of those.
    """

    def __init__(self, message: str, *, processes: Sequence[int]) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


class UnequalError(ProcessesError, AssertionError):
    """Values that should be the same in all processes, and are not.

    Attributes:
        paths: The paths of the values that differ, as users write them.
    """

    def __init__(self, message: str, *, processes: Sequence[int], paths: Sequence[str]) -> None:
        super().__init__(message, processes=processes)
        self.paths = tuple(paths)


class DeadlockError(ProcessesError):
    """Processes that wait for others that can't come any more."""


class ProgramsDifferError(ProcessesError):
    """A program that is not the same in all of its processes; none of them ran it.

    Attributes:
        processes: The indices of those that differ from most others.
        programs: What each process was about to run, by its index.
        difference: What differs: `"order"`, `"argument"`, `"sharding"`, `"devices"`, `"option"`,
            `"donation"`, `"closed over"`, `"callback"`, `"operation"`, `"version"`, `"flags"`; of
            programs from files `"module"`.
    """

    def __init__(
        self,
        message: str,
        *,
        processes: Sequence[int],
        programs: Mapping[int, str],
        difference: str,
    ) -> None:
        super().__init__(message, processes=processes)
        self.programs = dict(programs)
        self.difference = difference


class OutOfMemoryError(XlashardError, MemoryError):
    """A placement for which there is not enough memory.

    Attributes:
        bytes_per_device: What it needs on each device at least, in bytes.
    """

    def __init__(self, message: str, *, bytes_per_device: int) -> None:
        super().__init__(message)
        self.bytes_per_device = bytes_per_device


class ResourceError(XlashardError, ValueError):
    """A sharding given to `pjit` that does not fit its argument or result.

    Attributes:
        path: The path in the arguments or results, as users write it.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class ResourceTypeError(ResourceError, TypeError):
    """An `in_shardings` or `out_shardings` leaf of a type that is not a sharding."""


class DeviceMismatchError(XlashardError, ValueError):
    """Arguments of one program that live on different devices."""


class TracingError(XlashardError, RuntimeError):
    """A function that would have to be traced where that is forbidden."""


class MeshError(XlashardError, RuntimeError):
    """A partition spec with no mesh in force to give its axes a meaning."""


class ModuleError(XlashardError, ValueError):
    """A StableHLO module that can't be read, or does not fit what is to be made of it."""


class PlanError(XlashardError, ValueError):
    """A plan of a program that contradicts itself, or the module that it is for."""


class CompileError(XlashardError, RuntimeError):
    """A program that the compiler refuses, or reports too little about."""


class ProgramTooLargeError(CompileError, MemoryError):
    """A program that needs more memory than its devices have."""


class TopologyError(XlashardError, ValueError):
    """A TPU topology, or a mesh on one, that can't be; or none at all for want of libtpu.

    Attributes:
        problem: What is wrong, without what to write.
        axes: Of a mesh that can be, by their names, where the problem is one that can't.
        topology: The name of one that can be, where the problem is how many slices are joined;
            empty otherwise.
        slices: How many slices of that there can be.
    """

    def __init__(
        self,
        message: str,
        *,
        axes: Mapping[str, int] | None = None,
        topology: str = "",
        slices: int = 1,
    ) -> None:
        fix = "" if axes is None else f": mesh({dict(axes)})"
        if topology:
            joined = f", slices={slices}" if slices > 1 else ""
            fix = f": topology({topology!r}{joined})"
        super().__init__(f"{message}{fix}")
        self.problem = message
        self.axes = axes
        self.topology = topology
        self.slices = slices


class CompileOnlyError(NotAddressableError):
    """Something that needs a device was asked of a topology, for which programs only compile.

    Attributes:
        topology: Its name.
    """

    def __init__(self, message: str, *, topology: str) -> None:
        super().__init__(message)
        self.topology = topology


class SavedProgramError(XlashardError, ValueError):
    """A compiled program that can't be saved, or a saved one that can't be loaded here."""


class SerializationError(XlashardError, ValueError):
    """An array that can't be written to its files, or read from them.

    Attributes:
        stored_at: Where the files are, or were to be.
    """

    def __init__(self, message: str, *, stored_at: str = "") -> None:
        super().__init__(message)
        self.stored_at = stored_at


class NonFiniteError(XlashardError, FloatingPointError):
    """A result with NaN or infinity, where `jax_debug_nans` or `jax_debug_infs` forbids them.

    Attributes:
        result: The path of the result: `result['loss']`.
        kind: `"nan"` or `"inf"`.
    """

    def __init__(self, message: str, *, result: str, kind: str) -> None:
        super().__init__(message)
        self.result = result
        self.kind = kind


class DonationError(XlashardError, ValueError):
    """A donated argument whose buffers no result can take over, where that was forbidden."""


class SharedBinaryWarning(UserWarning):
    """A program that every process compiles, though one should have compiled it for all."""


class DonationWarning(UserWarning):
    """A donated argument whose buffers no result can take over."""


class DeviceCountError(XlashardError, RuntimeError):
    """Emulated devices that were asked for too late: JAX runs already, with others.

    Attributes:
        asked: How many were asked for.
        found: How many there are.
    """

    def __init__(self, message: str, *, asked: int, found: int) -> None:
        super().__init__(message)
        self.asked = asked
        self.found = found


class ExpectationError(XlashardError, AssertionError):
    """A program that does not meet the expectation of a test."""


class LaunchError(XlashardError, OSError):
    """A program that can't be started in the processes of a pod.

    Attributes:
        errno: The system's number for the reason; None if it has none.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class PodError(XlashardError, RuntimeError):
    """Something that failed in processes of a pod.

    Attributes:
        tracebacks: By process the traceback of what was raised there, as text.
        outputs: By process what it wrote.
        errors: By process the exception itself, where it could be sent here.
    """

    def __init__(
        self,
        message: str,
        *,
        tracebacks: Mapping[int, str] | None = None,
        outputs: Mapping[int, str] | None = None,
        errors: Mapping[int, BaseException] | None = None,
    ) -> None:
        super().__init__(message)
        self.tracebacks = dict(tracebacks or {})
        self.outputs = dict(outputs or {})
        self.errors = dict(errors or {})


class CloudError(XlashardError, RuntimeError):
    """A TPU in the cloud is unavailable or unreachable, or a request for one is invalid.

    Attributes:
        code: Exit code of a script that fails with it: 2 for an invalid request.
    """

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class RefusedError(XlashardError, NotImplementedError):
    """A name of 2022 or 2023 that can't do today what it did then, or could not do then either.

    Attributes:
        name: The name, as programs import it.
    """

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name
