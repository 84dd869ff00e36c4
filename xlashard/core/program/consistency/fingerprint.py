"""Fingerprints of programs, which must be equal in all of their processes."""

import hashlib
import json
import linecache
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.runtime import compiler
from xlashard._version import __version__
from xlashard.core.processes import NamedValue, processes_of
from xlashard.core.program.environment import NOT_COMPILED_IN, Environment
from xlashard.core.program.plan import ProgramPlan, ValuePlan
from xlashard.core.sharding import NamedSharding, XLACompatibleSharding
from xlashard.support.documents import JsonRecord
from xlashard.support.formatting import typed
from xlashard.support.lazily import dataclass

# Number of arguments in a short description.
_TYPES_SHOWN = 4
_DEVICES_SHOWN = 8
# A named location of a module that is a line of Python.
_NAMED_IN_FILE = re.compile(r'^#loc\d* = loc\("((?:[^"\\]|\\.)*)":(\d+):\d+', re.MULTILINE)

type ValueNamer = Callable[[Any], str]
"""Returns the name of a closed-over value."""


type ProcessCopies = Callable[[], Iterable[NamedValue]]
"""Returns the arguments of which every process passes its own copy."""


class ClosedOver(Protocol):
    """The values that a function closes over."""

    def digests(self) -> Sequence[str]:
        """Return a digest per hoisted value; empty for a global array."""
        ...

    def describe(self, naming: ValueNamer | None) -> Sequence[tuple[str, str, str]]:
        """Return the name, type and digest of every closed-over value."""
        ...


@dataclass(frozen=True)
class ValueDescription:
    """An argument or result in the description of a program.

    Attributes:
        path: Its path.
        type: Dtype and shape.
        sharding: Its sharding.
        rest: Donation, layout and memory.
    """

    path: str
    type: str
    sharding: str
    rest: str = ""


@dataclass(frozen=True)
class ProgramDescription(JsonRecord):
    """Description of a program for other processes.

    Attributes:
        name: The function's name.
        arguments: Its arguments.
        results: Its results.
        devices: Its devices.
        settings: Settings of the compiler.
        closed: Name, type and digest of every closed-over value.
        callbacks: The Python functions that it calls.
        before: Programs that ran before it, in order.
        text: The module, with its locations; empty for a program from a file.
        code: Lines of Python that the module refers to, by file and number.
    """

    name: str
    arguments: tuple[ValueDescription, ...]
    results: tuple[ValueDescription, ...]
    devices: str
    settings: dict[str, str]
    closed: tuple[tuple[str, str, str], ...]
    callbacks: tuple[str, ...]
    before: tuple[str, ...]
    text: str
    code: dict[str, str]


