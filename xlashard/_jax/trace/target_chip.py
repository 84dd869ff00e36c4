"""Trace and lower programs for the chip of a topology, which this machine lacks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import jax
import numpy as np

from xlashard._jax.private import cudnn, replace_name
from xlashard._jax.runtime.shardings import AbstractMesh, Device, is_compile_only
from xlashard._jax.trace.tracing import equations
from xlashard.support.lazily import dataclass

_CUDNN = 91002
"""Version of cuDNN that programs are traced for on a machine without it: 9.10.2."""
_EVERY_CAPABILITY = (99,)
"""Capability of TPUs: their compiler refuses kernels of cuDNN by name and line, JAX's trace not."""

_QUERIES = "Unsupported TPU device kind", "No supported GPU devices found"
"""Errors of kernels that query the chip, where the mesh has another one."""

_KERNELS = frozenset(("core_map", "mosaic_gpu", "pallas_call"))
"""Primitives of kernels."""

_CHIP = "abstract_device"
"""The attribute of an abstract mesh."""

KEYED_ANEW = (
    "the program has kernels, which may query the chip: each function of jax.jit in this process "
    "is traced and compiled once more at its next call"
)


@dataclass(frozen=True, eq=False)
class _Scope:
    """Block of `assume_chip`.

    Attributes:
        capability: Compute capability of the chip, if it is a GPU.
        chip: The chip for kernels; None leaves them with that of their mesh.
        thread: Thread whose programs it concerns; None for all threads.
    """

    capability: tuple[int, ...] | None
    chip: Any
    thread: int | None


_lock = threading.Lock()
_scopes: tuple[_Scope, ...] = ()
_undo: dict[str, Callable[[], None]] = {}
_keys: list[Callable[[Any], AbstractContextManager[Any]]] = []
"""Maker of the key of a chip in JAX's caches, once a program has needed one."""


@contextmanager
def assume_chip(
    device: Device | None, *, in_kernels: bool = False, all_threads: bool = False
) -> Iterator[None]:
    """Let programs be traced and lowered in a block for a chip that this machine lacks.

    JAX queries the version of cuDNN, and the compute capability of the process's own GPU, to
    refuse heads that the kernels of cuDNN do not take. The compiler itself needs neither. Kernels
    of Pallas query the chip of the mesh. All of these are replaced from the first such block to the
    end of the last.

    Args:
        device: A device that the programs are for; the block has no effect unless it is one of a
            topology.
        in_kernels: Whether kernels that query the chip get that of the device. What JAX caches in
            the block has a key of its own. The first block of this kind in a process extends the
            keys of all programs, which misses the caches once for each function.
        all_threads: Whether programs of all threads are for the device, such as those of a script:
            they have no key of their own.
    """
    if device is None or not is_compile_only(device):
        yield
        return
    is_gpu = device.platform == "gpu"
    scope = _Scope(
        tuple(map(int, device.compute_capability.split("."))) if is_gpu else _EVERY_CAPABILITY,
        describe_chip(device) if in_kernels else None,
        None if all_threads else threading.get_ident(),
    )
    is_keyed = in_kernels and not all_threads and not _is_chip_of_process(device)
    with _find_key()(scope.chip) if is_keyed else nullcontext():
        _begin(scope)
        try:
            yield
        finally:
            _end(scope)


class _HasJaxpr(Protocol):
    @property
    def jaxpr(self) -> Any: ...


def trace_for_chip[T: _HasJaxpr | None](
    trace: Callable[[], T], device: Device | None
) -> tuple[T, str]:
    """Trace a program for a chip, and once more with the chip if its kernels query it.

    Args:
        trace: Traces the program.
        device: A device that the program is for; None for the devices at hand.

    Returns:
        The traced program, and what this did to other programs of the process; empty for nothing.
    """
    if device is None or not is_compile_only(device):
        return trace(), ""
    note = "" if _keys or _is_chip_of_process(device) else KEYED_ANEW
    with assume_chip(device):
        try:
            traced = trace()
            if not has_kernels(traced):
                return traced, ""
            if not _has_other_chips(device):
                # Their lowering queries the chip.
                _find_key()
                return traced, note
        except Exception as error:
            if not any(query in str(error) for query in _QUERIES):
                raise
    with assume_chip(device, in_kernels=True):
        return trace(), note


