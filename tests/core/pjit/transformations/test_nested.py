"""pjit-ed functions inside other programs: their modules, and JAX's settings."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32, spec_of, under
from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard import Mesh, NamedSharding, P, pjit, with_sharding_constraint
from xlashard._jax.trace import jaxprs, tracing
from xlashard.core.pjit.function import Function
from xlashard.errors import CompileError, ResourceError

W, X = f32(4, 4) / 10, f32(8, 4) / 10


def layer(w, x):
    return jnp.tanh(x @ w) * 2


def sharded(mesh, jit=pjit):
    """Return the layer with every argument and result sharded."""
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    return jit(layer, in_shardings=(whole, rows), out_shardings=rows)


def same(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, wanted)


def functions(jit, fun):
    """Return the names of the functions in a module, except for `@main`."""
    return re.findall(r"func\.func private @(\w+)", jit(fun).lower(W, X).as_text())


def twice(f):
    return lambda w, x: f(w, f(w, x)) + f(w, x)


def loop(f, length):
    return lambda w, x: jax.lax.scan(lambda c, _: (f(w, f(w, c)), None), x, length=length)[0]


PROGRAMS = {
    "twice": twice,
    "grad": lambda f: jax.grad(lambda w, x: twice(f)(w, x).sum()),
    "two loops": lambda f: lambda w, x: loop(f, 2)(w, x) + loop(f, 3)(w, x),
    "branches": lambda f: lambda w, x: jax.lax.cond(x.sum() > 0, f, twice(f), w, x),
    "batches": lambda f: lambda w, x: twice(jax.vmap(f, (None, 0)))(w, x[None]),
    "two inner functions": lambda f: (
        lambda w, x: pjit(lambda w, x: f(w, x))(w, x) + pjit(lambda w, x: f(w, x) * 2)(w, x)
    ),
}


@pytest.mark.parametrize("how", PROGRAMS)
def test_a_function_is_emitted_once_for_each_body(mesh, how):
    ours = functions(pjit, PROGRAMS[how](sharded(mesh)))
    # pjit or jax.jit outside: as many functions as with jax.jit everywhere.
    assert len(ours) == len(functions(jax.jit, PROGRAMS[how](sharded(mesh, jax.jit))))
    assert len(functions(jax.jit, PROGRAMS[how](sharded(mesh)))) == len(ours)


def test_equal_functions_are_emitted_once(mesh):
    names = functions(pjit, lambda w, x: sharded(mesh)(w, sharded(mesh)(w, x)))
    assert names == ["layer"]


@pytest.mark.devices(8)
def test_operation_names_include_the_enclosing_pjit_call(mesh):
    f = sharded(mesh)
    text = pjit(jax.grad(lambda w, x: f(w, x).sum())).lower(W, X).compile().as_text()
    assert "jvp(pjit(layer))/tanh" in text
    assert "transpose(jvp(pjit(layer)))/dot_general" in text


def test_make_jaxpr_shows_one_equation_with_its_shardings(mesh):
    jaxpr = jax.make_jaxpr(sharded(mesh))(W, X)
    (equation,) = jaxpr.eqns
    assert equation.primitive.name == "pjit"
    text = str(jaxpr)
    assert text.count("boundary_sharding[") == 3 and "spec=P('x',)" in text
    assert "name=layer" in text and "options" not in text
    pulled = jax.make_jaxpr(lambda w, x: jax.vjp(sharded(mesh), w, x)[1](x))(W, X)
    fast = pjit(layer, compiler_options={"xla_cpu_enable_fast_math": True})
    assert "xla_cpu_enable_fast_math" in str(jax.make_jaxpr(fast)(W, X))
    for printed in (text, str(pulled)):
        assert "witness" not in printed and "GSPMDSharding" not in printed


def call_params(fun):
    """Return the parameters of the calls in a function's jaxpr, bodies left out."""
    equations = tracing.equations(jax.make_jaxpr(fun)(W, X))
    calls = [eqn for eqn in equations if eqn.primitive.name in ("jit", "pjit")]
    for eqn in calls:
        counts = len(eqn.invars), len(eqn.outvars), len(eqn.invars)
        names = "in_shardings", "out_shardings", "donated_invars"
        assert tuple(len(eqn.params[name]) for name in names) == counts
    return [{k: v for k, v in eqn.params.items() if k != "jaxpr"} for eqn in calls]


