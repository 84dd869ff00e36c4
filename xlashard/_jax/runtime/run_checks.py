"""Check the runs of programs while a setting of JAX forbids runs, NaN or infinity.

jaxlib's dispatcher runs repeat calls without Python, and JAX's own hook for their results has
neither the name of the function nor of the result, and calls the function again with arguments that
may be donated. Therefore `jax_debug_nans` and `jax_debug_infs` are part of the dispatch key: while
one is set, or `jax_no_execution`, every call enters Python.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from xlashard._jax.private import api, lib_jax, xc
from xlashard._jax.runtime.global_state import dispatch_flag, follow_settings, hook_before
from xlashard._jax.runtime.transfer import copy_to, split
from xlashard.errors import ExecutionError, NonFiniteError
from xlashard.support.lazily import dataclass


@lru_cache(maxsize=1)
def find_check_flag() -> Any:
    """Return the flag that is on while any run has to be checked."""
    return dispatch_flag("xlashard_checks_runs")


def _list_nan_flags() -> tuple[Any, ...]:
    return jax.debug_nans, jax.debug_infs


def checks_runs() -> bool:
    """Return True if runs are forbidden, or results have to be checked for NaN or infinity."""
    return find_check_flag().value


def check_may_run(name: str) -> None:
    """Refuse to run a program while `jax_no_execution` is on.

    Args:
        name: The function.

    Raises:
        ExecutionError: While it is on.
    """
    if jax.config.jax_no_execution:
        raise ExecutionError(
            f"{name} would run, which jax.no_execution forbids: call it outside of that block, or "
            f"compile it there by {name}.lower(...).compile()"
        )


class NonFinite:
    """The non-finite values that the flags forbade when this object was created."""

    def __init__(self) -> None:
        self._tests = [
            (kind, test)
            for kind, test, flag in (
                ("nan", np.isnan, jax.debug_nans),
                ("inf", np.isinf, jax.debug_infs),
            )
            if flag.value
        ]

    def find_kind(self, value: Any) -> str | None:
        """Return `"nan"` or `"inf"` if a local element of a value is forbidden, else None."""
        for piece in _list_local_pieces(value):
            for kind, test in self._tests:
                if test(piece).any():
                    return kind
        return None


def _list_local_pieces(value: Any) -> list[np.ndarray]:
    """Return the local pieces of a floating-point value; no pieces of other values."""
    if type(value) is xc.ArrayImpl:
        if not jax.dtypes.issubdtype(value.dtype, np.inexact):
            return []
        buffers = split(value)[:1] if value.is_fully_replicated else split(value)
        with jax.transfer_guard("allow"):
            return [np.asarray(buffer) for buffer in buffers]
    if isinstance(value, np.ndarray | np.generic | float | complex):
        value = np.asarray(value)
        return [value] if jax.dtypes.issubdtype(value.dtype, np.inexact) else []
    return []


def debug_flag(kind: str) -> str:
    """Return the setting that forbids a kind."""
    return f"jax_debug_{kind}s"


@dataclass(frozen=True, eq=False)
class RunChecks:
    """Checks of the runs of a program while a setting requests them.

    Attributes:
        name: The function.
        results: The name of each result, the last of the raw results.
        donated: For each argument, True if the program may take its buffers.
    """

    name: str
    results: Sequence[str]
    donated: Sequence[bool]

    def run(
        self,
        run: Callable[[Sequence[Any], list[Any]], None],
        handles: Sequence[Any],
        out: list[Any],
    ) -> None:
        """Run the program, check its results, and append them to `out`.

        The program gets copies of donated handles, which are deleted once its results have passed:
        the search for the operation that made a forbidden value needs them.

        Args:
            run: Runs the program on handles, and appends its raw results to a list.
            handles: The arguments of the program.
            out: Receives the list of raw results.

        Raises:
            ExecutionError: If no program may run.
            NonFiniteError: With the first result that has a forbidden element.
        """
        check_may_run(self.name)
        copies = [
            copy_to(handle, handle.sharding, fresh=True) if gives else handle
            for handle, gives in zip(handles, self.donated, strict=True)
        ]
        raw: list[Any] = []
        run(copies, raw)
        forbidden, first = NonFinite(), len(raw[0]) - len(self.results)
        for result, name in zip(raw[0][first:], self.results, strict=True):
            kind = forbidden.find_kind(result)
            if kind is not None:
                raise NonFiniteError(
                    f"{name} holds {kind}, which {debug_flag(kind)} forbids: call the function "
                    "inside `with jax.disable_jit():` to stop at the operation that makes it",
                    result=name,
                    kind=kind,
                )
        out.extend(raw)
        for handle, copy in zip(handles, copies, strict=True):
            if copy is not handle and copy.is_deleted():
                handle.delete()


@contextmanager
def skip_result_checks() -> Iterator[None]:
    """Disable the checks of results within a block."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def watch_flags() -> None:
    """Make the settings part of the dispatch key."""
    follow_settings(find_check_flag(), (*_list_nan_flags(), jax.no_execution))
    for flag in _list_nan_flags():
        flag._update_thread_local_hook = hook_before(flag._update_thread_local_hook, _set_posthook)


def _set_posthook() -> None:
    """Set JAX's own hook of the thread, which at the end of a block ignores the global flags."""
    unset = all(flag.get_local() is lib_jax.config.unset for flag in _list_nan_flags())
    checking = api._nan_check_posthook if any(flag.value for flag in _list_nan_flags()) else None
    api._post_hook_state.set_local(lib_jax.config.unset if unset else checking)
