"""`jax_debug_nans` and `jax_debug_infs`: whether results are looked through, and looking.

Repeat calls go from jaxlib's dispatcher to PJRT and back, and nobody looks at their results but a
hook of JAX, which knows neither the function nor the result, and calls the function again though
its arguments may be donated by then. So the flags are made part of what the dispatcher tells calls
apart by: under them every call comes to Python, and without them none does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import api, config
from jax._src.lib import _jax

from xlashard._jax.transfer import HandleType, copy_to, split
from xlashard.errors import NonFiniteError

_unset = _jax.config.unset
_flags = (config.debug_nans, config.debug_infs)
_in_dispatch = _jax.config.Config("xlashard_checks_results", False, include_in_jit_key=True)


def checks_results() -> bool:
    """True if results are to be looked through for NaN or infinity."""
    return config.debug_nans.value or config.debug_infs.value


class Forbidden:
    """What the flags forbid, as they stand when this is made."""

    def __init__(self) -> None:
        self._tests = [
            (kind, test)
            for kind, test, flag in (
                ("nan", np.isnan, config.debug_nans),
                ("inf", np.isinf, config.debug_infs),
            )
            if flag.value
        ]

    def kind_in(self, value: Any) -> str | None:
        """`"nan"` or `"inf"` if this process has such an element of a value, which is forbidden."""
        for piece in _pieces(value):
            for kind, test in self._tests:
                if test(piece).any():
                    return kind
        return None


def _pieces(value: Any) -> list[np.ndarray]:
    """What this process has of a value of floating-point numbers; nothing of others."""
    if type(value) is HandleType:
        if not jax.dtypes.issubdtype(value.dtype, np.inexact):
            return []
        buffers = split(value)[:1] if value.is_fully_replicated else split(value)
        with jax.transfer_guard("allow"):
            return [np.asarray(buffer) for buffer in buffers]
    if isinstance(value, np.ndarray | np.generic | float | complex):
        value = np.asarray(value)
        return [value] if jax.dtypes.issubdtype(value.dtype, np.inexact) else []
    return []


def flag_against(kind: str) -> str:
    """The setting that forbids a kind."""
    return f"jax_debug_{kind}s"


def run_checked(
    run: Callable[[Sequence[Any], list[Any]], None],
    handles: Sequence[Any],
    names: Sequence[str],
    donated: Sequence[bool],
    out: list[Any],
) -> None:
    """Run a program, check its results, and append them to `out`.

    The program gets copies of donated handles, which are deleted once its results have passed: the
    search for the operation that made a forbidden value needs them.

    Args:
        run: Runs the program on handles, and appends its raw results to a list.
        handles: The arguments of the program.
        names: The name of each result, the last of the raw results.
        donated: For each argument whether the program may take its buffers.
        out: Receives the list of raw results.

    Raises:
        NonFiniteError: With the first result that holds something forbidden.
    """
    given = [
        copy_to(handle, handle.sharding, fresh=True) if gives else handle
        for handle, gives in zip(handles, donated, strict=True)
    ]
    raw: list[Any] = []
    run(given, raw)
    forbidden = Forbidden()
    for result, name in zip(raw[0][len(raw[0]) - len(names) :], names, strict=True):
        kind = forbidden.kind_in(result)
        if kind is not None:
            raise NonFiniteError(
                f"{name} holds {kind}, which {flag_against(kind)} forbids: call the function "
                "inside `with jax.disable_jit():` to stop at the operation that makes it",
                result=name,
                kind=kind,
            )
    out.extend(raw)
    for handle, copy in zip(handles, given, strict=True):
        if copy is not handle and copy.is_deleted():
            handle.delete()


@contextmanager
def unchecked() -> Iterator[None]:
    """A block in which results are what they are."""
    with config.debug_nans(False), config.debug_infs(False):
        yield


def watch_flags() -> None:
    """Lets the dispatcher tell calls apart by the flags."""
    for flag in _flags:
        flag._add_hooks(
            _both(flag._update_global_hook, _follow_global),
            _both(flag._update_thread_local_hook, _follow_thread),
        )


def _both(first: Any, then: Callable[[], None]) -> Callable[[Any], None]:
    def hook(value: Any) -> None:
        first(value)
        then()

    return hook


def _follow_global() -> None:
    _in_dispatch.set_global(any(flag.get_global() for flag in _flags))


def _follow_thread() -> None:
    """Also mends JAX's hook: at the end of a `with` block it would ignore the global flags."""
    if all(flag.get_local() is _unset for flag in _flags):
        _in_dispatch.set_local(_unset)
        api._post_hook_state.set_local(_unset)
        return
    checks = checks_results()
    _in_dispatch.set_local(checks)
    api._post_hook_state.set_local(api._nan_check_posthook if checks else None)
