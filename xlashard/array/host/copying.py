"""Copies within the memory of the host, by several threads.

The first touch of new memory dominates a large copy, as the kernel maps it page by page in the
touching thread: two threads take half the time of one.
"""

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from xlashard._jax.runtime.transfer import aligned_empty

type Copy = tuple[np.ndarray, np.ndarray]
"""Destination and source, of one shape and dtype."""

# Starting a thread takes about as long as copying a tenth of this many bytes.
_BYTES_PER_THREAD = 4 << 20
_MOST_THREADS = 16

# Bytes of one piece of work. Contiguous memory is copied past the caches if there is enough of it;
# strided pieces share pages with their neighbours.
_CONTIGUOUS_STRETCH = 16 << 20
_STRIPED_STRETCH = 2 << 20


def copy_all(copies: Sequence[Copy]) -> None:
    """Make copies in any order; no two destinations may overlap.

    After an exception, including `KeyboardInterrupt`, no thread writes any more.
    """
    copies = [(_plain(to), _plain(source)) for to, source in copies]
    threads = _threads_for(sum(to.nbytes for to, _ in copies))
    if threads == 1:
        for to, source in copies:
            np.copyto(to, source)
        return
    stretches = _in_order([s for copy in copies for s in _stretches(*copy)])
    _work_off(stretches, threads)


def private_copy(value: np.ndarray) -> np.ndarray:
    """Return a contiguous copy that a CPU device can use as its buffer."""
    out = aligned_empty(value.shape, value.dtype)
    copy_all([(out, value)])
    return out


def _plain(x: np.ndarray) -> np.ndarray:
    """Return a view with a dtype of NumPy, which NumPy copies faster than extension dtypes."""
    if x.dtype.kind != "V" or x.itemsize not in (1, 2, 4, 8):
        return x
    return x.view(f"u{x.itemsize}")


def _threads_for(total: int) -> int:
    processors = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    return max(1, min(processors, _MOST_THREADS, total // _BYTES_PER_THREAD))


def _stretches(to: np.ndarray, source: np.ndarray) -> list[Copy]:
    """Split a copy into pieces of limited size, along the dimension with the longest stride."""
    striped = not (to.flags.c_contiguous and source.flags.c_contiguous)
    limit = _STRIPED_STRETCH if striped else _CONTIGUOUS_STRETCH
    if to.nbytes <= limit or to.size < 2:
        return [(to, source)]
    dim = max(range(to.ndim), key=lambda d: (to.shape[d] > 1, abs(source.strides[d])))
    size = to.shape[dim]
    parts = min(size, -(-to.nbytes // limit))
    edges = [size * n // parts for n in range(parts + 1)]
    before = (slice(None),) * dim
    cuts = [(*before, slice(a, b)) for a, b in pairwise(edges)]
    # A piece may still be too large where the dimension has few elements.
    return [part for cut in cuts for part in _stretches(to[cut], source[cut])]


def _in_order(stretches: list[Copy]) -> list[Copy]:
    """Sort pieces by address, on the strided side if there is one."""

    def address(copy: Copy) -> int:
        to, source = copy
        return to.ctypes.data if source.flags.c_contiguous else source.ctypes.data

    return sorted(stretches, key=address)


def _work_off(stretches: list[Copy], threads: int) -> None:
    waiting = stretches[::-1]

    def work() -> None:
        while True:
            try:
                to, source = waiting.pop()
            except IndexError:
                return
            np.copyto(to, source)

    def help_out() -> None:
        while waiting:
            try:
                copy = waiting.pop()
            except IndexError:  # another thread was faster
                return
            try:
                np.copyto(*copy)
            except Exception:  # the caller's thread raises it again
                waiting.append(copy)
                return

    helpers = _started(help_out, threads - 1)
    try:
        work()
    except BaseException:
        waiting.clear()
        raise
    finally:
        for helper in helpers:
            helper.join()
    work()


def _started(work: Callable[[], None], count: int) -> list[threading.Thread]:
    """Start threads; fewer if the process reaches its limit or is about to exit."""
    helpers: list[threading.Thread] = []
    for _ in range(count):
        # The caller joins it, and Python must not exit while it copies.
        helper = threading.Thread(target=work, name="xlashard copy", daemon=False)
        try:
            helper.start()
        except RuntimeError:
            break
        helpers.append(helper)
    return helpers
