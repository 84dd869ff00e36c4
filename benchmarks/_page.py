"""Writes docs/performance.md: the words of a template, the figures of the benchmarks' JSON files.

    python -m benchmarks._page RESULTS_FOLDER [PAGE]

In the template, `{{tables NAME}}` stands for all tables of `NAME.json`, `{{environment}}` for what
they were measured on, and `{{NAME: table: candidate: KEY}}` for one figure, where KEY is `ratio`
(to the baseline) or `floor_ratio` (to the least that must be done). What was not measured is said
to be so.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import format_seconds

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_name("performance.md")
PAGE = ROOT / "docs" / "performance.md"
NOT_MEASURED = "not measured"

_MARKER = re.compile(r"\{\{([^{}]+)\}\}")

type Results = Mapping[str, Mapping[str, Any]]
"""By the name of a benchmark what it wrote as JSON."""


def read_results(folder: Path) -> dict[str, Any]:
    """The JSON files of a folder, by the names of their benchmarks."""
    read = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {result["benchmark"]: result for result in read}


def render(template: str, results: Results) -> str:
    """The page.

    Args:
        template: Its words, with markers where figures go.
        results: What the benchmarks wrote.

    Raises:
        ValueError: A marker that means nothing.
    """

    def replaced(found: re.Match[str]) -> str:
        words = found[1].strip()
        if words == "environment":
            return _environment(results)
        if words.startswith("tables "):
            return _tables(results.get(words.removeprefix("tables ").strip()))
        parts = [part.strip() for part in words.split(": ")]
        if len(parts) != 4 or parts[3] not in ("ratio", "floor_ratio"):
            raise ValueError(
                f"the template has {found[0]}: write {{{{tables NAME}}}}, {{{{environment}}}} or "
                "{{NAME: table: candidate: ratio}} (or floor_ratio)"
            )
        return _figure(results.get(parts[0]), *parts[1:])

    return _MARKER.sub(replaced, template)


def fixed_parts(template: str) -> list[str]:
    """What of a template is on every page made from it, in order."""
    return [part for part in _MARKER.split(template)[::2] if part.strip()]


def marked(template: str) -> list[str]:
    """The benchmarks whose tables a template shows."""
    words = (found.strip() for found in _MARKER.findall(template))
    return [word.removeprefix("tables ").strip() for word in words if word.startswith("tables ")]


def _environment(results: Results) -> str:
    seen = []
    for result in results.values():
        found = result["environment"]
        text = (
            f"jax {found['jax']}, jaxlib {found['jaxlib']}, NumPy {found['numpy']}, Python "
            f"{found['python']}, {found['processors']} processors ({found['machine']})"
        )
        if text not in seen:
            seen.append(text)
    return "; ".join(seen) or NOT_MEASURED


def _tables(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return f"({NOT_MEASURED})"
    return "\n\n".join(_table(table["title"], table["rows"]) for table in result["tables"])


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    floor = next((row["floor"] for row in rows if row.get("floor")), None)
    headings = [title, "median", f"× {rows[0]['baseline']}"]
    headings += [] if floor is None else [f"× {floor}"]
    headings += ["goal", "met"]
    lines = [headings, ["---", *["---:"] * (len(headings) - 3), "---", "---"]]
    for row in rows:
        is_baseline = row["name"] == row["baseline"]
        cells = [row["name"], format_seconds(row["median_s"])]
        cells.append("" if is_baseline else factor(row["ratio"]))
        if floor is not None:
            cells.append("" if row["name"] == floor else factor(row["floor_ratio"]))
        cells += [row["goal"] or "", {None: "", True: "yes", False: "**no**"}[row["ok"]]]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _figure(result: Mapping[str, Any] | None, table: str, candidate: str, key: str) -> str:
    for found in result["tables"] if result else ():
        for row in found["rows"] if found["title"] == table else ():
            if row["name"] == candidate and row[key] is not None:
                return f"{factor(row[key])} ×"
    return f"({NOT_MEASURED})"


def factor(ratio: float) -> str:
    """A ratio with as many digits as mean something."""
    if ratio >= 10:
        return f"{ratio:,.0f}"
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="folder of the benchmarks' JSON files")
    parser.add_argument("page", type=Path, nargs="?", default=PAGE, help="the file to write")
    given = parser.parse_args()
    page = render(TEMPLATE.read_text(encoding="utf-8"), read_results(given.results))
    given.page.write_text(page, encoding="utf-8")
    print(f"wrote {given.page}")


if __name__ == "__main__":
    main()
