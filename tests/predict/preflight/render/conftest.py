"""One browser for all tests of pages."""

from collections.abc import Iterator

import pytest

from tests.browser import Browser, started


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with started() as running:
        yield running
