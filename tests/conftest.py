"""Give every test process eight emulated devices, before JAX starts.

`XLASHARD_TEST_PLATFORM=cuda pytest ...` runs the tests on that platform instead, and
`XLASHARD_TEST_DEVICES=1` on another number of devices; tests that need more are skipped.
`XLASHARD_TEST_WITHOUT_JAX=1 pytest -m without_jax ...` runs the tests of the pure ring as if JAX
were not installed.
"""

import functools
import gc
import importlib.metadata
import os
import platform
import re
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from tests.device_counts import (
    COUNT_FLAG,
    EMULATED,
    QUICK_COMPILE,
    USUAL,
    count_devices,
    describe_missing_devices,
)
from tests.without_jax import HAS_JAX

# An installed xlashard has it as an entry point; here it is found without one.
pytest_plugins = ["xlashard_pytest"]

# They need the built site; `make docs` builds it and selects them.
collect_ignore = [] if any("tests/site" in word for word in sys.argv) else ["site"]

# Eight devices on two shared cores may wait for each other longer than the 40 s after which XLA
# takes a collective for stuck and ends the process.
PATIENCE = ("--xla_cpu_collective_call_terminate_timeout_seconds=1200",)


def _prepare_jax() -> None:
    """Set the environment that JAX reads when it is imported and when its backend starts."""
    if "XLASHARD_POD_PROCESSES" in os.environ:
        return  # Process of a pod, where JAX runs already and has its devices.
    # Exception notes of the tested code are without links to the documentation.
    os.environ.setdefault("XLASHARD_DOCS_URL", "")
    if not HAS_JAX:
        # Python refuses to import a module that is None.
        sys.modules.update(dict.fromkeys(("jax", "jaxlib", "libtpu")))  # pyright: ignore
        return
    if "jax" in sys.modules:
        raise pytest.UsageError(
            "JAX was imported before tests/conftest.py could ask for "
            f"{EMULATED} emulated devices: find the plugin that imports it "
            "(python -X importtime -m pytest) and switch it off with -p no:NAME"
        )
    platform = os.environ.get("XLASHARD_TEST_PLATFORM", "")
    os.environ["JAX_PLATFORMS"] = platform or "cpu"
    if platform:
        # Each process of pytest would take three quarters of a GPU's memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if COUNT_FLAG not in flag]
    os.environ["XLA_FLAGS"] = " ".join(
        [QUICK_COMPILE, *PATIENCE, *kept, f"{COUNT_FLAG}={EMULATED}"]
    )


_prepare_jax()
# `python` in the command lines of tests is the one that runs the tests.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
os.environ.pop("VIRTUAL_ENV", None)

# A shell starts background processes with SIGINT and SIGQUIT ignored, and children inherit that:
# tests of Ctrl-C would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Compilation and busy machines make single examples slow, whatever the tested code.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="rewrite the golden files instead of comparing; runs the tests of golden files alone",
    )
    parser.addoption(
        "--full-size",
        action="store_true",
        help="also compile what takes minutes, of which a small version is always tested",
    )
    parser.addoption(
        "--random-programs",
        type=int,
        default=60,
        metavar="N",
        help="how many random programs pjit is tested with",
    )


