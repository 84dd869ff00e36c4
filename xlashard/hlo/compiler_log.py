"""Warnings of XLA about operations of a program, from what the compiler writes to its log.

jaxlib passes neither warnings nor log on: XLA writes them to the standard error of the process that
compiles, and libtpu does if `TPU_STDERR_LOG_LEVEL` allows it.
"""

import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

from xlashard.hlo.module import Instruction
from xlashard.hlo.text_reader import read_text

_ENTRY = re.compile(r"^[IWEF]\d{4} [\d:.]+ +\d+ \S+:\d+\] ", re.MULTILINE)
_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_OPERATION = re.compile(rf"%[\w.-]+ = \S.*? [\w-]+\(.*?\)(?:, [\w-]+=(?:{_BRACES}|[^\s,{{]+))*")
_RESHARDING = re.compile(rf"from sharding ({_BRACES}) to ({_BRACES}) (?:efficiently|without)")
# A pipe that is full would stop the compiler, which may hold Python's lock.
_PIPE_BYTES = 1 << 20


@dataclass(frozen=True)
class CompilerWarning:
    """Warning about an operation.

    Attributes:
        text: The warning up to the operation.
        operation: The operation, before the module was partitioned or meanwhile.
        source: For a value that is replicated between two shardings ("involuntary full
            rematerialization"), the first one in HLO's syntax; else empty.
        target: The second one.
    """

    text: str
    operation: Instruction
    source: str = ""
    target: str = ""


def read_warnings(log: str) -> tuple[CompilerWarning, ...]:
    """Return the warnings that name an operation, each one once.

    Args:
        log: What the compiler wrote.

    Example:
        >>> log = (
        ...     "W1128 14:59:13.95 5996 spmd_partitioner.cc:666] [SPMD] Involuntary full "
        ...     "rematerialization. The compiler cannot go from sharding {devices=[1,8]<=[8]} to "
        ...     "{devices=[8,1]<=[8]} efficiently for HLO operation %sin = f32[32,4]{1,0} "
        ...     "sine(%x), sharding={devices=[1,8]<=[8]}. As the last resort, SPMD will replicate."
        ... )
        >>> (warning,) = read_warnings(log)
        >>> warning.operation.opcode, warning.target
        ('sine', '{devices=[8,1]<=[8]}')
    """
    warnings: dict[str, CompilerWarning] = {}
    for message in _messages(log):
        match = _OPERATION.search(message)
        if match is None:
            continue
        module = read_text(f"HloModule log\n\nENTRY %log {{\n  ROOT {match[0].rstrip('.')}\n}}\n")
        operation = module.computations[module.entry].root
        if operation is not None:
            ways = _RESHARDING.search(message)
            source, target = ("", "") if ways is None else ways.groups()
            text = message[: match.start()]
            warnings[message] = CompilerWarning(text, operation, source, target)
    return tuple(warnings.values())


# libtpu 0.0.50 writes these about its own start and options, whatever the program.
_START_MESSAGES = (
    "Collective matmul V1 is enabled.",
    "Multi slice config from proto,",
    "No hardware is found.",
    "Unable to dump host DMA stats",
)


def read_general_warnings(log: str) -> tuple[str, ...]:
    """Return the texts of the warnings about the program that name no operation, each one once.

    Errors are left out: they end the compilation with an error of its own.

    Args:
        log: What the compiler wrote.
    """
    messages = (
        message
        for message in _messages(log, "W")
        if not _OPERATION.search(message) and not message.startswith(_START_MESSAGES)
    )
    return tuple(dict.fromkeys(messages))


def _messages(log: str, levels: str = "WE") -> Iterator[str]:
    """Yield the texts of a log's warnings and errors, or of some levels, each in one line."""
    starts = [match.start() for match in _ENTRY.finditer(log)]
    for begin, end in pairwise([*starts, len(log)]):
        entry = log[begin:end]
        if entry[0] in levels and _ENTRY.match(entry):
            yield " ".join(_ENTRY.sub("", entry).split())


_WARNING_LINE = re.compile(rb"(?m)^W\d{4} .*\n?")


@contextmanager
def captured_log(*, hides_warnings: bool = False) -> Iterator[list[str]]:
    """Collect what this process writes to its standard error within a block, and pass it on.

    The one text is there after the block. Other threads and their subprocesses would write to the
    pipe, too: a process that has some collects nothing.

    Args:
        hides_warnings: Pass on all but the compiler's warnings.
    """
    texts: list[str] = []
    own = None
    if threading.active_count() == 1:
        with suppress(OSError):  # closed
            own = os.dup(2)
    if own is None:
        yield texts
        return
    parts: list[bytes] = []
    ready, end = os.pipe()
    with suppress(OSError, AttributeError):  # Linux alone has it
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.dup2(end, 2)
    os.close(end)

    def pass_on() -> None:
        while part := os.read(ready, 1 << 16):
            parts.append(part)
            os.write(own, _WARNING_LINE.sub(b"", part) if hides_warnings else part)

    thread = threading.Thread(target=pass_on, name="log of the compiler")
    thread.start()
    try:
        yield texts
    finally:
        os.dup2(own, 2)
        thread.join()
        os.close(own)
        os.close(ready)
        texts.append(b"".join(parts).decode(errors="replace"))
