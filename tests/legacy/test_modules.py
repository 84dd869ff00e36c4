"""The docstring of each package lists its modules."""

import re
from pathlib import Path

import pytest

from xlashard import legacy
from xlashard.legacy import (
    arrays,
    migration,
    modes,
    modules,
    serialization,
    shardings,
)

PACKAGES = [
    *(legacy, arrays, migration, modes, modules, serialization, shardings),
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_docstring_lists_every_module(package):
    rows = re.findall(r"^\| (`.*?) \|", package.__doc__, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    folder = Path(package.__file__).parent
    there = {path.stem for path in folder.glob("*.py")} | {
        p.parent.name for p in folder.glob("*/*.py")
    }
    assert sorted(named) == sorted(name for name in there if not name.startswith("__"))