# Folders whose fast tests run under GSPMD as well, and with the oldest versions. Single files of
# others carry the marker themselves.
_LAYER = ("analysis/explain", "analysis/recompile", "core/array", "core/pjit", "core/program")
PARTITIONER_FOLDERS = (*_LAYER, "core/sharding", "errors", "hlo")
# Those of them whose slow tests run under GSPMD too: what they compile, or read of compiled
# programs, is written for one partitioner. `make test-all` runs the others.
LOWERING_FOLDERS = (
    *("analysis/explain", "core/pjit/shardings", "core/pjit/stages"),
    *("core/pjit/transformations", "core/program"),
)
JAX_VERSION_FOLDERS = (*_LAYER, "_jax", "core/sharding", "hlo", "legacy", "predict/targets/gpu")
# Folders and files of the pure ring: their tests run without JAX too, except those that are slow
# or marked `needs_jax`.
WITHOUT_JAX = (
    "analysis/explain/test_stored_reports.py",
    "analysis/explain/test_text.py",
    "cli/commands/test_completion.py",
    "cli/commands/test_legacy.py",
    "cli/test_main.py",
    "geometry",
    "hlo/test_buffers.py",
    "hlo/test_loops.py",
    "hlo/test_text.py",
    "legacy/migration",
    "predict/costs/gpu/test_cuda_calls.py",
    "predict/costs/test_memory_traffic.py",
    "predict/costs/test_schedule.py",
    "predict/preflight/render/test_odd_reports.py",
    "predict/preflight/render/test_roofline.py",
    "predict/preflight/render/test_step_timeline.py",
    "predict/preflight/render/test_terminal_report.py",
    "predict/preflight/render/test_torus_drawing.py",
    "predict/preflight/report/test_budget.py",
    "predict/preflight/report/test_comparison.py",
    "predict/preflight/report/test_preflight_report.py",
    "predict/preflight/report/test_pricing.py",
    "predict/preflight/report/test_schema.py",
    "predict/sweep/test_sweep_results.py",
    "predict/targets/gpu/test_gpu_models.py",
    "predict/targets/gpu/test_gpu_names.py",
    "predict/targets/test_mesh_layout.py",
    "predict/targets/tpu/test_topology_names.py",
    "support/test_documents.py",
    "support/test_program_runner.py",
    "test_layers.py",
    "train/config/test_schema.py",
    "workers",
)


# Folders and files whose tests expect what eight devices do.
EIGHT_DEVICES = (
    *("core/pjit/shardings/test_explicit.py", "core/sharding/test_classes.py"),
    *("legacy/modules/test_multihost_utils.py", "legacy/shardings/test_pmap.py"),
)


# Some libraries need a newer JAX than this package: `make check-jax` installs none of them.
_MISSING = [name for name in ("equinox", "flax", "optax") if find_spec(name) is None]
_IMPORTS_MISSING = re.compile(rf"^(import|from) ({'|'.join(_MISSING)})\b", re.MULTILINE)


