"""Requests that a program does not follow, and values that are whole without a request."""

import jax
import jax.numpy as jnp
import pytest

import xlashard
from tests.core.pjit.helpers import f32
from xlashard import NamedSharding, P, explain, pjit

pytestmark = pytest.mark.usefixtures("partitioner")

U = P.UNCONSTRAINED


def named(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def found(report, kind):
    return [(u.path, u.actual, u.advice, u.nbytes) for u in report.unmet if u.kind == kind]


def test_result_replicated_over_an_axis_of_an_argument_is_listed(mesh):
    fun = pjit(lambda x: x.sum(0), in_shardings=named(mesh, "x"))
    # Each device has all 8 sums, and needs only 2 of them.
    assert found(explain(fun, f32(16, 8)), "result") == [
        ("result", "P()", "shard dimension 0 over x by out_shardings", 6 * 4)
    ]
    # Three sums can't be sharded over four devices.
    assert found(explain(fun, f32(16, 3)), "result") == []


@pytest.mark.slow
def test_requested_or_argument_like_replication_is_not_listed(mesh):
    sort = lambda x: jnp.sort(x, axis=0)  # noqa: E731
    asked = pjit(sort, in_shardings=named(mesh, "x"), out_shardings=named(mesh))
    assert found(explain(asked, f32(16, 8)), "result") == []

    def update(w, batch):
        return w + (batch.sum(0)[:, None] * w), batch.mean()

    # Data parallelism: parameters are replicated, as arguments and as results.
    fun = pjit(update, in_shardings=(named(mesh), named(mesh, "x")))
    assert found(explain(fun, f32(8, 4), f32(16, 8)), "result") == []


def test_unsharded_open_dimension_of_a_constraint_is_listed(mesh):
    def f(x):
        y = jnp.ones((8, 6)) + x.sum()
        return xlashard.with_sharding_constraint(y, named(mesh, U, None))

    report = explain(pjit(f, in_shardings=named(mesh, "x")), f32(16))
    assert found(report, "unconstrained dimension") == [
        ("result", "P()", "shard dimension 0 over x, y by its spec", 8 * 6 * 4 * 7 // 8)
    ]


def test_a_sharded_open_dimension_is_not_listed(mesh):
    def f(x):
        return xlashard.with_sharding_constraint(x * 2, named(mesh, U))

    assert explain(pjit(f, in_shardings=named(mesh, "x")), f32(16)).unmet == ()


def test_unsharded_open_dimension_of_an_argument_is_listed(mesh):
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=named(mesh, U, "y"))
    report = explain(pjit(lambda x: x * 2), x)
    ((path, _, advice, _),) = found(report, "unconstrained dimension")
    assert path == "x" and advice.startswith("shard dimension 0")


UNSHARDED = "gathered along y", "the constraint unshards dimension 1"


def line_of(mark):
    with open(__file__) as source:
        return next(i for i, line in enumerate(source, 1) if line.endswith(f"# {mark}\n"))


def test_constraint_that_causes_a_gather_has_its_source_line(mesh):
    def f(x):
        x = xlashard.with_sharding_constraint(jnp.sin(x), named(mesh, "x", "y"))
        x = jnp.tanh(x) * 2
        x = xlashard.with_sharding_constraint(x, named(mesh, "x", None))  # CLOSED
        return xlashard.with_sharding_constraint(jnp.cos(x), named(mesh, "x", "y"))

    report = explain(pjit(f, in_shardings=named(mesh, "x", "y")), f32(16, 8))
    (constraint,) = (u for u in report.unmet if u.kind == "constraint that gathers")
    assert (constraint.path, constraint.requested) == ("float32[16,8]", "P('x')")
    assert (constraint.actual, constraint.reason) == UNSHARDED
    # A quarter of the rows, of which the other half comes from the neighbour.
    assert constraint.nbytes == 4 * 4 * 4
    assert (constraint.source.file, constraint.source.line) == (__file__, line_of("CLOSED"))
    assert constraint.source.in_user_file


def test_a_constraint_that_closes_a_dimension_of_an_argument_is_found(mesh):
    def f(w):
        return xlashard.with_sharding_constraint(jnp.sin(w), named(mesh, "x"))

    report = explain(pjit(f, in_shardings=named(mesh, "x", "y")), f32(16, 8))
    (constraint,) = (u for u in report.unmet if u.kind == "constraint that gathers")
    assert (constraint.actual, constraint.reason) == UNSHARDED
    assert [c.argument for c in report.collectives] in (["w"], [""])


def test_moving_an_axis_to_another_dimension_replicates_nothing(mesh):
    def f(x):
        x = xlashard.with_sharding_constraint(jnp.sin(x), named(mesh, "x", None))
        return xlashard.with_sharding_constraint(x * 2, named(mesh, None, "x"))

    report = explain(pjit(f, in_shardings=named(mesh, "x")), f32(16, 8))
    assert found(report, "constraint that gathers") == []
    assert [c.kind for c in report.collectives] == ["all-to-all"]


def test_a_gather_for_another_operation_is_not_attributed_to_the_constraint(mesh):
    def f(x, w):
        x = xlashard.with_sharding_constraint(jnp.sin(x), named(mesh, "x", "y"))
        return xlashard.with_sharding_constraint(x @ w, named(mesh, "x"))

    fun = pjit(f, in_shardings=(named(mesh, "x", "y"), named(mesh)))
    report = explain(fun, f32(16, 8), f32(8, 8))
    assert found(report, "constraint that gathers") == []


def test_constraints_of_jax_and_in_loops_are_found(mesh):
    def f(x):
        def layer(x, _):
            x = jax.lax.with_sharding_constraint(jnp.sin(x), named(mesh, "x", "y"))
            x = jax.lax.with_sharding_constraint(x * 2, named(mesh, "x", None))
            return jax.lax.with_sharding_constraint(jnp.cos(x), named(mesh, "x", "y")), None

        return jax.lax.scan(layer, x, None, length=3)[0]

    report = explain(pjit(f, in_shardings=named(mesh, "x", "y")), f32(16, 8))
    (constraint,) = (u for u in report.unmet if u.kind == "constraint that gathers")
    assert (constraint.actual, constraint.nbytes) == ("gathered along y", 3 * 4 * 4 * 4)