def test_equations_have_the_parameters_of_those_of_jax(mesh):
    rows = jax.sharding.NamedSharding(mesh, P("x"))

    def calls(jit):
        f = jit(layer, in_shardings=(None, rows), out_shardings=rows, donate_argnums=1)
        return f, call_params(f)[0]

    (f, ours), (_, wanted) = calls(xlashard.jit), calls(jax.jit)
    assert wanted.keys() <= ours.keys()
    ours["inline"] = wanted["inline"]  # an enumeration since JAX 0.12
    assert {name: ours[name] for name in wanted} == wanted
    with jax.set_mesh(mesh):
        assert calls(xlashard.jit)[1]["ctx_mesh"] == calls(jax.jit)[1]["ctx_mesh"]

    def loss(w, x):
        return f(w, x).sum()

    for change in (jax.grad, jax.checkpoint, lambda f: jax.grad(jax.checkpoint(f))):
        assert any(rows in params["in_shardings"] for params in call_params(change(loss)))
    call_params(lambda w, x: jax.vmap(f, (None, 0))(w, x[None]))
    call_params(lambda w, x: jax.vjp(f, w, x)[1](x)[0])


@pytest.mark.slow
def test_jax_settings_apply_to_nested_functions(mesh):
    f = sharded(mesh)

    def outer(w, x):
        return f(w, x) + jnp.float32(1)

    gradient = jax.grad(lambda w: layer(w, X).sum())(W)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in pjit(outer).lower(W, X).as_text()
    assert "HIGHEST" not in pjit(outer).lower(W, X).as_text()
    with jax.numpy_dtype_promotion("strict"):
        same(pjit(outer)(W, X), layer(W, X) + 1)
        with pytest.raises(ValueError, match="promotion"):
            pjit(lambda x: pjit(lambda x: x + jnp.arange(4))(x))(X)
    with jax.disable_jit():
        same(jax.grad(lambda w: pjit(outer)(w, X).sum())(W), gradient)
    ranged = pjit(lambda x: x * 2 + jnp.arange(8.0), in_shardings=NamedSharding(mesh, P("x")))
    assert ranged(np.ones(8)).dtype == np.float32
    with jax.enable_x64(True):
        assert ranged(np.ones(8)).dtype == np.float64
        assert jax.grad(lambda x: ranged(x).sum())(np.ones(8)).dtype == np.float64
    assert ranged(np.ones(8)).dtype == np.float32


@pytest.mark.slow
def test_nested_call_is_evaluated_at_compile_time(mesh):
    def fun(x):
        with jax.ensure_compile_time_eval():
            scale = sharded(mesh)(W, X).sum()
        assert not isinstance(scale, jax.core.Tracer)
        return x * float(scale)

    same(pjit(fun)(X), X * layer(W, X).sum())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["grad", "two loops", "branches", "batches"])
def test_nested_calls_pass_jax_enable_checks(mesh, how):
    program = PROGRAMS[how](sharded(mesh))
    wanted = PROGRAMS[how](layer)(W, X)
    for jit in (jax.jit, pjit):
        same(under("jax_enable_checks", True, lambda jit=jit: jit(program)(W, X)), wanted)


def test_eval_shape_gives_shapes_and_weak_types(mesh):
    f = sharded(mesh)
    assert jax.eval_shape(f, W, X).shape == X.shape
    assert jax.eval_shape(jax.grad(lambda w: f(w, X).sum()), W).shape == W.shape
    assert jax.eval_shape(pjit(lambda x: x * 2), 1.0).weak_type


