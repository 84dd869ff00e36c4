"""Sharding rules: results of equations in parts, and the collectives of the partitioner."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from tests.auto.rules.factor_oracle import COUNTED, in_parts, pieces, run, visited
from tests.auto.rules.models import MODELS
from tests.auto.rules.rule_cases import FAMILIES, TABLE, M, X, Y, special
from tests.grouped_cases import Together
from xlashard._jax.trace.tracing import bodies
from xlashard.auto.rules import op_rules
from xlashard.auto.rules.factors import Factor
from xlashard.auto.rules.op_rules import op_rule
from xlashard.tpu import topology

COLLECTIVES = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")


RULES = op_rules.ELEMENTWISE | op_rules.COPIES | set(op_rules._RULES)

UNREACHED = {
    *("after_all", "check", "create_token", "dce_sink", "debug_callback", "debug_print"),
    *("axis_index", "dim_as_value", "dimension_size", "empty2", "platform_index"),
    *("boundary_sharding", "layout_constraint", "mesh_cast", "preduced", "pvary"),
    *("reduced_vary_cast", "relayout", "reshard", "vary_unreduced_cast"),
    *("with_memory_space_constraint", "from_edtype", "to_edtype", "copy_p", "stage", "tie"),
    *("iota_2x32_shape", "philox2x32", "philox4x32", "threefry4x32"),
    *("cholesky_update", "geqp3", "geqrf", "ormqr", "select_and_scatter", "stop_gradient"),
    # Releases of JAX differ in these.
    *("stack", "unstack", "tile", "empty", "mulhi", "one_minus_square", "polynomial"),
}
"""Primitives that need a mesh, a device, or a caller inside of JAX."""

WITHOUT_RULE = {
    *("cond", "scan", "while", "eval_jaxpr", "jit", "remat2", "call", "closed_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_lin", "custom_linear_solve"),
    *("all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all"),
    *("get", "swap", "addupdate"),
}
"""Calls and loops, collectives of one device's program, and uses of references."""


def plain(value: Any) -> Any:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations that need a rule: those without one are entered."""
    for eqn in jaxpr.eqns:
        inner = [] if op_rule(eqn).known else list(bodies(eqn))
        if inner:
            for body in inner:
                yield from equations(body)
        else:
            yield eqn


def of(function: Any, *args: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the last equation of a function, and the dimensions that its factors index."""
    (*_, eqn) = jax.make_jaxpr(function)(*args).eqns
    rule = op_rule(eqn)
    return rule, [(f.size, f.operands, f.results, f.reduced) for f in rule.factors]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_equation_computed_in_parts_equals_the_unsplit_equation(family: Any) -> None:
    cases = {name: (jax.make_jaxpr(f)(*args), args) for name, f, args in family()}

    def program(values: Any) -> Any:
        made = {}
        for name, (jaxpr, _) in cases.items():
            for number, (eqn, operands, results) in enumerate(visited(jaxpr, values[name])):
                if eqn.primitive.name in COUNTED:
                    continue
                operands = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in operands]
                for factor in op_rule(eqn).factors:
                    key = f"{name}: equation {number}, {eqn.primitive.name}: {factor}"
                    parts = in_parts(eqn, factor, operands)
                    made[key] = [(plain(a), plain(b)) for a, b in zip(results, parts, strict=True)]
        return made

    compared = jax.jit(program)
    values = compared({name: args for name, (_, args) in cases.items()})
    with Together() as together:
        for key, pairs in values.items():
            with together.case(key):
                for whole, parts in pairs:
                    np.testing.assert_allclose(whole, parts, rtol=2e-4, atol=1e-4)


def test_special_functions_are_elementwise() -> None:
    for name, function, args in special():
        rule, factors = of(function, *args)
        both = (0,) * len(args)
        assert rule.elementwise, name
        assert factors == [(args[0].shape[0], both, (0,), False)], name


UNCHECKED = {
    "fft",  # Its pieces have a test of their own.
    *("eig", "schur", "hessenberg", "tridiagonal"),  # TPUs have none.
    "select_and_scatter_add",  # In two dimensions.
    *("cumsum", "cumprod", "cummax", "cummin"),  # Of a few values, it gathers all.
}
"""Primitives that the compiler of TPUs refuses, or treats otherwise when they are small."""


