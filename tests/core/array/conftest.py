"""Fixtures of tests of arrays."""

import pytest

from tests.core.array.cases import DEVICES
from xlashard.core.array.reshard import plan


@pytest.fixture(params=["in one memory", "between devices"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both transfer paths: of emulated devices, and of devices with their own memory."""
    if request.param == "between devices":
        monkeypatch.setattr(plan, "in_one_memory", lambda *places: False)
    elif DEVICES[0].platform != "cpu":
        pytest.skip("these devices have memories of their own")
    return request.param
