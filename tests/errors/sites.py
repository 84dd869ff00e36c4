"""Find every `raise` of the package, and the comments that exempt one from the catalogue."""

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

from tests.errors.running import PACKAGE

MARKER = "# no-catalogue:"


@dataclass(frozen=True)
class Site:
    """One `raise` in the package.

    Attributes:
        file: Relative to the package.
        first: Number of its first line.
        last: Number of its last line.
        source: Its text, in one line.
        exempt: The reason after `# no-catalogue:` in one of its lines, or in the line above.
    """

    file: str
    first: int
    last: int
    source: str
    exempt: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.first}: {self.source}"


def raise_sites(*rooms: str) -> list[Site]:
    """Return every statement in some folders or files that raises an error of its own.

    Raises:
        ValueError: If a marker belongs to no such statement.
    """
    paths = [path for room in rooms for path in sorted(PACKAGE.glob(room))]
    return [site for path in paths for site in read_sites(path.read_text("utf-8"), _name(path))]


def read_sites(source: str, name: str) -> list[Site]:
    """Return the sites of one file."""
    reasons = _reasons(source)
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        text = " ".join((ast.get_source_segment(source, node) or "").split())
        exempt = [reasons.pop(line) for line in range(first - 1, last + 1) if line in reasons]
        found.append(Site(name, first, last, text, " ".join(exempt)))
    if reasons:
        raise ValueError(f"{name}: lines {sorted(reasons)} exempt no raise statement")
    return sorted(found, key=lambda site: site.first)


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _reasons(source: str) -> dict[int, str]:
    """Return the reasons of all markers by the numbers of their lines."""
    if MARKER not in source:
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return {
        token.start[0]: token.string.removeprefix(MARKER).strip()
        for token in comments
        if token.string.startswith(MARKER)
    }
