"""One of the processes of a pod of eight devices: `python across_processes_moving.py [N]`.

Between random pairs of shardings, the same in all processes, arrays go from any devices to any
others; N is the number of pairs.
"""

import sys
from typing import Any

import jax
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

jax.distributed.initialize()

from tests.array.cases import Stripes, same  # noqa: E402
from tests.array.test_reshard_property import cases  # noqa: E402
from xlashard import device_put, make_array_from_callback  # noqa: E402
from xlashard.array import retile  # noqa: E402

ME = jax.process_index()
EXAMPLES = int(sys.argv[1]) if len(sys.argv) > 1 else 60

# All must draw the same.
ALIKE = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def check(v: np.ndarray, source: Any, target: Any, donate: bool, fresh: bool) -> None:
    x = make_array_from_callback(v.shape, source, lambda index: v[index], dtype=v.dtype)
    y = device_put(x, target, donate=donate, may_alias=False if fresh and not donate else None)
    assert y.sharding == target or isinstance(target, Stripes)
    assert x.is_deleted() == donate
    indices = target.devices_indices_map(v.shape)
    shards = {shard.device: shard.data for shard in y.addressable_shards}
    assert shards.keys() == {d for d in indices if d.process_index == ME}
    for device, data in shards.items():
        assert data.devices() == {device}
        assert same(data, v[indices[device]]), (source, target, v.dtype)
    if not donate:
        for shard in x.addressable_shards:
            assert same(shard.data, v[shard.index])


@ALIKE
@given(case=cases(), donate=st.booleans(), fresh=st.booleans(), slabs=st.booleans())
def every_shard_is_the_right_piece(case: Any, donate: bool, fresh: bool, slabs: bool) -> None:
    whole = retile._NEGLIGIBLE_BYTES
    retile._NEGLIGIBLE_BYTES = 0 if slabs else whole
    v, source, target = case
    check(v, source, target, donate, fresh)
    retile._NEGLIGIBLE_BYTES = whole


every_shard_is_the_right_piece()
print("all agree")