def sample() -> dict[Any, tuple[Any, Factor]]:
    """Return an equation for each primitive and each kind of factor."""
    chosen: dict[Any, tuple[Any, Factor]] = {}
    for family in FAMILIES[1:]:
        for _, f, args in family():
            for eqn in equations(jax.make_jaxpr(f)(*args)):
                for factor in op_rule(eqn).factors:
                    used = [d is not None for d in (*factor.operands, *factor.results)]
                    groups = [eqn.params.get(f"{of}_group_count") for of in ("feature", "batch")]
                    key = (eqn.primitive.name, *used, factor.reduced, factor.halo > 0, *groups)
                    # A shift leaves sizes that arguments can't have: it has a test of its own.
                    unchecked = UNCHECKED | op_rules.ELEMENTWISE
                    if factor.size > 1 and key not in chosen and key[0] not in unchecked:
                        chosen[key] = (eqn, factor)
    return chosen


def partitioned(eqn: Any, factor: Factor, devices: Any) -> list[str]:
    """Return the collectives of an equation that is sharded along a factor."""
    count = pieces(factor)
    mesh = jax.sharding.Mesh(np.array(devices[:count]), "d")

    def sharding(var: Any, dim: int | None) -> Any:
        spec = ["d" if d == dim else None for d in range(var.aval.ndim)]
        return jax.sharding.NamedSharding(mesh, jax.P(*spec))

    taken = [i for i, v in enumerate(eqn.invars) if not isinstance(v, core.Literal)]

    def function(*args: Any) -> tuple[Any, ...]:
        operands = [getattr(v, "val", None) for v in eqn.invars]
        for i, value in zip(taken, args, strict=True):
            operands[i] = value
        return tuple(run(eqn, operands))

    avals = [eqn.invars[i].aval for i in taken]
    compiled = (
        jax.jit(
            function,
            in_shardings=tuple(sharding(eqn.invars[i], factor.operands[i]) for i in taken),
            out_shardings=tuple(map(sharding, eqn.outvars, factor.results)),
        )
        .lower(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
        .compile()
    )
    return COLLECTIVES.findall(compiled.as_text())


@pytest.mark.slow
def test_partitioner_adds_at_most_the_expected_collective() -> None:
    devices = topology("v5e-4").devices
    with Together() as together:
        for key, (eqn, factor) in sample().items():
            with together.case(f"{key}: {factor}"):
                # The best of each device goes with its place, which is gathered.
                kind = "all-gather" if key[0].startswith(("arg", "top")) else "all-reduce"
                collectives = set(partitioned(eqn, factor, devices))
                if factor.halo or eqn.primitive.name == "slice":
                    collectives -= {"collective-permute"}
                assert collectives == ({kind} if factor.reduced else set())


@pytest.mark.slow
def test_cumulative_sums_exchange_sums_of_blocks() -> None:
    rule, _ = of(lambda x: lax.cumsum(x, 0), np.ones((1024, 512), np.float32))
    mesh = jax.sharding.Mesh(np.array(topology("v5e-4").devices), "d")
    rows = jax.sharding.NamedSharding(mesh, jax.P("d"))
    summed = jax.jit(lambda x: lax.cumsum(x, 0), in_shardings=rows, out_shardings=rows)
    text = summed.lower(jax.ShapeDtypeStruct((1024, 512), np.float32)).compile().as_text() or ""
    made = re.findall(r"= \(?f32\[([\d,]+)\].* (?:all-gather|collective-permute)", text)
    moved = sum(math.prod(map(int, dims.split(","))) for dims in made)
    assert 0 < moved <= rule.factors[0].halo * 1024 * 512


@pytest.mark.slow
def test_devices_exchange_what_is_expected_of_shifts_and_transforms() -> None:
    mesh = jax.sharding.Mesh(np.array(topology("v5e-4").devices), "d")
    rows = jax.sharding.NamedSharding(mesh, jax.P("d"))
    cases: dict[str, Any] = {
        "roll": lambda x: jnp.roll(x, 3, 0),
        "roll back": lambda x: jnp.roll(x, -1, 0),
        "shift": lambda x: jnp.pad(x, ((2, 0), (0, 0)))[:-2],
        "inner": lambda x: jnp.pad(x[1:-1], ((1, 1), (0, 0))),
        "difference": lambda x: jnp.concatenate([x[:1], x[1:] - x[:-1]], 0),
        "reverse": lambda x: jnp.flip(x, 0),
        "transform": lambda x: jnp.fft.fft(x.astype(jnp.complex64), axis=0).real,
    }
    with Together() as together:
        for name, function in cases.items():
            with together.case(name):
                x = jax.ShapeDtypeStruct((512, 256), np.float32)
                expected = 0.0
                for eqn in equations(jax.make_jaxpr(function)(x)):
                    for factor in op_rule(eqn).factors:
                        # A transform is of the last dimension.
                        if 0 in factor.operands or eqn.primitive.name == "fft":
                            expected += factor.halo * eqn.invars[0].aval.size
                            expected += eqn.outvars[0].aval.size if factor.reduced else 0
                step = jax.jit(function, in_shardings=rows, out_shardings=rows)
                text = step.lower(x).compile().as_text() or ""
                made = re.findall(r"= \(?f32\[([\d,]+)\].* (collective-permute|all-reduce)", text)
                # Elements of a sum are sent twice, but for a device's own; two are a complex one.
                times = {"collective-permute": 1.0, "all-reduce": 2 * 3 / 4 / 2}
                moved = sum(
                    math.prod(map(int, dims.split(","))) * times[kind] for dims, kind in made
                )
                assert 0 < moved <= 1.25 * expected


def test_matmuls_and_convolutions_have_flops() -> None:
    dot, factors = of(jnp.dot, X[0], Y[0].T)
    assert dot.flops == 2 * 6 * 8 * 6
    assert factors == [
        (6, (0, None), (0,), False),
        (6, (None, 1), (1,), False),
        (8, (1, 0), (None,), True),
    ]
    image, kernel = np.ones((2, 8, 8, 4), np.float32), np.ones((3, 3, 2, 6), np.float32)
    conv, _ = of(
        lambda x, k: lax.conv_general_dilated(
            x, k, (2, 2), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), 2
        ),
        *(image, kernel),
    )
    assert conv.flops == 2 * (2 * 4 * 4 * 6) * (3 * 3 * 2)
    sizes = np.ones(4, np.int32)
    ragged, _ = of(lax.ragged_dot, X[0], np.ones((4, 8, 5), np.float32), sizes)
    assert ragged.flops == 2 * 6 * 8 * 5


