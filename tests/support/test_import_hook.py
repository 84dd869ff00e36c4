"""Functions run once a module has been imported, whichever finder finds it."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from xlashard.support.import_hook import when_imported

NAME = "hooked_module"


class _Elsewhere(MetaPathFinder):
    """Finder of a module outside of `sys.path`, as of an editable installation."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return spec_from_file_location(NAME, self._file) if fullname == NAME else None


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that a finder of its own finds, behind one of the old protocol."""
    (tmp_path / "code.py").write_text("value = 3\n")
    finders = [object(), _Elsewhere(tmp_path / "code.py")]
    monkeypatch.setattr(sys, "meta_path", [*finders, *sys.meta_path])
    yield NAME
    sys.modules.pop(NAME, None)


def test_each_function_runs_once_after_the_code_of_the_module(module: str) -> None:
    seen: list[tuple[int, int]] = []

    def note(number: int) -> None:
        seen.append((number, sys.modules[module].value))

    with when_imported(module, lambda: note(1)), when_imported(module, lambda: note(2)):
        assert not seen
        assert importlib.util.find_spec(module).loader.get_source(module) == "value = 3\n"
        imported = importlib.import_module(module)
        importlib.import_module(module)
        importlib.reload(imported)
    assert sorted(seen) == [(1, 3), (2, 3)]
    assert type(imported.__loader__).__module__.startswith(("importlib", "_frozen_importlib"))


def test_an_imported_module_runs_the_function_at_once_and_a_later_one_does_not(module: str) -> None:
    before, seen = list(sys.meta_path), []
    with when_imported(module, lambda: seen.append("late")):
        pass
    assert sys.meta_path == before
    importlib.import_module(module)
    assert not seen
    with when_imported(module, lambda: seen.append("at once")):
        assert seen == ["at once"]
