"""Sources, tests and documents use the vocabulary of the field."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

CHECKED = (
    "xlashard",
    "xlashard_pytest",
    "tests",
    "benchmarks",
    "examples",
    "tpu_scripts",
    "configs",
    ".ci",
    "docs",
)
"""Folders whose sources and texts are checked, beside documents and the Makefile at the root."""

_BANNED = re.compile(
    r"\b(said|says|told|tells?|telling|nobody|somebody|someone|whoever|whomever|a person"
    r"|dealt out|deals? out|dealing out|(?-i:(?<!there )(?:is|are) none)|asked for by)\b",
    re.IGNORECASE,
)
"""Words that a machine does not do, people who are not users, and private idioms."""

_BANNED_NAMES = frozenset(
    (
        *("said", "told", "given", "wanted", "found", "asked", "heard", "made", "taken", "came"),
        *("mine", "ours", "theirs", "its", "here", "there"),
    )
)
"""Participles, pronouns and adverbs in place of the noun of a variable or parameter."""

_OPENINGS = re.compile(r"(What|Who|Whom|Whose|Whether|Of|Which|How|Where|Why)\b")
"""First words of a docstring that begins with a clause instead of a verb or a noun."""

_QUOTED_OPENING = re.compile(r"[\"']\s*" + _OPENINGS.pattern)

_CODE = re.compile(r"(?ms)^( *)(```|~~~).*?^\1\2|`[^`\n]*`")


class Finding(NamedTuple):
    """One banned word or opening."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def _words(path: str, line: int, text: str) -> Iterator[Finding]:
    for match in _BANNED.finditer(text):
        at = line + text.count("\n", 0, match.start())
        yield Finding(path, at, f"banned: {match[0]!r}")


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def source_findings(path: str, source: str) -> Iterator[Finding]:
    """Yield banned words of docstrings, comments, string literals and names of tests.

    Docstrings that begin with a clause are findings, too.
    """
    # Parsing takes ten times as long as these searches.
    if not (_BANNED.search(source.replace("_", " ")) or _QUOTED_OPENING.search(source)):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _words(path, node.lineno, node.value)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield from _words(path, node.lineno, node.name.replace("_", " "))
        elif isinstance(node, ast.Expr) and _is_docstring(node):
            text = ast.literal_eval(node.value).lstrip()
            if _OPENINGS.match(text):
                opening = " ".join(text.split()[:4])
                yield Finding(path, node.lineno, f"docstring begins with {opening!r}")
    if any("#" in line and _BANNED.search(line) for line in source.splitlines()):
        yield from _comment_findings(path, source)


def _comment_findings(path: str, source: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _words(path, token.start[0], token.string)


def variable_findings(path: str, source: str) -> Iterator[Finding]:
    """Yield variables and parameters of functions that are named by a verb or a pronoun."""
    if _BANNED_NAMES.isdisjoint(re.findall(r"\w+", source)):
        return
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    for node in {inner for function in functions for inner in ast.walk(function)}:
        is_variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if is_variable else node.arg if isinstance(node, ast.arg) else ""
        if name in _BANNED_NAMES:
            yield Finding(path, node.lineno, f"variable: {name!r}")


def document_findings(path: str, text: str) -> Iterator[Finding]:
    """Yield banned words of a Markdown document, outside of code."""
    blank = _CODE.sub(lambda block: re.sub(r"[^\n]", "", block[0]), text)
    yield from _words(path, 1, blank)


def findings(file: Path) -> Iterator[Finding]:
    """Yield the findings of a source, of a document, or of any other text."""
    name = str(file.relative_to(ROOT))
    text = file.read_text(encoding="utf-8")
    match file.suffix:
        case ".py":
            return source_findings(name, text)
        case ".md":
            return document_findings(name, text)
        case _:
            return _words(name, 1, text)


def _files() -> list[Path]:
    below = (file for folder in CHECKED for file in (ROOT / folder).rglob("*"))
    files = [file for file in below if file.suffix in (".py", ".md", ".toml", ".ipynb")]
    scripts = [file for file in (ROOT / ".ci").iterdir() if not file.suffix]
    return sorted([*files, *scripts, *ROOT.glob("*.md"), ROOT / "Makefile"])


def test_files_use_the_vocabulary() -> None:
    files = [file for file in _files() if file != Path(__file__)]
    assert len(files) > 400
    found = [finding for file in files for finding in findings(file)]
    assert not found, "\n".join(map(str, found))


_ONE_OF_SEVERAL = re.compile(
    r"(?<![\w.,:=×/-])1\s(devices|chips|hosts|processes|programs|calls|times|files|lines|rows|meshes"
    r"|slices|layouts|values|arguments|results|collectives|groups|copies)\b"
)


def test_printed_texts_count_one_in_the_singular() -> None:
    texts = [ROOT / "tests", ROOT / "docs"]
    files = [f for folder in texts for f in folder.rglob("*") if f.suffix in (".txt", ".md")]
    assert len(files) > 100
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in files
        for match in _ONE_OF_SEVERAL.finditer(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_variables_of_the_package_are_nouns() -> None:
    files = [*(ROOT / "xlashard").rglob("*.py"), *(ROOT / "xlashard_pytest").rglob("*.py")]
    assert len(files) > 300
    sources = [(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in files]
    names = [finding for source in sources for finding in variable_findings(*source)]
    assert not names, "\n".join(map(str, names))


def test_findings_in_variables() -> None:
    source = "class A:\n    found: int\n    def f(self, told):\n        found = g(asked=1)\n"
    findings = {(finding.line, finding.text) for finding in variable_findings("a.py", source)}
    assert findings == {(3, "variable: 'told'"), (4, "variable: 'found'")}


def test_findings_in_a_source() -> None:
    source = (
        '"""Cache of programs."""\n'
        "x = f'no device is none of {x}, as told'\n"
        "# Nobody reads this.\n"
        "def f():\n"
        '    """What it does."""\n'
        "    y = 1\n"
        '    """Which one."""\n'
    )
    lines = [(finding.line, finding.text) for finding in source_findings("a.py", source)]
    assert sorted(lines) == [
        (2, "banned: 'is none'"),
        (2, "banned: 'told'"),
        (3, "banned: 'Nobody'"),
        (5, "docstring begins with 'What it does.'"),
        (7, "docstring begins with 'Which one.'"),
    ]


def test_findings_in_a_document() -> None:
    text = "The barrier\n\n```python\nsaid = 1\n```\n\nwaits for whoever is late.\n"
    assert list(document_findings("a.md", text)) == [Finding("a.md", 7, "banned: 'whoever'")]


def test_findings_in_names_of_tests() -> None:
    source = "def test_a_timeout_is_told(): ...\ndef told(): ...\n"
    assert [finding.line for finding in source_findings("a.py", source)] == [1]
