"""Comparison of programs between the processes of a group."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial

from xlashard._jax.runtime import coordination
from xlashard.config import CHECK_PROGRAMS, PROGRAMS_TIMEOUT
from xlashard.core.processes import (
    RENDEZVOUS,
    Barrier,
    BarrierTimeoutError,
    differences,
    digest_of_all,
    format_differences,
    minority,
    store,
)
from xlashard.core.program.consistency.difference import (
    Difference,
    environment_difference,
    find_difference,
)
from xlashard.core.program.consistency.fingerprint import (
    ProcessCopies,
    ProgramDescription,
    ProgramFingerprint,
    Proposal,
    ValueNamer,
    shared_environment,
)
from xlashard.errors import (
    ProcessesError,
    ProgramsDifferError,
    UnequalError,
    XlashardError,
    counted,
)
from xlashard.support.formatting import format_processes
from xlashard.support.lazily import dataclass

UNCHECKED = "programs/unchecked"
"""Folder of the store with the processes that don't compare their programs."""

# Rounds, and seconds per round, of waiting for programs of other threads before programs count as
# different.
_ROUNDS, _ROUND = 8, 0.25
# Seconds for a process with the same error to describe its program.
_DESCRIBING = 6.0
# Number of earlier programs in a description.
_BEFORE = 4


@dataclass(eq=False)
class _Waiting:
    """A program for which threads wait.

    Attributes:
        fingerprint: The program.
        naming: Returns the name of a closed-over value.
        copies: Returns the arguments of which every process passes its own copy.
        copies_digests: Digests of the paths and of the values of the copies.
        threads: Number of waiting threads.
        failure: Makes the error for these threads.
    """

    fingerprint: ProgramFingerprint
    naming: ValueNamer | None
    copies: ProcessCopies
    copies_digests: tuple[str, str]
    threads: int = 0
    failure: Callable[[], XlashardError] | None = field(default=None)


