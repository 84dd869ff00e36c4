"""Writes `docs/errors.md` from the catalogue and from what its calls say."""

import builtins
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from tests.errors.catalogue import SETUP, SHARED, Mistake, Topic
from tests.errors.comparing import Score, jax_score, our_score
from tests.errors.running import ours, theirs
from xlashard import errors
from xlashard.errors import counted

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
WIDTH = 96
# Of what JAX says, so that the page stays readable.
JAX_CHARACTERS = 600

_NO_RUN = "python no-run: the tests run each of these calls by itself"

INTRODUCTION = """\
# Errors

Every check that xlashard makes: a call as a person types it, what xlashard says, the call as it
should be, and what JAX says of the same mistake. The tests run every call on this page, compare
every message with what stands here, and fail where a check of xlashard has no entry; so the page
can't fall behind the code. It is written by `make docs-errors`.

A message names the argument by its path (`state['params']['w']`), gives the numbers, and shows what
to write instead. Every class below is in `xlashard.errors`, derives from `XlashardError`, and is
the built-in exception that fits besides, so that `except ValueError` goes on working.

Messages are wrapped here. All calls stand after these lines, on a machine with eight devices
(without any: `XLA_FLAGS=--xla_force_host_platform_device_count=8`).
"""


def write_page(topics: Sequence[Topic]) -> str:
    """The whole page, with what the installed JAX says."""
    return "\n".join(_lines(topics))


def without_jax(page: str) -> str:
    """The page without what depends on the version of JAX."""
    page = re.sub(r"<!-- jax -->\n.*?<!-- /jax -->\n\n?", "", page, flags=re.DOTALL)
    return page.rstrip() + "\n"


def jax_version(page: str) -> str:
    """The version of JAX whose messages stand on a page."""
    found = re.search(r"What JAX says is from JAX (\S+)\.\n", page)
    return found[1] if found else ""


def _lines(topics: Sequence[Topic]) -> Iterator[str]:
    yield INTRODUCTION
    yield from _block(_NO_RUN, SETUP + "\n" + SHARED)
    yield "## Classes\n"
    yield from _index(topics)
    yield "## Compared with JAX\n"
    yield "<!-- jax -->"
    yield from _comparison([m for topic in topics for m in topic.mistakes])
    yield "<!-- /jax -->\n"
    for topic in topics:
        yield f"## {topic.title}\n"
        yield f"{topic.about}\n"
        if topic.setup:
            yield "The calls of this part stand after these lines, too:\n"
            yield from _block(_NO_RUN, topic.setup)
        for mistake in topic.mistakes:
            yield from _entry(mistake)


def _index(topics: Sequence[Topic]) -> Iterator[str]:
    by_class: dict[str, list[Mistake]] = defaultdict(list)
    for topic in topics:
        for mistake in topic.mistakes:
            by_class[mistake.error].append(mistake)
    yield "| class | is a | what it says |\n|---|---|---|"
    for name in sorted(by_class):
        yield f"| `{name}` | {_bases(name)} | {_meaning(name)} |"
    yield ""
    for name in sorted(by_class):
        count = counted(len(by_class[name]), "mistake")
        yield f"<details><summary><code>{name}</code>: {count}</summary>\n"
        yield from (f"- [{m.title}](#{m.slug})" for m in by_class[name])
        yield "\n</details>\n"


def _meaning(name: str) -> str:
    kind = getattr(errors, name, None)
    if kind is None:
        return "Python's own, where its protocols ask for it."
    return (kind.__doc__ or "").partition("\n")[0]


def _bases(name: str) -> str:
    """The built-in classes that one of ours is besides."""
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
    yield (
        f"Of the {len(mistakes)} mistakes on this page JAX can be given {len(both)}. What its "
        "message has of what ours must have, in whatever words:\n"
    )
    yield "| | xlashard | JAX |\n|---|---|---|"
    for words, field in (
        ("refuses the call or warns", "refused"),
        ("names the place", "place"),
        ("gives all numbers and names", "facts"),
        ("shows what to write", "advice"),
        ("all of these", "is_whole"),
    ):
        yield f"| {words} | {_count(mine, field)} | {_count(its, field)} |"
    yield f"\nWhat JAX says is from JAX {jax.__version__}.\n"


def _count(scores: Sequence[Score], field: str) -> int:
    return sum(getattr(score, field) for score in scores)


def _entry(mistake: Mistake) -> Iterator[str]:
    yield f"### {mistake.title}\n"
    yield from _block(_NO_RUN, mistake.wrong)
    outcome = ours(mistake)
    yield from _block("text", wrapped(f"{outcome.kind}: {outcome.text}"))
    yield "Write:\n"
    yield from _block(_NO_RUN, mistake.right)
    if mistake.no_jax:
        yield f"JAX has no such check: {mistake.no_jax}.\n"
        return
    yield "<!-- jax -->"
    yield from _what_jax_says(mistake)
    yield "<!-- /jax -->\n"


def _what_jax_says(mistake: Mistake) -> Iterator[str]:
    outcome = theirs(mistake)
    if not outcome.kind:
        yield "JAX takes this call without a word.\n"
        return
    missing = jax_score(mistake, outcome).missing()
    summary = f"JAX says, without {missing}" if missing else "JAX says as much"
    yield f"<details><summary>{summary}</summary>\n"
    if mistake.jax:
        yield from _block(_NO_RUN, mistake.jax)
    yield from _block("text", wrapped(f"{outcome.kind}: {shortened(outcome.text)}"))
    yield "</details>\n"


def _block(info: str, text: str) -> Iterator[str]:
    yield f"```{info}\n{text.strip()}\n```\n"


def wrapped(text: str) -> str:
    """Text in lines of the page's width; its own line breaks and indents stay."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        ) or [""]
    return "\n".join(lines)


def shortened(text: str) -> str:
    """What JAX says, up to where it only goes on."""
    text = text.partition("\n=== Source Location Trace")[0].rstrip()
    # The frames are those of whoever runs this: pytest, or a worker of it.
    text = re.sub(r"(?m)^Traceback \(most recent call last\):\n(?: .*\n?)+", "[...]\n", text)
    if len(text) <= JAX_CHARACTERS:
        return text
    return text[:JAX_CHARACTERS].rsplit(" ", 1)[0] + " [...]"