def test_rows_of_a_table_are_summed() -> None:
    rule, factors = of(lambda t, i: t.at[i].get(mode="clip"), TABLE, M)
    assert factors[-1] == (6, (0, None), (None,), True)
    assert [f.divides_work for f in rule.factors] == [True, True, True, False]


def test_dimensions_of_size_one_have_no_factor() -> None:
    rule, factors = of(jnp.tanh, np.ones((1, 4), np.float32))
    assert rule.elementwise
    assert factors == [(4, (1,), (1,), False)]
    _, factors = of(lambda x: x.reshape(2, 1, 2), np.ones((1, 4), np.float32))
    assert factors == [(2, (1,), (0,), False)]


def test_optimization_barrier_has_factors_per_operand() -> None:
    rule, factors = of(lambda x, y: lax.optimization_barrier((x, y)), X[0], M[0])
    assert rule.pairwise
    assert not rule.elementwise
    assert factors == [
        (6, (0, None), (0, None), False),
        (8, (1, None), (1, None), False),
        (6, (None, 0), (None, 0), False),
    ]


def test_unknown_primitives_have_no_factors() -> None:
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    rule, factors = of(lambda x: jax.pure_callback(lambda x: x, shape, x), X[0, 0, :4])
    assert not rule.known
    assert not factors


@pytest.mark.slow
def test_cases_cover_every_rule() -> None:
    reached = {
        eqn.primitive.name
        for family in (*FAMILIES, special)
        for _, f, args in family()
        for eqn in equations(jax.make_jaxpr(f)(*args))
    }
    assert reached >= RULES - UNREACHED
    public = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    assert public - RULES <= WITHOUT_RULE


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_models_have_no_unknown_primitives(model: Any) -> None:
    rules = [(eqn.primitive.name, op_rule(eqn)) for eqn in equations(model())]
    assert [name for name, rule in rules if not rule.known] == []
    assert sum(rule.flops for _, rule in rules) > 0
