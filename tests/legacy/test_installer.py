"""Installation of legacy names into JAX's modules, and their complete removal."""

import importlib
import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import xlashard
from xlashard import legacy
from xlashard.legacy import installer as installing
from xlashard.legacy.module_shims import resolve_source
from xlashard.legacy.modules import Entry

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def names_of_jax() -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.legacy.names_of_jax"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["xlashard", "xlashard.legacy"])
def test_import_neither_adds_nor_removes_names_of_jax(names_of_jax, imported: str) -> None:
    assert names_of_jax[f"by {imported}"] == []


@pytest.mark.slow
def test_installation_adds_the_legacy_names(names_of_jax) -> None:
    assert "the table of modules: jax.linear_util" in names_of_jax["installed"]
    assert "config: jax_array" in names_of_jax["installed"]
    assert all(names_of_jax["asked"])


def test_repeated_installation_changes_nothing(names_of_jax) -> None:
    assert names_of_jax["twice"] == []


def test_uninstallation_restores_every_name_of_jax(names_of_jax) -> None:
    assert names_of_jax["after"] == []


def test_imported_names_work_after_uninstallation(names_of_jax) -> None:
    assert names_of_jax["still works"] == [3, [3]]


def test_modules_imported_while_installed_are_restored_afterwards(names_of_jax) -> None:
    assert names_of_jax["late modules"] == [True] * 8


def test_installed_context_manager_nests_and_restores() -> None:
    with legacy.installed():
        assert jax.tree_map(abs, [-1]) == [1]
        with legacy.installed():
            pass
        assert jax.tree_map(abs, [-1]) == [1]
    assert not hasattr(jax, "tree_map")


def test_attributes_set_by_a_program_are_kept() -> None:
    try:
        with legacy.installed():
            jax.tree_map = str
        assert jax.tree_map is str
    finally:
        del jax.tree_map


def test_star_import_and_dir_list_legacy_names() -> None:
    with legacy.installed():
        results: dict[str, object] = {}
        exec("from jax.linear_util import *", results)
        assert {"wrap_init", "transformation"} <= results.keys()
        assert "linear_util" in dir(jax)
        assert "wrap_init" in dir(importlib.import_module("jax.linear_util"))


def test_concurrent_installation_is_thread_safe() -> None:
    start = threading.Barrier(8)
    results = []

    def use() -> None:
        start.wait()
        for _ in range(20):
            installing.install()
            results.append(jax.tree_map(abs, [-1]))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    installing.uninstall()
    assert results == [[1]] * 160
    assert not hasattr(jax, "tree_map")


@pytest.mark.slow
def test_overlapping_installed_blocks_are_thread_safe() -> None:
    start = threading.Barrier(8)
    failed: list[BaseException] = []

    def use(number: int) -> None:
        start.wait()
        try:
            for turn in range(12):
                with legacy.installed():
                    assert jax.tree_map(abs, [-1]) == [1]
                    if (number + turn) % 3 == 0:
                        with legacy.installed():
                            maps = importlib.import_module("jax.experimental.maps")
                    else:
                        maps = importlib.import_module("jax.experimental.maps")
                    assert maps.Mesh is jax.experimental.maps.Mesh
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert not hasattr(jax, "tree_map")


def test_names_stay_until_the_last_block_ends() -> None:
    first, second = legacy.installed(), legacy.installed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert jax.tree_map(abs, [-1]) == [1]
    legacy.uninstall()
    assert jax.tree_map(abs, [-1]) == [1]
    installing.install()
    second.__exit__(None, None, None)
    assert jax.tree_map(abs, [-1]) == [1]
    legacy.uninstall()
    assert not hasattr(jax, "tree_map")


def entry(name: str, source: str) -> Entry:
    return Entry(name, "0.4.1", "works", source, "jax.numpy")


def test_failed_installation_is_rolled_back() -> None:
    table = {
        e.name: e
        for e in (
            entry("jax.tree_map", "jax.tree_util:tree_map"),
            entry("jax.Array.no_such", "xlashard:no_such"),
        )
    }
    before = dict(vars(jax))
    with pytest.raises(AttributeError):
        installing.Installation(table).start()
    assert vars(jax) == before
    assert not hasattr(jax.config, "jax_array")


@pytest.mark.parametrize(
    ("module", "is_today"),
    [("xlashard._jax.late", True), ("xlashard.late", True), ("jax.late", True), ("late", False)],
)
def test_late_modules_of_xlashard_and_jax_import_current_names(module: str, is_today: bool) -> None:
    with legacy.installed():
        scope = {"__name__": module}
        exec("from jax.sharding import PartitionSpec", scope)
        exec("from jax.experimental.array_serialization import serialization as s", scope)
        exec("found = s.run_deserialization", scope)
    assert (scope["PartitionSpec"] is jax.sharding.PartitionSpec) is is_today
    assert scope["found"].__module__.startswith("jax" if is_today else "xlashard.legacy")


