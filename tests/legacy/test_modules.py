"""The docstrings of the packages say which modules there are."""

import re
from pathlib import Path

import pytest

from xlashard import legacy
from xlashard.legacy import serialization


@pytest.mark.parametrize("package", [legacy, serialization], ids=lambda package: package.__name__)
def test_every_module_has_a_place_in_the_table(package):
    rows = re.findall(r"^\| (`.*?) \|", package.__doc__, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    folder = Path(package.__file__).parent
    there = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert sorted(named) == sorted(name for name in there if not name.startswith("__"))