def has_kernels(traced: Any) -> bool:
    """Return True for a traced program with kernels, which may query the chip."""
    return traced is not None and any(
        eqn.primitive.name in _KERNELS for eqn in equations(traced.jaxpr)
    )


def describe_chip(device: Device) -> Any:
    """Return the chip of a device as abstract meshes have it."""
    mesh = jax.sharding.Mesh(np.array([device]), ("device",)).abstract_mesh
    # Not the attribute, which a block of another chip replaces.
    return vars(mesh)[_CHIP]


def _has_other_chips(device: Device) -> bool:
    """Return True if the chips at hand are of another kind than a device, and of its platform."""
    own = jax.devices()[0]
    return own.platform == device.platform and own.device_kind != device.device_kind


def _is_chip_of_process(device: Device) -> bool:
    """Return True in a block in which all threads trace for the chip of a device."""
    chip = describe_chip(device)
    return any(scope.thread is None and scope.chip == chip for scope in _scopes)


def _find_key() -> Callable[[Any], AbstractContextManager[Any]]:
    """Return what makes the key of a chip in JAX's caches."""
    with _lock:
        if not _keys:
            _keys.append(jax.make_user_context(None))
        return _keys[0]


def _begin(scope: _Scope) -> None:
    global _scopes
    with _lock:
        _scopes = (*_scopes, scope)
        if scope.capability is not None and "checks" not in _undo:
            _undo["checks"] = _replace_checks()
        if scope.chip is not None and "kernels" not in _undo:
            _undo["kernels"] = _replace_chip_of_meshes()


def _end(scope: _Scope) -> None:
    global _scopes
    with _lock:
        _scopes = tuple([other for other in _scopes if other is not scope])
        while _undo and not _scopes:
            _undo.popitem()[1]()


def _find_assumed(fact: Literal["capability", "chip"]) -> Any:
    """Return a fact of this thread's innermost block that assumes one; None if none does."""
    threads = (None, threading.get_ident())
    values = (getattr(scope, fact) for scope in reversed(_scopes) if scope.thread in threads)
    return next((value for value in values if value is not None), None)


def _replace_checks() -> Callable[[], None]:
    """Replace JAX's checks of cuDNN, and return what puts them back."""
    check_version = cudnn.check_cudnn_version
    check_capability = cudnn.check_compute_capability

    def version() -> int:
        try:
            return check_version()
        except RuntimeError:
            if _find_assumed("capability") is None:
                raise
            return _CUDNN

    def has_capability(least: str) -> bool:
        capability = _find_assumed("capability")
        if capability is None:
            return check_capability(least)
        return capability >= tuple(map(int, least.split(".")))

    def undo() -> None:
        replace_name(cudnn, "check_cudnn_version", check_version)
        replace_name(cudnn, "check_compute_capability", check_capability)

    replace_name(cudnn, "check_cudnn_version", version)
    replace_name(cudnn, "check_compute_capability", has_capability)
    return undo


def _replace_chip_of_meshes() -> Callable[[], None]:
    """Replace the chip that abstract meshes have, and return what puts it back.

    Meshes that JAX makes of others keep their own chip: meshes are compared by identity.
    """
    update = AbstractMesh.update

    def read(mesh: Any) -> Any:
        chip = _find_assumed("chip")
        return vars(mesh)[_CHIP] if chip is None else chip

    def write(mesh: Any, chip: Any) -> None:
        vars(mesh)[_CHIP] = chip

    def update_with_own_chip(mesh: Any, *args: Any, **changes: Any) -> Any:
        return update(mesh, *args, **{_CHIP: vars(mesh)[_CHIP], **changes})

    def undo() -> None:
        delattr(AbstractMesh, _CHIP)
        AbstractMesh.update = update

    setattr(AbstractMesh, _CHIP, property(read, write))
    AbstractMesh.update = update_with_own_chip
    return undo
