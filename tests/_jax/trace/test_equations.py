"""Equations of jaxprs that hold jaxprs, shardings or memory spaces, beside a walk of JAX."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from jax.experimental.custom_partitioning import custom_partitioning

from tests.core.pjit.helpers import f32
from tests.grouped_cases import Together
from xlashard import Mesh, NamedSharding, P, pjit, with_sharding_constraint
from xlashard._jax.lowering import memory_transfers
from xlashard._jax.private import jax_dispatch, pxla
from xlashard._jax.trace import primitives, tracing

pytestmark = pytest.mark.devices(8)

X = f32(8, 8)


@pytest.fixture
def rows():
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))


def make_programs(rows):
    """Return functions of one array whose equations hold jaxprs, shardings or memory spaces."""
    exported = jax.export.export(jax.jit(lambda x: x * 2))(X)
    partitioned = custom_partitioning(lambda x: x + 1)
    partitioned.def_partition(
        infer_sharding_from_operands=lambda mesh, args, results: rows,
        partition=lambda mesh, args, results: (mesh, lambda x: x + 1, rows, (rows,)),
        sharding_rule="i j -> i j",
    )

    on_host = {}
    if "out_memory_spaces" in inspect.signature(compute_on).parameters:  # since JAX 0.11
        where = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}
        on_host["compute_on"] = compute_on(lambda x: x * 2, **where)

    def constrained(x):
        return with_sharding_constraint(x * 2, rows)

    twice = jax.custom_jvp(constrained)
    twice.defjvp(lambda primals, tangents: (twice(*primals), constrained(*tangents)))

    spec, mesh = rows.spec, rows.mesh
    return {
        "plain": lambda x: x * 2,
        "jit": lambda x: jax.jit(lambda x: jnp.sin(x))(x),
        "jit with shardings": lambda x: jax.jit(constrained, out_shardings=rows)(x),
        "pjit": lambda x: pjit(constrained, in_shardings=rows)(x),
        "constraint": constrained,
        "constraint of JAX": lambda x: jax.lax.with_sharding_constraint(x, rows),
        "while": lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, constrained, x),
        "custom_jvp": lambda x: jax.jvp(twice, (x,), (x,)),
        "scan": lambda x: jax.lax.scan(lambda c, row: (constrained(c), row), x, x),
        "cond": lambda x: jax.lax.cond(x[0, 0] > 0, constrained, jnp.cos, x),
        "gradient": jax.grad(lambda x: jax.checkpoint(constrained)(x).sum()),
        "shard_map": jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec),
        "move": lambda x: jax.device_put(x, jax.memory.Space.Host) * 2,
        "device_put": lambda x: jax.device_put(x, rows),
        "nested move": lambda x: pjit(lambda x: jax.device_put(x, jax.memory.Space.Host))(x),
        **on_host,
        "exported": lambda x: exported.call(x),
        "partitioned": lambda x: pjit(lambda x: partitioned(x))(x),
    }


def test_equations_hold_what_jax_finds_in_them(rows):
    with Together() as all_of:
        for name, function in make_programs(rows).items():
            with all_of.case(name):
                jaxpr = jax.make_jaxpr(function)(X)
                moves = pxla.jaxpr_transfer_mem_kinds(jaxpr)
                assert memory_transfers(jaxpr) == tuple(moves)
                needs = jax_dispatch.jaxpr_has_prim_requiring_devices(jaxpr)
                assert tracing.needs_devices(jaxpr) == needs
                found = [s for s, _ in jax_dispatch.get_intermediate_shardings(jaxpr)]
                found = {s for s in found if isinstance(s, jax.sharding.Sharding)}
                assert set(tracing.inner_shardings(jaxpr)) == found


def test_lowering_copies_a_constraint_for_jax_once(rows, monkeypatch):
    copies, copy = [], primitives._copy_slots
    monkeypatch.setattr(primitives, "_copy_slots", lambda j: copies.append(j) or copy(j))

    def chain(x):
        for _ in range(10):
            x = with_sharding_constraint(x * 2, rows)
        return x

    inside = {"in_shardings": rows, "out_shardings": rows}
    for function in (chain, pjit(chain, **inside), lambda x: jax.jit(chain, **inside)(x)):
        copies.clear()
        pjit(function).lower(X)
        assert 0 < len(copies) <= 4
