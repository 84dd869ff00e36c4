"""The files around the package agree with each other and with the package."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import xlashard
from tests.layers import read_package
from tests.release import find_problems
from xlashard import _jax
from xlashard._version import __version__
from xlashard.errors import JaxVersionError, JaxVersionWarning

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def lower_bounds(requirements: list[str]) -> dict[str, str]:
    """Return the version behind `>=` by distribution."""
    found = {}
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[\w+\])?[>=]=([0-9.]+)", requirement)
        assert match, f"{requirement!r} has no lower bound"
        found[match[1]] = match[2]
    return found


def same_release(one: str, other: str) -> bool:
    """Return whether versions are equal except for trailing zeros."""
    parts = [[int(part) for part in version.split(".")] for version in (one, other)]
    width = max(map(len, parts))
    first, second = (part + [0] * (width - len(part)) for part in parts)
    return first == second


def test_every_requirement_has_a_lower_bound() -> None:
    for requirements in (PROJECT["project"]["dependencies"], *EXTRAS.values()):
        assert lower_bounds(requirements)


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    lines = (ROOT / ".ci" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    names = ("equinox", "flatbuffers", "flax", "ipython", "orbax")
    libraries = [entry for entry in EXTRAS["dev"] if entry.startswith(names)]
    extras = ("train", "gcs", "legacy", "gpu-target")
    used = [*(entry for extra in extras for entry in EXTRAS[extra]), *libraries]
    bounds = lower_bounds([*PROJECT["project"]["dependencies"], *used])
    assert set(pinned) == set(bounds)
    assert EXTRAS["gcs"][0] in EXTRAS["dev"]
    # The libraries among them work with no older JAX; `make check-jax` tests the bound itself.
    everything = ".".join(map(str, _jax.MINIMUM))
    bounds |= dict.fromkeys(("jax", "jaxlib", "jax-cuda13-plugin"), everything)
    for name, version in pinned.items():
        assert same_release(version, bounds[name]), name


def test_target_extras_support_one_jax_version() -> None:
    (core,) = [e for e in PROJECT["project"]["dependencies"] if e.startswith("jax>")]
    (tpu,) = EXTRAS["tpu"]
    assert tpu == core.replace("jax", "jax[tpu]")
    (plugin,) = (entry.partition(" ;")[0] for entry in EXTRAS["gpu-target"])
    assert plugin == core.replace("jax", "jax-cuda13-plugin")
    assert core.replace("jax", "jaxlib") in PROJECT["project"]["dependencies"]


# Distributions by the names of their modules, where the names differ.
DISTRIBUTIONS = {
    "_pytest": "pytest",
    "absl": "absl-py",
    "libtpu": "jax[tpu]",
    "orbax": "orbax-checkpoint",
}

# Modules that only work with an extra.
EXTRA_MODULES = {
    "legacy": ("xlashard._jax.array_serialization", "xlashard.legacy.migration"),
    "tpu": ("xlashard._jax.private", "xlashard._jax.runtime.topologies"),
    "train": ("xlashard.train",),
    "gcs": ("xlashard.train.stores",),
    # pytest loads its plugin.
    "dev": ("xlashard.pods.testing.pytest_plugin", "xlashard_pytest"),
}


def list_distributions(requirements: list[str]) -> set[str]:
    """Return the names of the required distributions, with their extras."""
    return {re.split(r"[<>=; ]", requirement, maxsplit=1)[0] for requirement in requirements}


def is_inside(module: str, homes: tuple[str, ...]) -> bool:
    """Return whether the module is one of the packages or modules, or lies in one."""
    return any(f"{module}.".startswith(f"{home}.") for home in homes)


LIBRARIES_OF_PROGRAMS = {
    "xlashard.legacy.libraries.optax_names": {"optax"},
    "xlashard.legacy.libraries.pkg_resources": {"packaging"},
}


@pytest.mark.slow
def test_imported_distributions_are_declared() -> None:
    modules = read_package(ROOT, "xlashard") | read_package(ROOT, "xlashard_pytest")
    core = list_distributions(PROJECT["project"]["dependencies"])
    unused, undeclared = set(core), set()
    for module in modules.values():
        declared = core.union(
            *(
                list_distributions(EXTRAS[extra])
                for extra, homes in EXTRA_MODULES.items()
                if is_inside(module.name, homes)
            )
        )
        # Imported only for programs that use these libraries' own names.
        declared |= LIBRARIES_OF_PROGRAMS.get(module.name, set())
        heads = {entry.target.partition(".")[0] for entry in module.imports}
        for head in heads - sys.stdlib_module_names - {"__main__", "xlashard", "xlashard_pytest"}:
            distribution = DISTRIBUTIONS.get(head, head)
            unused.discard(distribution)
            if distribution not in declared:
                undeclared.add((module.name, distribution))
    assert not undeclared
    assert not unused


def read_opening(path: str) -> str:
    """Return the first paragraph below the title of a page, without markup."""
    text = (ROOT / path).read_text(encoding="utf-8").split("\n\n")[1]
    return " ".join(re.sub(r"[*`]", "", text).split())


def test_one_sentence_describes_the_purpose() -> None:
    purpose = PROJECT["project"]["description"]
    assert purpose.count(". ") == 0 and purpose.endswith(".")
    pages = ("README.md", "docs/index.md", "docs/how/architecture.md")
    assert {read_opening(page) for page in pages} == {purpose}
    assert f"site_description: {purpose}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert " ".join((xlashard.__doc__ or "").split("\n\n")[0].split()) == purpose


@pytest.mark.slow
def test_find_python_returns_a_supported_python() -> None:
    done = subprocess.run(
        [str(ROOT / ".ci" / "find-python"), "3.12"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    version = subprocess.run(
        [done.stdout.strip(), "-c", "import sys; print(sys.version_info >= (3, 12))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == "True"


@pytest.mark.slow
def test_find_python_names_the_missing_version() -> None:
    done = subprocess.run(
        [str(ROOT / ".ci" / "find-python"), "3.99"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    assert "xlashard needs Python 3.99 or newer" in done.stderr
    assert done.stdout == ""


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "xlashard/_version.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest
    assert newest[1] in ("Unreleased", __version__)


def test_a_release_needs_a_new_version_with_entries() -> None:
    log = "# Changelog\n\n## Unreleased\n\n{}\n## 0.2.0\n\n- A.\n\n## 0.1.0\n\n- B.\n"
    assert find_problems(log.format(""), "0.2.0", ["v0.1.0"]) == []
    (left,) = find_problems(log.format("- C.\n"), "0.2.0", [])
    assert "Unreleased" in left
    (absent,) = find_problems(log.format(""), "0.3.0", [])
    assert "## 0.3.0" in absent
    (released,) = find_problems(log.format(""), "0.1.0", ["v0.1.0"])
    assert "v0.1.0" in released


@pytest.mark.devices(8)
def test_tests_run_on_eight_emulated_devices() -> None:
    if os.environ["JAX_PLATFORMS"] == "cpu":
        assert jax.device_count() == 8
    assert jax.default_backend() == jax.devices()[0].platform


@pytest.mark.slow
def test_conftest_refuses_an_early_import_of_jax(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import jax\n", encoding="utf-8")
    command = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pytest; "
    arguments = ["-p", "early", "-p", "no:xdist", "tests/test_project.py"]
    done = subprocess.run(
        [sys.executable, "-c", f"{command}raise SystemExit(pytest.main({arguments!r}))"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "JAX was imported before tests/conftest.py" in done.stdout + done.stderr


def test_import_check_agrees_with_the_requirement() -> None:
    bounds = lower_bounds(PROJECT["project"]["dependencies"])
    oldest = ".".join(map(str, _jax.OLDEST))
    assert bounds["jax"] == bounds["jaxlib"] == oldest
    assert f"make check-jax JAX={oldest}\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_tested_versions_of_jax_are_accepted_silently(recwarn: pytest.WarningsRecorder) -> None:
    for version in ("0.11.2", "0.11.2.1", "0.11.9", "0.12.0", "0.12.99"):
        _jax.warn_of_untested_version(version)
    assert not recwarn.list


@pytest.mark.parametrize("version", ["0.10.1", "0.4.30", "0.9.99.1"])
def test_older_jax_is_refused_with_the_versions_to_install(version: str) -> None:
    with pytest.raises(ImportError, match=re.escape("'jax>=0.11.2,<0.13'")) as caught:
        _jax.warn_of_untested_version(version)
    assert isinstance(caught.value, JaxVersionError)
    assert (caught.value.installed, caught.value.tested) == (version, "0.11.2 to 0.12")


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0", "0.11.1"])
def test_jax_for_reports_alone_gets_one_warning(version: str) -> None:
    with pytest.warns(
        JaxVersionWarning, match=r"Array and pjit .* 'jax>=0\.11\.2,<0\.13'"
    ) as caught:
        _jax.warn_of_untested_version(version)
    assert len(caught) == 1
    assert f"jax {version} is installed" in str(caught[0].message)


@pytest.mark.parametrize("version", ["0.13.0", "0.13.0.dev20270101", "1.0"])
def test_newer_jax_gets_one_warning_that_names_the_tested_versions(version: str) -> None:
    with pytest.warns(JaxVersionWarning, match=r"jax 0\.11\.2 to 0\.12") as caught:
        _jax.warn_of_untested_version(version)
    assert len(caught) == 1
    assert version in str(caught[0].message)


@pytest.mark.slow
def test_import_and_first_call_load_no_rare_modules() -> None:
    """Neither the import nor a call over several devices loads it."""
    code = """
