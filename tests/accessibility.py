"""Violations that axe-core finds in a page: contrast, names of controls, landmarks, ids."""

from importlib.resources import files
from typing import Any

from tests.browser import Tab

_RUN = """axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations
    .filter(each => ["serious", "critical"].includes(each.impact))
    .flatMap(each => each.nodes.map(node => [
        each.id, node.target.join(" "), node.html.slice(0, 200),
        (node.any[0] ?? node.all[0] ?? node.none[0])?.message ?? "",
    ])))"""


def find_violations(tab: Tab) -> list[str]:
    """Return the serious violations in a page: rule, element, and what is wrong with it."""
    tab.run(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8") + "; 0")
    found: list[list[Any]] = tab.run(_RUN)
    return [" · ".join(each) for each in found]
