"""`docs/errors.md` says what the code says."""

import re

import jax

from tests.documents import program
from tests.errors.catalogue import read_topics
from tests.errors.page import PAGE, jax_version, shortened, without_jax, wrapped, write_page
from tests.goldens import check_golden


def test_the_page_is_what_the_calls_say(update_goldens) -> None:
    now = write_page(read_topics())
    there = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if not update_goldens and jax_version(there) != jax.__version__:
        # What another version of JAX says is not on the page; what we say is the same.
        assert without_jax(now) == without_jax(there), "as it should be? make docs-errors"
        return
    check_golden(PAGE, now, update=update_goldens, by="make docs-errors")


def test_every_link_of_the_index_leads_to_a_heading() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^### (.+)$", text, flags=re.MULTILINE)
    linked = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", text)
    assert sorted(title for title, _ in linked) == sorted(headings)


def test_the_blocks_are_run_here_and_not_as_one_program() -> None:
    assert not program(PAGE.read_text(encoding="utf-8")).strip()


def test_what_depends_on_jax_can_be_left_out() -> None:
    text = "a\n<!-- jax -->\nb\n<!-- /jax -->\nc\n<!-- jax -->\nd\n<!-- /jax -->\n"
    assert without_jax(text) == "a\nc\n"


def test_lines_are_wrapped_between_words() -> None:
    long = "word " * 40 + "\n  " + "indented " * 20
    lines = wrapped(long).splitlines()
    assert all(len(line) <= 96 for line in lines)
    assert wrapped(long).split() == long.split()
    assert lines[-1].startswith("  indented")


def test_long_messages_of_jax_are_cut() -> None:
    assert shortened("short") == "short"
    assert shortened("said\n=== Source Location Trace: ===\nxla/util.h:304") == "said"
    frames = 'said\nTraceback (most recent call last):\n  File "a", line 1\n    f()\nError: why'
    assert shortened(frames) == "said\n[...]\nError: why"
    assert shortened("word " * 200).endswith("word [...]")