import sys, numpy as np, jax, xlashard
from xlashard import Mesh, NamedSharding, P
mesh = Mesh(np.array(jax.devices()), ("x",))
x = xlashard.device_put(np.ones(8), NamedSharding(mesh, P("x")))
assert float(xlashard.pjit(lambda x: x * 2)(x).sum()) == 16
print(*sorted(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "xlashard.core.array" in loaded
    libraries = {"jinja2", "markupsafe", "rich"}
    late = {*libraries, *(f"xlashard.{name}" for name in FEW_NEED.split())}
    assert late - libraries <= read_package(ROOT, "xlashard").keys()
    assert not loaded.intersection(late)


FEW_NEED = """
_jax.array_serialization _jax.legacy_api _jax.stablehlo_parse _jax.trace.origins
analysis core.array.constructors core.array.device_buffers core.array.dlpack
core.array.reshard.compiled core.array.reshard.p2p core.array.reshard.permute
core.array.reshard.plan core.array.reshard.report core.pjit.stages.bound_step
core.pjit.stages.traced core.processes core.program.consistency.exchange
core.program.consistency.fingerprint core.program.environment core.program.parsed_module
core.program.remote_compile core.program.saved_program geometry.groups geometry.reshard
hlo.collectives hlo.module legacy multihost numpy pods predict train
"""


def test_lazily_imported_names_are_available() -> None:
    assert {"explain", "visualize", "reshard_plan"} <= set(dir(xlashard))
    assert all(getattr(xlashard, name) is not None for name in xlashard.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'visualise'"):
        _ = xlashard.visualise