@dataclass(frozen=True, eq=False)
class ProgramFingerprint:
    """Fingerprint of a program.

    Attributes:
        plan: Its plan.
        module: Its module; None for a program from a file.
        request: Its compile request; None for a program from a file.
        callbacks: Names of the Python functions that it calls.
        closed: Its closed-over values, if any.
        saved: Digest of the module of a program from a file.
    """

    plan: ProgramPlan
    module: Any = None
    request: compiler.CompileRequest | None = None
    callbacks: tuple[str, ...] = ()
    closed: ClosedOver | None = None
    saved: str = ""

    @property
    def name(self) -> str:
        """Return the function's name."""
        return self.plan.function_name

    @cached_property
    def group(self) -> tuple[int, ...]:
        """Return the processes that its devices belong to."""
        return processes_of(self.plan.devices)

    @cached_property
    def module_digest(self) -> str:
        """Return a digest of its module without source locations."""
        return self.saved if self.module is None else modules.digest(self.module)

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything that must be equal in every process.

        It does not depend on earlier traces, nor on the run.
        """
        closed = () if self.closed is None else tuple(self.closed.digests())
        parts = (
            self.module_digest,
            self.name,
            _assigned(self.plan),
            sorted(self._settings().items()),
            self.callbacks,
            closed,
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def brief(self) -> str:
        """Return a short description: `step(float32[8,4], float32[4])`."""
        types = [typed(value.dtype, value.shape) for value in self.plan.args[:_TYPES_SHOWN]]
        more = len(self.plan.args) - len(types)
        return f"{self.name}({', '.join(types)}{f', and {more} more' if more else ''})"

    def describe(self, naming: ValueNamer | None, before: Sequence[str]) -> ProgramDescription:
        """Return the description of the program for other processes.

        Args:
            naming: Returns the name of a closed-over value.
            before: Programs that ran before it.
        """
        plan = self.plan
        text = "" if self.module is None else modules.to_text(self.module, debug_info=True)
        return ProgramDescription(
            name=self.name,
            arguments=tuple(map(_describe_value, plan.args, plan.donated)),
            results=tuple(_describe_value(value, False) for value in plan.results),
            devices=_devices_text(plan),
            settings=self._settings(),
            closed=() if self.closed is None else tuple(self.closed.describe(naming)),
            callbacks=self.callbacks,
            before=tuple(before),
            text=text,
            code=source_lines(text),
        )

    def _settings(self) -> dict[str, str]:
        settings = {"partitioner": self.plan.partitioner.value}
        if self.request is None:
            return settings | {name: repr(value) for name, value in self.plan.options}
        return settings | compiler.settings(self.request)


def source_lines(text: str) -> dict[str, str]:
    """Return the lines of Python that a module names, by file and line number."""
    lines = {}
    files: dict[str, list[str]] = {}
    for match in _NAMED_IN_FILE.finditer(text):
        file, number = match[1], int(match[2])
        if file not in files:
            files[file] = linecache.getlines(file)
        if 0 < number <= len(files[file]):
            lines[f"{file}:{number}"] = files[file][number - 1].strip()
    return lines


def _describe_value(value: ValuePlan, donated: bool) -> ValueDescription:
    rest = [
        "donated" if donated else "",
        f"the layout {value.layout}" if value.layout else "",
        f"the memory {value.memory_kind!r}" if value.memory_kind else "",
    ]
    return ValueDescription(
        path=value.name,
        type=typed(value.dtype, value.shape),
        sharding=_sharding_text(value.sharding),
        rest=", ".join(filter(None, rest)),
    )


def _sharding_text(sharding: XLACompatibleSharding | None) -> str:
    if sharding is None:
        return "left to the partitioner"
    if isinstance(sharding, NamedSharding):
        mesh = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        entries = list(sharding.spec.partitions)
        while entries and entries[-1] is None:
            # Trailing None entries are optional.
            entries.pop()
        return f"{sharding.spec.update(partitions=entries)} on the mesh ({mesh})"
    return repr(sharding)


def _assigned(plan: ProgramPlan) -> list[tuple[str, int]]:
    return [(device.platform, device.id) for device in plan.devices]


def _devices_text(plan: ProgramPlan) -> str:
    ids = [str(device.id) for device in plan.devices]
    shown = ids if len(ids) <= _DEVICES_SHOWN else [*ids[: _DEVICES_SHOWN - 2], "...", ids[-1]]
    of_all = hashlib.sha256(json.dumps(_assigned(plan)).encode()).hexdigest()[:8]
    order = "" if shown is ids else f" (in all {len(ids)}, in the order {of_all})"
    return f"{plan.devices[0].platform} {', '.join(shown)}{order}"


def shared_environment(fingerprint: ProgramFingerprint) -> dict[str, str]:
    """Return the versions and compiler flags that all processes must share."""
    environment = Environment.of(fingerprint.plan.local_devices[:1])
    values = {
        "xlashard": __version__,
        "jax": environment.jax,
        "jaxlib": environment.jaxlib,
        "platform": environment.platform,
        "the platform's runtime": environment.runtime,
    }
    for variable, value in environment.flags:
        kept = sorted({flag for flag in value.split() if not flag.startswith(NOT_COMPILED_IN)})
        if kept:
            values[variable] = " ".join(kept)
    return values


@dataclass(frozen=True)
class Proposal(JsonRecord):
    """Programs that a process is about to run for the first time.

    Attributes:
        programs: Digest and short description of each waiting program, the oldest first.
        copies: Digests of the paths, and of the values, of the arguments of each waiting program
            that the process passes its own copy of.
        number: Number of the oldest program among all programs of the process.
        is_threaded: Whether other threads may propose other programs.
        environment: Its versions and flags, until the group has compared them.
    """

    programs: tuple[tuple[str, str], ...]
    copies: tuple[tuple[str, str], ...]
    number: int
    is_threaded: bool
    environment: dict[str, str]

    @property
    def digests(self) -> frozenset[str]:
        """Return the digests of all its programs."""
        return frozenset(digest for digest, _ in self.programs)

    def copies_of(self, digest: str) -> tuple[str, str]:
        """Return the digests of the copies that the process passes to a program."""
        return next(c for (d, _), c in zip(self.programs, self.copies, strict=True) if d == digest)

    @property
    def first(self) -> tuple[str, str]:
        """Return digest and description of the oldest program."""
        return self.programs[0]
