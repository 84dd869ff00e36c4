"""Sharding constraints inserted into jaxprs: their positions, and the unchanged equations."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import make_mesh
from xlashard import P, pjit, preflight, tpu
from xlashard._jax.trace.jaxprs import as_function
from xlashard._jax.trace.tracing import bodies
from xlashard.auto.problem import ConstraintSite, insert_constraints, machine_of
from xlashard.core.pjit.constraint import constraint_p


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((4, 2), ("x", "y"))


@jax.custom_vjp
def scaled(x):
    return x * 3


scaled.defvjp(lambda x: (x * 3, None), lambda _, g: (g * 3,))


@jax.custom_jvp
def shifted(x):
    return x - 1


shifted.defjvp(lambda x, t: (shifted(*x), *t))

inner = pjit(lambda x: jnp.sin(x) + 1)
plain = jax.jit(lambda x: jnp.cos(x) + 2)


@jax.checkpoint
def layer(x, w):
    return inner(plain(x @ w))


def model(x, ws):
    x, ys = jax.lax.scan(lambda c, w: (layer(c, w), c.sum()), x, ws)
    x = jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2 + 100, x)
    x = jax.lax.cond(x[0, 0] > 0, lambda v: v + 1, lambda v: v - 1, x)
    return shifted(scaled(plain(x))) * 2.0, ys


X, WS = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8), np.ones((3, 8, 8), np.float32) / 9


@pytest.fixture(scope="module")
def traced(mesh):
    with jax.set_mesh(mesh):
        return jax.make_jaxpr(model)(X, WS)


def find(jaxpr, name, path=()):
    """Yield the path of each equation of a primitive."""
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == name:
            yield (*path, i)
        for k, body in enumerate(bodies(eqn)):
            yield from find(body, name, (*path, i, k))


def at(jaxpr, path):
    """Return the equation at a path, or the inner jaxpr."""
    eqn = jaxpr.eqns[path[0]]
    if len(path) == 1:
        return eqn
    body = list(bodies(eqn))[path[1]]
    return at(body, path[2:]) if path[2:] else body


def constraints(jaxpr):
    """List the constraints of each place; a body may stand in several."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is constraint_p:
            found.append((eqn.params["sharding"].spec, eqn))
        for body in () if "witness" in eqn.params else bodies(eqn):
            found += constraints(body)
    return found


@pytest.mark.slow
def test_constraints_in_every_jaxpr_body_change_no_value(traced, mesh):
    names = "dot_general", "sin", "while", "cond", "sub", "cos", "custom_vjp_call", "scan"
    sites = {}
    for path in (path for name in names for path in find(traced, name)):
        for kind, values in (
            ("operand", at(traced, path).invars),
            ("result", at(traced, path).outvars),
        ):
            k = next(k for k, value in enumerate(values) if value.aval.ndim == 2)
            sites[ConstraintSite(path, kind, k)] = P("x", "y")
    for path in [*find(traced, "scan"), *find(traced, "while"), *find(traced, "cond")]:
        for k, body in enumerate(bodies(at(traced, path))):
            for i, var in enumerate(body.invars):
                if var.aval.ndim == 2:
                    sites[ConstraintSite((*path, k), "parameter", i)] = P("y", "x")
    sites[ConstraintSite((), "parameter", 0)] = P("x")
    sites[ConstraintSite((), "parameter", 1)] = P(None, "y")
    new = insert_constraints(traced, mesh, sites.items())
    assert len(sites) > 25 and len(constraints(new)) == len(sites)
    for ours, plain_value in zip(run(new, mesh), run(traced, mesh), strict=True):
        np.testing.assert_allclose(ours, plain_value, rtol=1e-6)
    assert not constraints(traced)
    assert not constraints(jax.make_jaxpr(model)(X, WS))


def run(jaxpr, mesh):
    with jax.set_mesh(mesh):
        return jax.jit(as_function(jaxpr))(X, WS)


def test_constraint_on_operand_result_and_parameter(mesh):
    def f(x, y):
        z = x + y
        return z * z, z - y, x

    jaxpr = jax.make_jaxpr(f)(X, X)

    def text(path, kind, index):
        site = ConstraintSite(path, kind, index)
        new = insert_constraints(jaxpr, mesh, [(site, P("x"))])
        ((spec, eqn),) = constraints(new)
        assert spec == P("x")
        (before,), (after,) = eqn.invars, eqn.outvars
        uses = [
            (i, k)
            for i, other in enumerate(e for e in new.eqns if e is not eqn)
            for k, var in enumerate(other.invars)
            if var is after
        ]
        return before, uses, [v is after for v in new.outvars], new.eqns.index(eqn)

    z, x, y = jaxpr.eqns[0].outvars[0], *jaxpr.invars
    assert text((1,), "operand", 1) == (z, [(1, 1)], [False] * 3, 1)
    assert text((0,), "result", 0) == (z, [(1, 0), (1, 1), (2, 0)], [False] * 3, 1)
    assert text((2,), "result", 0)[2:] == ([False, True, False], 3)
    assert text((), "parameter", 1) == (y, [(0, 1), (2, 1)], [False] * 3, 0)
    assert text((), "parameter", 0) == (x, [(0, 0)], [False, False, True], 0)


