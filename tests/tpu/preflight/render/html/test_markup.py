"""Elements escape their texts."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard.tpu.preflight.render.html.markup import Html, join, printable, tag, user_text


class Reader(HTMLParser):
    """Parser that collects the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.feed(html)
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(attrs)


@pytest.mark.slow
@given(st.text())
def test_any_text_is_read_as_it_is_written(text: str) -> None:
    read = Reader(tag("p", text, title=text))
    assert read.tags == ["p"]
    assert read.text == printable(text)
    assert read.attributes == {"title": printable(text)}


@given(st.text())
def test_a_user_text_loses_nothing_where_it_may_break(text: str) -> None:
    read = Reader(user_text(text, "code"))
    assert read.text == printable(text)
    assert read.attributes["dir"] == "auto"
    assert set(read.tags) <= {"code", "wbr"}


@given(st.text())
def test_every_text_can_be_written_in_utf_8(text: str) -> None:
    assert printable(text + "\udcff").encode("utf-8").endswith(b"\\udcff")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("états/שלום", "états/שלום"),
        ("a\u202eb", r"a\u202eb"),
        ("a\0b\x1b[1m", r"a\x00b\x1b[1m"),
        ("one\ntwo", "one\ntwo"),
        ("no\u00a0break", "no\u00a0break"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_paths_may_break_between_their_steps() -> None:
    assert user_text("a/b['c']['d']") == "<bdi>a/<wbr>b[&#x27;c&#x27;]<wbr>[&#x27;d&#x27;]</bdi>"
    assert user_text("a/b.py:3", "code", whole=True) == '<code dir="auto">a/b.py:3</code>'


def test_attributes_are_left_out_bare_or_written() -> None:
    written = tag("input", value=0, checked=True, hidden=False, title=None, aria_label="<x>")
    assert written == '<input value="0" checked aria-label="&lt;x&gt;">'
    assert tag("rect", x=1.50, y=2 / 3, class_="a") == '<rect x="1.5" y="0.67" class="a"></rect>'


def test_elements_are_not_escaped_again() -> None:
    assert join("<", Html("<b>"), ["&", [tag("i", None)]]) == "&lt;<b>&amp;<i></i>"