class ConsistencyGroup:
    """Processes of some programs.

    Args:
        processes: Their indices.
    """

    def __init__(self, processes: tuple[int, ...]) -> None:
        self._processes = processes
        self._folder = f"programs/{'-'.join(map(str, processes))}"
        self._changed = threading.Condition()
        self._agreed: set[str] = set()
        self._names: list[str] = []
        self._waiting: dict[str, _Waiting] = {}
        self._is_exchanging = False
        self._has_compared_environment = False
        self._differences = 0

    def admit(
        self,
        fingerprint: ProgramFingerprint,
        naming: ValueNamer | None,
        timeout: float,
        copies: ProcessCopies = tuple,
    ) -> None:
        """Return once all processes have arrived with the same program.

        Args:
            fingerprint: The program.
            naming: Returns the name of a closed-over value.
            timeout: Timeout for the peers, in seconds.
            copies: Returns the arguments of which every process passes its own copy.

        Raises:
            ProgramsDifferError: A process has another program.
            UnequalError: An argument's copies differ between processes.
            ProcessesError: A process did not arrive.
        """
        digest = fingerprint.digest
        if digest in self._agreed:
            return
        # Reading arrays waits for their computation, so it happens outside the lock. They may be
        # large, and are read one by one.
        entries = [value.entry() for value in copies()]
        digests = digest_of_all([path for path, *_ in entries]), digest_of_all(entries)
        with self._changed:
            if digest in self._agreed:
                return
            waiting = self._waiting.setdefault(
                digest, _Waiting(fingerprint, naming, copies, digests)
            )
            waiting.threads += 1
            self._changed.notify_all()
        try:
            while not self._is_settled(digest, waiting):
                try:
                    self._exchange_round(timeout)
                finally:
                    with self._changed:
                        self._is_exchanging = False
                        self._changed.notify_all()
        finally:
            with self._changed:
                waiting.threads -= 1
                if not waiting.threads and self._waiting.get(digest) is waiting:
                    del self._waiting[digest]
        if waiting.failure is not None:
            raise waiting.failure()  # no-catalogue: needs several processes

    def _is_settled(self, digest: str, waiting: _Waiting) -> bool:
        """Wait while another thread runs an exchange; return False if this thread runs the next."""
        with self._changed:
            while True:
                if digest in self._agreed or waiting.failure is not None:
                    return True
                if not self._is_exchanging:
                    self._is_exchanging = True
                    return False
                self._changed.wait()

    def _exchange_round(self, timeout: float) -> None:
        """Exchange the waiting programs with the other processes."""
        left = _ROUNDS
        while True:
            with self._changed:
                proposal, first = self._proposal()
            proposals = self._exchange(proposal, first, timeout)
            if self._refused_environment(proposals):
                return
            common = frozenset.intersection(*(proposal.digests for proposal in proposals.values()))
            if common:
                self._agree(common - self._refuse_unequal(common, proposals, timeout))
                return
            if not left or not any(proposal.is_threaded for proposal in proposals.values()):
                break
            with self._changed:
                known = len(self._waiting)
                self._changed.wait_for(lambda known=known: len(self._waiting) > known, _ROUND)
            left -= 1
        self._differ(proposals, first)

    def _proposal(self) -> tuple[Proposal, _Waiting]:
        waiting = list(self._waiting.values())
        first = waiting[0]
        environment = (
            {} if self._has_compared_environment else shared_environment(first.fingerprint)
        )
        proposal = Proposal(
            programs=tuple((w.fingerprint.digest, w.fingerprint.brief) for w in waiting),
            copies=tuple(w.copies_digests for w in waiting),
            number=len(self._names) + 1,
            is_threaded=threading.active_count() > 1,
            environment=environment,
        )
        return proposal, first

    def _exchange(self, proposal: Proposal, first: _Waiting, timeout: float) -> dict[int, Proposal]:
        name = first.fingerprint.name
        waiting, what = partial(_check_compared, name), f"the first run of {name}"
        barrier = Barrier(self._processes, "programs", timeout, waiting, what)
        try:
            texts = RENDEZVOUS.exchange(barrier, proposal.to_json())
        except BarrierTimeoutError as error:
            # no-catalogue: needs several processes
            raise self._timeout_error(name, timeout, error) from None
        return {process: Proposal.from_json(text) for process, text in texts.items()}

    def _timeout_error(
        self, name: str, timeout: float, error: BarrierTimeoutError
    ) -> ProcessesError:
        absent = error.missing("to run it, too", len(self._processes))
        return ProcessesError(
            f"{name} waited {timeout:g} s for {absent}: a program over several processes must "
            "be called by all of them, in the same order. If they only need longer, set "
            f"{PROGRAMS_TIMEOUT}, in seconds",
            processes=error.processes,
        )

    def _agree(self, digests: frozenset[str]) -> None:
        with self._changed:
            self._has_compared_environment = True
            self._agreed |= digests
            agreed = [self._waiting.pop(digest, None) for digest in sorted(digests)]
            self._names.extend(w.fingerprint.name for w in agreed if w is not None)

    def _refuse_unequal(
        self, digests: frozenset[str], proposals: Mapping[int, Proposal], timeout: float
    ) -> set[str]:
        """Set the error of programs whose arguments differ between processes; return them.

        Programs of which the processes pass copies of other arguments are not compared: one may
        pass an array of all processes, where another one passes a host value.
        """
        unequal = set()
        for digest in sorted(digests):
            copies = {proposal.copies_of(digest) for proposal in proposals.values()}
            if len(copies) < 2 or len({paths for paths, _ in copies}) > 1:
                continue
            with self._changed:
                waiting = self._waiting[digest]
            name = waiting.fingerprint.name
            barrier = Barrier(
                self._processes, "programs", timeout, what=f"the comparison of {name}'s arguments"
            )
            try:
                unlike = differences(barrier, tuple(waiting.copies()))
            except BarrierTimeoutError as error:
                # no-catalogue: needs several processes
                raise self._timeout_error(name, timeout, error) from None
            text = (
                f"{name} runs on devices of {len(self._processes)} processes, which must pass "
                f"equal values, but {format_differences(unlike)}: give all the same value (from "
                "one seed, one file, or multihost.broadcast_one_to_all), or, if each has a part of "
                f"its own, make_array_from_process_local_data(sharding, part). ({CHECK_PROGRAMS}=0 "
                "turns the comparison off.)"
            )
            failure = partial(
                UnequalError,
                text,
                processes=sorted({p for d in unlike for p in d.processes}),
                paths=[d.path for d in unlike],
            )
            with self._changed:
                waiting.failure = failure
                del self._waiting[digest]
            unequal.add(digest)
        return unequal

    def _refused_environment(self, proposals: Mapping[int, Proposal]) -> bool:
        environments = {p: c.environment for p, c in proposals.items() if c.environment}
        texts = {
            process: tuple(environment.items()) for process, environment in environments.items()
        }
        if len(set(texts.values())) < 2:
            return False
        pair = _pair(texts)
        difference = environment_difference(environments[pair[0]], environments[pair[1]])
        if difference is None:
            return False
        self._fail(proposals, minority(texts), pair, difference)
        return True

    def _differ(self, proposals: Mapping[int, Proposal], first: _Waiting) -> None:
        """Find the difference of the programs; all processes compare the same two."""
        digests = {process: proposal.first[0] for process, proposal in proposals.items()}
        pair = _pair(digests)
        self._differences += 1
        folder = f"{self._folder}/{self._differences}"
        me = coordination.process_index()
        if me in pair:
            # All processes have handled the error before this one.
            store.drop(f"{self._folder}/{self._differences - 1}/{me}")
            description = first.fingerprint.describe(first.naming, self._names[-_BEFORE:])
            store.write(f"{folder}/{me}", description.to_json().encode())
        end = time.monotonic() + _DESCRIBING
        descriptions = [store.read(f"{folder}/{p}", max(end - time.monotonic(), 0.1)) for p in pair]
        if descriptions[0] is None or descriptions[1] is None:
            silent = pair[0] if descriptions[0] is None else pair[1]
            difference = Difference(
                "unknown",
                f"Process {silent} did not describe its program:",
                *(proposals[process].first[1] for process in pair),
                fix="look at its own output",
            )
            self._fail(proposals, minority(digests), pair, difference)
            return
        one, other = map(ProgramDescription.from_json, (descriptions[0], descriptions[1]))
        difference = find_difference(one, other)
        self._fail(proposals, minority(digests), pair, difference, before=one.before)

    def _fail(
        self,
        proposals: Mapping[int, Proposal],
        odd: tuple[int, ...],
        pair: tuple[int, int],
        difference: Difference,
        before: tuple[str, ...] = (),
    ) -> None:
        """Set the error of all waiting threads."""
        text = _error_text(proposals, pair, difference, before)
        programs = {process: proposal.first[1] for process, proposal in proposals.items()}

        def failure() -> XlashardError:
            return ProgramsDifferError(
                text, processes=odd, programs=programs, difference=difference.kind
            )

        with self._changed:
            for waiting in self._waiting.values():
                waiting.failure = failure
            self._waiting = {}