# Marks by which a suite selects its tests, with the folders that have them without a word.
FOLDERS_BY_MARK = {
    "integration": (),
    "partitioner": PARTITIONER_FOLDERS,
    "jax_version": JAX_VERSION_FOLDERS,
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that import JAX, or a library, which isn't installed.

    Files without a test of the suite stay out too: importing all takes a quarter of a minute.
    """
    if not HAS_JAX:
        return None if _is_without_jax(collection_path) else True
    if collection_path.suffix != ".py":
        return None
    mark = _find_required_mark(config.option.markexpr)
    if mark is not None and not _names_mark(collection_path, mark):
        return True
    if not _MISSING:
        return None
    return _IMPORTS_MISSING.search(collection_path.read_text(encoding="utf-8")) is not None or None


def _find_required_mark(expression: str) -> str | None:
    """Return the mark that every test has which an expression of `-m` selects."""
    first, *others = expression.split(" and ")
    is_required = first in FOLDERS_BY_MARK and not any(" or " in other for other in others)
    return first if is_required else None


@functools.cache
def _names_mark(path: Path, mark: str) -> bool:
    """Return whether a file has the mark by its folder, or in its text."""
    return _lies_in(path, FOLDERS_BY_MARK[mark]) or mark in path.read_text(encoding="utf-8")


def _is_without_jax(place: Path) -> bool:
    listed = (Path(__file__).parent / name for name in WITHOUT_JAX)
    return any(place.is_relative_to(path) or path.is_relative_to(place) for path in listed)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the folders above, before `-m` selects by markers.

    `--update-goldens` keeps the tests that write golden files, and no other.
    """
    if config.getoption("--update-goldens"):
        items[:] = [item for item in items if "update_goldens" in getattr(item, "fixturenames", ())]
    for item in items:
        others = map(item.get_closest_marker, ("needs_jax", "slow", "integration"))
        if _lies_in(item.path, WITHOUT_JAX) and not any(others):
            item.add_marker("without_jax")
        elif _depends_on_partitioner(item):
            item.add_marker("partitioner")
        if _lies_in(item.path, EIGHT_DEVICES):
            item.add_marker(pytest.mark.devices(USUAL))
        if _lies_in(item.path, JAX_VERSION_FOLDERS):
            item.add_marker("jax_version")
    _check_marks_are_found(items)


def _check_marks_are_found(items: list[pytest.Item]) -> None:
    """Raise for a test whose mark its file does not name: its suite would not find the test."""
    for item in items:
        for mark in FOLDERS_BY_MARK:
            if item.get_closest_marker(mark) and not _names_mark(item.path, mark):
                raise pytest.UsageError(
                    f"{item.path} has {item.name} marked {mark}: name the mark there"
                )


@functools.cache
def _lies_in(path: Path, folders: tuple[str, ...]) -> bool:
    here = os.path.dirname(__file__)
    # Comparisons of paths as such took a twentieth of the collection.
    return any(f"{path}/".startswith(f"{here}/{folder}/") for folder in folders)


def _depends_on_partitioner(item: pytest.Item) -> bool:
    """Return whether a test of a folder runs under GSPMD as well."""
    is_slow = item.get_closest_marker("slow") is not None
    folders = LOWERING_FOLDERS if is_slow else PARTITIONER_FOLDERS
    return _lies_in(item.path, folders) and not _chooses_partitioner(item)


def _chooses_partitioner(item: pytest.Item) -> bool:
    """Return True for a test that behaves alike under both partitioners."""
    if item.get_closest_marker("own_partitioner") is not None:
        return True
    # The fixture of this name sets the partitioner, to each in turn.
    return isinstance(item, pytest.Function) and isinstance(
        getattr(item, "callspec", None) and item.callspec.params.get("partitioner"), str
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more devices than there are."""
    marker = item.get_closest_marker("devices")
    if HAS_JAX and marker is not None and marker.args[0] > count_devices():
        pytest.skip(f"needs {marker.args[0]} devices, and there are {count_devices()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a request for devices that do not exist into a skip."""
    report = yield
    if report.failed and call.excinfo is not None:
        _skip_for_devices(report, item.path, call.excinfo.value)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip the files that request such devices at their import."""
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None:
        _skip_for_devices(report, collector.path, call.excinfo.value)
    return report


def _skip_for_devices(
    report: pytest.TestReport | pytest.CollectReport, path: Path, error: BaseException
) -> None:
    if HAS_JAX and (reason := describe_missing_devices(error)):
        report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collect without the garbage collector, which would scan everything that was imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    _keep_what_there_is()
    if HAS_JAX:
        _remember_paths_of_hidden_frames()


def _remember_paths_of_hidden_frames() -> None:
    """Cache the comparison of paths by which JAX hides frames of a traceback.

    JAX compares the path of every frame of every error with the path of every hidden folder, and
    queries the file system each time: milliseconds for each error that a test expects.
    """
    from jax._src import traceback_util

    traceback_util._path_starts_with = functools.cache(traceback_util._path_starts_with)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_there_is()


def _keep_what_there_is() -> None:
    """Move long-lived objects out of the garbage collector's sight.

    The tests, what they import, and the programs that JAX keeps are a million objects, and every
    collection would look at all of them, also each `gc.collect()` of a test: 0.2 s and more.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Return whether to write golden files."""
    return request.config.getoption("--update-goldens")


def pytest_report_header() -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")]
    partitioner = os.environ.get("XLASHARD_PARTITIONER") or "shardy (default)"
    return (
        f"python {platform.python_version()}, {', '.join(versions)}, "
        f"platform {os.environ['JAX_PLATFORMS'] if HAS_JAX else 'none'}, partitioner {partitioner}"
    )


@pytest.fixture(scope="module")
def shared_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use JAX's persistent cache in a folder of this test run, in processes of the tests too."""
    if not HAS_JAX:
        yield
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    settings = {
        "jax_compilation_cache_dir": str(folder / "programs"),
        # Looking up the smallest program takes 3 ms, compiling it 25.
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
