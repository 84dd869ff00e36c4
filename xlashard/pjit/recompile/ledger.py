"""One function's account of what it had to make: written at each miss, explained when asked."""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xlashard._jax.context import explains_cache_misses
from xlashard.config import RECOMPILE_LOGGER
from xlashard.lazily import deferred
from xlashard.pjit.recompile.history import History, Key, Record
from xlashard.pjit.recompile.making import Making
from xlashard.pjit.recompile.pieces import PIECES
from xlashard.pjit.recompile.sites import SITES, Site

if TYPE_CHECKING:
    from xlashard.pjit.recompile import explanation as explaining
    from xlashard.pjit.recompile import hints as hinting
    from xlashard.pjit.recompile import report as reporting
else:
    explaining = deferred("xlashard.pjit.recompile.explanation")
    hinting = deferred("xlashard.pjit.recompile.hints")
    reporting = deferred("xlashard.pjit.recompile.report")

LOGGER = logging.getLogger(RECOMPILE_LOGGER)


class Ledger:
    """What a pjit-ed function made, and the reasons.

    Args:
        function: Its name.
        fun: The Python function.
    """

    def __init__(self, function: str, fun: Callable[..., Any]) -> None:
        self._function = function
        self._fun = fun
        self._history = History()

    @cached_property
    def _site(self) -> tuple[Site, int]:
        """What the function is made of, and how many were made of it by now."""
        site = SITES.of(self._fun)
        return site, site.new_maker()

    def note(self, making: Making, key: Callable[[], Key]) -> None:
        """Writes down what a call made since it was last asked, if anything.

        Args:
            making: Of the call.
            key: Gives what the call is told apart by.
        """
        record = self._history.note(making, key)
        if record is not None:
            site, maker = self._site
            site.add(maker, record.key.digest())

    def tell(self, making: Making) -> None:
        """Logs why a call had something to make, if it did and somebody wants to know."""
        level = _level()
        if making.told == making.noted or not LOGGER.isEnabledFor(level):
            return
        making.told = making.noted
        records = [r for r in self._history.records() if r.number <= (making.number or 0)]
        if not records:
            return
        explanation = self._explained(records, len(records) - 1)
        if explanation.why == "first":
            return
        if explanation.why == "made anew" and level == logging.INFO and not self._site[0].is_due():
            return
        advice = [
            f"\n  hint: {hint}" for hint in hinting.hints([explanation], records, self._makers)
        ]
        LOGGER.log(level, "%s%s", explanation.text(self._function), "".join(advice))

    def report(self) -> "reporting.RecompileReport":
        """Everything that is remembered, explained."""
        records = self._history.records()
        explained = tuple(self._explained(records, i) for i in range(len(records)))
        return reporting.RecompileReport(
            function=self._function,
            explanations=explained,
            pieces=PIECES.of(records[-1].key.source) if records else (),
            forgotten=records[0].number - 1 if records else 0,
            hints=hinting.hints(explained, records, self._makers if records else 1),
        )

    def forget(self) -> None:
        """Forgets everything."""
        for source in {record.key.source for record in self._history.records()}:
            PIECES.forget(source)
        self._history.forget()

    @property
    def _makers(self) -> int:
        return self._site[0].makers

    def _explained(self, records: Sequence[Record], index: int) -> "explaining.Explanation":
        site, maker = self._site
        return explaining.explain_record(records[index], records[:index], site.others(maker))


def _level() -> int:
    """Whoever asks for these lines alone sees them without setting up any logging."""
    asked = explains_cache_misses() or logging.NOTSET < LOGGER.level <= logging.INFO
    return logging.WARNING if asked else logging.INFO
