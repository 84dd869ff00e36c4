"""The templates escape the texts of reports."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard.analysis.report.html_page import make_page_environment, user_text
from xlashard.support.formatting import printable


class Reader(HTMLParser):
    """Parser that collects the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.feed(str(html))
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(attrs)


@pytest.mark.slow
@given(st.text())
def test_escaped_text_parses_back_unchanged(text: str) -> None:
    template = make_page_environment().from_string('<p title="{{ text }}">{{ text }}</p>')
    read = Reader(template.render(text=text))
    assert read.tags == ["p"]
    assert read.text == printable(text)
    assert read.attributes == {"title": printable(text)}


@given(st.text())
def test_line_break_hints_leave_user_text_unchanged(text: str) -> None:
    read = Reader(user_text(text, "code"))
    assert read.text == printable(text)
    assert read.attributes["dir"] == "auto"
    assert set(read.tags) <= {"code", "wbr"}


def test_paths_have_line_break_hints_between_segments() -> None:
    assert user_text("a/b['c']['d']") == "<bdi>a/<wbr>b[&#39;c&#39;]<wbr>[&#39;d&#39;]</bdi>"
    assert user_text("a/b.py:3", "code", whole=True) == '<code dir="auto">a/b.py:3</code>'


def test_escaped_elements_are_not_escaped_twice() -> None:
    template = make_page_environment().from_string("{{ text }}{{ text|text }}")
    assert template.render(text="<&") == "&lt;&amp;<bdi>&lt;&amp;</bdi>"
    tip = user_text("a", "span", title='"<\u202e')
    assert tip == '<span dir="auto" title="&#34;&lt;\\u202e">a</span>'


@pytest.mark.parametrize(("number", "shown"), [(1.50, "1.5"), (2 / 3, "0.67"), (3, "3")])
def test_coordinates_are_rounded(number: float, shown: str) -> None:
    assert make_page_environment().from_string("{{ number|pixels }}").render(number=number) == shown