def _error_text(
    proposals: Mapping[int, Proposal],
    pair: tuple[int, int],
    difference: Difference,
    before: tuple[str, ...],
) -> str:
    """Return the text of a `ProgramsDifferError`.

    Args:
        proposals: Proposal of each process.
        pair: The two processes that are compared.
        difference: The difference.
        before: Programs that all processes ran before.
    """
    names = dict.fromkeys(proposals[p].first[1].partition("(")[0] for p in pair)
    alike = difference.kind in ("version", "flags")
    what = "are not set up alike" if alike else "are not about to run the same program"
    lines = [f"{' and '.join(names)}: the processes {what}, so none of them runs it"]
    sides: dict[tuple[str, str], list[int]] = {}
    for process, proposal in proposals.items():
        sides.setdefault(proposal.first, []).append(process)
    for (_, brief), processes in sides.items():
        lines.append(f"  {format_processes(processes)}: {brief}")
    lines.append(difference.title)
    lines += [
        f"  process {process}: {text}"
        for process, text in zip(pair, (difference.one, difference.other), strict=True)
    ]
    if difference.lines:
        lines.append(f"  (- is of process {pair[0]}, + of process {pair[1]})")
        lines += [f"    {line}" for line in difference.lines]
    if before:
        count = counted(proposals[pair[0]].number - 1, "program")
        lines.append(f"They agreed on {count} before, the last one last: {', '.join(before)}")
    lines.append(f"To fix this, {difference.fix}. ({CHECK_PROGRAMS}=0 turns the comparison off.)")
    return "\n".join(lines)


def _check_compared(name: str, missing: tuple[int, ...], seconds: float) -> None:
    """Raise an error for missing processes that don't compare their programs.

    Raises:
        ProcessesError: With those.
    """
    unchecked = store.listed(UNCHECKED)
    silent = tuple(process for process in missing if str(process) in unchecked)
    if silent:
        raise ProcessesError(  # no-catalogue: needs several processes
            f"{name} can't be compared between the processes: that is turned off in "
            f"{format_processes(silent)} ({CHECK_PROGRAMS}=0, or "
            "xlashard.multihost.check_programs(False)), and not in this one: set it alike in all",
            processes=silent,
        )


def _pair(by_process: Mapping[int, object]) -> tuple[int, int]:
    """Return a process of the majority, and the first process that differs from it."""
    odd = minority(by_process)
    return min(set(by_process) - set(odd)), odd[0]
