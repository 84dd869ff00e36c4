"""The site in a browser: navigation, search, copied code, and no need for a network."""

import functools
import http.server
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.accessibility import find_violations
from tests.browser import Browser, Tab, started
from tests.fork_server import python_command

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
PHONE, DESKTOP = (390, 844), (1280, 900)


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the site on this machine; return its address."""
    assert SITE.is_dir(), "build the site first: make docs"
    handler = functools.partial(_QuietHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as running:
        yield running


@pytest.fixture
def tab(browser: Browser, address: str) -> Iterator[Tab]:
    with browser.page("<title>empty</title>") as opened:
        opened.go(f"{address}/")
        yield opened


def test_navigation_leads_to_a_page(tab: Tab) -> None:
    tab.click('.md-tabs a[href="tutorials/"]')
    tab.until("document.querySelector('h1')?.innerText.includes('Tutorials')")
    tab.click('.md-sidebar--primary a[href="unwanted_collective/"]')
    tab.until("document.querySelector('h1')?.innerText.includes('unwanted collective')")
    assert any("Read the report" in text for text in tab.texts(".md-sidebar--secondary a"))


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("trip count", "Glossary"),
        ("compiled again", "Why was it compiled again"),
        ("GlobalDeviceArray", "Names of 2022 and 2023"),
        ("MeshError", "MeshError"),
        ("colab", "Install, and a first program"),
        ("jupyter", "Install, and a first program"),
        ("out of memory", "Preflight: the memory, time and cost"),
        ("auto", "Automatic layouts"),
    ],
)
def test_search_finds_a_page(tab: Tab, words: str, page: str) -> None:
    tab.click(".md-search__input, [for=__search]")
    tab.focus(".md-search__input")
    tab.type(words)
    tab.until("document.querySelectorAll('.md-search-result__item').length > 0")
    titles = tab.run(
        "[...document.querySelectorAll('.md-search-result__item h1, .md-search-result__item h2')]"
        ".map(e => e.innerText)"
    )
    assert any(page in title for title in titles), titles


def test_code_from_the_copy_button_runs(tab: Tab, address: str) -> None:
    tab.browser.call(
        "Browser.grantPermissions",
        origin=address,
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
    )
    button = ".highlight .md-clipboard, .highlight [data-md-type=copy]"
    tab.until(f"document.querySelector('{button}')")
    tab.point_at(".highlight code")
    tab.click(button)
    tab.until("document.querySelector('.md-dialog--active, .md-dialog[data-md-state]')")
    copied = tab.run("navigator.clipboard.readText()")
    assert "xs.explain(layer, x, w)" in copied
    done = subprocess.run(
        [*python_command(), "-c", copied], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "all-reduce" in done.stdout


@pytest.mark.parametrize("page", ["", "tpu/preflight/", "reference/api/programs/", "start/trust/"])
def test_page_requests_only_its_own_origin(tab: Tab, address: str, page: str) -> None:
    tab.go(f"{address}/{page}")
    assert all(url.startswith((address, "data:", "blob:")) for url in tab.requests())
    assert not tab.complaints()


def test_no_page_loads_resources_from_other_origins() -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?https?:"""
        r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?https?:"""
    )
    for page in SITE.rglob("*.html"):
        assert not loads.findall(page.read_text(encoding="utf-8")), page


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
@pytest.mark.parametrize(
    "page", ["", "start/comparison/", "tutorials/unwanted_collective/", "reference/api/arrays/"]
)
def test_a_page_fits_the_window(
    tab: Tab, address: str, page: str, size: tuple[int, int], tmp_path: Path
) -> None:
    tab.resize(*size)
    tab.go(f"{address}/{page}")
    width = tab.run("document.documentElement.scrollWidth")
    assert width <= size[0], "the page scrolls sideways"
    assert tab.text("h1").strip("¶ \n")
    (tmp_path / "page.png").write_bytes(tab.picture(whole=False))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "page",
    ["", "tutorials/does_it_fit/", "guides/explain/", "reference/api/programs/", "tpu/step_times/"],
)
def test_people_can_read_and_reach_a_page(tab: Tab, address: str, page: str, scheme: str) -> None:
    tab.prefer(scheme)
    # The theme keeps the colours of the first page.
    tab.run("localStorage.clear()")
    tab.go(f"{address}/{page}")
    assert find_violations(tab) == []


@pytest.mark.parametrize(
    "page", ["", "tutorials/automatic_layout/", "guides/explain/", "reference/cli/"]
)
def test_code_of_usual_lines_fits_beside_the_menus(tab: Tab, address: str, page: str) -> None:
    tab.resize(1300, 900)
    tab.go(f"{address}/{page}")
    wide = tab.run(
        "[...document.querySelectorAll('pre > code')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => e.innerText).filter(text => text.split('\\n').every(l => l.length <= 100))"
    )
    assert not wide


def test_the_home_page_opens_with_a_picture_and_a_report(tab: Tab) -> None:
    assert tab.run("document.querySelector('article img').getBoundingClientRect().top") < 400
    order = tab.run(
        "[...document.querySelectorAll('article img, article pre, article table')]"
        ".map(e => e.tagName)"
    )
    assert order == ["IMG", "PRE", "PRE", "TABLE"]
    assert any("auto_shard" in cell for cell in tab.texts("article td"))


def test_no_cache_of_python_is_published() -> None:
    assert not [*SITE.rglob("__pycache__")]


def test_error_pages_and_schemas_exist() -> None:
    assert (SITE / "reference/errors/MeshError/index.html").is_file()
    for name in ("program", "script", "preflight"):
        schema = json.loads((SITE / f"reference/{name}.schema.json").read_text())
        assert schema["$id"].startswith(f"urn:xlashard:{name}:")
