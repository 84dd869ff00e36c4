"""Tables of docs/how/performance.md, from the figures that the benchmarks measured.

    python -m benchmarks._page RESULTS_FOLDER [NAME ...]

It copies the medians and ratios of the benchmarks' JSON files into `benchmarks/figures.json`, from
which the site is built. On the page, `{{tables NAME}}` stands for all tables of a benchmark,
`{{environment}}` for the machine and versions, and `{{NAME: table: candidate: KEY}}` for one
figure, where KEY is `ratio` (to the baseline) or `floor_ratio` (to the floor candidate).
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import format_quantity, format_seconds

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how" / "performance.md"
FIGURES = Path(__file__).with_name("figures.json")
NOT_MEASURED = "not measured"

_MARKER = re.compile(r"\{\{([^{}]+)\}\}")

type Results = Mapping[str, Mapping[str, Any]]
"""JSON results of each benchmark, by benchmark name."""


def read_results(folder: Path) -> dict[str, Any]:
    """Return the JSON files of a folder, by benchmark name."""
    read = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {result["benchmark"]: result for result in read}


def render(template: str, results: Results) -> str:
    """Render the page.

    Args:
        template: Text of the page, with markers in place of figures.
        results: JSON output of the benchmarks.

    Raises:
        ValueError: A marker is unknown.
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


def marked(template: str) -> list[str]:
    """Return the benchmarks whose tables a template shows."""
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
    lines = _growth_lines(title, rows) if "row" in rows[0] else _lines(title, rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _growth_lines(title: str, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of a growth table, whose rows compare JAX and xlashard at several sizes."""
    theirs = rows[0]["baseline"]
    has_floor = any(row.get("floor_ratio") is not None for row in rows)
    headings = [title, "size", theirs, "xlashard", "ratio", *["floor"] * has_floor]
    headings += ["growth", f"{theirs}'s", "goal", "met"]
    lines = [headings, ["---", "---", *["---:"] * (len(headings) - 4), "---", "---"]]
    shown = None
    for row in rows:
        growth = [row["growth"], row["baseline_growth"]]
        floor = row.get("floor_ratio")
        lines.append(
            [
                "" if row["row"] == shown else row["row"],
                row["size"],
                format_quantity(row["baseline_median_s"], row["unit"]),
                format_quantity(row["median_s"], row["unit"]),
                factor(row["ratio"]),
                *["" if floor is None else factor(floor)] * has_floor,
                *("" if exponent is None else f"{exponent:.2f}" for exponent in growth),
                row["goal"],
                "yes" if row["ok"] else "**no**",
            ]
        )
        shown = row["row"]
    return lines


def _lines(title: str, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of a table, whose rows are candidates for the same work."""
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
    return lines


def _figure(result: Mapping[str, Any] | None, table: str, candidate: str, key: str) -> str:
    for found in result["tables"] if result else ():
        for row in found["rows"] if found["title"] == table else ():
            if row["name"] == candidate and row.get(key) is not None:
                return f"{factor(row[key])} ×"
    return f"({NOT_MEASURED})"


def factor(ratio: float) -> str:
    """Format a ratio with its significant digits."""
    if ratio >= 10:
        return f"{ratio:,.0f}"
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def figures(results: Results) -> dict[str, Any]:
    """Return the parts of the benchmarks' results that the page shows."""
    shown = ("name", "baseline", "floor", "median_s", "ratio", "floor_ratio", "goal", "ok")
    shown += ("row", "size", "unit", "baseline_median_s", "growth", "baseline_growth")
    return {
        name: {
            "benchmark": name,
            "environment": result["environment"],
            "tables": [
                {
                    "title": table["title"],
                    "rows": [
                        {key: _rounded(row[key]) for key in shown if key in row}
                        for row in table["rows"]
                    ],
                }
                for table in result["tables"]
            ],
        }
        for name, result in results.items()
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def read_figures() -> dict[str, Any]:
    """Return the figures of the last measurement."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def write_figures(measured: Mapping[str, Any]) -> None:
    """Keep figures, one row of a table in a line."""
    text = json.dumps(measured, ensure_ascii=False, sort_keys=True)
    text = re.sub(r'(?=\{"(?:baseline|environment|rows)")', "\n", text)
    FIGURES.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Keep the figures of the benchmarks that ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="folder of the benchmarks' JSON files")
    parser.add_argument("names", nargs="*", help="benchmarks that ran; all by default")
    options = parser.parse_args()
    results = read_results(options.results)
    if options.names:
        results = {name: result for name, result in results.items() if name in options.names}
    before = read_figures() if FIGURES.exists() else {}
    write_figures(before | figures(results))
    print(f"wrote {FIGURES}")


if __name__ == "__main__":
    main()
