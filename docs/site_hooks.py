"""Generated parts of the site: tables, command lines, errors, schemas, files of the repository.

MkDocs calls `on_files` once and `on_page_markdown` for every page. The pages in `docs/` contain
marker comments such as `<!-- table: settings -->` where generated text belongs, so that git
holds no generated text. MkDocs has to run in the root of the repository, by `python -m mkdocs`.
"""

import html
import json
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from textwrap import indent
from typing import Any

from mkdocs.structure.files import File, Files

import xlashard
from benchmarks import _page, _preflights
from docs import site_errors, site_names
from tests.documents import LINK
from tests.errors.catalogue import read_topics
from xlashard.cli.main import make_parser
from xlashard.pjit.report.script_report import ScriptReport

ROOT = Path(__file__).resolve().parent.parent

# Files of the repository that pages link to are part of the site, below this folder.
REPOSITORY = "repository"
_FENCE = re.compile(r"^( *```+)(python|text) (?:no-run|(?:command )?output).*$", re.MULTILINE)
_MARKER = re.compile(r"<!-- (table|commands|api|file): ?([^>]*?) ?-->")


def on_config(config: Any) -> Any:
    """List the pages of all exception classes in the navigation."""
    (reference,) = [each["Reference"] for each in config.nav if "Reference" in each]
    classes = [path for path, _ in _error_pages()]
    classes.sort(key=lambda path: (not path.endswith("index.md"), path))
    reference.insert(_position(reference, "Errors") + 1, {"All errors": classes})
    return config


def _position(entries: list[dict[str, Any]], title: str) -> int:
    return next(i for i, each in enumerate(entries) if isinstance(each, dict) and title in each)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the files outside `docs/` that pages link to."""
    for path, content in (
        ("reference/preflight.schema.json", _json(xlashard.PreflightReport.json_schema())),
        ("reference/program.schema.json", _json(xlashard.ProgramReport.json_schema())),
        ("reference/script.schema.json", _json(ScriptReport.json_schema())),
        *_error_pages(),
    ):
        files.append(File.generated(config, path, content=content))
    for name in sorted(_linked_files()):
        file = ROOT / name
        files.append(File.generated(config, f"{REPOSITORY}/{name}", abs_src_path=str(file)))
    return files


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill the markers of a page, and redirect links to files of the repository."""
    path = page.file.src_uri
    if path.startswith("tutorials/"):
        # They answer what people search for, such as "out of memory".
        page.meta.setdefault("search", {"boost": 4})
    if path == "how/performance.md":
        markdown = _page.render(markdown, _page.read_figures())
    markdown = _MARKER.sub(lambda match: _generated(match[1], match[2]), markdown)
    # The words for the tests, such as `no-run: needs a TPU`, stay in the source.
    markdown = _FENCE.sub(r"\1\2", markdown)
    return LINK.sub(lambda match: _redirected(match, path), markdown)


def _generated(kind: str, name: str) -> str:
    if kind == "api":
        return "\n\n".join(_api(each) for each in name.split(", "))
    if kind == "file":
        text = (ROOT / name).read_text(encoding="utf-8")
        return indent(f"```toml\n{text.rstrip()}\n```", "    ")
    if kind == "commands":
        return "\n\n".join(_command_line())
    return {
        "settings": _preflights.table,
        "legacy names": site_names.table,
        "library names": site_names.library_table,
    }[name]()


def _api(name: str) -> str:
    """Refer to a public name by the module that defines it."""
    try:
        target: Any = attrgetter(name.removeprefix("xlashard."))(xlashard)
    except AttributeError:
        # `xlashard.pjit` is the function; a module inside of that package is found by its import.
        target = pkgutil.resolve_name(name)
    origin = f"{target.__module__}.{target.__qualname__}"
    if not origin.startswith("xlashard"):
        return f"## {name}\n\nThe class or function of JAX: `{origin}`."
    return f"::: {origin}\n    options:\n      heading: {name}\n      toc_label: {name}"


def _command_line() -> Iterator[str]:
    """Yield the help of every command."""
    parser = make_parser()
    (commands,) = [each for each in parser._actions if each.dest == "command"]
    assert isinstance(commands.choices, dict)
    os.environ["COLUMNS"] = "80"
    for name, each in commands.choices.items():
        yield f"## xlashard {name}\n\n```text\n{each.format_help().rstrip()}\n```"


_SEARCH = 'data-md-component="search" role="dialog"'
_CODE = re.compile(r"<code>(?=(?P<text>.*?)</code></pre>)", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_NARROW = 38
"""Characters of a line of code on a telephone, where longer ones scroll."""


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the dialog of the search, and let the keyboard reach code that scrolls."""
    output = output.replace(_SEARCH, f'{_SEARCH} aria-label="Search"')
    return _CODE.sub(_reachable, output)


def _reachable(match: re.Match[str]) -> str:
    lines = html.unescape(_TAG.sub("", match["text"])).splitlines()
    return '<code tabindex="0">' if max(map(len, lines), default=0) > _NARROW else match[0]


@cache
def _error_pages() -> tuple[tuple[str, str], ...]:
    """Run the catalogue of errors and write a page per exception class.

    `mkdocs serve` builds again at every change and keeps these pages.
    """
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        site_errors.write_pages(read_topics(), Path(folder, "pages"))
        tempfile.tempdir = None
        made = sorted(Path(folder, "pages").glob("*.md"))
        return tuple((f"reference/errors/{file.name}", file.read_text()) for file in made)


@cache
def _tracked() -> frozenset[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(done.stdout.split())


def _linked_files() -> set[str]:
    """Return the files outside `docs/` that pages link to, and what those link to."""
    reached: set[str] = set()
    new = {"CONTRIBUTING.md", "CHANGELOG.md", *_outside(_preflights.table(), "docs/tpu/configs.md")}
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT).as_posix()
        new |= set(_outside(page.read_text(encoding="utf-8"), name))
    while new:
        reached |= new
        linked = [n for n in new if n.endswith(".md")]
        new = {t for n in linked for t in _outside((ROOT / n).read_text(), n)} - reached
    return reached


def _outside(text: str, name: str) -> Iterator[str]:
    """Yield the tracked files outside `docs/` that a file links to."""
    for match in LINK.finditer(text):
        target = _resolved(match["target"], name)
        if target in _tracked() and not target.startswith("docs/"):
            yield target


def _resolved(target: str, name: str) -> str:
    folder = os.path.dirname(name)
    return os.path.normpath(os.path.join(folder, target.partition("#")[0]))


def _redirected(match: re.Match[str], path: str) -> str:
    """Point a link between `docs/` and the rest of the repository into the site."""
    target = match["target"]
    inside = path.removeprefix(f"{REPOSITORY}/")
    name = inside if inside != path else f"docs/{path}"
    if "://" in target or target.startswith(("#", "mailto:")):
        return match[0]
    resolved = _resolved(target, name)
    if resolved in _linked_files():
        place = f"{REPOSITORY}/{resolved}"
    elif resolved.startswith("docs/") and inside != path:
        place = resolved.removeprefix("docs/")
    else:
        return match[0]
    anchor = target.partition("#")[2]
    relative = os.path.relpath(place, os.path.dirname(path) or ".")
    return match[0].replace(f"({target})", f"({relative}{'#' + anchor if anchor else ''})")
