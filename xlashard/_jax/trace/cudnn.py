"""Trace programs with cuDNN's attention for GPUs that this machine lacks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from xlashard._jax.private import cudnn, replace_name
from xlashard._jax.runtime.shardings import Device, is_compile_only
from xlashard.support.lazily import dataclass

type _Capability = tuple[int, ...]

_CUDNN = 91002
"""Version of cuDNN that programs are traced for on a machine without it: 9.10.2."""


@dataclass(frozen=True, eq=False)
class _Scope:
    """Block of `assume_cudnn`.

    Attributes:
        capability: Compute capability of its GPU.
        thread: Thread whose programs it concerns; None for all threads.
    """

    capability: _Capability
    thread: int | None


_lock = threading.Lock()
_scopes: tuple[_Scope, ...] = ()
_originals: dict[str, object] = {}


@contextmanager
def assume_cudnn(device: Device | None, *, all_threads: bool = False) -> Iterator[None]:
    """Let programs with cuDNN's attention be traced in a block, on a machine without cuDNN or GPU.

    JAX asks for the version of cuDNN, and for the compute capability of the process's own GPU, to
    refuse heads that the kernels do not take. The compiler itself needs neither. JAX's two checks
    are replaced from the first such block to the end of the last.

    Args:
        device: A device that the programs are for; the block has no effect unless it is a GPU of a
            topology.
        all_threads: Whether programs of all threads are for the device, such as those of a script.
    """
    if device is None or device.platform != "gpu" or not is_compile_only(device):
        yield
        return
    capability = tuple(map(int, device.compute_capability.split(".")))
    scope = _Scope(capability, None if all_threads else threading.get_ident())
    _begin(scope)
    try:
        yield
    finally:
        _end(scope)


def _begin(scope: _Scope) -> None:
    global _scopes
    with _lock:
        if not _scopes:
            _replace_checks()
        _scopes = (*_scopes, scope)


def _end(scope: _Scope) -> None:
    global _scopes
    with _lock:
        _scopes = tuple([other for other in _scopes if other is not scope])
        if not _scopes:
            for name, original in _originals.items():
                replace_name(cudnn, name, original)


def _find_capability() -> _Capability | None:
    """Return the compute capability that this thread's innermost block assumes, if any."""
    threads = (None, threading.get_ident())
    return next((s.capability for s in reversed(_scopes) if s.thread in threads), None)


def _replace_checks() -> None:
    check_version = cudnn.check_cudnn_version
    check_capability = cudnn.check_compute_capability

    def version() -> int:
        try:
            return check_version()
        except RuntimeError:
            if _find_capability() is None:
                raise
            return _CUDNN

    def has_capability(least: str) -> bool:
        capability = _find_capability()
        if capability is None:
            return check_capability(least)
        return capability >= tuple(map(int, least.split(".")))

    _originals.update(check_cudnn_version=check_version, check_compute_capability=check_capability)
    replace_name(cudnn, "check_cudnn_version", version)
    replace_name(cudnn, "check_compute_capability", has_capability)
