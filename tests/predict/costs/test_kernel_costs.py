"""Costs of kernels from the caller, for a preflight and on the command line."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from tests.message_patterns import naming
from xlashard import PreflightReport, preflight
from xlashard.errors import ArgumentError
from xlashard.predict.costs.kernel_costs import (
    KernelCost,
    read_kernel_cost_words,
    read_kernel_costs,
)


def test_kernel_cost_is_seconds_or_flops_and_bytes():
    cost = KernelCost(flops=7)
    costs = read_kernel_costs({"a": 1, "b": cost, "c": {"hbm_bytes": 5, "dtype": "int8"}})
    assert costs == {"a": KernelCost(1.0), "b": cost, "c": KernelCost(hbm_bytes=5, dtype="int8")}
    assert read_kernel_costs(None) == {}
    assert read_kernel_costs({"skipped": 0}) == {"skipped": KernelCost(seconds=0.0)}


@pytest.mark.parametrize("value", [True, -1, float("nan"), float("inf"), None, [1]])
def test_invalid_kernel_costs_are_refused(value):
    with pytest.raises(ArgumentError, match=naming("kernel_costs['a']")):
        read_kernel_costs({"a": value})
    with pytest.raises(ArgumentError, match=naming("flops=")):
        KernelCost(seconds=1.0, flops=value)


@pytest.mark.parametrize(
    ("word", "name", "seconds"),
    [
        ("fwd=0.003", "fwd", 0.003),
        ("fwd=1.2ms", "fwd", 1.2e-3),
        ("fwd = 350 us", "fwd", 350e-6),
        ("fwd=2µs", "fwd", 2e-6),
        ("fwd=1e-3s", "fwd", 1e-3),
        ("dq_block_q=128_block_k=128=4ms", "dq_block_q=128_block_k=128", 4e-3),
    ],
)
def test_command_line_kernel_costs_require_time_units(word, name, seconds):
    ((found, cost),) = read_kernel_cost_words([word]).items()
    assert (found, cost.seconds) == (name, pytest.approx(seconds))


def test_kernel_cost_file_has_times_and_tables_by_name(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text("fwd = 1.2e-3\n['a.b']\nflops = 4.6e9\nhbm_bytes = 38e6\n", encoding="utf-8")
    costs = read_kernel_cost_words([str(path), "bwd=3ms"])
    assert costs["fwd"] == KernelCost(seconds=1.2e-3)
    assert costs["a.b"] == KernelCost(flops=4.6e9, hbm_bytes=38e6)
    assert costs["bwd"].seconds == pytest.approx(3e-3)
    path.write_text("fwd = '1.2ms'", encoding="utf-8")
    with pytest.raises(ArgumentError, match=naming(str(path), "kernel_costs['fwd']", "'1.2ms'")):
        read_kernel_cost_words([str(path)])
    path.write_text("fwd 1.2", encoding="utf-8")
    with pytest.raises(ArgumentError, match=naming(str(path), "can't be read")):
        read_kernel_cost_words([str(path)])


def doubled(x):
    def kernel(x, out):
        out[...] = x[...] + x[...]

    def layer(x, _):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, name="double")(x), None

    return jax.lax.scan(layer, x, None, length=5)[0]


@pytest.mark.slow
def test_report_uses_given_kernel_costs_and_lists_unmatched_costs():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    how = {"topology": "v5e-1", "mesh": {"one": 1}, "estimate": True}
    counted = preflight(doubled, x, **how)
    assert counted.time.kernels == (("double", 5),)
    assert counted.time.elementwise_flops >= 5 * 256 * 256
    assert not counted.time.is_lower_bound and counted.time.unmatched_kernel_costs == ()

    given = preflight(doubled, x, **how, kernel_costs={"double": 0.25, "triple": 1.0})
    assert 5 * 0.25 < given.time.seconds < 5 * 0.25 + counted.time.seconds
    assert given.time.elementwise_flops < counted.time.elementwise_flops
    assert given.time.unmatched_kernel_costs == ("triple",)
    text = " ".join(str(given).split())
    assert "'triple'. Its kernels: double ×5." in text
    assert PreflightReport.from_json(given.to_json()) == given
