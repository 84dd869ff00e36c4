"""The picture of the page in the documents, which `make goldens` updates."""

import struct
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.predict.preflight.examples import FITTING

PICTURE = Path(__file__).parents[4] / "docs" / "pictures" / "preflight.png"
WIDTH, HEIGHT, SCALE = 1000, 1480, 0.75
MOST_BYTES = 150_000


@pytest.mark.slow
def test_documentation_picture_is_small_and_has_the_expected_size(
    browser: Browser, update_goldens: bool
) -> None:
    if update_goldens:
        with browser.page(FITTING.to_html(), width=WIDTH, height=HEIGHT) as tab:
            tab.run("document.querySelectorAll('.memory details').forEach(d => d.open = false)")
            tab.click(".choices label:nth-of-type(3)")
            tab.run("scrollTo(0, 0)")
            PICTURE.write_bytes(tab.picture(whole=False, scale=SCALE))
    data = PICTURE.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (WIDTH * SCALE, HEIGHT * SCALE)
    assert len(data) < MOST_BYTES
