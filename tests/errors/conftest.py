"""Remove files that calls of the catalogue write."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run the calls, which do not clean up, in a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("mistakes")))
        yield