@pytest.mark.devices(8)
@pytest.mark.slow
def test_pjit_around_and_inside_shard_map(mesh, partitioner):
    def body(x):
        return pjit(lambda x: jax.lax.psum(x, "x") * jax.lax.axis_index("x"))(jnp.sin(x))

    both = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    wanted = (np.sin(X).reshape(4, 2, 4).sum(0) * np.arange(4)[:, None, None]).reshape(8, 4)
    for f in (both, pjit(both), jax.jit(both)):
        same(f(X), wanted)
    gradient = jax.grad(lambda x: pjit(both)(x).sum())(X)
    same(gradient, np.cos(X) * 6)


@pytest.mark.slow
@pytest.mark.parametrize("enter", [lambda mesh: mesh, jax.set_mesh], ids=["with mesh", "set_mesh"])
def test_pjit_works_inside_a_partially_manual_shard_map(mesh, enter, partitioner):
    inner = pjit(lambda x: with_sharding_constraint(jnp.sin(x) * 2, P(None, "y")))
    part = jax.shard_map(
        inner, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names=frozenset({"x"})
    )
    with enter(mesh):
        same(pjit(part)(X), np.sin(X) * 2)
        same(jax.grad(lambda x: pjit(part)(x).sum())(X), np.cos(X) * 2)
    clash = jax.shard_map(
        pjit(lambda x: with_sharding_constraint(x, NamedSharding(mesh, P("x")))),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    with pytest.raises(ResourceError, match=naming("of x ", "P('x',)", "shard_map")):
        jax.jit(clash)(X)
    inner = pjit(jnp.sin, out_shardings=NamedSharding(mesh, P("x")))
    clash = jax.shard_map(inner, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ResourceError, match=naming("out_shardings of result ", "shard_map", "'x'")):
        jax.jit(clash)(X)


@pytest.mark.devices(8)
def test_jaxpr_constrained_outside_shard_map_is_refused_inside(mesh):
    rows = NamedSharding(mesh, P("x"))
    jaxpr = jax.make_jaxpr(lambda x: with_sharding_constraint(x * 2, rows))(f32(2, 4))
    inside = jax.shard_map(
        lambda x: jax.core.eval_jaxpr(jaxpr, jaxpr.consts, x)[0],
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    with pytest.raises(ResourceError, match=naming("P('x',)", "'x'", "shard_map")):
        pjit(inside)(X)


@pytest.mark.devices(8)
def test_pjit_around_and_inside_pmap():
    double = jax.pmap(pjit(lambda x: jax.lax.psum(x * 2, "i")), axis_name="i")
    np.testing.assert_array_equal(double(f32(8, 3)), np.stack([f32(8, 3).sum(0) * 2] * 8))
    around = pjit(jax.pmap(lambda x: x * 2))
    np.testing.assert_array_equal(around(f32(8, 3)), f32(8, 3) * 2)


@pytest.mark.slow
def test_nested_functions_can_be_exported(mesh):
    f = sharded(mesh)
    exported = jax.export.export(jax.jit(lambda w, x: f(w, x)))(W, X)
    w, x = (jax.device_put(v, NamedSharding(mesh, P()).jax_sharding(())) for v in (W, X))
    same(exported.call(w, x), layer(W, X))
    same(pjit(lambda w, x: exported.call(w, x) + 1)(w, x), layer(W, X) + 1)
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 4"), np.float32)
    same(jax.export.export(jax.jit(pjit(jnp.sin)))(rows).call(X), np.sin(X))


@pytest.mark.devices(8)
def test_inner_annotations_are_in_the_outer_module(mesh, partitioner):
    f = sharded(mesh)
    outer = pjit(lambda w, x: f(w, x).sum())
    text = outer.lower(W, X).as_text()
    sign = "sdy.sharding_constraint" if partitioner == "shardy" else "@Sharding"
    assert text.count(sign) == 3
    same(outer(W, X), layer(W, X).sum())


@pytest.mark.devices(8)
@pytest.mark.parametrize("inside", ["pjit", "with_sharding_constraint"])
def test_a_program_of_jax_runs_on_the_devices_named_inside(mesh, inside, partitioner):
    named = NamedSharding(mesh, P("x"))
    if inside == "pjit":
        f = pjit(lambda x: x * 2, in_shardings=named, out_shardings=named)
    else:

        def f(x):
            return with_sharding_constraint(x * 2, named)

    out = jax.jit(lambda x: f(x) + 1)(f32(8, 2))
    assert out.sharding.is_equivalent_to(named, 2)
    text = jax.jit(f).lower(f32(8, 2)).as_text()
    assert "mhlo.num_partitions = 8" in text
    np.testing.assert_array_equal(out, f32(8, 2) * 2 + 1)


@pytest.mark.slow
def test_device_of_a_nested_call_places_the_program():
    device = jax.devices()[3]
    out = jax.jit(pjit(lambda x: x * 2, device=device))(f32(4))
    assert out.devices() == {device}
    assert jax.grad(lambda x: pjit(jnp.sin, device=device)(x).sum())(f32(4)).devices() == {device}


def test_inline_emits_no_private_function(mesh):
    named = NamedSharding(mesh, P("x"))
    late = (jax.Inline.XLA_LATE, jax.Inline.XLA_EARLY, jax.Inline.AUTO, False)
    for kind in (jax.Inline.JAX_EARLY, jax.Inline.JAX_LATE, *late, True):
        f = pjit(jnp.sin, inline=kind, in_shardings=named)
        text = pjit(lambda x, f=f: f(x)).lower(f32(8)).as_text()
        assert ("func.func private" in text) == (kind in late)
    jaxpr = jax.make_jaxpr(f)(f32(8))
    assert "pjit" not in str(jaxpr)
    assert "pjit" not in str(jax.make_jaxpr(jax.vmap(f))(f32(2, 8)))


def test_inline_does_not_affect_calls_at_the_top_level(mesh, compilations):
    f = pjit(lambda x: jnp.sin(x) * jnp.cos(x) + 1, inline=True)
    jax.vmap(f)(f32(2, 8))
    assert compilations.count == 1


@pytest.mark.slow
def test_jax_jit_works_inside_pjit(mesh):
    @jax.jit
    def inner(x):
        return jnp.sin(x) @ x.T

    f = pjit(lambda x: inner(x) + inner(x * 2), out_shardings=NamedSharding(mesh, P("x", "y")))
    out = f(X)
    assert spec_of(out) == ("x", "y")
    same(out, inner(X) + inner(X * 2))


@pytest.mark.devices(8)
def test_lowering_for_another_platform(mesh):
    f = pjit(lambda x: with_sharding_constraint(x, NamedSharding(mesh, P("x"))) * 2)
    shape = jax.ShapeDtypeStruct((8,), np.float32)
    exported = jax.export.export(jax.jit(f), platforms=["tpu"])(shape)
    assert exported.nr_devices == 8
    assert '[{"x"}]' in exported.mlir_module() or "devices=[4,2]" in exported.mlir_module()


def test_jax_wrappers_keep_their_methods(mesh):
    f = sharded(mesh)
    for wrapped in (jax.jit(f), jax.jit(jax.vmap(f, (None, None), axis_size=2))):
        assert isinstance(wrapped.lower(W, X), jax.stages.Lowered)
    copied = functools.wraps(f)(lambda w, x: x)
    assert copied.__wrapped__ is f
    assert not hasattr(copied, "lower")


@pytest.mark.slow
def test_static_and_donated_arguments_inside(mesh):
    f = pjit(lambda x, n: x**n, static_argnums=1, donate_argnums=0)
    x = jnp.asarray(f32(4))
    gradient = jax.grad(lambda x: f(x, 3).sum())(jnp.asarray(f32(4)))
    np.testing.assert_allclose(gradient, 3 * f32(4) ** 2, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda x: f(x, 2) + x)(x), f32(4) ** 2 + f32(4))
    assert not x.is_deleted()


def test_compiler_options_belong_to_the_outermost_call():
    f = pjit(jnp.sin, compiler_options={"xla_cpu_enable_fast_math": True})
    for jit in (pjit, jax.jit):
        with pytest.raises(
            CompileError,
            match=naming("sin ", "compiler_options={'xla_cpu_enable_fast_math': True}"),
        ):
            jit(lambda x: f(x) + 1)(f32(4))


def test_compiler_options_apply_to_transformed_programs(mesh):
    f = pjit(jnp.sin, compiler_options={"xla_nonsense": True})
    with pytest.raises(Exception, match="xla_nonsense"):
        jax.grad(lambda x: f(x).sum())(f32(4))


def test_equation_has_the_parameters_of_a_jax_pjit_equation():
    def calls(jaxpr):
        for eqn in jaxpr.eqns:
            if "jaxpr" in eqn.params:
                body = eqn.params["jaxpr"]
                yield eqn.params["name"], eqn.params["donated_invars"], len(body.eqns)
                yield from calls(body)

    def found(jit):
        inner = jit(layer, donate_argnums=0)
        return list(calls(jax.make_jaxpr(jit(lambda w, x: inner(w, x) + 1))(W, X)))

    assert found(pjit) == found(jax.jit)
    (call,) = jax.make_jaxpr(pjit(layer))(W, X).eqns
    same(call.primitive.bind(W, X, **call.params), [layer(W, X)])


CONSTANTS = (1, True, 2.5, 1j, np.arange(3), np.float32(2), jnp.float32(3), jnp.arange(3))


@pytest.mark.parametrize("constant", CONSTANTS, ids=repr)
def test_inlined_constant_becomes_a_tracer_of_its_type(constant):
    def seen(jit):
        inner = jit(lambda x: constant, inline=True)
        found = []

        def fun(x):
            result = inner(x)
            aval = jax.typeof(result)
            found.append((isinstance(result, jax.core.Tracer), str(aval), aval.weak_type))
            return x, result

        jax.eval_shape(jit(fun), 1.0)
        jax.eval_shape(jax.vmap(fun), np.ones(3, np.float32))
        jax.eval_shape(lambda x: jax.lax.scan(lambda carry, _: fun(carry), x, None, 3), 1.0)
        jax.make_jaxpr(jax.grad(lambda x: fun(x)[0]))(1.0)
        return found

    assert seen(pjit) == seen(jax.jit)
    assert len(seen(pjit)) == 4


WEAK_BODIES = {
    "shape": lambda x: jnp.expand_dims(x, 0),
    "product": lambda x: x * 2.0,
    "forwarded": lambda x: (x, x * 3),
    "stronger": lambda x: (x, jnp.float32(1) * x),
}
WEAK_TRANSFORMS = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "weak tangent": lambda f: lambda x: jax.jvp(f, (x,), (1.0,)),
    "strong tangent": lambda f: lambda x: jax.jvp(f, (x,), (jnp.float32(1),)),
    "vjp": lambda f: lambda x: (lambda y, pull: (y, pull(y)))(*jax.vjp(f, x)),
    "linearize": lambda f: lambda x: (lambda y, push: (y, push(x)))(*jax.linearize(f, x)),
    "grad": lambda f: jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x))))),
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", WEAK_TRANSFORMS)
def test_weak_types_are_those_of_jax_under_inline_too(transform):
    def types(jit, body, x, options):
        transformed = WEAK_TRANSFORMS[transform](jit(body, inline=options["inline"]))
        call = jax.jit(transformed) if options["inside"] else transformed
        return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(call(x))]

    flags = (False, True)
    with Together() as all_of:
        for name, inline, inside in itertools.product(WEAK_BODIES, flags, flags):
            for x in (1.5, jnp.float32(1.5)):
                options = {"inline": inline, "inside": inside}
                with all_of.case(f"{name}, {x!r}, {options}"):
                    case = WEAK_BODIES[name], x, options
                    assert types(pjit, *case) == types(jax.jit, *case)


