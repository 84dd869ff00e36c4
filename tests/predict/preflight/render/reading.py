"""Readers of the tables and lists of a page."""

import json

from tests.browser import Tab


def column(tab: Tab, place: str, name: str, *, what: str = "value") -> list[str]:
    """Return the values of a column by its name, of visible rows only; "" where it is left out."""
    return tab.run(
        f"[...document.querySelectorAll({json.dumps(f'{place} tbody tr')})]"
        f".filter(r => r.checkVisibility()).map(r => [...r.cells].find(c => c.dataset.label === "
        f"{json.dumps(name)})?.dataset.{what} ?? '')"
    )


def press(tab: Tab, place: str, name: str) -> None:
    """Click on the head of a column by its name."""
    tab.run(
        f"[...document.querySelectorAll({json.dumps(f'{place} th button')})]"
        f".find(b => b.innerText.startsWith({json.dumps(name)})).click()"
    )


def numbers(tab: Tab, selector: str, key: str, inside: str = "[data-value]") -> dict[str, float]:
    """Return the numbers of a list by name."""
    return tab.run(
        f"Object.fromEntries([...document.querySelectorAll({json.dumps(selector)})].map(e =>"
        f" [e.dataset.{key}, Number(e.querySelector({json.dumps(inside)}).dataset.value)]))"
    )
