"""Generate one Markdown page per exception class from the catalogue, for the documentation site.

    python -m docs.site_errors FOLDER

It runs every call of the catalogue, ours and JAX's, which takes a few minutes on eight devices
(`make docs` sets them). The pages are part of the site, not of the repository.
"""

import builtins
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from tests.errors.catalogue import JAX_VERSION, SETUP, SHARED, Mistake, Topic, read_topics, wrapped
from tests.errors.comparing import Score, jax_score, our_score
from tests.errors.messages import message
from tests.errors.running import ours, theirs
from xlashard import errors
from xlashard.errors import counted

# Of a message of JAX, so that the pages stay readable.
JAX_CHARACTERS = 600
NO_RUN = "python no-run: the tests run each call by itself"

_INTRODUCTION = """\
# All errors

Every check of xlashard, by exception class: the wrong call, its message, the corrected call, and
JAX's message for the same mistake. The tests run all of these calls. Every class of xlashard is in
`xlashard.errors`, derives from `XlashardError` and from a built-in exception.

Messages are wrapped here. All calls run after these lines, on a machine with eight devices
(emulated: `XLA_FLAGS=--xla_force_host_platform_device_count=8`).
"""


def write_pages(topics: Sequence[Topic], folder: Path) -> None:
    """Write `index.md` and one page per exception class into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    mistakes = [m for topic in topics for m in topic.mistakes]
    pages = {"index": index(topics)}
    pages |= {name: class_page(name, topics) for name in documented(mistakes)}
    for name, lines in pages.items():
        (folder / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")


def documented(mistakes: Sequence[Mistake]) -> list[str]:
    """Return the names of all classes with a page: those that mistakes raise, and all of xlashard.

    The address of a class's page stands below each error of xlashard, whichever check raised it.
    """
    ours = {name for name, kind in vars(errors).items() if isinstance(kind, type) and is_own(kind)}
    return sorted({m.error for m in mistakes} | ours)


def is_own(kind: type) -> bool:
    """Return True for a class of xlashard.errors."""
    return kind.__module__ == errors.__name__ and issubclass(kind, BaseException)


def index(topics: Sequence[Topic]) -> Iterator[str]:
    """Yield the lines of the page that lists the classes and compares with JAX."""
    mistakes = [m for topic in topics for m in topic.mistakes]
    yield _INTRODUCTION
    yield from block(NO_RUN, SETUP + "\n" + SHARED)
    yield "## Classes\n"
    yield "| class | derives from | meaning | mistakes |\n|---|---|---|---|"
    for name in documented(mistakes):
        count = sum(m.error == name for m in mistakes)
        yield f"| [`{name}`]({name}.md) | {_bases(name)} | {_meaning(name)} | {count} |"
    yield ""
    yield "## Compared with JAX\n"
    yield from _comparison(mistakes)


def class_page(name: str, topics: Sequence[Topic]) -> Iterator[str]:
    """Yield the lines of the page of one exception class."""
    yield f"# {name}\n\n{_meaning(name)}\n"
    if not any(m.error == name for topic in topics for m in topic.mistakes):
        yield "The catalogue has no call that raises it.\n"
    for topic in topics:
        chosen = [m for m in topic.mistakes if m.error == name]
        if not chosen:
            continue
        yield f"## {topic.title}\n\n{topic.about}\n"
        if topic.setup:
            yield "Setup of these calls, after the one of the [index](index.md):\n"
            yield from block(NO_RUN, topic.setup)
        for mistake in chosen:
            yield f"### {mistake.title}\n"
            yield from entry(mistake, message(mistake))
            yield from _jax_entry(mistake)


def entry(mistake: Mistake, text: str) -> Iterator[str]:
    """Yield the wrong call of a mistake, its message and the corrected call."""
    yield from block(NO_RUN, mistake.wrong)
    yield from block("text", text)
    yield "Write:\n"
    yield from block(NO_RUN, mistake.right)


def block(info: str, text: str) -> Iterator[str]:
    """Yield a fenced block."""
    yield f"```{info}\n{text.strip()}\n```\n"


def shortened(text: str) -> str:
    """Cut a message of JAX to its beginning, without stack traces."""
    text = text.partition("\n=== Source Location Trace")[0].rstrip()
    # The frames are those of the process that runs the call: pytest, or this module.
    text = re.sub(r"(?m)^Traceback \(most recent call last\):\n(?: .*\n?)+", "[...]\n", text)
    if len(text) <= JAX_CHARACTERS:
        return text
    return text[:JAX_CHARACTERS].rsplit(" ", 1)[0] + " [...]"


def _meaning(name: str) -> str:
    kind = getattr(errors, name, None)
    if kind is None:
        return "Python's own class, required by one of its protocols."
    return (kind.__doc__ or "").partition("\n")[0]


def _bases(name: str) -> str:
    """List the built-in classes that a class of xlashard derives from."""
    kind = getattr(errors, name, None)
    if kind is None:
        return "built-in"
    plain = {"Exception", "BaseException", "object", "Warning"}
    known = [base.__name__ for base in kind.__mro__ if hasattr(builtins, base.__name__)]
    return ", ".join(f"`{base}`" for base in known if base not in plain)


def _comparison(mistakes: Sequence[Mistake]) -> Iterator[str]:
    both = [m for m in mistakes if not m.no_jax]
    mine = [our_score(m, ours(m)) for m in both]
    its = [jax_score(m, theirs(m)) for m in both]
    number = counted(len(both), "mistake")
    yield f"{number} of {len(mistakes)} can be made with JAX {jax.__version__} too.\n"
    yield "| | xlashard | JAX |\n|---|---|---|"
    for words, field in (
        ("raises or warns", "refused"),
        ("names the place", "place"),
        ("gives all numbers and names", "facts"),
        ("shows the correction", "advice"),
        ("all of these", "is_whole"),
    ):
        yield f"| {words} | {_count(mine, field)} | {_count(its, field)} |"
    if jax.__version__ != JAX_VERSION:
        yield f"\nThe catalogue describes the messages of JAX {JAX_VERSION}."


def _count(scores: Sequence[Score], field: str) -> int:
    return sum(getattr(score, field) for score in scores)


def _jax_entry(mistake: Mistake) -> Iterator[str]:
    if mistake.no_jax:
        yield f"JAX has no such check: {mistake.no_jax}.\n"
        return
    outcome = theirs(mistake)
    if not outcome.kind:
        yield "JAX accepts this call.\n"
        return
    missing = jax_score(mistake, outcome).missing()
    summary = f"JAX's message, which lacks {missing}" if missing else "JAX's message"
    yield f"<details><summary>{summary}</summary>\n"
    if mistake.jax:
        yield from block(NO_RUN, mistake.jax)
    yield from block("text", wrapped(f"{outcome.kind}: {shortened(outcome.text)}"))
    yield "</details>\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        tempfile.tempdir = temporary
        write_pages(read_topics(), Path(sys.argv[1]))