def test_each_level_of_nested_calls_is_visited_once(mesh, monkeypatch):
    visited, find = [], tracing.sharding_equations
    monkeypatch.setattr(
        tracing, "sharding_equations", lambda jaxpr: visited.append(jaxpr) or find(jaxpr)
    )

    def visits(depth):
        def call(x):
            return x + 1

        rows = NamedSharding(mesh, P("x"))
        for _ in range(depth):
            call = pjit(lambda x, inner=call: inner(x) * 2, out_shardings=rows)
        visited.clear()
        call.trace(jax.ShapeDtypeStruct((8,), np.float32))
        return len(visited)

    few = visits(16)
    assert 0 < visits(32) <= 2.2 * few


@pytest.fixture
def searches(monkeypatch):
    """Count the nested calls whose trace is searched anew."""
    found = []
    find = Function.trace_values

    def record(self, args, kwargs):
        found.append(args)
        return find(self, args, kwargs)

    monkeypatch.setattr(Function, "trace_values", record)
    return lambda: [found.pop() for _ in range(len(found))]


def test_known_nested_calls_are_found_by_tree_and_types(searches):
    f = pjit(lambda *args, **kwargs: jax.tree.map(lambda x: x * 2, (args, kwargs)))
    x, other = jnp.ones(4), jnp.ones(4, jnp.int32)
    calls = ((x,), {}), ((other,), {}), ((x, x), {}), (([x],), {}), ((), {"k": x}), ((x[:2],), {})

    def outer(x, other):
        return [f(*args, **kwargs) for args, kwargs in calls]

    wanted = [jax.tree.map(lambda x: x * 2, call) for call in calls]
    same(jax.jit(outer)(x, other), wanted)
    assert len(searches()) == len(calls)
    same(jax.jit(lambda *xs: outer(*xs))(x, other), wanted)
    assert not searches()
    f.clear_cache()
    same(jax.jit(lambda *xs: outer(*xs))(x, other), wanted)
    assert len(searches()) == len(calls)


