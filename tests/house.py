"""Measure the package: budgets that tests hold, and figures for a reader to judge.

`python -m tests.house` prints both; `make house` does.
"""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fork_server import python_command
from tests.private_names.names import read_uses
from tests.test_jax_untouched import INSTALLED

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "xlashard"

_LAYOUT = frozenset(
    (
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        tokenize.ENDMARKER,
    )
)
"""Tokens that are no code."""

_PARTICIPLE = re.compile(r"_?[a-z]+ed|_?(held|kept|built|known|shown|given|found|made|read|sent)")

_LONG = 60
"""Lines from which a function counts as long."""

_SMALL, _LARGE = 80, 600
"""Code lines below and above which a file should be part of another one, or several."""


@dataclass
class Source:
    """Counts of a file.

    Attributes:
        path: The file.
        code: Lines of code.
        comments: Lines with a comment.
        functions: Name and number of lines of each function.
    """

    path: Path
    code: int = 0
    comments: int = 0
    functions: list[tuple[str, int]] = field(default_factory=list)

    @property
    def floor(self) -> str:
        """Return the folder of the package in which the file lies."""
        first, *rest = self.path.relative_to(PACKAGE).parts
        return first if rest else "the package's own files"


def read_sources(folder: Path = PACKAGE) -> list[Source]:
    """Read the files of a folder."""
    return [read_source(path) for path in sorted(folder.rglob("*.py"))]


def read_source(path: Path) -> Source:
    """Count lines and functions of a file."""
    text = path.read_text(encoding="utf-8")
    source, code, tree = Source(path), set[int](), ast.parse(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        source.comments += token.type == tokenize.COMMENT
        if token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        code -= set(_list_docstring_lines(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            source.functions.append((node.name, lines))
    source.code = len(code)
    return source


def _list_docstring_lines(node: ast.AST) -> range:
    """Return the lines of the text that describes a module, a class or a function."""
    if not isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ) or not (ast.get_docstring(node, clean=False)):
        return range(0)
    return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


_LOADED = """
import sys
import xlashard
print(sum(name.partition(".")[0] == "xlashard" for name in sys.modules))
"""


def measure_budgets() -> dict[str, int]:
    """Return the number that each budget limits."""
    # Variables of the package are read at import.
    env = {name: text for name, text in os.environ.items() if not name.startswith("XLASHARD_")}
    loaded = subprocess.run(
        [sys.executable, "-c", _LOADED],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=env,
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "modules_at_import": int(loaded.stdout),
        "replaced_in_jax": len(INSTALLED),
        "private_names": len(read_uses()),
        "dependencies": len(project["dependencies"]),
        "code_lines": sum(source.code for source in read_sources()),
    }


def read_budgets() -> dict[str, int]:
    """Return the limits."""
    return tomllib.loads((ROOT / "tests" / "budgets.toml").read_text(encoding="utf-8"))


_WAYS = {
    "`import xlashard`": "",
    "an array on eight devices": "xs.device_put(np.ones((8, 8), np.float32), rows)",
    "the first call of `jit` with 21 donated arrays": "step(arrays)",
    "`explain` of a function of `jax.jit`": "xs.explain(jax.jit(lambda x: x @ x.T), arrays[0])",
    "an estimate for v5e-8": (
        "xs.preflight(lambda x: x @ x.T, arrays[0], topology='v5e-8', estimate=True)"
    ),
}
"""Code of the first things that people do."""

_COUNT = """
import sys
way = "`import xlashard`"
calls, modules = dict.fromkeys({ways!r}, 0), {}
def loaded():
    return sum(name.partition(".")[0] == "xlashard" for name in sys.modules)
def count(frame, event, arg):
    if event == "call" and "/xlashard/" in frame.f_code.co_filename:
        calls[way] += 1
sys.setprofile(count)
import xlashard as xs
sys.setprofile(None)
modules[way] = loaded()
import jax
import numpy as np
mesh = xs.Mesh(np.array(jax.devices()), ("x",))
rows = xs.NamedSharding(mesh, xs.P("x"))
arrays = [xs.device_put(np.ones((8, 8), np.float32), rows) for _ in range(21)]
step = xs.jit(lambda arrays: [x + 1 for x in arrays], donate_argnums=0)
for way, code in {ways!r}.items():
    if code:
        compiled = compile(code, "way", "exec")
        sys.setprofile(count)
        exec(compiled)
        sys.setprofile(None)
        modules[way] = loaded()
print({way: (calls[way], modules[way]) for way in calls})
"""


def count_own_calls() -> dict[str, tuple[int, int]]:
    """Count what runs of the package in what people do first.

    Returns:
        By action the calls of functions of the package, and its modules that are loaded by then.
    """
    done = subprocess.run(
        [*python_command(), "-c", _COUNT.replace("{ways!r}", repr(_WAYS))],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return ast.literal_eval(done.stdout.splitlines()[-1])


def _tables() -> Iterator[Table]:
    """Make the tables of all figures."""
    limits = Table("budget", "now", "at most", title="Budgets")
    for (name, most), now in zip(read_budgets().items(), measure_budgets().values(), strict=True):
        limits.add_row(name, f"{now:,}", f"{most:,}", style="" if now <= most else "red")
    yield limits
    yield _describe_floors(read_sources())
    calls = Table("what is done, in this order", "calls", "modules loaded", title="Own functions")
    for way, (count, modules) in count_own_calls().items():
        calls.add_row(way, f"{count:,}", f"{modules}")
    yield calls


def _describe_floors(sources: list[Source]) -> Table:
    """Make the table of files and names by floor."""
    headings = (
        *("floor", "files", f"< {_SMALL}", f"> {_LARGE}", "code lines", "comments per 100"),
        *("functions", f"> {_LONG} lines", "names of one word", "participles"),
    )
    table = Table(*headings, title="Files and names")
    floors = Counter[str]()
    for source in sources:
        floors[source.floor] += source.code
    for floor in (*[name for name, _ in floors.most_common()], ""):
        files = [source for source in sources if floor in ("", source.floor)]
        names = [name for source in files for name, _ in source.functions]
        own = [name for name in names if not name.startswith("__")]
        words = Counter("one" for name in own if "_" not in name.strip("_"))
        words["participle"] = sum(map(bool, map(_PARTICIPLE.fullmatch, own)))
        code = sum(source.code for source in files)
        table.add_row(
            floor or "all",
            *map(
                str,
                (
                    len(files),
                    sum(0 < source.code < _SMALL for source in files),
                    sum(source.code > _LARGE for source in files),
                    f"{code:,}",
                    f"{100 * sum(source.comments for source in files) / code:.1f}",
                    f"{len(names):,}",
                    sum(lines > _LONG for source in files for _, lines in source.functions),
                    f"{words['one'] / max(len(own), 1):.0%}",
                    f"{words['participle'] / max(len(own), 1):.1%}",
                ),
            ),
        )
    return table


def main() -> int:
    """Print all figures."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in _tables():
        console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
