"""What several tests of arrays are given."""

import pytest

from tests.array.cases import DEVICES
from xlashard.array.reshard import plan


@pytest.fixture(params=["in one memory", "between devices"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways: that of emulated devices, and that of devices with a memory of their own."""
    if request.param == "between devices":
        monkeypatch.setattr(plan, "in_one_memory", lambda *places: False)
    elif DEVICES[0].platform != "cpu":
        pytest.skip("these devices have memories of their own")
    return request.param