def test_known_nested_calls_depend_on_settings_and_meshes(mesh, searches):
    f = pjit(lambda x: x @ x.T, out_shardings=P("x"))
    x = f32(8, 8)

    def text():
        return str(jax.make_jaxpr(lambda x: f(x))(x))

    with jax.set_mesh(mesh):
        known = text()
        assert searches()
        assert text() == known
        assert not searches()
        with jax.default_matmul_precision("highest"):
            assert "HIGHEST" in text()
            assert searches()
    other = Mesh(mesh.devices, tuple(reversed(mesh.axis_names)))
    for enter in (jax.set_mesh(other), other):
        with enter:
            text()
            assert searches()
    with jax.set_mesh(mesh):
        assert text() == known
        assert not searches()


def test_nested_calls_with_references_and_static_arguments_are_checked_each_time():
    def add(ref, other):
        ref[...] += other[...]

    f = pjit(add)
    jax.jit(lambda x, y: f(jax.new_ref(x), jax.new_ref(y)))(f32(4), f32(4))

    def twice(x):
        ref = jax.new_ref(x)
        f(ref, ref)

    with pytest.raises(ValueError, match="only one reference to a mutable array"):
        jax.jit(twice)(f32(4))
    scaled = pjit(lambda x, by: x * by, static_argnums=1)
    same(jax.jit(lambda x: scaled(x, 2) + scaled(x, 3) + scaled(x, 2))(f32(4)), 7 * f32(4))


def test_dead_code_keeps_what_jax_keeps():
    def keeps(jit):
        jaxpr = jit(lambda w, x: jit(layer)(w, x) + 1).trace(W, X).jaxpr
        smaller, kept = jaxprs.drop_unused(jaxpr)
        assert kept == (True, True)
        return smaller is jaxpr

    # JAX 0.11 makes each equation anew.
    assert keeps(pjit) == keeps(jax.jit)
    unused = pjit(lambda w, x: (pjit(layer)(w, x), pjit(layer)(w, x * 2))[0])
    smaller, kept = jaxprs.drop_unused(unused.trace(W, X).jaxpr)
    assert len(smaller.eqns) == 1 and kept == (True, True)


@pytest.mark.parametrize("strict", [False, True])
def test_calls_of_one_function_share_their_boundary(monkeypatch, strict):
    resolved, resolve = [], Function._boundary_shardings
    monkeypatch.setattr(
        Function, "_boundary_shardings", lambda *args: resolved.append(args) or resolve(*args)
    )
    closed = f32(4, 4)
    inner = pjit(lambda w, x: layer(w, x) @ closed, strict=strict)
    pjit(lambda w, x: sum(inner(w, x) for _ in range(5))).lower(W, X)
    assert len(resolved) <= 2
