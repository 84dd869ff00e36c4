"""Virtual environments for tests, made of links to packages of the test's own environment."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMPILED = frozenset({"jax", "jaxlib", "numpy", "scipy"})
"""Required distributions that a lent xlashard expects in the environment of the program."""


def required(names: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """Return distributions and all that they require, by their normalized names."""
    found, pending = set(), [re.split(r"[ <>=!~\[(;]", name)[0] for name in names]
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in found or name in without:
            continue
        found.add(name)
        entries = metadata.requires(name) or ()
        pending += [re.split(r"[ <>=!~\[(;]", e)[0] for e in entries if "extra ==" not in e]
    return found


def list_members(name: str) -> dict[str, Path]:
    """Return the folders and files of a distribution in `site-packages`, by their names."""
    distribution = metadata.distribution(name)
    parts = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    return {part: Path(str(distribution.locate_file(part))) for part in parts}


def import_names(name: str) -> set[str]:
    """Return the names of the packages that a distribution has."""
    return {m for m, path in list_members(name).items() if (path / "__init__.py").exists()}


def find_newest_python() -> str:
    """Return the interpreter that `make` makes the newest environment with."""
    outside = os.environ["PATH"].partition(os.pathsep)[2]
    done = subprocess.run(
        [ROOT / ".ci" / "find-python", "3.12"],
        env=os.environ | {"PATH": outside},
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or sys.executable


def make_environment(folder: Path, python: str, links: dict[str, Path]) -> Path:
    """Make a virtual environment with links to packages, and return its interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, path in links.items():
        (packages / name).symlink_to(path)
    return folder / "bin" / "python"


def list_files(folder: Path) -> list[str]:
    """List the files of an environment, without the bytecode that any import may write."""
    walked = os.walk(folder, followlinks=True)
    return sorted(f"{at}/{name}" for at, _, names in walked for name in names if "__py" not in at)
