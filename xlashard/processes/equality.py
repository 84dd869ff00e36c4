"""Whether all processes have the same values, found out by digests, and where they differ.

Where the values are the same, one meeting says so, with a few bytes of each process. Only where
they are not, the processes tell each other more: which values differ, and then, part by part of
the first that does, at which element.
"""

import hashlib
import json
import zlib
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from xlashard.errors import counted
from xlashard.lazily import dataclass
from xlashard.processes.process_groups import format_processes, group_by_value
from xlashard.processes.rendezvous import RENDEZVOUS, Barrier
from xlashard.wording import typed

# What one checksum covers, in bytes.
_STRETCH = 1 << 20
# From so many bytes on several threads share the work, which lets go of Python's lock.
_THREADED = 16 << 20
_THREADS = 4

# Into how many parts a value is cut to find the one that differs, and how many elements are then
# compared one by one.
_PARTS = 64
_ELEMENTS = 32

_CONTENTS_SHOWN = 4
# Of so many differing values each is told.
_TOLD = 5
_NOTHING = "nothing"


@dataclass(frozen=True)
class NamedValue:
    """A value, and what a person calls it.

    Attributes:
        path: Its path in what was given: `x['w']`.
        value: The value.
        also: What else must be the same about it, in words, such as where it goes.
    """

    path: str
    value: np.ndarray
    also: str = ""

    @property
    def type(self) -> str:
        """Dtype and shape: `float32[8,4]`."""
        return typed(self.value.dtype.name, self.value.shape)

    def listed(self) -> "_Entry":
        """What is told to the others."""
        return self.path, self.type, self.also, digest(self.value).hex()


type _Entry = tuple[str, str, str, str]
"""Path, type, what else must be the same, digest."""


@dataclass(frozen=True)
class ValueDifference:
    """A value that some processes have otherwise than most.

    Attributes:
        path: Its path.
        processes: The processes that differ from most others; from the first, if none are more.
        text: What each has, in words.
    """

    path: str
    processes: tuple[int, ...]
    text: str


def digest(value: np.ndarray) -> bytes:
    """A short sum of a value's bits, its dtype and its shape: equal for equal values only.

    It tells apart what differs by mistake, not what somebody made to have the same sum.

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
    # Small values are covered twice: a sum of 32 bits alone may well be equal by chance.
    few = bytes(memory) if len(memory) <= _STRETCH else b""
    head = f"{value.dtype.name}{value.shape}".encode()
    return hashlib.sha256(head + np.array(sums, np.uint32).tobytes() + few).digest()


def differences(invitation: Barrier, values: Sequence[NamedValue]) -> tuple[ValueDifference, ...]:
    """What is not the same in all processes; nothing, if all is.

    Every process of the invitation must call it with values of its own.

    Args:
        invitation: Who compares.
        values: What this process has, in order.

    Raises:
        BarrierTimeoutError: Some processes did not come.
    """
    mine = [named.listed() for named in values]
    everything = json.dumps(mine)
    came = RENDEZVOUS.exchange(invitation, hashlib.sha256(everything.encode()).hexdigest())
    if len(set(came.values())) < 2:
        return ()
    told = RENDEZVOUS.exchange(invitation, everything)
    lists = {process: [tuple(e) for e in json.loads(said)] for process, said in told.items()}
    paths = {process: tuple(e[0] for e in entries) for process, entries in lists.items()}
    if len(set(paths.values())) > 1:
        return (_path_difference(paths),)
    found = []
    for number, named in enumerate(values):
        entries = {process: entries[number] for process, entries in lists.items()}
        if len(set(entries.values())) < 2:
            continue
        # Of type and place only what differs: the other would stand there for every process.
        told = [n for n in (1, 2) if len({e[n] for e in entries.values()}) > 1]
        types = {process: " ".join(e[n] for n in told) for process, e in entries.items()}
        text = ""
        if len(set(types.values())) > 1:
            text = f"it is {_group_text(types)}"
        elif not found:
            # Where the first one differs is worth some meetings. Of others it is enough that.
            text = _first_difference(invitation, named.value)
        found.append(ValueDifference(named.path, minority(entries), text))
    return tuple(found)


def format_differences(found: Sequence[ValueDifference]) -> str:
    """Some values that differ, in words: `x['w'] differs in process 1: at [3] it is ...`."""
    told = "; ".join(
        f"{d.path} differs in {format_processes(d.processes)}{d.text and f': {d.text}'}"
        for d in found[:_TOLD]
    )
    more = len(found) - _TOLD
    return f"{told}; and {counted(more, 'more leaf', 'more leaves')}" if more > 0 else told


def minority(by_process: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The processes that have something else than most; than the first, if none are more."""
    groups = group_by_value(by_process)
    return tuple(sorted(p for others in groups[1:] for p in others[1]))


def _group_text(by_process: Mapping[int, Hashable]) -> str:
    """`3.0 in processes 0, 1, 4.0 in process 2`."""
    groups = group_by_value(by_process)
    parts = [f"{what} in {format_processes(who)}" for what, who in groups[:_CONTENTS_SHOWN]]
    more = len(groups) - _CONTENTS_SHOWN
    return ", ".join(parts) + (f", and {more} other values elsewhere" if more > 0 else "")


def _path_difference(paths: Mapping[int, tuple[str, ...]]) -> ValueDifference:
    """Says how trees differ: by the first place where one has something else than the others."""
    columns = zip_longest(*paths.values(), fillvalue=_NOTHING)
    number, column = next((n, c) for n, c in enumerate(columns) if len(set(c)) > 1)
    here = dict(zip(paths, column, strict=True))
    path = next(what for what, _ in group_by_value(here) if what != _NOTHING)
    return ValueDifference(path, minority(here), f"leaf {number} is {_group_text(here)}")


def _first_difference(invitation: Barrier, value: np.ndarray) -> str:
    """The first element that differs. All processes ask for it, of values of one type."""
    flat = np.ascontiguousarray(value).reshape(-1)
    start, stop = 0, flat.size
    while stop - start > _ELEMENTS:
        edges = [start + (stop - start) * n // _PARTS for n in range(_PARTS + 1)]
        parts = [flat[a:b] for a, b in pairwise(edges)]
        came = RENDEZVOUS.exchange(invitation, json.dumps([digest(part).hex() for part in parts]))
        unlike = _first_mismatch([json.loads(said) for said in came.values()])
        if unlike is None:
            return ""
        start, stop = edges[unlike], edges[unlike + 1]
    own = [[bytes(_bytes_of(x)).hex(), str(x)] for x in flat[start:stop]]
    came = {p: json.loads(s) for p, s in RENDEZVOUS.exchange(invitation, json.dumps(own)).items()}
    unlike = _first_mismatch(list(came.values()))
    if unlike is None:
        return ""
    texts = {process: elements[unlike][1] for process, elements in came.items()}
    if len(set(texts.values())) < 2:  # such as zeros of either sign, or different bits of NaN
        texts = {p: f"{e[unlike][1]} (bits {e[unlike][0]})" for p, e in came.items()}
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
