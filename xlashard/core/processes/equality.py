"""Comparison of values between processes, by digests.

If all values are equal, one barrier round with a few bytes per process is enough. Only if they
differ do the processes exchange more: first the list of values that differ, then, by bisection, the
first differing element of the first one.
"""

import hashlib
import json
import zlib
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from xlashard.core.processes.rendezvous import RENDEZVOUS, Barrier
from xlashard.errors import counted
from xlashard.support.formatting import format_processes, group_by_value, typed
from xlashard.support.lazily import dataclass

# Bytes covered by one checksum.
_STRETCH = 1 << 20
# Size from which several threads compute the checksums; zlib releases the GIL.
_THREADED = 16 << 20
_THREADS = 4

# Number of parts per bisection step, and the size from which elements are compared one by one.
_PARTS = 64
_ELEMENTS = 32

_CONTENTS_SHOWN = 4
# Differing values that a message lists.
_VALUES_SHOWN = 5
_NOTHING = "nothing"


@dataclass(frozen=True)
class NamedValue:
    """A value and its path in the user's arguments.

    Attributes:
        path: Path of the value: `x['w']`.
        value: The value.
        also: Text that must also be equal in all processes, such as the target sharding.
    """

    path: str
    value: np.ndarray
    also: str = ""

    @property
    def type(self) -> str:
        """Dtype and shape: `float32[8,4]`."""
        return typed(self.value.dtype.name, self.value.shape)

    def entry(self) -> "_Entry":
        """Return the entry that is compared between processes."""
        return self.path, self.type, self.also, digest(self.value).hex()


type _Entry = tuple[str, str, str, str]
"""Path, type, additional text, digest."""


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs between processes.

    Attributes:
        path: Path of the value.
        processes: Processes that differ from the majority, or from the first process if no value
            has a majority.
        text: Description of the values by process.
    """

    path: str
    processes: tuple[int, ...]
    text: str


def digest(value: np.ndarray) -> bytes:
    """Return a digest of a value's dtype, shape and bits.

    It detects accidental differences; it is not collision-resistant against an adversary.

    Args:
        value: Of any dtype that a device can hold.

    Example:
        >>> digest(np.zeros(3)) == digest(np.zeros(3)) != digest(np.zeros((3, 1)))
        True
    """
    memory = _bytes_of(value)
    stretches = [memory[i : i + _STRETCH] for i in range(0, len(memory), _STRETCH)]
    if len(memory) < _THREADED:
        sums = list(map(zlib.crc32, stretches))
    else:
        with ThreadPoolExecutor(_THREADS) as threads:
            sums = list(threads.map(zlib.crc32, stretches))
    # Small values are also hashed as bytes, because one 32-bit checksum can collide.
    few = bytes(memory) if len(memory) <= _STRETCH else b""
    head = f"{value.dtype.name}{value.shape}".encode()
    return hashlib.sha256(head + np.array(sums, np.uint32).tobytes() + few).digest()


def digest_of_all(entries: Sequence[Any]) -> str:
    """Return a digest of JSON values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def differences(barrier: Barrier, values: Sequence[NamedValue]) -> tuple[ValueDifference, ...]:
    """Return the values that differ between processes; an empty tuple if all are equal.

    Every process of the barrier must call this function with its own values.

    Args:
        barrier: Processes and timeout of the comparison.
        values: Values of this process, in order.

    Raises:
        BarrierTimeoutError: Some processes did not arrive.
    """
    entries_here = [named.entry() for named in values]
    everything = json.dumps(entries_here)
    digests = RENDEZVOUS.exchange(barrier, digest_of_all(entries_here))
    if len(set(digests.values())) < 2:
        return ()
    entries_of = RENDEZVOUS.exchange(barrier, everything)
    lists = {process: [tuple(e) for e in json.loads(text)] for process, text in entries_of.items()}
    paths = {process: tuple(e[0] for e in entries) for process, entries in lists.items()}
    if len(set(paths.values())) > 1:
        return (_path_difference(paths),)
    unequal = []
    for number, named in enumerate(values):
        entries = {process: entries[number] for process, entries in lists.items()}
        if len(set(entries.values())) < 2:
            continue
        # List only the fields that differ; the others are equal in every process.
        fields = [n for n in (1, 2) if len({e[n] for e in entries.values()}) > 1]
        types = {process: " ".join(e[n] for n in fields) for process, e in entries.items()}
        text = ""
        if len(set(types.values())) > 1:
            text = f"it is {_group_text(types)}"
        elif not unequal:
            # Locate the first differing element of the first value only; each costs several rounds.
            text = _first_difference(barrier, named.value)
        unequal.append(ValueDifference(named.path, minority(entries), text))
    return tuple(unequal)