@pytest.mark.parametrize("module", ["jax.lib.xla_bridge", "jax._src.lib.xla_bridge"])
def test_mocked_process_index_applies_to_jax(module: str) -> None:
    with legacy.installed():
        mesh = jax.sharding.Mesh(
            np.array([mock.Mock(id=n, process_index=n // 4) for n in range(8)]), ("x",)
        )
        for _ in range(2):
            with mock.patch(f"{module}.process_index", return_value=1):
                assert jax.process_index() == 1
                assert [device.id for device in mesh.local_devices] == [4, 5, 6, 7]
                assert mesh.local_mesh.devices[0].id == 4
            assert jax.process_index() == 0 and mesh.local_mesh.devices[0].id == 0
            assert importlib.import_module(module).process_index() == 0


def test_shim_replaces_a_current_module() -> None:
    today = importlib.import_module("jax.experimental.pjit")
    table = {
        e.name: e
        for e in (
            entry("jax.experimental.pjit", "xlashard.legacy.modules.toplevel"),
            entry("jax.experimental.pjit.pjit", "xlashard:pjit"),
            entry("jax.experimental.there.below", "xlashard.legacy.modules.core"),
            entry("jax.sharding.NamedSharding", "xlashard:NamedSharding"),
        )
    }
    installation = installing.Installation(table)
    installation.start()
    try:
        here = importlib.import_module("jax.experimental.pjit")
        assert here.pjit is resolve_source("xlashard:pjit")
        assert here.curry(max)(1)(2) == 2
        assert here is jax.experimental.pjit
        asked_by_jax = {"__name__": "jax.tools.some", "here": here, "jax": jax}
        assert eval("here.pjit", asked_by_jax) is today.pjit
        assert eval("jax.sharding.NamedSharding", asked_by_jax) is jax.NamedSharding
        assert jax.sharding.NamedSharding is resolve_source("xlashard:NamedSharding")
        below = importlib.import_module("jax.experimental.there.below")
        assert below.split_dict({"a": 1}, ["a"]) == [1]
        with pytest.raises(ImportError, match="no_such"):
            exec("from jax.experimental.pjit import no_such")
        with pytest.raises(AttributeError, match=r"'jax.experimental.there'.* 'x'"):
            _ = jax.experimental.there.x
    finally:
        installation.end()
    assert importlib.import_module("jax.experimental.pjit") is today is jax.experimental.pjit
    assert jax.sharding.NamedSharding is jax.NamedSharding
    assert not hasattr(jax.experimental, "there")


def test_installation_adds_and_removes_class_members() -> None:
    table = {"jax.Device.self": entry("jax.Device.self", "operator:pos")}
    installation = installing.Installation(table)
    installation.start()
    try:
        assert "self" in dir(jax.devices()[0])
    finally:
        installation.end()
    assert not hasattr(jax.Device, "self")


@pytest.mark.parametrize(
    ("module", "name"), [("jax", "tree_mapp"), ("jax.experimental.maps", "Me")]
)
def test_error_of_a_misspelled_name_has_no_internal_frames(module: str, name: str) -> None:
    with (
        legacy.installed(),
        pytest.raises(AttributeError, match=f"no attribute '{name}'") as caught,
    ):
        getattr(importlib.import_module(module), name)
    ours = str(Path(xlashard.__file__).parent)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not [file for file in files if file.startswith(ours)]


MIGRATED, OLD = "/code/migrated.py", "/code/old.py"


@pytest.fixture
def run_in() -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """Return a function that runs code of a file, while one file is migrated."""

    def run(file: str, code: str) -> dict[str, Any]:
        scope: dict[str, Any] = {"__name__": "program"}
        exec(compile(code, file, "exec"), scope)
        return scope

    assert installing.INSTALLER.install(migrated=frozenset([MIGRATED]))
    yield run
    installing.uninstall()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("from jax import tree_map", ImportError),
        ("import jax; jax.tree_map", AttributeError),
        ("import jax; getattr(jax, 'xla')", AttributeError),
        ("import jax.experimental.maps", ModuleNotFoundError),
        ("from jax.experimental import maps", ModuleNotFoundError),
        ("from jax.experimental.maps import Mesh", ModuleNotFoundError),
        ("import jax; jax.interpreters.xla.DeviceArray", AttributeError),
        ("from jax.interpreters.batching import BatchTracer", ImportError),
    ],
)
def test_migrated_file_gets_no_removed_name_while_others_do(
    code: str, error: type[Exception], run_in: Callable[[str, str], dict[str, Any]]
) -> None:
    # The other file first: what it reads is not kept for the migrated one.
    run_in(OLD, code)
    with pytest.raises(error):
        run_in(MIGRATED, code)
    run_in(OLD, code)


def test_migrated_file_gets_names_as_today(
    today: dict[str, Any], run_in: Callable[[str, str], dict[str, Any]]
) -> None:
    code = "import jax\npmap, jit, Mesh = jax.pmap, jax.jit, jax.sharding.Mesh\n"
    code += "has = hasattr(jax, 'tree_map'), hasattr(jax.experimental, 'maps')"
    scope = run_in(MIGRATED, code)
    assert scope["has"] == (False, False)
    assert {name: scope[name] for name in today} == today
    assert run_in(OLD, code)["has"] == (True, True)
    # Imports beside the removed ones, and those relative to a package, are Python's.
    assert run_in(MIGRATED, "import json.decoder as it; from jax import numpy")["it"].JSONDecoder


@pytest.fixture
def today() -> dict[str, Any]:
    return {"pmap": jax.pmap, "jit": jax.jit, "Mesh": jax.sharding.Mesh}
