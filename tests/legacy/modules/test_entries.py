"""The table, entry by entry: the installed names, and the page."""

import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests.legacy.modules.replacements import by_attributes, resolve
from tests.legacy.modules.usage_lines import REACHED_INTO, WORKING
from xlashard import legacy
from xlashard.errors import XlashardError
from xlashard.legacy.modes.config_flags import OWN
from xlashard.legacy.module_shims import ModuleShim
from xlashard.legacy.modules import Entry, entries, entries_by_module

HERE = Path(__file__).parent
ALL_TESTS = HERE.parent
TABLE = tuple(entries().values())
IN_USE = [
    line
    for line in (HERE / "names_in_use.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
NOTHING = object()


def name_of(entry: Entry) -> str:
    return entry.name


def resolved(name: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return resolve(name)
    except (AttributeError, ImportError):
        return NOTHING


@pytest.fixture(scope="module", autouse=True)
def jax_before() -> Iterator[dict[str, object]]:
    before = {entry.name: resolved(entry.name) for entry in TABLE}
    yield before
    after = {entry.name: resolved(entry.name) for entry in TABLE}
    different = [
        name
        for name, value in before.items()
        # Each access to a method of an object makes a new one.
        if value is not after[name] and value != after[name]
    ]
    assert not different, f"left behind: {different}"


@pytest.fixture(scope="module")
def installed(jax_before: dict[str, object]) -> Iterator[None]:
    with legacy.installed():
        yield


@pytest.mark.parametrize("entry", TABLE, ids=name_of)
def test_entry_is_importable_and_reachable_by_attributes(
    entry: Entry, installed: None, jax_before: dict
) -> None:
    parent, _, name = entry.name.rpartition(".")
    if entry.name == "jax.config.config":
        # An attribute of the module, and not of the object that `jax.config` is.
        assert importlib.import_module(parent).config is jax.config
        return
    if parent == "jax.Array":
        # That class is an interface; the class of arrays has the member.
        assert hasattr(type(jax.numpy.ones(())), name)
        return
    here = by_attributes(entry.name)
    if entry.is_module:
        module = importlib.import_module(entry.name)
        assert isinstance(module, ModuleShim)
        assert here is module or entry.name == "jax.config"
        return
    if is_module(parent):
        scope: dict[str, object] = {}
        exec(f"from {parent} import {name} as it", scope)
        assert scope["it"] is here or scope["it"] == here or parent == "jax.config"
    before = jax_before[entry.name]
    assert before is NOTHING or here is not before


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


REFUSED = [entry for entry in TABLE if entry.treatment == "refused"]


@pytest.mark.parametrize("entry", REFUSED, ids=name_of)
def test_removed_name_raises_with_a_suggestion(entry: Entry, installed: None) -> None:
    refused = by_attributes(entry.name)
    with pytest.raises(XlashardError) as caught:
        refused()
    assert entry.today in str(caught.value)
    assert entry.name.rpartition(".")[2] in str(caught.value)


# Modules of which `usage_lines.py` has a line for every name that is not refused.
WITH_LINES = ("core", "host_callback", "numpy", "toplevel")
# Names of these modules with separate tests.
TESTED_ELSEWHERE = ("jax.pmap", "jax.spmd_mode", *(f"jax.config.{flag.name}" for flag in OWN))
WORKS = [
    entry
    for module in WITH_LINES
    for entry in entries_by_module()[module]
    if entry.treatment != "refused" and entry.name not in TESTED_ELSEWHERE
]
WORKS += [entry for entry in TABLE if entry.name.startswith(("jax.lib.", "jax._src.lib."))]


@pytest.mark.parametrize("entry", WORKS, ids=name_of)
@pytest.mark.devices(8)
def test_entry_works(entry: Entry, installed: None) -> None:
    """Run the line of `usage_lines.py` that uses the entry."""
    code = WORKING[entry.name]
    scope: dict[str, object] = {}
    exec("import jax, importlib\nimport jax.numpy as jnp\nimport numpy as np", scope)
    exec(code, scope)


@pytest.mark.parametrize("name", REACHED_INTO)
@pytest.mark.devices(8)
def test_internals_used_by_programs_work(name: str, installed: None) -> None:
    scope: dict[str, object] = {}
    exec("import jax\nimport jax.numpy as jnp\nimport numpy as np", scope)
    exec(REACHED_INTO[name], scope)


def test_every_example_belongs_to_an_entry() -> None:
    assert WORKING.keys() == {entry.name for entry in WORKS}
    assert REACHED_INTO.keys() <= entries().keys()


OTHERS = [entry for entry in TABLE if entry.treatment != "refused" and entry not in WORKS]


@pytest.mark.parametrize("entry", OTHERS, ids=name_of)
def test_entry_is_used_by_a_test(entry: Entry, all_tests: str) -> None:
    assert re.search(rf"\b{re.escape(entry.name.rpartition('.')[2])}\b", all_tests)


@pytest.fixture(scope="module")
def all_tests() -> str:
    files = [path for path in ALL_TESTS.rglob("*.py") if path.name != Path(__file__).name]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@pytest.mark.parametrize("name", IN_USE)
def test_every_name_in_use_has_an_entry_and_is_reachable(name: str, installed: None) -> None:
    parts = name.split(".")
    heads = {".".join(parts[: n + 1]) for n in range(len(parts))}
    about = heads & entries().keys()
    assert about, "no entry is about it"
    if name != "jax.config.config":
        by_attributes(name)