def format_differences(unequal: Sequence[ValueDifference]) -> str:
    """Describe differing values: `x['w'] differs in process 1: at [3] it is ...`."""
    text = "; ".join(
        f"{d.path} differs in {format_processes(d.processes)}{d.text and f': {d.text}'}"
        for d in unequal[:_VALUES_SHOWN]
    )
    more = len(unequal) - _VALUES_SHOWN
    return f"{text}; and {counted(more, 'more leaf', 'more leaves')}" if more > 0 else text


def minority(by_process: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the processes that differ from the majority, or from the first process without one."""
    groups = group_by_value(by_process)
    return tuple(sorted(p for others in groups[1:] for p in others[1]))


def _group_text(by_process: Mapping[int, Hashable]) -> str:
    """Return a text such as `3.0 in processes 0, 1, 4.0 in process 2`."""
    groups = group_by_value(by_process)
    parts = [f"{what} in {format_processes(who)}" for what, who in groups[:_CONTENTS_SHOWN]]
    more = len(groups) - _CONTENTS_SHOWN
    return ", ".join(parts) + (f", and {more} other values elsewhere" if more > 0 else "")


def _path_difference(paths: Mapping[int, tuple[str, ...]]) -> ValueDifference:
    """Describe the first leaf at which the trees differ."""
    columns = zip_longest(*paths.values(), fillvalue=_NOTHING)
    number, column = next((n, c) for n, c in enumerate(columns) if len(set(c)) > 1)
    by_process = dict(zip(paths, column, strict=True))
    path = next(what for what, _ in group_by_value(by_process) if what != _NOTHING)
    return ValueDifference(
        path, minority(by_process), f"leaf {number} is {_group_text(by_process)}"
    )


def _first_difference(barrier: Barrier, value: np.ndarray) -> str:
    """Describe the first differing element. Every process calls it, with values of one type."""
    flat = np.ascontiguousarray(value).reshape(-1)
    start, stop = 0, flat.size
    while stop - start > _ELEMENTS:
        edges = [start + (stop - start) * n // _PARTS for n in range(_PARTS + 1)]
        parts = [flat[a:b] for a, b in pairwise(edges)]
        answers = RENDEZVOUS.exchange(barrier, json.dumps([digest(part).hex() for part in parts]))
        unlike = _first_mismatch([json.loads(text) for text in answers.values()])
        if unlike is None:
            return ""
        start, stop = edges[unlike], edges[unlike + 1]
    own = [[bytes(_bytes_of(x)).hex(), str(x)] for x in flat[start:stop]]
    answers = {p: json.loads(s) for p, s in RENDEZVOUS.exchange(barrier, json.dumps(own)).items()}
    unlike = _first_mismatch(list(answers.values()))
    if unlike is None:
        return ""
    texts = {process: elements[unlike][1] for process, elements in answers.items()}
    if len(set(texts.values())) < 2:  # Equal texts, different bits: -0.0 and 0.0, or two NaNs.
        texts = {p: f"{e[unlike][1]} (bits {e[unlike][0]})" for p, e in answers.items()}
    index = [int(n) for n in np.unravel_index(start + unlike, value.shape)]
    return f"{f'at {index} ' if index else ''}it is {_group_text(texts)}"


def _first_mismatch(lists: Sequence[Sequence[Any]]) -> int | None:
    unlike = (
        n
        for n, (first, *rest) in enumerate(zip(*lists, strict=True))
        if rest != [first] * len(rest)
    )
    return next(unlike, None)


def _bytes_of(value: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
