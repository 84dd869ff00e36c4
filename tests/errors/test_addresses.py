"""Errors name the page of their class in the documentation."""

import copy
import os
import pickle
import subprocess
import traceback
import warnings
from pathlib import Path

import pytest

from docs import site_errors as pages
from tests.errors.catalogue import read_topics
from tests.fork_server import python_command
from xlashard import errors
from xlashard.errors import DonationWarning, MeshError, ResourceError, XlashardError
from xlashard.train.errors import SettingsError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address below which the pages are, which errors name in this test."""
    monkeypatch.setattr(XlashardError, "docs_url", "https://docs.example/latest/")
    return "https://docs.example/latest/reference/errors"


def shown(error: BaseException) -> list[str]:
    """Return the lines of an exception below its traceback."""
    return "".join(traceback.format_exception_only(error)).splitlines()


def test_traceback_ends_with_the_documentation_url(address: str) -> None:
    error = ResourceError("the message", path="state['w']")
    assert str(error) == "the message"
    assert shown(error) == [
        "xlashard.errors.ResourceError: the message",
        f"Documentation: {address}/ResourceError/",
    ]


def test_further_notes_follow_the_documentation_note(address: str) -> None:
    error = MeshError("the message")
    error.add_note("It was passed as x.")
    assert error.__notes__ == [f"Documentation: {address}/MeshError/", "It was passed as x."]
    assert MeshError("another").__notes__ == [f"Documentation: {address}/MeshError/"]


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copied_error_has_one_documentation_note(address: str, copied) -> None:
    error = ResourceError("the message", path="state['w']")
    assert copied(copied(error)).__notes__ == [f"Documentation: {address}/ResourceError/"]
    assert copied(error).path == "state['w']"


def test_text_of_a_warning_ends_with_the_documentation_url(address: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("the message", DonationWarning, stacklevel=1)
    assert str(caught[0].message).splitlines() == [
        "the message",
        f"Documentation: {address}/DonationWarning/",
    ]


def test_empty_docs_url_omits_the_documentation_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XlashardError, "docs_url", "")
    assert shown(MeshError("the message")) == ["xlashard.errors.MeshError: the message"]
    assert str(DonationWarning("the message")) == "the message"


def test_subclass_outside_xlashard_links_the_page_of_its_base(address: str) -> None:
    class OwnError(MeshError):
        pass

    assert OwnError("the message").__notes__ == [f"Documentation: {address}/MeshError/"]
    assert SettingsError("the message").__notes__ == []


def test_every_documentation_url_has_a_page(address: str) -> None:
    mistakes = [mistake for topic in read_topics() for mistake in topic.mistakes]
    written = pages.documented(mistakes)
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and pages.is_own(kind)
    ]
    assert len(kinds) > 40
    for kind in kinds:
        for note in errors._page_notes(kind):
            folder, _, name = note.removeprefix("Documentation: ").rstrip("/").rpartition("/")
            assert (folder, name) == (address, kind.__name__)
            assert name in written


@pytest.mark.slow
@pytest.mark.parametrize("url", [None, "", "file:///site"])
def test_terminals_and_notebooks_show_the_documentation_url(url: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "XLASHARD_DOCS_URL"}
    if url is not None:
        environment["XLASHARD_DOCS_URL"] = url
    done = subprocess.run(
        [*python_command(environment), "-c", WRONG_CALLS],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    for text in (done.stdout, done.stderr):
        lines = [line for line in text.splitlines() if line.startswith("Documentation: ")]
        base = "" if url is None else f"{url}/"
        assert lines == ([] if url == "" else [f"Documentation: {base}reference/errors/MeshError/"])
        assert "MeshError: in_shardings of x is P('x',)" in text


WRONG_CALLS = """
from IPython.core.interactiveshell import InteractiveShell
import xlashard as xs

call = "xs.pjit(lambda x: x, in_shardings=xs.P('x'))(1.0)"
InteractiveShell.instance(colors="nocolor", user_ns={"xs": xs}).run_cell(call)
exec(call)
"""