def test_constraint_in_a_scan_body_is_lowered_once(traced, mesh):
    (path,) = find(traced, "dot_general")
    site = ConstraintSite(path, "result", 0)
    new = insert_constraints(traced, mesh, [(site, P("y", "x"))])
    with jax.set_mesh(mesh):
        module = jax.jit(as_function(new)).lower(X, WS).as_text()
    lines = module.splitlines()
    (product,) = (i for i, line in enumerate(lines) if "stablehlo.dot_general" in line)
    pinned = "sdy.sharding_constraint" if "sdy.mesh" in module else "@Sharding"
    assert pinned in lines[product + 1] and lines[product].split()[0] in lines[product + 1]
    assert sum(pinned in line for line in lines) == 1
    # Two equations deep: in the remat inside of the scan.
    assert len(path) == 5


def test_effects_debug_info_donation_and_lines_are_preserved(mesh):
    def f(state, batch):
        jax.debug.print("{}", batch.sum())
        return inner_step(state, batch)

    inner_step = pjit(lambda state, batch: state * batch, donate_argnums=0)
    jaxpr = jax.make_jaxpr(f)(X, X)
    (path,) = (p for p in find(jaxpr, "mul"))
    sites = [
        (ConstraintSite(path, "operand", 0), P("x")),
        (ConstraintSite((), "parameter", 1), P()),
    ]
    new = insert_constraints(jaxpr, mesh, sites)
    assert new.effects == jaxpr.effects and new.effects
    assert new.debug_info.safe_arg_names(2) == ("state", "batch")
    call, before = at(new, (path[0] + 1,)), at(jaxpr, path[:1])
    assert call.primitive is before.primitive
    assert call.params["donated_invars"] == before.params["donated_invars"] == (True, False)
    assert call.params["jaxpr"].debug_info == before.params["jaxpr"].debug_info
    assert new.consts == jaxpr.consts and new.in_avals == jaxpr.in_avals
    constraint, product = call.params["jaxpr"].eqns
    (old,) = before.params["jaxpr"].eqns
    assert product.source_info is old.source_info is constraint.source_info
    assert constraint.ctx is old.ctx
    assert inspect.getsourcefile(f) in str(product.source_info.traceback)


def test_calls_with_equal_sites_share_a_jaxpr(mesh):
    jaxpr = jax.make_jaxpr(lambda x: plain(plain(plain(x))))(X)
    assert len({id(eqn.params["jaxpr"]) for eqn in jaxpr.eqns}) == 1
    sites = [(ConstraintSite((i, 0, 0), "result", 0), P("x")) for i in (0, 2)]
    first, second, third = (e.params["jaxpr"] for e in insert_constraints(jaxpr, mesh, sites).eqns)
    assert first is third and second is jaxpr.eqns[1].params["jaxpr"]
    assert len(constraints(first)) == 1


def test_literals_and_shard_map_bodies_get_no_constraints(mesh):
    def f(x):
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x * 2.0)

    jaxpr = jax.make_jaxpr(f)(X)
    sites = [ConstraintSite((0,), "operand", 1), ConstraintSite((1, 0, 0), "result", 0)]
    assert not constraints(insert_constraints(jaxpr, mesh, [(s, P()) for s in sites]))
    assert insert_constraints(jaxpr, mesh, []) is jaxpr


@pytest.mark.parametrize(
    "site",
    [
        ConstraintSite((5,), "result", 0),
        ConstraintSite((0,), "operand", 7),
        ConstraintSite((0, 1, 0), "result", 0),
        ConstraintSite((0, 0, 9), "result", 0),
    ],
)
def test_nonexistent_site_raises_index_error(mesh, site):
    jaxpr = jax.make_jaxpr(lambda x: plain(x))(X)
    with pytest.raises(IndexError):
        insert_constraints(jaxpr, mesh, [(site, P("x"))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "megabytes", "kind"),
    [("v6e-64", 16, "all-reduce"), ("v6e-64", 18, "all-gather"), ("v5p-128", 16, "all-gather")],
)
def test_small_arrays_are_gathered_on_a_plane_by_an_all_reduce(name, megabytes, kind):
    topology = tpu.topology(name)
    mesh = topology.mesh({"data": 16, "model": 4})
    devices = P(("data", "model"))
    report = preflight(
        pjit(jnp.dot, in_shardings=(devices, P(None, devices[0])), out_shardings=devices),
        jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16),
        jax.ShapeDtypeStruct((1024, megabytes * 512), jnp.bfloat16),
        topology=name,
        mesh=mesh,
        estimate=True,
    )
    assert [traffic.kind for traffic in report.traffic] == [kind]
    along = machine_of(mesh, topology).join(machine_of(mesh, topology).axes)
    assert (megabytes << 20 <= along.small_bytes) == (kind == "all-reduce")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("v5e-16", (4, 4)), ("v5e-64", (8, 8))])
def test_price_of_another_order_of_axes_is_that_of_the_compiled_permutation(name, sizes):
    topology = tpu.topology(name)
    mesh = topology.mesh(dict(zip(("data", "model"), sizes, strict=True)))
    report = preflight(
        pjit(
            lambda x: x,
            in_shardings=(P(("data", "model")),),
            out_shardings=P(("model", "data")),
        ),
        jax.ShapeDtypeStruct((1024, 1024, 512), jnp.bfloat16),
        topology=name,
        mesh=mesh,
        estimate=True,
    )
    machine = machine_of(mesh, topology)
    expected = machine.swap_seconds(2**30 / mesh.size, *machine.axes)
    assert report.time.seconds == pytest.approx(expected, rel=0.1)
