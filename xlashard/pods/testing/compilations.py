"""`assert_compiles`: fail if jitted functions are compiled more often than expected."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xlashard.errors import ExpectationError, counted
from xlashard.pods.testing.emulated_devices import check_whole
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

    from xlashard.analysis.recompile import explain_recompile, recompile_report
    from xlashard.core.pjit import cache_miss, compile_log
else:
    # They need private names of JAX, the other assertions don't.
    compile_log = deferred("xlashard.core.pjit.compile_log")
    explain_recompile = deferred("xlashard.analysis.recompile.explain_recompile")
    recompile_report = deferred("xlashard.analysis.recompile.recompile_report")

_SHOWN = 8
"""Functions of which an error has the report."""


def assert_compiles(fun: Any = None, /, *, at_most: int) -> "_GeneratorContextManager[None]":
    """Fail if jitted functions are compiled more often than expected inside of a `with`.

    Compilations of functions of `jax.jit` and of `xlashard.pjit` count, in all threads, also those
    that JAX's persistent cache answers, or that `xlashard.explain` compiles for the next call; not
    the operations that JAX runs outside of `jit`. Nothing is checked after another error.

    As a decorator it checks each call of a function. The pytest plugin has it as a fixture of the
    same name, which checks at the end of the test: `assert_compiles(at_most=1)`.

    Args:
        fun: A function of `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit` that alone
            counts; all functions without it.
        at_most: Largest number of compilations.

    Returns:
        A context manager and decorator, which raises ExpectationError with the report of
        `xlashard.explain_recompile` for each function. It is an `AssertionError`.

    Raises:
        ArgumentError: `fun` is no jitted function, or `at_most` no whole number.

    Example:
        >>> import jax, numpy as np
        >>> double = jax.jit(lambda x: x * 2)
        >>> with assert_compiles(at_most=1):
        ...     for _ in range(3):
        ...         _ = double(np.ones(4))
    """
    with short_tracebacks:
        check_whole("at_most", at_most, 0, "assert_compiles(at_most=2)")
        log = None if fun is None else explain_recompile.find_log(fun, "assert_compiles")
    return _limit_compilations(log, at_most)


@contextmanager
def _limit_compilations(only: "compile_log.CompileLog | None", at_most: int) -> Iterator[None]:
    # By the identity of the record: each stage of a call reports it again, and the numbers of a
    # function begin anew when its cache is cleared.
    misses: dict[int, tuple[compile_log.CompileLog, cache_miss.CacheMiss]] = {}

    def collect(log: "compile_log.CompileLog", miss: "cache_miss.CacheMiss") -> None:
        if only is None or log is only:
            misses[id(miss)] = (log, miss)

    with explain_recompile.watch(), compile_log.report_misses(collect):
        yield
    compiled = [
        pair for pair in misses.values() if pair[1].executable_source in recompile_report.COMPILED
    ]
    if len(compiled) <= at_most:
        return
    with short_tracebacks:
        raise ExpectationError(  # no-catalogue: it has the seconds of each compilation
            f"{counted(len(compiled), 'compilation')}, at most {at_most} expected:\n\n"
            + "\n\n".join(_report_each(compiled))
        )


def _report_each(
    compiled: "Sequence[tuple[compile_log.CompileLog, cache_miss.CacheMiss]]",
) -> Iterator[str]:
    """Yield the report of each function, restricted to its cache misses among some."""
    numbers: dict[compile_log.CompileLog, set[int]] = {}
    for log, miss in compiled:
        numbers.setdefault(log, set()).add(miss.number)
    for log in list(numbers)[:_SHOWN]:
        yield str(_restrict(log.report(), numbers[log]))
    if len(numbers) > _SHOWN:
        yield f"and {counted(len(numbers) - _SHOWN, 'more function')}"


def _restrict(
    report: "recompile_report.RecompileReport", numbers: set[int]
) -> "recompile_report.RecompileReport":
    """Return a report of some cache misses alone."""
    explanations = tuple(e for e in report.explanations if e.number in numbers)
    return replace(report, explanations=explanations, dropped=len(numbers) - len(explanations))
