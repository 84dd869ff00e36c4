"""Bytes, operations, shapes, types and tables as people read them."""

import io
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def plain_text(shown: "RenderableType", width: int | None = None) -> str:
    """What rich prints, as wide as is said or else as the terminal, without colours."""
    from rich.console import Console  # takes long to import, and few need it

    width = width or shutil.get_terminal_size((100, 24)).columns
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as printed:
        console.print(shown)
    return "\n".join(line.rstrip() for line in printed.get().rstrip().splitlines())


def in_bytes(count: float) -> str:
    """A number of bytes: `3.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def in_flop(count: float) -> str:
    """A number of floating-point operations: `1.8 GFLOP`."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "FLOP" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PFLOP"


def shape_text(shape: Iterable[int]) -> str:
    """Sizes as in `[8,16]`."""
    return f"[{','.join(map(str, shape))}]"


def typed(dtype: object, shape: Iterable[int]) -> str:
    """A type by the name of its dtype and its shape: `float32[8,16]`."""
    return f"{dtype}{shape_text(shape)}"
