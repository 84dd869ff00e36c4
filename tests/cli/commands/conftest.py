"""Tests of commands read standard error whole."""

import pytest

from xlashard.support import consoles


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch):
    """On a busy machine a compilation may take as long as the interval of progress lines."""
    monkeypatch.setattr(consoles, "_LINE_INTERVAL", 3600.0)
