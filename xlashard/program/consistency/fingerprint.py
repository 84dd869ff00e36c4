"""What the processes of a program must have in common before they run it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Protocol

from xlashard._jax.lower import modules
from xlashard._jax.runtime import compiler, coordination
from xlashard._version import __version__
from xlashard.lazily import dataclass
from xlashard.processes import processes_of
from xlashard.program.consistency.listing import source_lines
from xlashard.program.ir.plan import ProgramPlan, ValuePlan
from xlashard.program.runtime.environment import Environment
from xlashard.program.runtime.flags import NOT_COMPILED_IN
from xlashard.sharding import NamedSharding, XLACompatibleSharding
from xlashard.wording import typed

# How many arguments are written out where a program is only named.
_TYPES_SHOWN = 4
_DEVICES_SHOWN = 8

type ValueNamer = Callable[[Any], str]
"""What a person calls a value that a function closes over."""


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
    """An argument or result as it is told to another process.

    Attributes:
        path: Its path.
        type: Dtype and shape.
        sharding: Where it goes.
        rest: What else was said of it.
    """

    path: str
    type: str
    sharding: str
    rest: str = ""


@dataclass(frozen=True)
class ProgramDescription:
    """All of a program that another process may want to see.

    Attributes:
        name: The function's name.
        arguments: Its arguments.
        results: Its results.
        devices: The devices it runs on.
        settings: How it is compiled.
        closed: What it closes over: name, type, digest.
        callbacks: The Python functions that it calls.
        before: The programs that ran before it, the last one last.
        text: The module, with its locations; empty where there is none.
        code: The lines of Python that the module names, by file and number.
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

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ProgramDescription":
        """Parse the JSON of `to_bytes`."""
        said = json.loads(data)
        for side in ("arguments", "results"):
            said[side] = tuple(ValueDescription(**value) for value in said[side])
        said["closed"] = tuple((name, kind, digest) for name, kind, digest in said["closed"])
        said["callbacks"], said["before"] = tuple(said["callbacks"]), tuple(said["before"])
        return cls(**said)


@dataclass(frozen=True, eq=False)
class ProgramFingerprint:
    """A program as its processes compare it.

    Attributes:
        plan: What it was made by.
        module: Its module; None for a program that was loaded from a file.
        request: How it is compiled; None likewise.
        callbacks: The names of the Python functions that it calls.
        closed: What it closes over; None for nothing.
        saved: For a program from a file, the digest of the module that it was made of.
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
        return self.plan.name.removeprefix("pjit_")

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

        It is the same whatever a process has traced before, and in every run.
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
            naming: Names the values that its function closes over.
            before: The programs that ran before it.
        """
        plan = self.plan
        text = "" if self.module is None else modules.to_text(self.module, debug_info=True)
        return ProgramDescription(
            name=self.name,
            arguments=tuple(map(_told, plan.args, plan.donated)),
            results=tuple(_told(value, False) for value in plan.results),
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


def _told(value: ValuePlan, donated: bool) -> ValueDescription:
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
            # One may write it or leave it out.
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
    mine = [d for d in fingerprint.plan.devices if d.process_index == coordination.process_index()]
    found = Environment.of(mine[:1])
    said = {
        "xlashard": __version__,
        "jax": found.jax,
        "jaxlib": found.jaxlib,
        "platform": found.platform,
        "the platform's runtime": found.runtime,
    }
    for variable, value in found.flags:
        kept = sorted({flag for flag in value.split() if not flag.startswith(NOT_COMPILED_IN)})
        if kept:
            said[variable] = " ".join(kept)
    return said


@dataclass(frozen=True)
class Proposal:
    """What one process is about to run for the first time.

    Attributes:
        programs: Digest and short text of each program that a thread of it waits with; the first
            one came first.
        number: Which of its programs the first one is.
        is_threaded: Whether other threads may come with other programs.
        environment: Its versions and flags, as long as the group has not compared them.
    """

    programs: tuple[tuple[str, str], ...]
    number: int
    is_threaded: bool
    environment: dict[str, str]

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Proposal":
        """Parse the JSON of `to_text`."""
        said = json.loads(text)
        programs = tuple((digest, brief) for digest, brief in said.pop("programs"))
        return cls(programs, **said)

    @property
    def digests(self) -> frozenset[str]:
        """Return the digests of all its programs."""
        return frozenset(digest for digest, _ in self.programs)

    @property
    def first(self) -> tuple[str, str]:
        """Return digest and description of the oldest program."""
        return self.programs[0]
