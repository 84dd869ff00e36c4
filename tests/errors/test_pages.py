"""The page of common errors, and the generated page of each class."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import site_errors as pages
from tests.errors.catalogue import SETUP, SHARED, Mistake, read_topics, wrapped
from tests.errors.messages import message

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md"
MISTAKES = {mistake.slug: mistake for topic in read_topics() for mistake in topic.mistakes}
# The blocks of an entry stand between `<!-- mistake: SLUG -->` and `<!-- end -->`.
ENTRY = re.compile(r"(?<=<!-- mistake: )(\S+) -->\n\n.*?(?=<!-- end -->)", flags=re.DOTALL)


def with_entries(page: str) -> str:
    """Return the page with the calls of the catalogue and their messages of today."""

    def replaced(found: re.Match[str]) -> str:
        mistake = MISTAKES[found[1]]
        return f"{found[1]} -->\n\n" + "\n".join([*pages.entry(mistake, message(mistake)), ""])

    return ENTRY.sub(replaced, page)


@pytest.mark.devices(8)
def test_page_of_common_errors_is_up_to_date(update_goldens) -> None:
    page = PAGE.read_text(encoding="utf-8")
    if update_goldens:
        PAGE.write_text(with_entries(page), encoding="utf-8")
        return
    assert with_entries(page) == page, "make goldens"


def test_common_errors_are_entries_of_the_catalogue() -> None:
    page = PAGE.read_text(encoding="utf-8")
    slugs = [found[1] for found in ENTRY.finditer(page)]
    assert len(set(slugs)) == len(slugs) == page.count("\n## ") - 1 == 15
    assert set(slugs) <= set(MISTAKES)
    assert not any(MISTAKES[slug].setup for slug in slugs), "the page shows the common setup only"
    assert SETUP + "\n" + SHARED.rstrip() in page


def test_every_class_has_a_page_with_its_mistakes(tmp_path: Path) -> None:
    topics = [topic for topic in read_topics() if topic.name in ("mesh", "reading")]
    pages.write_pages(topics, tmp_path)
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w+)\.md\)", index))
    assert linked == {path.stem for path in tmp_path.glob("*.md")} - {"index"}
    assert {"ResourceError", "MeshError", "DeletedError"} <= linked
    for mistake in _mistakes(topics):
        page = (tmp_path / f"{mistake.error}.md").read_text(encoding="utf-8")
        assert f"### {mistake.title}\n" in page
        assert mistake.wrong.strip() in page and mistake.right.strip() in page
        assert message(mistake) in page


def _mistakes(topics) -> Iterator[Mistake]:
    return (mistake for topic in topics for mistake in topic.mistakes)


@pytest.mark.parametrize("slug", ["a-string-as-an-argument", "a-spec-that-shards-a-scalar"])
def test_an_entry_shows_both_calls_and_the_message(slug: str) -> None:
    mistake = MISTAKES[slug]
    text = "\n".join(pages.entry(mistake, "E: text"))
    assert text.index(mistake.wrong.strip()) < text.index("E: text") < text.rindex("Write:")
    assert mistake.right.strip() in text


def test_lines_are_wrapped_between_words() -> None:
    long = "word " * 40 + "\n  " + "indented " * 20
    lines = wrapped(long).splitlines()
    assert all(len(line) <= 96 for line in lines)
    assert wrapped(long).split() == long.split()
    assert lines[-1].startswith("  indented")


def test_long_jax_messages_are_truncated() -> None:
    assert pages.shortened("short") == "short"
    assert pages.shortened("text\n=== Source Location Trace: ===\nxla/util.h:304") == "text"
    frames = 'text\nTraceback (most recent call last):\n  File "a", line 1\n    f()\nError: why'
    assert pages.shortened(frames) == "text\n[...]\nError: why"
    assert pages.shortened("word " * 200).endswith("word [...]")
