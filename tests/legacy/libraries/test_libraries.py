"""Names of other libraries: given back where they are missing, and nowhere else."""

import builtins
import collections
import dataclasses
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from tests.legacy.libraries.library_lines import EQUINOX_LINES, LINES, OPTAX_LINES
from tests.message_patterns import naming
from xlashard.errors import ResourceError
from xlashard.legacy.installer import installed
from xlashard.legacy.libraries.entries import find_missing_entries, list_library_entries
from xlashard.legacy.libraries.installation import (
    LibraryInstallation,
    UsedNames,
    return_frozen_dicts,
)
from xlashard.legacy.module_shims import ModuleShim
from xlashard.legacy.recorder import Recorder
from xlashard.legacy.usage_report import Report, text_of

MISSING = find_missing_entries()


@pytest.fixture
def used() -> Iterator[UsedNames]:
    before = set(sys.modules)
    used = UsedNames()
    installation = LibraryInstallation(used.listen)
    installation.start()
    yield used
    installation.end()
    left = {name for name in set(sys.modules) - before if isinstance(sys.modules[name], ModuleShim)}
    assert not left


def read_numpy(name: str) -> object:
    return getattr(np, name)


def run(lines: dict[str, str]) -> None:
    for name, code in lines.items():
        try:
            exec(code, {"np": np, "__name__": "program"})
        except Exception as error:
            raise AssertionError(name) from error


def test_names_behave_as_then(used: UsedNames) -> None:
    pytest.importorskip("packaging")
    run({name: code for name, code in LINES.items() if name in MISSING})
    described = used.describe()
    for name in ("numpy.object (until NumPy 1.24)", "collections.Mapping (until Python 3.10)"):
        assert name in described


@pytest.mark.slow
def test_names_of_optax_and_flax_behave_as_then(used: UsedNames) -> None:
    optax = pytest.importorskip("optax")
    pytest.importorskip("flax")
    run(OPTAX_LINES)
    described = used.describe()
    assert "optax.hvp (until optax 0.1.8)" in described
    is_own = "MaybeUpdateState" in vars(optax)
    assert ("optax.MaybeUpdateState (until optax 0.2.5)" in described) != is_own


@pytest.mark.slow
def test_names_of_equinox_behave_as_then(used: UsedNames) -> None:
    pytest.importorskip("equinox")
    run({name: code for name, code in EQUINOX_LINES.items() if name in MISSING})


def test_names_are_gone_after_the_run(used: UsedNames) -> None:
    assert read_numpy("object") is object
    LibraryInstallation(used.listen).end()
    installation = LibraryInstallation(used.listen)
    installation.start()
    installation.end()
    assert read_numpy("object") is object


def test_nothing_is_installed_by_default() -> None:
    with installed():
        assert not hasattr(np, "float_")
        assert not hasattr(collections, "Mapping")


def test_names_that_a_library_has_stay_its_own(monkeypatch) -> None:
    monkeypatch.setattr(np, "product", "its own", raising=False)
    monkeypatch.setitem(sys.modules, "imp", types.ModuleType("imp"))
    sys.modules["imp"].__spec__ = builtins.__spec__
    before = np.bool, np.long
    used = UsedNames()
    installation = LibraryInstallation(used.listen)
    installation.start()
    try:
        assert (read_numpy("product"), np.bool, np.long) == ("its own", *before)
        assert not isinstance(sys.modules["imp"], ModuleShim)
        assert "numpy" not in used.describe()
    finally:
        installation.end()


def test_entries_of_absent_packages_are_left_out() -> None:
    assert (
        {"numpy.object", "collections.Mapping"} <= MISSING.keys() <= list_library_entries().keys()
    )
    for package in ("chex", "optax"):
        listed = any(name.startswith(f"{package}.") for name in MISSING)
        assert listed == (find_spec(package) is not None)


def test_report_counts_accesses_and_no_calls_of_the_builtin(tmp_path) -> None:
    file = tmp_path / "program.py"
    recorder = Recorder()
    installation = LibraryInstallation(recorder.listen)
    installation.start()
    recorder.start()
    try:
        code = "import numpy as np\nnp.int(3)\nfor _ in range(3): int(4)\n"
        exec(compile(code, str(file), "exec"), {"__name__": "program"})
    finally:
        recorder.end()
        installation.end()
    uses = [use for use in recorder.uses() if use.file == str(file)]
    assert [(use.entry.name, use.line, use.count) for use in uses] == [("numpy.int", 2, 1)]
    text = text_of(Report.of(recorder.uses()))
    assert "numpy.int (until NumPy 1.24); today: int" in text


MUTABLE = """\
import dataclasses, numpy as np
from typing import Any, ClassVar
@dataclasses.dataclass
class State:
    counter: np.ndarray = np.zeros(2, np.int32)
    scale: Any = dataclasses.field(default=np.ones(1), repr=False)
    steps: int = 3
    shared: ClassVar[Any] = np.zeros(1)
"""


def test_dataclasses_have_arrays_as_defaults() -> None:
    used, scope = UsedNames(), {"__name__": "program"}
    with pytest.raises(ValueError, match="mutable default"):
        exec(MUTABLE, dict(scope))
    installation = LibraryInstallation(used.listen)
    installation.start()
    try:
        exec(MUTABLE, scope)
        for default in ([], {}, set()):
            with pytest.raises(ValueError, match="mutable default"):
                dataclasses.make_dataclass("Wrong", [("x", object, default)])
    finally:
        installation.end()
    state = scope["State"](steps=4)
    assert state.counter is scope["State"].counter and state.scale.tolist() == [1]
    assert [field.name for field in dataclasses.fields(state)] == ["counter", "scale", "steps"]
    assert repr(state) == "State(counter=array([0, 0], dtype=int32), steps=4)"
    assert "dataclasses.dataclass(default) (until Python 3.11)" in used.describe()
    with pytest.raises(ValueError, match="mutable default"):
        exec(MUTABLE, dict(scope))


class Configuration:
    """Stand-in of `flax.config`."""

    flax_return_frozendict = False

    def update(self, name: str, value: bool) -> None:
        setattr(self, name, value)


def test_flax_returns_frozen_dicts_unless_the_environment_decides(monkeypatch) -> None:
    module = types.ModuleType("flax.configurations")
    config = Configuration()
    vars(module)["config"] = config
    used = UsedNames()
    undo = return_frozen_dicts(module, used.listen)
    assert config.flax_return_frozendict
    undo()
    assert not config.flax_return_frozendict
    assert "flax.config.flax_return_frozendict (until flax 0.7.1)" in used.describe()
    monkeypatch.setenv("FLAX_RETURN_FROZENDICT", "0")
    return_frozen_dicts(module, used.listen)
    assert not config.flax_return_frozendict


@pytest.mark.slow
def test_error_about_frozen_specs_names_the_switch(mesh) -> None:
    core = pytest.importorskip("flax.core")
    import jax

    from xlashard.legacy import pjit

    x = np.ones((8, 4), np.float32)
    for specs, value, advice in (
        (core.freeze({"w": jax.P("x")}), {"w": x}, "xlashard legacy --libraries"),
        ({"w": jax.P("x")}, core.freeze({"w": x}), "flax.core.freeze(specs)"),
    ):
        identity = pjit(lambda p: p, in_axis_resources=(specs,), out_axis_resources=None)
        with mesh, pytest.raises(ResourceError, match=naming("FrozenDict", advice)):
            identity(value)
