"""`jax.export` of pjit-ed functions, and exports that are called inside of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import xlashard as xs
from tests.core.pjit.helpers import f32
from tests.grouped_cases import Together
from xlashard import NamedSharding, P

X = f32(8, 4)

# Each uses the symbolic size in another operation of StableHLO.
POLYMORPHIC = {
    "elementwise": lambda x: x * 2,
    "iota": lambda x: x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None],
    "reduce": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "reshape": lambda x: x.reshape(-1),
    "dot": lambda x: x @ x.T,
    "broadcast": lambda x: jnp.broadcast_to(x[:1], x.shape) + x,
    "pad": lambda x: jnp.pad(x, ((0, 1), (0, 0))),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "softmax": lambda x: jax.nn.softmax(x, 0),
}


def symbolic(fun, jit=jax.jit):
    """Return the export of a function for any number of rows."""
    (rows,) = export.symbolic_shape("rows")
    return export.export(jit(fun))(jax.ShapeDtypeStruct((rows, 4), np.float32))


@pytest.mark.slow
def test_exports_with_symbolic_shapes_run_inside_of_jit(mesh):
    rows = NamedSharding(mesh, P("x"))
    with Together() as all_of:
        for name, fun in POLYMORPHIC.items():
            with all_of.case(name):
                exported = symbolic(fun)
                wanted = jax.jit(exported.call)(X)
                np.testing.assert_array_equal(xs.jit(exported.call)(X), wanted)
                inside = xs.jit(lambda x, call=exported.call: call(x) + 0, in_shardings=rows)
                np.testing.assert_allclose(inside(X), wanted, rtol=1e-6)


@pytest.mark.slow
def test_a_symbolic_size_is_static_once_compiled():
    call = symbolic(POLYMORPHIC["iota"], xs.jit).call
    compiled = xs.jit(call).lower(X).compile()
    np.testing.assert_array_equal(compiled(X), X + np.arange(8, dtype=np.float32)[:, None])
    assert "?" not in xs.jit(call).lower(X).as_text()
    assert xs.explain(jax.jit(call), X).name


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.own_partitioner  # under GSPMD neither library can call them
def test_exports_on_an_abstract_mesh_are_serialized(mesh):
    abstract = mesh.abstract_mesh

    def exported(jit, sharding):
        step = jit(lambda a: jax.lax.with_sharding_constraint(a @ a.T, sharding(P(None, "x"))))
        struct = jax.ShapeDtypeStruct((16, 16), np.float32, sharding=sharding(P("x", "y")))
        return export.deserialize(export.export(step)(struct).serialize())

    ours = exported(xs.jit, lambda spec: NamedSharding(abstract, spec))
    wanted = exported(jax.jit, lambda spec: jax.sharding.NamedSharding(abstract, spec))
    assert ours.nr_devices == wanted.nr_devices == 8
    assert ours.in_shardings_hlo == wanted.in_shardings_hlo
    np.testing.assert_array_equal(
        xs.jit(ours.call)(xs.device_put(f32(16, 16), NamedSharding(mesh, P("x", "y")))),
        f32(16, 16) @ f32(16, 16).T,
    )


def test_exports_have_memory_spaces_and_donations():
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.device_put(X, host)

    def both(jit):
        same = export.export(jit(lambda x: x), platforms=("tpu",))(x)
        spread = export.export(jit(lambda x, *, y: (x + 1, y + 1), donate_argnames="y"))(X, y=X)
        first = export.export(jit(lambda s, x: (s["w"] + x, x), donate_argnums=0))({"w": X}, X)
        donors = [
            e.mlir_module().split("public @main")[1].split("->")[0].count("tf.aliasing_output")
            for e in (spread, first)
        ]
        return same.in_avals[0].memory_space, same.out_avals[0].memory_space, donors

    assert both(xs.jit) == both(jax.jit)
    with pytest.raises(NotImplementedError, match="support donation"):
        export.export(xs.jit(jnp.sin, donate_argnums=0), platforms=["cpu", "other"])(X)


@pytest.mark.slow
def test_exports_have_the_options_of_the_function():
    fast = {"xla_cpu_enable_fast_math": True}
    cases = {
        "unused arguments": ({}, ("cpu",)),
        "kept arguments": ({"keep_unused": True}, ("cpu",)),
        "two platforms": ({"keep_unused": True}, ("cpu", "tpu")),
        "donated": ({"keep_unused": True, "donate_argnums": 1}, ("cpu",)),
        "compiler options": ({"compiler_options": fast}, ("cpu",)),
    }

    def facts(jit, options, platforms):
        step = export.export(jit(lambda x, y: y * 2, **options), platforms=platforms)(X, X)
        functions = step.mlir_module().count("func.func ")
        return step.module_kept_var_idx, step.in_avals, step.fun_name, functions

    with Together() as all_of:
        for name, case in cases.items():
            with all_of.case(name):
                assert facts(xs.jit, *case) == facts(jax.jit, *case)
