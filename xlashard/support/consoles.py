"""Standard output and error: characters that they can encode, widths, and long work in progress."""

import codecs
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TextIO

from xlashard.support.background import repeating
from xlashard.support.formatting import encodes_all, in_ascii, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

PIPE_WIDTH = 200
"""Columns of what no terminal shows: rows of tables are not folded, and a page is not too wide."""

_LINE_INTERVAL = 15.0
_SPINNER_INTERVAL = 1.0
"""Seconds between two lines about long work, and between two updates in a terminal."""

_ERRORS = "xlashard.in_ascii"


def _encode_in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Stand in for the characters that a stream can't encode, as `codecs.register_error` asks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return in_ascii(error.object[error.start : error.end]), error.end


codecs.register_error(_ERRORS, _encode_in_ascii)


def replace_unencodable() -> None:
    """Let standard output and error write in ASCII what a terminal cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a stream of another class
            stream.reconfigure(errors=_ERRORS)  # pyright: ignore[reportAttributeAccessIssue]


def print_json(document: Any) -> None:
    """Print JSON, with escapes where standard output can't encode a character."""
    print(json.dumps(document, indent=2, ensure_ascii=not encodes_all(sys.stdout)))


def make_console(*, file: TextIO | None = None, stderr: bool = False) -> "Console":
    """Return a console of rich, wide enough for whole rows where no terminal shows them.

    Args:
        file: The file; None for standard output.
        stderr: Whether to print to standard error.
    """
    from rich.console import Console  # takes long to import, and few need it

    console = Console(file=file, stderr=stderr, highlight=False)
    if not (console.is_terminal or console.is_jupyter or os.environ.get("COLUMNS")):
        console.width = PIPE_WIDTH
    return console


_shown: list[str] = []
"""Work in progress that is shown: the outermost, of which later work is a part."""


@contextmanager
def show_progress(
    what: str, *, spinner: bool = True, lines: bool = False
) -> Iterator[Callable[[], None]]:
    """Show long work inside the block, unless work around it is shown.

    Args:
        what: The work, such as `compiling step for v5p-128`.
        spinner: Whether a terminal shows a spinner and the elapsed time.
        lines: Whether a line appears every 15 s where standard error is no terminal.

    Yields:
        A function that shows nothing more, before the end of the block.
    """
    is_shown_in_terminal = is_terminal(sys.stderr)
    if _shown or not (spinner if is_shown_in_terminal else lines):
        yield lambda: None
        return
    from rich.text import Text

    what, started = printable(what), time.monotonic()
    status = _make_status(what) if is_shown_in_terminal else None

    def show() -> None:
        text = f"{what}: {time.monotonic() - started:.0f} s"
        if status is None:
            print(text, file=sys.stderr, flush=True)
        else:
            status.update(Text(text))

    _shown.append(what)
    interval = _LINE_INTERVAL if status is None else _SPINNER_INTERVAL
    try:
        with repeating(show, interval, "progress") as stop_showing:

            def hide() -> None:
                stop_showing()
                if status is not None:
                    status.stop()

            with status or nullcontext():
                yield hide
    finally:
        _shown.remove(what)


def _make_status(what: str) -> "Status":
    from rich.text import Text

    console = make_console(stderr=True)
    # The dots of the usual spinner are no ASCII.
    return console.status(Text(what), spinner="line" if console.options.ascii_only else "dots")


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a terminal shows a stream."""
    with suppress(ValueError):  # closed
        return stream is not None and stream.isatty()
    return False
