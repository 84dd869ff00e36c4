"""What a process says when it comes to a meeting about programs."""

import json
from dataclasses import asdict

from xlashard.lazily import dataclass


@dataclass(frozen=True)
class Subject:
    """What one process is about to run for the first time.

    Attributes:
        programs: Digest and short text of each program that a thread of it waits with; the first
            one came first.
        number: Which of its programs the first one is.
        is_threaded: Whether other threads may come with other programs.
        surroundings: Its versions and flags, as long as the group has not compared them.
    """

    programs: tuple[tuple[str, str], ...]
    number: int
    is_threaded: bool
    surroundings: dict[str, str]

    def to_text(self) -> str:
        """It as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Subject":
        """What `to_text` gave."""
        said = json.loads(text)
        programs = tuple((digest, brief) for digest, brief in said.pop("programs"))
        return cls(programs, **said)

    @property
    def digests(self) -> frozenset[str]:
        """Of all its programs."""
        return frozenset(digest for digest, _ in self.programs)

    @property
    def first(self) -> tuple[str, str]:
        """Digest and short text of the program that came first."""
        return self.programs[0]
