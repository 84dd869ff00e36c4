"""Score messages by their required parts: the place, the facts, the advice."""

from dataclasses import dataclass

from tests.errors.catalogue import Mistake
from tests.errors.running import Outcome


@dataclass(frozen=True)
class Score:
    """Required parts of one message.

    Attributes:
        refused: Whether there is a message at all.
        place: Whether it names the place of the mistake.
        facts: Whether it has all numbers and names.
        advice: Whether it shows what to write.
    """

    refused: bool
    place: bool
    facts: bool
    advice: bool

    @property
    def is_whole(self) -> bool:
        """Return whether the message has all parts."""
        return self.refused and self.place and self.facts and self.advice

    def missing(self) -> str:
        """Return the missing parts, in words."""
        parts = {"the place": self.place, "the facts": self.facts, "what to write": self.advice}
        return ", ".join(name for name, there in parts.items() if not there)


def our_score(mistake: Mistake, outcome: Outcome) -> Score:
    """Score our message."""
    return Score(
        refused=bool(outcome.kind),
        place=mistake.path in outcome.text,
        facts=all(fact in outcome.text for fact in mistake.facts),
        advice=mistake.fix in outcome.text,
    )


def jax_score(mistake: Mistake, outcome: Outcome) -> Score:
    """Score JAX's message, which may spell the place and the facts otherwise."""
    if not outcome.kind:
        return Score(False, False, False, False)
    return Score(
        refused=True,
        place=(mistake.jax_path or mistake.path) in outcome.text,
        facts=all(fact in outcome.text for fact in mistake.jax_facts or mistake.facts),
        advice=bool(mistake.jax_fix) and mistake.jax_fix in outcome.text,
    )
