"""A bucket on this machine, in which each test has a folder."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xlashard.train.stores import locate

if TYPE_CHECKING:
    from tests.train.store.server import Bucket


@pytest.fixture(scope="session")
def served() -> "Iterator[Bucket]":
    """Serve one bucket for all tests of a process, whose clients read the variables once."""
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("gcsfs is not installed: pip install 'xlashard[gcs]'")
    from tests.train.store.server import serve_bucket

    with serve_bucket() as (bucket, variables), pytest.MonkeyPatch.context() as patch:
        # Before gcsfs is imported, which reads one of them then.
        for name, value in variables.items():
            patch.setenv(name, value)
        yield bucket


@pytest.fixture
def bucket(served: "Bucket") -> "Iterator[Bucket]":
    """Return the bucket, in which nothing goes wrong yet."""
    faults = type(served.faults)
    served.objects.clear()
    served.faults = faults()
    yield served
    served.faults = faults()


@pytest.fixture
def store(bucket: "Bucket") -> Path:
    """Return the folder of runs in the bucket."""
    return locate("gs://bucket/runs")
