"""Bytes sent by feed-forward layers, against the closed formulas of sharding."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from tests.predict.preflight.scheduled import scheduled
from xlashard import NamedSharding, P
from xlashard.predict.preflight.attribution.attribution import describe_traffic
from xlashard.tpu import topology

PLACE = topology("v5e:2x4")
# Over more devices the compiler splits products into steps, and sends operands in parallel.
MESHES = [(8, 1, 1), (4, 2, 1), (4, 1, 2), (1, 4, 2), (2, 4, 1), (2, 2, 2)]
SHAPES = [(1024, 2048, 4096), (1024, 2048, 2048), (1024, 1024, 2048), (2048, 1024, 4096)]


def loss(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return jnp.mean((hidden @ params["down"]) ** 2)


def step(params, x):
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("width, hidden, rows", SHAPES)
@pytest.mark.parametrize("data, fsdp, tensor", MESHES)
def test_sent_bytes_equal_the_closed_formulas(data, fsdp, tensor, width, hidden, rows):
    mesh = PLACE.mesh({"data": data, "fsdp": fsdp, "tensor": tensor})

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    params = {
        "up": struct((width, hidden), "fsdp", "tensor"),
        "down": struct((hidden, width), "tensor", "fsdp"),
    }
    x = struct((rows, width), ("data", "fsdp"), None)
    layout = jax.tree.map(lambda p: p.sharding, params)
    reports = describe_traffic(scheduled(step, params, x, out_shardings=layout), PLACE, mesh)[0]
    sent = Counter()
    for report in reports:
        sent[report.origin] += report.sent_bytes
    whole = 2 * width * hidden * 2 / tensor
    gathered = (fsdp - 1) / fsdp * whole
    summed = gathered + 2 * (data - 1) / data * whole / fsdp
    reduced = 2 * (tensor - 1) / tensor * rows / (data * fsdp) * width * 2
    assert not any(r.origin == "resharding" for r in reports)
    assert sent["argument"] == pytest.approx(gathered, rel=0.01)
    assert sent["gradient"] == pytest.approx(summed, rel=0.01)
    assert sent["reduction"] == pytest.approx(reduced, rel=0.01)
