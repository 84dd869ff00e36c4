"""Log of what one pjit-ed function traced, lowered and compiled."""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xlashard._jax.runtime.global_state import explains_cache_misses
from xlashard.config import RECOMPILE_LOGGER
from xlashard.lazily import deferred
from xlashard.pjit.recompile.derived_programs import DERIVED_PROGRAMS
from xlashard.pjit.recompile.history import CacheMiss, CallKey, MissHistory, MissRecord
from xlashard.pjit.recompile.sites import SITES, Site

if TYPE_CHECKING:
    from xlashard.pjit.recompile import explanation as explaining
    from xlashard.pjit.recompile import hints as hinting
    from xlashard.pjit.recompile import recompile_report as reporting
else:
    explaining = deferred("xlashard.pjit.recompile.explanation")
    hinting = deferred("xlashard.pjit.recompile.hints")
    reporting = deferred("xlashard.pjit.recompile.recompile_report")

LOGGER = logging.getLogger(RECOMPILE_LOGGER)


class CompileLog:
    """Cache misses of a pjit-ed function, explained once a log line or report needs the reasons.

    Args:
        function: Its name.
        fun: The Python function.
    """

    def __init__(self, function: str, fun: Callable[..., Any]) -> None:
        self._function = function
        self._fun = fun
        self._history = MissHistory()

    @cached_property
    def _site(self) -> tuple[Site, int]:
        """Source of the function, and the function's number among those made of that source."""
        site = SITES.of(self._fun)
        return site, site.add_function()

    def record(self, miss: CacheMiss, key: Callable[[], CallKey]) -> None:
        """Record the stages that a call has run since its last record.

        Args:
            miss: The stages of the call.
            key: Returns the key of the call.
        """
        record = self._history.record(miss, key)
        if record is not None:
            site, number = self._site
            site.add_call(number, record.key.digest())

    def log_reason(self, miss: CacheMiss) -> None:
        """Log the reason of a cache miss, if logging is enabled and the miss is not yet logged."""
        level = _level()
        if miss.logged == miss.recorded or not LOGGER.isEnabledFor(level):
            return
        miss.logged = miss.recorded
        records = [r for r in self._history.records() if r.number <= (miss.number or 0)]
        if not records:
            return
        explanation = self._explain(records, len(records) - 1)
        if explanation.reason == "first":
            return
        recreated = explanation.reason == "recreated"
        if recreated and level == logging.INFO and not self._site[0].is_due():
            return
        advice = [
            f"\n  hint: {hint}"
            for hint in hinting.hints([explanation], records, self._num_functions)
        ]
        LOGGER.log(level, "%s%s", explanation.text(self._function), "".join(advice))

    def report(self) -> "reporting.RecompileReport":
        """Return all records with their explanations."""
        records = self._history.records()
        explained = tuple(self._explain(records, i) for i in range(len(records)))
        return reporting.RecompileReport(
            function=self._function,
            explanations=explained,
            derived_programs=DERIVED_PROGRAMS.of(records[-1].key.source) if records else (),
            dropped=records[0].number - 1 if records else 0,
            hints=hinting.hints(explained, records, self._num_functions if records else 1),
        )

    def clear(self) -> None:
        """Drop all records."""
        for source in {record.key.source for record in self._history.records()}:
            DERIVED_PROGRAMS.drop(source)
        self._history.clear()

    @property
    def _num_functions(self) -> int:
        return self._site[0].num_functions

    def _explain(self, records: Sequence[MissRecord], index: int) -> "explaining.Explanation":
        site, number = self._site
        earlier = site.calls_before(number)
        return explaining.explain_record(records[index], records[:index], earlier)


def _level() -> int:
    """Return WARNING where a setting enables these lines alone: they need no handler then."""
    enabled = explains_cache_misses() or logging.NOTSET < LOGGER.level <= logging.INFO
    return logging.WARNING if enabled else logging.INFO
