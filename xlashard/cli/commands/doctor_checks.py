"""Checks of ``xlashard doctor`` as values, and the lines that show them."""

import shutil
import textwrap
from typing import Literal, NamedTuple

from xlashard.support.formatting import printable

PREFIXES = ("XLASHARD_", "JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_VISIBLE_", "NCCL_")
"""Prefixes of the variables that xlashard, JAX, XLA, libtpu and NCCL read."""


class Check(NamedTuple):
    """Result of one check.

    Attributes:
        subject: What was checked.
        status: `"ok"`, `"note"` for what may be intended, or `"fail"`.
        observed: What was found.
        advice: What to do; empty if nothing.
    """

    subject: str
    status: Literal["ok", "note", "fail"]
    observed: str
    advice: str = ""


def shown(check: Check) -> str:
    """Return the lines of a check, as wide as the terminal."""
    width = max(shutil.get_terminal_size((100, 24)).columns, 40)
    indent = 26 if width >= 70 else 6
    lines = []
    for text in filter(None, (check.observed, check.advice and f"→ {check.advice}")):
        lines += textwrap.wrap(
            printable(text), width - indent, break_long_words=False, break_on_hyphens=False
        )
    head = f"{check.status.upper() if check.status == 'fail' else check.status:<6}{check.subject}"
    if len(head) >= indent:
        lines.insert(0, "")
    return "\n".join(
        f"{head:<{indent}}{line}".rstrip() if not number else f"{'':<{indent}}{line}"
        for number, line in enumerate(lines)
    )
