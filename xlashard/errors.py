"""Exception classes of the project.

Each class also derives from the matching built-in exception (`ValueError`, `TypeError`,
`RuntimeError`), so code that does not import this module still catches it. JAX's own class of the
same mistake joins the bases when an error is created: this module works where JAX is absent. The
facts behind a message are attributes, given as keywords: an upper layer can raise them again with a
path.
"""

import sys
from collections.abc import Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Self

from xlashard.support.hooks import jax_errors


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 entry`, `2,048 entries`; the plural is `noun` with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


class XlashardError(Exception):
    """Base class of all exceptions that this project raises.

    A traceback shows the address of the class's page below the message, as an exception note;
    `str(error)` is the message alone. Keywords of the constructor set attributes, except for
    `also`: a further class of exceptions of which the error becomes an instance.

    Attributes:
        docs_url: Address of the site with the documentation; None for addresses within the site;
            "" for tracebacks without an address.
        jax_class: JAX's class of the same mistake, of which errors are instances where JAX is
            loaded; "" without one.
    """

    docs_url: ClassVar[str | None] = None
    jax_class: ClassVar[str] = ""

    def __new__(cls, *args: object, also: type[Exception] | None = None, **attributes: Any) -> Self:
        """Create an error of a class that joins the class with JAX's."""
        joined = _join_classes(cls, also)
        maker: Any = joined
        # Python creates an instance by the class in C whose memory layout it has.
        while maker.__module__ != "builtins":
            maker = maker.__base__ or Exception
        return maker.__new__(joined, *args)

    def __init__(
        self, *args: object, also: type[Exception] | None = None, **attributes: Any
    ) -> None:
        # Not super(): the class of JAX may take other arguments.
        Exception.__init__(self, *args)
        for name, value in attributes.items():
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    # KeyError would quote the message.
    __str__ = Exception.__str__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle an error by its public class: Python can't find a joined one by its name."""
        cls, also = vars(type(self)).get("_joined_from", (type(self), None))
        return _rebuild, (cls, also, self.args), self.__dict__

    @cached_property
    def __notes__(self) -> list[str]:
        """Notes of the exception, made when they are first read: raising takes no more time."""
        return _page_notes(type(self))


def _join_classes(cls: type[XlashardError], also: type[Exception] | None) -> type[XlashardError]:
    """Return a class of errors that derives from JAX's class and from another one, too.

    Of a class of this package only JAX's counterpart joins, for handlers read its attributes.
    """
    bases = [_find_jax_class(cls)]
    if also is not None:
        bases.append(_find_jax_class(also) if issubclass(also, XlashardError) else also)
    new = [b for b in dict.fromkeys(bases) if b is not None and not issubclass(cls, b)]
    return _join_bases(cls, also, *new) if new else cls


def _find_jax_class(cls: type[XlashardError]) -> type[Exception] | None:
    if not cls.jax_class or "jax.errors" not in sys.modules:
        return None
    return jax_errors.find_error_class(cls.jax_class)


@lru_cache(maxsize=256)
def _join_bases(
    cls: type[XlashardError], also: type[Exception] | None, *bases: type[Exception]
) -> type[XlashardError]:
    own = vars(cls).get("_joined_from", (cls, None))[0]
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        return type(cls.__name__, (cls, *bases), {**members, "_joined_from": (own, also)})
    except TypeError:
        return cls  # Python can't join every two classes that are written in C.


def _rebuild(
    cls: type[XlashardError], also: type[Exception] | None, args: tuple[object, ...]
) -> XlashardError:
    return cls(*args) if also is None else cls(*args, also=also)


def _page_notes(cls: type) -> list[str]:
    """Return the note with the address of a class's page; none for classes without a page."""
    documented = next((base for base in cls.__mro__ if base.__module__ == __name__), XlashardError)
    site = XlashardError.docs_url
    if site == "" or documented is XlashardError:
        return []
    page = f"reference/errors/{documented.__name__}/"
    return [f"Documentation: {page if site is None else f'{site.rstrip("/")}/{page}'}"]


class ConfigError(XlashardError, ValueError):
    """An environment variable or flag with an invalid value."""


class JaxVersionError(XlashardError, ImportError):
    """A function that needs a private module or name of JAX, which the installed release lacks.

    Attributes:
        feature: The function of this package: `xlashard.device_put`, `Array.__add__`.
        private_name: The full name that JAX lacks; empty for a JAX that is too old as a whole.
        installed: The installed version of JAX.
        tested: The versions that this release is tested with: `0.11.2 to 0.12`.
    """

    feature: str
    private_name: str = ""
    installed: str
    tested: str


class GeometryError(XlashardError, ValueError):
    """An invalid mesh, spec, tiling or shape, or two that do not match."""


class GridError(GeometryError):
    """An invalid mesh grid, or device positions outside it."""


class BoxError(GridError):
    """Device positions that don't form one contiguous box of their mesh."""


class SpecEntryError(GeometryError, TypeError):
    """A partition spec with an entry that is not an axis name.

    Attributes:
        dim: The dimension of the invalid entry.
        entry: The entry.
    """

    dim: int
    entry: object


class UnknownAxisError(GeometryError):
    """A partition spec names an axis that the mesh lacks.

    Attributes:
        axis: Name of the axis.
        dim: The dimension sharded over it; None for an axis of `unreduced` or `reduced`.
        mesh_axes: Axis names of the mesh.
    """

    axis: str
    dim: int | None
    mesh_axes: tuple[str, ...]


class DuplicateAxisError(GeometryError):
    """A partition spec uses one mesh axis more than once.

    Attributes:
        axis: Name of the axis.
        dims: The dimensions sharded over it, once per use.
    """

    jax_class = "DuplicateSpecError"

    axis: str
    dims: tuple[int, ...]


class RankError(GeometryError):
    """An array whose rank does not match its partitioning.

    Attributes:
        ndim: The array's rank.
        needed: The rank that the partitioning requires.
    """

    ndim: int
    needed: int


class DivisibilityError(GeometryError):
    """A dimension whose size is not divisible by its number of tiles.

    Attributes:
        dim: The dimension.
        tiles: Number of tiles along the dimension.
        shape: Shape of the array.
        axes: `(name, size)` of the mesh axes that shard the dimension, if known.
    """

    jax_class = "IndivisibleError"

    dim: int
    tiles: int
    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def size(self) -> int:
        """Size of the dimension."""
        return self.shape[self.dim]


class TilingError(GeometryError):
    """A placement that cannot be expressed as equal tiles, or not on the given mesh."""


class ShardingTextError(GeometryError):
    """Text that is not a valid HLO sharding.

    Attributes:
        text: The whole text.
        offset: Position of the error in the text, in characters.
    """

    text: str
    offset: int


class GroupTextError(GeometryError):
    """Text that is not a valid list of replica groups."""


class ShardingError(XlashardError, ValueError):
    """An invalid sharding, or an invalid use of one."""


class ShardingTypeError(ShardingError, TypeError):
    """An operation of a traced function that the explicit mesh axes of its operands don't allow.

    Attributes:
        operation: Name of JAX's primitive, such as `dot_general`; empty for an invalid spec.
        paths: Paths of the arguments that the operands are computed from.
        source: File and line of the operation: `train.py:41`.
    """

    jax_class = "ShardingTypeError"

    operation: str = ""
    paths: tuple[str, ...] = ()
    source: str = ""


class PlacementError(XlashardError, ValueError):
    """Buffers, shapes, dtypes or devices that do not match in an array constructor."""


class ArgumentError(XlashardError, TypeError, ValueError):
    """An argument of a type that the function does not accept."""


def check_type(name: str, value: object, types: type | tuple[type, ...], expected: str) -> None:
    """Check the type of an argument.

    Args:
        name: Name of the argument.
        value: Its value.
        types: The valid types.
        expected: What to write, for the error message.

    Raises:
        ArgumentError: The value is of another type.
    """
    if not isinstance(value, types):
        raise ArgumentError(f"{name} is of type {type(value).__name__}: expected {expected}")


class DLPackError(XlashardError, BufferError, ValueError):
    """Memory that cannot be shared with another library."""

    jax_class = "JaxRuntimeError"


class DeletedError(XlashardError, RuntimeError):
    """A use of an array whose buffers were deleted or donated."""

    jax_class = "JaxRuntimeError"


class NotAddressableError(XlashardError, RuntimeError):
    """A use of an array that is not fully addressable from this process."""


class UnreducedError(XlashardError, RuntimeError):
    """A use of an unreduced array that requires its partial results to be reduced first."""

    jax_class = "JaxRuntimeError"


class TransferGuardError(XlashardError, RuntimeError):
    """A transfer that a transfer guard forbids."""

    jax_class = "JaxRuntimeError"


class ProcessesError(XlashardError, RuntimeError):
    """A collective operation in which some processes failed, or did not take part.

    Attributes:
        processes: Indices of these processes.
    """

    jax_class = "JaxRuntimeError"

    processes: tuple[int, ...]


class UnequalError(ProcessesError, AssertionError):
    """Values, at `paths` as users write them, that must be equal in all processes and differ."""

    paths: tuple[str, ...]


class DeadlockError(ProcessesError):
    """Processes that wait for each other in a cycle, or for a peer that has ended."""


class ProgramsDifferError(ProcessesError):
    """A program that differs between its processes; no process ran it.

    Attributes:
        processes: Those that differ from the majority.
        programs: Description of each process's program, keyed by process index.
        difference: Kind of difference: `"order"`, `"argument"`, `"sharding"`, `"devices"`,
            `"option"`, `"donation"`, `"closed over"`, `"callback"`, `"operation"`, `"version"` or
            `"flags"`; `"module"` for deserialized programs.
    """

    programs: dict[int, str]
    difference: str


class OutOfMemoryError(XlashardError, MemoryError):
    """A placement that needs at least `bytes_per_device` of memory, which is not available."""

    jax_class = "JaxRuntimeError"

    bytes_per_device: int


class ResourceError(XlashardError, ValueError):
    """A sharding in `pjit` that does not match its value, at `path` as users write it."""

    path: str = ""


class ResourceTypeError(ResourceError, TypeError):
    """An `in_shardings` or `out_shardings` leaf of a type that is not a sharding."""


class UnmetRequestError(XlashardError, ValueError):
    """A request that the program does not follow: the base of what `strict=True` raises."""


class UnevenShardingError(UnmetRequestError, ResourceError):
    """A constraint by which a dimension does not divide, under `strict=True`.

    Attributes:
        dim: The dimension.
        size: Its size.
        tiles: Number of tiles along it.
        axes: `(name, size)` of the mesh axes that shard it, if known.
    """

    dim: int
    size: int
    tiles: int
    axes: tuple[tuple[str, int], ...] = ()


class ReplicationError(UnmetRequestError, ResourceError):
    """A large value without a sharding that is replicated, under `strict=True`.

    Attributes:
        device_bytes: Bytes on each device.
    """

    device_bytes: int


class IgnoredShardingError(UnmetRequestError, ResourceError):
    """A sharding that a program names and does not follow, under `strict=True`."""


class DeviceMismatchError(XlashardError, ValueError):
    """Arguments of one program that live on different devices."""


class TracingError(XlashardError, RuntimeError):
    """A function that requires tracing where tracing is disabled."""


class ExecutionError(XlashardError, RuntimeError):
    """A program that would run where execution is disabled."""


class MeshError(XlashardError, RuntimeError, ValueError):
    """A partition spec outside any mesh context."""


class ModuleError(XlashardError, ValueError):
    """A StableHLO module that is invalid, or does not match its annotations."""


class PlanError(XlashardError, ValueError):
    """An annotation plan that is inconsistent, or does not match its module."""


class CompileError(XlashardError, RuntimeError):
    """A program that the compiler rejects, or for which its report is incomplete."""

    jax_class = "JaxRuntimeError"


class UnsupportedOperationError(CompileError, NotImplementedError):
    """An operation that the compiler of a topology does not take.

    Attributes:
        operation: Its name: a primitive, or the target of a custom call.
        source: Its line, `model.py:12`; empty if unknown.
    """

    operation: str
    source: str = ""


class IncompleteDumpError(CompileError):
    """A compilation whose temporary files are missing or cut off, as on a full disk."""


class ProgramTooLargeError(CompileError, MemoryError):
    """A program that needs more memory than its devices have."""


class TopologyError(XlashardError, ValueError):
    """An invalid TPU topology or mesh on one, or no libtpu to describe it.

    Attributes:
        problem: The message without its suggestion.
        axes: Axis sizes of the suggested mesh, keyed by name; None without one.
        topology: Name of the suggested topology; empty without one.
        slices: Number of slices of the suggested topology.
    """

    problem: str
    axes: Mapping[str, int] | None = None
    topology: str = ""
    slices: int = 1

    def __init__(self, message: str, **suggestion: Any) -> None:
        super().__init__(message, problem=message, **suggestion)
        if self.topology:
            joined = f", slices={self.slices}" if self.slices > 1 else ""
            self.args = (f"{message}: topology({self.topology!r}{joined})",)
        elif self.axes is not None:
            self.args = (f"{message}: mesh({dict(self.axes)})",)


class CompileOnlyError(NotAddressableError):
    """An operation that requires devices, on a `topology` for which programs only compile."""

    jax_class = "JaxRuntimeError"

    topology: str


class SavedProgramError(XlashardError, ValueError):
    """A compiled program that cannot be serialized, or a saved one that cannot be loaded here."""


class SerializationError(XlashardError, ValueError):
    """An array that cannot be written to its files, `stored_at`, or read from them."""

    stored_at: str = ""


class NonFiniteError(XlashardError, FloatingPointError):
    """A NaN or an infinity in a result, under `jax_debug_nans` or `jax_debug_infs`.

    Attributes:
        result: Path of the result: `result['loss']`.
        kind: `"nan"` or `"inf"`.
    """

    result: str
    kind: str


class DonationError(UnmetRequestError):
    """A donated argument whose buffers no result can reuse, where this is an error."""


class XlashardWarning(UserWarning):
    """Base class of all warnings that this project issues.

    Their text ends with the address of the class's page: Python shows no notes of warnings.
    """

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *_page_notes(type(self))])


class ConfigWarning(XlashardWarning):
    """An environment variable `XLASHARD_*` that is not a setting of this release."""


class DamagedCacheWarning(XlashardWarning):
    """A file of a cache that can't be read: what it held is computed again."""


class JaxVersionWarning(XlashardWarning):
    """A JAX that is newer than the versions that this release is tested with."""


class SharedBinaryWarning(XlashardWarning):
    """A program that every process compiled, because sharing one binary failed."""


class DonationWarning(XlashardWarning):
    """A donated argument whose buffers no result can reuse."""


class UnevenShardingWarning(XlashardWarning):
    """A constraint by which a dimension does not divide: it is padded, or not sharded so."""


class IgnoredShardingWarning(XlashardWarning):
    """A sharding that a program names and does not follow."""


class ReplicationWarning(XlashardWarning):
    """A large value without a sharding that the partitioner leaves whole on every device."""


class DeviceCountError(XlashardError, RuntimeError):
    """Emulated devices requested after JAX has started with another number of devices.

    Attributes:
        asked: Number of devices requested.
        found: Number of devices of the running backend.
    """

    asked: int
    found: int


class ExpectationError(XlashardError, AssertionError):
    """A program that does not meet a test's expectation."""


class LaunchError(XlashardError, OSError):
    """A pod whose processes cannot be started; `errno` is None if unknown."""

    errno: int | None = None


class PodError(XlashardError, RuntimeError):
    """A failure in processes of a pod.

    Attributes:
        tracebacks: Traceback of each failed process, as text, keyed by process index.
        outputs: Output of each process, keyed by process index.
        errors: Exception of each failed process, if it could be pickled, keyed by process index.
    """

    tracebacks: Mapping[int, str] = MappingProxyType({})
    outputs: Mapping[int, str] = MappingProxyType({})
    errors: Mapping[int, BaseException] = MappingProxyType({})


class RefusedError(XlashardError, NotImplementedError):
    """A call of an API of 2022 or 2023, imported as `name`, that is not supported today."""

    name: str
