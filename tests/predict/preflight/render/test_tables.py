"""The tables of the page in a real Chromium: sorted, filtered, added up."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, Tab
from tests.predict.preflight.examples import FITTING, OUT_OF_MEMORY
from tests.predict.preflight.render.reading import column
from xlashard.support.formatting import in_bytes, in_seconds

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent


def test_collectives_are_sortable_by_mouse_and_keyboard(browser: Browser) -> None:
    sent = [t.sent_bytes for t in FITTING.traffic]
    with browser.page(FITTING.to_html()) as tab:
        head = "#collectives th:has(button[title^=Bytes])"
        tab.click(f"{head} button")
        assert [int(n) for n in column(tab, "#collectives", "sent")] == sorted(sent, reverse=True)
        assert tab.run(f"document.querySelector('{head}').ariaSort") == "descending"
        tab.click(f"{head} button")
        assert [int(n) for n in column(tab, "#collectives", "sent")] == sorted(sent)
        tab.focus("#collectives th:first-child button")
        tab.press("Enter")
        kinds = column(tab, "#collectives", "what")
        assert kinds == sorted(t.kind for t in FITTING.traffic)
        tab.press(" ")
        assert column(tab, "#collectives", "what") == kinds[::-1]
        assert (
            tab.run("document.querySelectorAll('#collectives th:not([aria-sort=none])').length")
            == 1
        )


def test_every_table_sorts_by_every_column(browser: Browser) -> None:
    with browser.page(OUT_OF_MEMORY.to_html()) as tab:
        tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        found = tab.run((SCRIPTS / "sorting.js").read_text(encoding="utf-8"))
        assert found["columns"] > 40
        assert found["unsorted"] == []
        assert tab.complaints() == []


def choose(tab: Tab, key: str, value: str) -> None:
    """Select an entry of a list, as a click does."""
    tab.run(
        f"(s => {{ s.value = {json.dumps(value)};"
        " s.dispatchEvent(new Event('input', {bubbles: true})) })"
        f"(document.querySelector('#collectives select[data-key={key}]'))"
    )


def test_collectives_can_be_filtered_by_text_kind_axis_and_reason(browser: Browser) -> None:
    def shown(keep: Callable[[Any], bool]) -> list[tuple[str, str]]:
        return [(t.kind, t.along) for t in FITTING.traffic if keep(t)]

    with browser.page(FITTING.to_html()) as tab:

        def seen() -> list[tuple[str, str]]:
            pairs = zip(
                column(tab, "#collectives", "what"),
                column(tab, "#collectives", "along"),
                strict=True,
            )
            return list(pairs)

        tab.focus("#collectives input")
        tab.type("TENSOR model.py:97")
        assert seen() == [("all-to-all", "tensor")]
        assert tab.text("#collectives .count") == "1 of 6 · sent 1.5 GiB · takes 8.9 ms"
        tab.run("document.querySelector('#collectives input').select()")
        tab.type("gather")
        assert seen() == shown(lambda t: "gather" in t.kind or "gather" in t.suggestion)
        choose(tab, "axis", "fsdp")
        assert seen() == [("all-gather", "fsdp")]
        tab.run("document.querySelector('#collectives input').select()")
        tab.press("Delete")
        assert seen() == shown(lambda t: t.along == "fsdp")
        choose(tab, "axis", "")
        choose(tab, "kind", "all-reduce")
        assert seen() == shown(lambda t: t.kind == "all-reduce")
        choose(tab, "kind", "")
        tab.click("#collectives button.shows")
        unasked = [t for t in FITTING.traffic if not t.requested]
        assert seen() == [(t.kind, t.along) for t in unasked]
        shown_suggestions = [f"Instead: {t.suggestion}" for t in unasked if t.suggestion]
        assert tab.texts("#collectives td[data-label=cause] .note") == shown_suggestions
        total = in_bytes(sum(t.sent_bytes for t in unasked))
        seconds = in_seconds(sum(t.seconds for t in unasked))
        assert tab.text("#collectives .count") == f"2 of 6 · sent {total} · takes {seconds}"
        choose(tab, "kind", "reduce-scatter")
        assert seen() == []
        tab.click("#collectives button.shows")
        assert seen() == [("reduce-scatter", "fsdp")]
        choose(tab, "reason", "not required")
        assert tab.text("#collectives .count") == "0 of 6 · sent 0 B · takes 0 s"


def test_numbers_are_formatted_as_in_python(browser: Browser) -> None:
    sizes = [0, 1, 1023, 1024, 2304, 1152, 10 * 2**20 + 1, 3 * 2**30 + 2**28, 2**43]
    times = [0, 3e-9, 1.25e-6, 9.995e-4, 0.00225, 0.0625, 1.005, 9.996, 10, 12.25]
    rows = [
        replace(t, seconds=s, sent_bytes=n, op_name=f"row{i}.")
        for i, (t, n, s) in enumerate(zip(FITTING.traffic[:1] * 9, sizes, times, strict=False))
    ]
    with browser.page(replace(FITTING, traffic=tuple(rows)).to_html()) as tab:
        for number, row in enumerate(rows):
            tab.run("document.querySelector('#collectives input').select()")
            tab.focus("#collectives input")
            tab.type(f"row{number}.")
            words = f"sent {in_bytes(row.sent_bytes)} · takes {in_seconds(row.seconds)}"
            assert tab.text("#collectives .count") == f"1 of 9 · {words}"
