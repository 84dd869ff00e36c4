"""Programs compiled as far as their schedule, for tests that need no code."""

from collections.abc import Callable
from typing import Any

from tests.predict.preflight.programs import compile_stage
from xlashard import pjit
from xlashard.analysis.programs.program import Compilation


def scheduled(function: Callable[..., Any], *arguments: Any, **how: Any) -> Compilation:
    """Return a program without its code, whose generation takes a hundred times as long.

    Args:
        function: The function.
        *arguments: Shapes with shardings.
        **how: Further arguments of `pjit`.
    """
    return compile_stage(pjit(function, **how).lower(*arguments), estimate=True)
