"""The wheel, installed without the checkout, does what the documents show."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import read_blocks

# A download of some hundred megabytes may be slow.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parent.parent
# Variables that change what the installed programs do, or put the checkout on their path.
OWN_VARIABLES = ("JAX_", "LIBTPU_", "PYTEST_", "PYTHON", "TPU_", "XLASHARD_", "XLA_")
EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

POD_TEST = """
import jax
import pytest

import xlashard as xs


@pytest.mark.pod(processes=2, devices=2)
def test_pod_has_four_devices():
    assert xs.make_mesh((4,), ("data",)).size == jax.device_count() == 4
"""


def run(folder: Path, *words: str | Path, **variables: str) -> str:
    """Run a command in the folder, without what this process has set, and return its output."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=kept | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(source: Path, folder: Path, *options: str) -> None:
    run(source, sys.executable, "-m", "hatchling", "build", *options, "--directory", folder)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


def find_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield an environment with the wheel, what it requires, and pytest."""
    folder = tmp_path_factory.mktemp("environment")
    run(folder, sys.executable, "-m", "venv", folder)
    install(folder, str(find_wheel(distributions)), "pytest")
    yield folder
    # pytest keeps the folders of three runs, and this one has 1.5 GB.
    shutil.rmtree(folder)


def install(environment: Path, *requirements: str) -> None:
    pip = ("python", "-m", "pip", "install", "--quiet", "--no-compile")
    run_installed(environment, environment, *pip, *requirements)


def run_installed(environment: Path, folder: Path, *words: str, **variables: str) -> str:
    """Run a command with the programs of the environment."""
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return run(folder, environment / "bin" / words[0], *words[1:], PATH=path, **variables)


def read_block(document: str, containing: str) -> str:
    """Return the first block of a document that contains the text."""
    blocks = read_blocks((ROOT / document).read_text(encoding="utf-8"))
    return next(code for block in blocks if containing in (code := "\n".join(block.code)))


def test_wheel_of_the_sdist_is_the_wheel_of_the_checkout(
    distributions: Path, tmp_path: Path
) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    build(source, tmp_path / "dist", "--target", "wheel")
    direct, other = (
        {entry.filename: entry.CRC for entry in zipfile.ZipFile(wheel).infolist()}
        for wheel in (find_wheel(distributions), find_wheel(tmp_path / "dist"))
    )
    assert direct == other
    assert {name.partition("/")[0].partition("-")[0] for name in direct} == {
        "xlashard",
        "xlashard_pytest",
    }
    shipped = {f"xlashard/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert {"xlashard/py.typed", *shipped} <= direct.keys()


def write_first_program(folder: Path) -> None:
    """Write the README's first program, with a last line that prints where its modules are."""
    program = read_block("README.md", "import xlashard as xs")
    where = "import xlashard_pytest\nprint('from', xs.__file__, xlashard_pytest.__file__)\n"
    (folder / "first.py").write_text(f"{program}\n{where}", encoding="utf-8")


def assert_imports_are_installed(out: str, environment: Path) -> None:
    (line,) = re.findall(r"^from (.*)$", out, flags=re.MULTILINE)
    files = line.split()
    assert len(files) == 2
    assert all(Path(file).is_relative_to(environment) for file in files)


def test_installed_package_runs_the_first_program(environment: Path, tmp_path: Path) -> None:
    write_first_program(tmp_path)
    out = run_installed(environment, tmp_path, "python", "first.py")
    assert re.search(r"all-reduce .* model ", out)
    assert_imports_are_installed(out, environment)


def test_installed_command_explains_a_script(environment: Path, tmp_path: Path) -> None:
    write_first_program(tmp_path)
    out = run_installed(environment, tmp_path, "xlashard", "explain", "--", "python", "first.py")
    assert re.search(r"<lambda> +first\.py:\d+", out)
    assert_imports_are_installed(out, environment)


def test_installed_command_runs_a_program_of_2022(environment: Path, tmp_path: Path) -> None:
    program = read_block("docs/tutorials/old_program.md", "in_axis_resources")
    (tmp_path / "old.py").write_text(program, encoding="utf-8")
    words = ("legacy", "--report", "--", "python", "old.py")
    out = run_installed(environment, tmp_path, "xlashard", *words, **EIGHT_DEVICES)
    assert "(16, 8)" in out
    assert "jax.experimental.pjit.pjit" in out


def test_installed_pytest_plugin_starts_a_pod(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "test_pod.py").write_text(POD_TEST, encoding="utf-8")
    assert "1 passed" in run_installed(environment, tmp_path, "python", "-m", "pytest")


# The last one: it adds packages, without which the tests above pass.
def test_installed_command_preflights_shipped_settings(
    environment: Path, distributions: Path, tmp_path: Path
) -> None:
    install(environment, f"{find_wheel(distributions)}[tpu,train]")
    command = read_block("README.md", "xlashard preflight configs/")
    words = (*shlex.split(command), "--estimate", "--html", "page.html")
    out = run_installed(environment, tmp_path, *words)
    assert "configs/8b_v5p_64.toml · v5p:2x4x4 (32 chips)" in out
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8")
