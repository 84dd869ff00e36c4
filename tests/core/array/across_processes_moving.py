"""One of the processes of a pod of eight devices: `python across_processes_moving.py [N]`.

Arrays are resharded between random pairs of shardings over any devices, the same pairs in all
processes; N is the number of pairs.
"""

import os
import random
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

jax.distributed.initialize()

from tests.core.array.cases import Stripes, same  # noqa: E402
from tests.core.array.reshard.test_reshard_property import draw_case  # noqa: E402
from xlashard import Mesh, NamedSharding, P, device_put, make_array_from_callback  # noqa: E402
from xlashard.core.array.reshard import compiled  # noqa: E402

ME = jax.process_index()
EXAMPLES = int(sys.argv[1]) if len(sys.argv) > 1 else 60


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


class Dice:
    """Random draws that are the same in all processes, which hypothesis doesn't promise."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, strategy: Any) -> Any:
        strategy = getattr(strategy, "wrapped_strategy", strategy)
        match type(strategy).__name__:
            case "SampledFromStrategy":
                return self._random.choice(list(strategy.elements))
            case "IntegersStrategy":
                return self._random.randint(strategy.start, strategy.end)
            case "PermutationStrategy":
                return self._random.sample(list(strategy.values), len(strategy.values))
            case "JustStrategy":
                return strategy.value
            case "BooleansStrategy":
                return self._random.random() < 0.5
        raise TypeError(strategy)


for number in range(EXAMPLES):
    draw: Any = Dice(number)
    case = draw_case(draw)
    whole = compiled._NEGLIGIBLE_BYTES
    compiled._NEGLIGIBLE_BYTES = 0 if draw(st.booleans()) else whole
    check(*case, donate=draw(st.booleans()), fresh=draw(st.booleans()))
    compiled._NEGLIGIBLE_BYTES = whole


def move_quietly() -> None:
    """Check that XLA writes no warnings about reshards that no single collective makes."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    v = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            for specs in (P("a"), P(None, ("a", "b"))), (P("b", "a"), P(("a", "b", "c"))):
                source, target = (NamedSharding(mesh, spec) for spec in specs)
                check(v, source, target, donate=False, fresh=False)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        log.seek(0)
        assert b"rematerialization" not in log.read()


move_quietly()
print("all agree")
