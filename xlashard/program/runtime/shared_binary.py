"""One process of a program compiles it, and the others load what it made.

What they load is machine code, and comes through the store that all processes share: who can write
there can run code in every process. So it is done only where it was asked for.
"""

import json
import threading
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from xlashard._jax.lower.lowering import LoweredBody
from xlashard._jax.runtime import compiler, coordination, executables
from xlashard.errors import ProcessesError, SharedBinaryWarning
from xlashard.lazily import dataclass
from xlashard.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, format_processes, store
from xlashard.program.consistency import CONSISTENCY, ProgramFingerprint, is_shared
from xlashard.program.runtime.environment import Environment
from xlashard.program.runtime.executables import LoadedExecutable, Source

_OWN_FILES = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class _Word:
    """What a process says of its part.

    Attributes:
        machine: What its machine code is for.
        refusal: Why the program can't be shared with it or by it; empty if it can.
        error: What the compiler said, if it refused the program.
    """

    machine: str = ""
    refusal: str = ""
    error: str = ""

    def to_text(self) -> str:
        return json.dumps([self.machine, self.refusal, self.error])

    @classmethod
    def from_text(cls, text: str) -> "_Word":
        return cls(*json.loads(text))


class SharedBinaries:
    """The programs that this process has shared with others.

    Each is shared once: a process that has to compile one again does so by itself, for the others
    may have no reason to.
    """

    def __init__(self) -> None:
        self._done: set[str] = set()
        self._lock = threading.Lock()

    def load(
        self,
        fingerprint: ProgramFingerprint,
        body: LoweredBody,
        loaded: LoadedExecutable,
        compile_here: Callable[[], Source],
    ) -> Source:
        """Compile in one process and load in the others; all of the program's must take part.

        Args:
            fingerprint: The program, which they compare first.
            body: Its module, and what must live as long as it.
            loaded: Where its executable goes.
            compile_here: Compiles into that.

        Returns:
            Where this process's executable comes from.

        Raises:
            ProgramsDifferError: They have another program.
            ProcessesError: Some did not come.
            RuntimeError: The compiler refuses it; in all processes, with what it said in one.
        """
        if not is_shared(fingerprint):
            return compile_here()
        CONSISTENCY.compare(fingerprint)
        with self._lock:
            first_time = fingerprint.digest not in self._done
            self._done.add(fingerprint.digest)
        if not first_time:
            return compile_here()
        if body.has_effects or body.keepalives or body.host_callbacks:
            _warn(
                fingerprint,
                "it calls Python functions, or has effects, which stay in their process",
            )
            return compile_here()
        return _Sharing(fingerprint, loaded, compile_here).source()


class _Sharing:
    """One program being shared."""

    def __init__(
        self,
        fingerprint: ProgramFingerprint,
        loaded: LoadedExecutable,
        compile_here: Callable[[], Source],
    ) -> None:
        self._fingerprint = fingerprint
        self._loaded = loaded
        self._compile_here = compile_here
        self._me = coordination.process_index()
        self._key = f"binaries/{fingerprint.digest}"

    def source(self) -> Source:
        """Return the source of the executable once it is loaded."""
        source: Source | None = None
        if self._me == self._fingerprint.group[0]:
            word, source = self._made()
        else:
            word = _Word(_machine(self._fingerprint))
        words = self._meet("compiling", word)
        made = words[self._fingerprint.group[0]]
        if made.error:
            raise RuntimeError(made.error)  # no-catalogue: needs several processes
        refusal = made.refusal
        if not refusal:
            word = _Word(refusal=self._taken(made.machine) if source is None else "")
            words = self._meet("loading", word)
            refused = {p: w.refusal for p, w in words.items() if w.refusal}
            if refused:
                refusal = f"{format_processes(tuple(refused))}: {next(iter(refused.values()))}"
        if source is not None:
            store.drop(self._key)
            if refusal:
                _warn(self._fingerprint, refusal)
            return source
        return self._compile_here() if refusal else "another process"

    def _made(self) -> tuple[_Word, Source | None]:
        """Compile, and write the bytes of the executable into the store."""
        try:
            source = self._compile_here()
        except RuntimeError as error:
            return _Word(error=compiler.error_text(error)), None
        try:
            store.write(self._key, self._loaded.to_bytes())
        except RuntimeError as error:
            return _Word(refusal=f"its bytes can't be had: {error}"), source
        return _Word(_machine(self._fingerprint)), source

    def _taken(self, machine: str) -> str:
        """Load the executable of another process; return the reason if this fails."""
        if machine != _machine(self._fingerprint):
            return "another kind of machine"
        code = store.read(self._key)
        if code is None:
            return "its bytes are not there any more"
        plan, request = self._fingerprint.plan, self._fingerprint.request
        arguments = len(plan.args if request is None else request.free_args)
        try:
            executable = executables.from_bytes(code, plan.devices, arguments)
        except RuntimeError as error:
            return f"its bytes can't be loaded: {compiler.error_text(error)}"
        self._loaded.take(executable, code)
        return ""

    def _meet(self, what: str, word: _Word) -> dict[int, _Word]:
        name, timeout = self._fingerprint.name, CONSISTENCY.policy.timeout
        invitation = Barrier(
            self._fingerprint.group,
            f"binaries/{what}/{self._fingerprint.digest}",
            timeout,
            what=f"{what} {name}, which share_binary lets one process compile for all,",
        )
        try:
            came = RENDEZVOUS.exchange(invitation, word.to_text())
        except BarrierTimeoutError as error:
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{what} {name} waited {timeout:g} s for {format_processes(error.processes)}: "
                "under share_binary=True one process compiles for all, so all must compile it, in "
                "the same order",
                processes=error.processes,
            ) from None
        return {process: _Word.from_text(text) for process, text in came.items()}


def _machine(fingerprint: ProgramFingerprint) -> str:
    """Return a digest of the machine that the code must fit."""
    mine = [d for d in fingerprint.plan.devices if d.process_index == coordination.process_index()]
    here = Environment.of(mine[:1])
    said: list[Any] = [here.platform, here.runtime, here.machine, sorted(here.features)]
    said.append(sorted({device.device_kind for device in mine}))
    return sha256(json.dumps(said).encode()).hexdigest()


def _warn(fingerprint: ProgramFingerprint, why: str) -> None:
    """Warn in one process that every process compiles the program."""
    if coordination.process_index() == fingerprint.group[0]:
        warnings.warn(
            f"{fingerprint.name} is compiled by each of its {len(fingerprint.group)} processes, "
            f"in spite of share_binary=True: {why}",
            SharedBinaryWarning,
            skip_file_prefixes=(_OWN_FILES,),
        )


SHARED_BINARIES = SharedBinaries()
"""The programs that this process has shared with others."""
