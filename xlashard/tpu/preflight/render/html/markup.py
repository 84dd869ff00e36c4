"""Escaped HTML and SVG elements, and tables that sort and filter."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

type Child = "str | int | Iterable[Child] | None"
type Attribute = str | int | float | bool | None

_VOID = frozenset({"br", "hr", "input", "link", "meta", "wbr"})
_KEPT = "\n\t"
_BREAKS = re.compile(r"(?<=.)[/,](?=.)|\](?=\[)", re.DOTALL)
"""Positions where a line may break."""


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """Return an element.

    Args:
        name: Name of the element.
        children: Elements, texts (which are escaped), and nested lists of them; None is ignored.
        attributes: Attributes by name, with `_` for `-`, and a trailing `_` after Python keywords.
            True writes no value; None and False omit the attribute.

    Example:
        >>> tag("p", "a < b ", tag("b", "so"), class_="note", data_value=1)
        '<p class="note" data-value="1">a &lt; b <b>so</b></p>'
    """
    written = "".join(_attributes(attributes))
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Concatenate elements and texts."""
    return Html("".join(_written(child) for child in children))


def user_text(
    text: str, /, name: str = "bdi", *, whole: bool = False, **attributes: Attribute
) -> Html:
    """Return an element for text from the user's program, such as a path.

    The text is isolated from its surroundings for bidirectional text, and may break after
    separators.

    Args:
        text: The text.
        name: Name of the element; elements other than `bdi` get `dir="auto"`.
        whole: Whether line breaks are suppressed.
        attributes: Attributes of the element.
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
    """Return the text with unprintable and bidirectional control characters escaped."""
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


MOST_ROWS = 1000
"""Maximum number of table rows, which keeps browsers responsive."""


@dataclass(frozen=True)
class TableColumn:
    """Column of a table.

    Attributes:
        name: Header.
        is_number: Whether cells are right-aligned numbers, sorted in descending order first.
        title: Tooltip of the header.
    """

    name: str
    is_number: bool = False
    title: str = ""


@dataclass(frozen=True)
class TableCell:
    """Cell of a table.

    Attributes:
        shown: Content.
        value: Sort key.
    """

    shown: Child
    value: str | int | float


@dataclass(frozen=True)
class TableRow:
    """Row of a table.

    Attributes:
        cells: One cell per column.
        search: Text for the text filter.
        keys: Values for the other filters, by name; several values separated by `|`.
        kind: CSS class.
    """

    cells: Sequence[TableCell]
    search: str
    keys: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""


def table(
    label: str,
    columns: Sequence[TableColumn],
    rows: Sequence[TableRow],
    sums: Sequence[tuple[str, str, Sequence[float]]] = (),
) -> Html:
    """Return a table that sorts by any column.

    Args:
        label: Label of the table.
        columns: Columns.
        rows: Rows in initial order; rows beyond `MOST_ROWS` are counted.
        sums: Sums over the filtered rows: label, number format, and one number per row.
    """
    shown = rows[:MOST_ROWS]
    head = tag("tr", [_head(column) for column in columns], role="row")
    body = [_row(row, columns, [s[2][n] for s in sums]) for n, row in enumerate(shown)]
    made = tag(
        "table",
        tag("caption", label, class_="unseen"),
        tag("thead", head, role="rowgroup"),
        tag("tbody", body, role="rowgroup"),
        role="table",
        class_="sorts",
        data_sums="|".join(f"{word}:{way}" for word, way, _ in sums) or None,
    )
    left_out = len(rows) - len(shown)
    more = tag("p", f"and {left_out:,} more, in the report's JSON", class_="note")
    return join(
        tag("div", made, class_="scrolls", tabindex=0, role="region", aria_label=label),
        more if left_out else None,
    )


def filters(label: str, choices: Mapping[str, Iterable[str]], placeholder: str) -> Html:
    """Return the filter fields of the following table, hidden without scripts.

    Args:
        label: Label of the filtered rows.
        choices: Values by key of the rows.
        placeholder: Placeholder of the text field.
    """
    search = tag(
        "input",
        type="search",
        placeholder=placeholder,
        aria_label=f"Filter {label} by text",
        autocomplete="off",
        spellcheck="false",
    )
    return tag(
        "div",
        search,
        [_choice(label, name, values) for name, values in choices.items()],
        tag("output", class_="count", role="status"),
        class_="filters needs-script",
        role="search",
        aria_label=f"Filter {label}",
    )


def _choice(label: str, name: str, values: Iterable[str]) -> Html:
    options = [tag("option", value, value=value) for value in values]
    return tag(
        "select",
        tag("option", f"any {name}", value=""),
        options,
        data_key=name,
        aria_label=f"Filter {label} by {name}",
    )


def _head(column: TableColumn) -> Html:
    return tag(
        "th",
        tag("button", column.name, type="button", title=column.title or None),
        scope="col",
        role="columnheader",
        class_="number" if column.is_number else None,
        aria_sort="none",
    )


def _row(row: TableRow, columns: Sequence[TableColumn], sums: Sequence[float]) -> Html:
    cells = [
        tag(
            "td",
            cell.shown,
            role="cell",
            class_="number" if column.is_number else None,
            data_label=column.name,
            data_value=repr(cell.value) if isinstance(cell.value, float) else cell.value,
        )
        for cell, column in zip(row.cells, columns, strict=True)
    ]
    return tag(
        "tr",
        cells,
        role="row",
        class_=row.kind or None,
        data_search=row.search,
        data_sums="|".join(map(repr, sums)) or None,
        **{f"data_{name.replace('-', '_')}": value for name, value in row.keys.items()},
    )
