"""Elements of HTML and SVG, of which every text is escaped unless it is an element already."""

import re
import unicodedata
from collections.abc import Iterable
from html import escape

type Child = "str | int | Iterable[Child] | None"
type Attribute = str | int | float | bool | None

_VOID = frozenset({"br", "hr", "input", "link", "meta", "wbr"})
_KEPT = "\n\t"
_BREAKS = re.compile(r"(?<=.)[/,](?=.)|\](?=\[)", re.DOTALL)
"""After these a line may end."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """An element.

    Args:
        name: Of the element.
        children: What is in it: elements, texts (which are escaped), lists of these; None for
            nothing.
        attributes: By name, with `_` for `-`, and one more `_` at the end of a word of Python;
            True for one without a value, None or False for one that is left out.

    Example:
        >>> tag("p", "a < b ", tag("b", "so"), class_="note", data_value=1)
        '<p class="note" data-value="1">a &lt; b <b>so</b></p>'
    """
    written = "".join(_attributes(attributes))
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Elements and texts, one after the other."""
    return Html("".join(_written(child) for child in children))


def user(text: str, /, name: str = "bdi", *, whole: bool = False, **attributes: Attribute) -> Html:
    """A name or a path that comes from the user's program.

    Whatever direction its letters run in, it changes nothing around it; and it may break where a
    line has to.

    Args:
        text: The text.
        name: Of the element, whose `dir` is set unless it is a `bdi`.
        whole: Whether it breaks nowhere.
        attributes: Of the element.
    """
    if name != "bdi":
        attributes["dir"] = "auto"
    if whole:
        return tag(name, text, **attributes)
    parts: list[Child] = []
    for part in _BREAKS.sub("\\g<0>\0", printable(text)).split("\0"):
        parts += [part, Html("<wbr>")]
    return tag(name, *parts[:-1], **attributes)


def printable(text: str) -> str:
    """The text with what has no glyph, or would turn the text around, written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if _is_printable(c) else c.encode("unicode_escape").decode() for c in text)


def _is_printable(character: str) -> bool:
    if character.isprintable() or character in _KEPT:
        return True
    return unicodedata.category(character) == "Zs"


def _attributes(attributes: dict[str, Attribute]) -> Iterable[str]:
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.removesuffix("_").replace("_", "-")
        yield f" {name}" if value is True else f' {name}="{escape(printable(_plain(value)))}"'


def _plain(value: str | int | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _written(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int):
        return escape(printable(str(child)))
    return "".join(_written(one) for one in child)
