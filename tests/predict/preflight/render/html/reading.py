"""Readers of the tables and lists of a page."""

import json

from tests.browser import Tab


def column(tab: Tab, place: str, number: int, *, what: str = "value") -> list[str]:
    """Return the values of a column, of visible rows only."""
    return tab.run(
        f"[...document.querySelectorAll({json.dumps(f'{place} tbody tr')})]"
        f".filter(r => r.checkVisibility()).map(r => r.cells[{number}].dataset.{what})"
    )


def numbers(tab: Tab, selector: str, key: str, inside: str = "[data-value]") -> dict[str, float]:
    """Return the numbers of a list by name."""
    return tab.run(
        f"Object.fromEntries([...document.querySelectorAll({json.dumps(selector)})].map(e =>"
        f" [e.dataset.{key}, Number(e.querySelector({json.dumps(inside)}).dataset.value)]))"
    )
