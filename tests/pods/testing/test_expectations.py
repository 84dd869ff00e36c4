"""Assertions about programs: their counts, and their errors."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.message_patterns import naming
from xlashard import Array, Mesh, NamedSharding, P, device_put, pjit, with_sharding_constraint
from xlashard.errors import ArgumentError, ExpectationError
from xlashard.testing import (
    assert_collectives,
    assert_memory,
    assert_no_host_transfer,
    assert_no_resharding,
)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def x(mesh: Mesh) -> Array:
    return device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, P("data", "model")))


@pjit
def total(x):
    return x.sum(axis=1)


@pytest.mark.slow
def test_expected_collectives_pass(x: Array) -> None:
    assert_collectives(total, (x,), all_reduce=1, others=0)
    assert_collectives(total, (x,), total=1, all_gather_at_most=0, all_reduce_at_most=2)
    # 16 sums of 4 bytes, to the other of two devices: a device sends half of them twice.
    assert_collectives(total, (x,), all_reduce_bytes_at_most=64, total_bytes_at_most=64)
    assert_collectives(total.lower(x).compile(), all_reduce=1)
    assert_collectives(total.lower(x), all_reduce=1)
    assert_collectives(lambda x: x.sum(axis=1), (x,), all_reduce=1)
    assert_collectives(
        total, [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)], total=1
    )


def test_collectives_can_be_counted_along_axes(x: Array) -> None:
    assert_collectives(total, (x,), along="model", all_reduce=1)
    assert_collectives(total, (x,), along="data", total=0)
    with pytest.raises(ExpectationError, match=naming("total", "along model", "total=0")):
        assert_collectives(total, (x,), along="model", total=0)


@pytest.mark.parametrize(
    ("expected", "text_of_problem"),
    [
        ({"all_reduce": 0}, "all_reduce=0: the program has 1"),
        ({"all_reduce": 2}, "all_reduce=2: the program has 1"),
        ({"all_gather": 1}, "all_gather=1: the program has 0"),
        ({"others": 0}, "others=0: the program has 1"),
        ({"others_at_most": 0}, "others_at_most=0: the program has 1"),
        ({"total_at_most": 0}, "total_at_most=0: the program has 1"),
        ({"all_reduce_bytes_at_most": 63}, "all_reduce_bytes_at_most=63: a device sends 64 bytes"),
    ],
)
def test_unexpected_collectives_show_a_table(
    x: Array, expected: dict[str, int], text_of_problem: str
) -> None:
    with pytest.raises(ExpectationError) as caught:
        assert_collectives(total, (x,), **expected)
    text = str(caught.value)
    assert text.startswith(
        f"total does not have the collectives that were expected:\n  {text_of_problem}"
    )
    assert "all-reduce  model  f32[16]" in text
    assert "test_expectations.py:" in text and "reduce_sum" in text
    assert isinstance(caught.value, AssertionError)


def test_no_table_without_collectives(x: Array) -> None:
    with pytest.raises(
        ExpectationError, match="all_gather=1: the program has 0\n\nIt has no collecti"
    ):
        assert_collectives(lambda x: x + 1, (x,), all_gather=1)


@pytest.mark.parametrize(
    ("call", "text_of_problem"),
    [
        (lambda x: assert_collectives(total, (x,)), "(?s)at least one expectation.*all_gather=2"),
        (lambda x: assert_collectives(total, (x,), all_gathers=1), "did you mean all_gather?"),
        (
            lambda x: assert_collectives(total, (x,), zzz=1),
            "valid names are all_gather, .* _bytes_at_most",
        ),
        (lambda x: assert_collectives(total, (x,), all_gather=-1), "is -1; it must be a whole"),
        (lambda x: assert_collectives(total, (x,), all_gather=1.0), "is 1.0; it must be"),
        (
            lambda x: assert_collectives(total, x, all_gather=1),
            r"not Array: .*\(f, \(x,\), \.\.\.\)",
        ),
        (lambda x: assert_no_resharding(total, x), r"not Array: assert_no_resharding"),
        (lambda x: assert_memory(total, (x,), at_most="1 GiX"), r"at_most is '1 GiX'.*2\*\*30"),
        (lambda x: assert_memory(total, (x,), at_most=-1), r"at_most is -1"),
        (lambda x: assert_memory(total, (x,), at_most=1, mesh={"x": 1}), r"write topology=\.\.\."),
        (lambda x: assert_no_host_transfer(total, x), r"not Array: assert_no_host_transfer"),
    ],
)
def test_invalid_arguments_are_refused(
    x: Array, call: Callable[[Array], None], text_of_problem: str
) -> None:
    with pytest.raises(ArgumentError, match=text_of_problem):
        call(x)


def test_matching_arguments_are_not_resharded(mesh: Mesh, x: Array) -> None:
    assert_no_resharding(total, (x,))
    rows = NamedSharding(mesh, P("data"))
    # Arguments from the host have to be transferred to the devices.
    assert_no_resharding(pjit(lambda x: x * 2, in_shardings=rows), (np.ones((8, 8)),))


def test_error_names_the_resharded_argument(mesh: Mesh) -> None:
    rows = NamedSharding(mesh, P("data"))
    step = pjit(lambda state: state["w"] * 2, in_shardings=rows)
    on_one = {"w": device_put(np.ones((8, 8), np.float32))}
    with pytest.raises(ExpectationError) as caught:
        assert_no_resharding(step, (on_one,))
    text = str(caught.value)
    assert "reshards state['w'] before it runs" in text
    assert "P('data')" in text.partition("Moved before each call")[2]


@pytest.mark.slow
def test_error_names_the_resharded_value(mesh: Mesh, x: Array) -> None:
    @pjit
    def turn(x):
        y = with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("model", "data")))
        return y.sum()

    with pytest.raises(
        ExpectationError, match=naming("turn reshards", "test_expectations.py:")
    ) as caught:
        assert_no_resharding(turn, (x,))
    assert "all-reduce" not in str(caught.value)
    assert_no_resharding(turn, (x,), inside=False)


def test_sufficient_memory_passes(x: Array) -> None:
    # A tile of 16 × 32 floats, and 16 sums.
    assert_memory(total, (x,), at_most=16 * 32 * 4 + 1024)


@pytest.mark.slow
def test_donation_counts_once() -> None:
    y = np.ones((256, 256), np.float32)
    keep, donate = pjit(lambda y: y + 1), pjit(lambda y: y + 1, donate_argnums=0)
    assert_memory(donate, (y,), at_most=y.nbytes + 1024)
    with pytest.raises(ExpectationError):
        assert_memory(keep, (y,), at_most=y.nbytes + 1024)


def test_largest_buffers_are_listed(x: Array) -> None:
    with pytest.raises(ExpectationError) as caught:
        assert_memory(total, (x,), at_most=1000)
    text = str(caught.value)
    assert "more than 1,000 (1000 B): 2.0 KiB arguments" in text
    assert "P('data', 'model')" in text and "result" in text


@pytest.mark.parametrize(
    ("f", "named"),
    [(3, "int"), (jnp.ones(3), "ArrayImpl")],
)
def test_values_in_place_of_functions_are_rejected(f: Any, named: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^assert_collectives takes.*not {named}: write"):
        assert_collectives(f, (jnp.ones(3),), others=0)


@pytest.mark.slow
def test_expectations_accept_jax_functions_and_stages(x: Array) -> None:
    summed = jax.jit(lambda x: x.sum())
    stages = [(summed.trace(x), ()), (summed.lower(x), ()), (summed.lower(x).compile(), ())]
    for f, args in [(summed, (x,)), (lambda x: x.sum(), (x,)), *stages]:
        assert_collectives(f, args, all_reduce=2, others=0)
        assert_no_resharding(f, args)
        assert_memory(f, args, at_most=2**20)
        with pytest.raises(ExpectationError, match="all_gather=1: the program has 0"):
            assert_collectives(f, args, all_gather=1)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [jax.jit, nnx.jit, eqx.filter_jit, lambda f: f])
def test_expectations_fail_equally_for_jax_and_xlashard_functions(
    mesh: Mesh, x: Array, wrap: Any
) -> None:
    def turn(x: Any) -> Any:
        y = jax.lax.with_sharding_constraint(x * 2, jax.NamedSharding(mesh, P("model", "data")))
        return y.sum()

    expected = [
        (assert_collectives, {"all_gather": 3}),
        (assert_collectives, {"total_bytes_at_most": 1}),
        (assert_no_resharding, {}),
    ]
    for check, options in expected:
        texts = []
        for f in (pjit(turn), wrap(turn)):
            with pytest.raises(
                ExpectationError, match=naming("turn", "test_expectations.py:")
            ) as e:
                check(f, (x,), **options)
            texts.append(str(e.value))
        assert texts[0] == texts[1]
    keep = np.ones((256, 256), np.float32)
    for f in (pjit(lambda y: y + 1), wrap(lambda y: y + 1)):
        with pytest.raises(ExpectationError, match=naming("1.0 KiB", "256.0 KiB arguments")):
            assert_memory(f, (keep,), at_most=1024)


def report_each(x):
    jax.debug.print("{}", x[0])
    return jax.pure_callback(np.sin, x, x)


@pytest.mark.parametrize("wrap", [jax.jit, nnx.jit, eqx.filter_jit, pjit, lambda f: f])
def test_host_transfers_are_listed_with_their_lines(wrap: Any) -> None:
    on_device = jnp.ones(8)
    assert_no_host_transfer(wrap(lambda x: x * 2), (on_device,))
    with pytest.raises(ExpectationError) as caught:
        assert_no_host_transfer(wrap(report_each), (np.ones(8, np.float32),))
    first, *lines = str(caught.value).splitlines()
    assert first == "report_each transfers data from or to the host:"
    assert lines[0].startswith("  x (float32[8]) is uploaded by each call: device_put it once")
    places = [line.rpartition(":")[0] for line in lines[1:]]
    assert sorted(places) == [
        f"  {name} at testing/test_expectations.py" for name in ("debug_print", "pure_callback")
    ]


def test_unused_arguments_and_shapes_are_not_uploaded() -> None:
    shape = jax.ShapeDtypeStruct((8,), "float32")
    assert_no_host_transfer(jax.jit(lambda x, y: x * 2), (shape, np.ones(4)))
    assert_no_host_transfer(jax.jit(jnp.sin).lower(shape))


@pytest.mark.parametrize("limit", ["16 KiB", 16 * 1024, "16384"])
def test_memory_for_a_topology(limit: Any) -> None:
    shape = jax.ShapeDtypeStruct((1024,), "float32")
    double = jax.jit(lambda x: x * 2)
    assert_memory(double, (shape,), at_most=limit, topology="v5e-1")
    with pytest.raises(ExpectationError, match="takes 8,192 bytes.*4,096 more than 4,096"):
        assert_memory(double, (shape,), at_most="4 KiB", topology="v5e-1")
