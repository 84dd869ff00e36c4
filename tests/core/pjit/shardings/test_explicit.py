"""Meshes with explicit axes: shardings are part of types, and pjit and constraints agree."""

import functools
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import xlashard as xs
from tests.core.pjit.helpers import f32
from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard import NamedSharding, P, pjit, with_sharding_constraint
from xlashard._jax.trace import type_errors
from xlashard.errors import ResourceError, ShardingTypeError

X = f32(8, 4)


@pytest.fixture
def explicit():
    return jax.make_mesh((4, 2), ("x", "y"))


@pytest.fixture
def mixed():
    """Return a mesh with an explicit axis `x`, and `y` left to the partitioner."""
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))


def put(x, mesh, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))


HOW = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "remat": lambda f: pjit(jax.grad(lambda x: jax.checkpoint(f)(x).sum())),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_values_and_types(explicit, how, partitioner):
    named = NamedSharding(explicit, P("x", "y"))
    f = pjit(lambda x: jnp.sin(x) * 2, in_shardings=named, out_shardings=named)
    x = put(X, explicit, "x", "y")
    with jax.set_mesh(explicit):
        out, wanted = HOW[how](f)(x), HOW[how](jax.jit(f.__wrapped__))(x)
        np.testing.assert_allclose(out, wanted, rtol=1e-5)
        assert jax.typeof(out) == jax.typeof(wanted)
        assert out.sharding.spec[-2:] == ("x", "y")


def test_pjit_works_inside_shard_map(explicit, partitioner):
    x = put(X, explicit, "x")
    with jax.set_mesh(explicit):
        whole = jax.shard_map(pjit(lambda x: jax.lax.psum(x, "x")), in_specs=P("x"), out_specs=P())
        np.testing.assert_allclose(pjit(whole)(x), X.reshape(4, 2, 4).sum(0), rtol=1e-6)
        part = jax.shard_map(
            pjit(lambda x: x * 2), in_specs=P("x"), out_specs=P("x"), axis_names=frozenset({"x"})
        )
        np.testing.assert_array_equal(pjit(part)(x), X * 2)


def constrained(mesh, *spec):
    return pjit(lambda x: with_sharding_constraint(x * 2, NamedSharding(mesh, P(*spec))))


def test_constraint_equal_to_the_type_is_accepted(explicit):
    x = put(X, explicit, "x")
    out = constrained(explicit, "x")(x)
    assert jax.typeof(out) == jax.typeof(x)
    np.testing.assert_array_equal(out, X * 2)


def test_a_constraint_changes_no_type(explicit, mixed):
    for mesh in (explicit, mixed):
        x = put(X, mesh, "x")
        with pytest.raises(
            ResourceError,
            match=r"of x is P\(None, 'x'\).*float32\[8@x,4\].*reshard\(x, P\(None, 'x'\)\)",
        ):
            constrained(mesh, None, "x")(x)
    with pytest.raises(
        ResourceError, match=naming("P()", "float32[8@x,4]", "dimension 0", "('x',)")
    ):
        constrained(explicit)(put(X, explicit, "x"))


def test_a_concrete_array_is_moved(explicit):
    x = put(X, explicit, "x")
    out = with_sharding_constraint(x, NamedSharding(explicit, P(None, "y")))
    assert out.sharding.spec == P(None, "y")


@pytest.mark.slow
@pytest.mark.parametrize("spec", [(None, "y"), (P.UNCONSTRAINED, "y"), ("x", "y")])
def test_auto_axes_are_constrained_beside_explicit_axes(mixed, spec):
    x = put(X, mixed, "x")
    with jax.set_mesh(mixed):
        out = constrained(mixed, *spec)(x)
        gradient = jax.grad(lambda x: (constrained(mixed, *spec)(x) ** 2).sum())(x)
    assert out.sharding.spec == P("x", "y")
    np.testing.assert_array_equal(out, X * 2)
    np.testing.assert_allclose(gradient, X * 8)


AXIS_TYPES = tuple(itertools.product((AxisType.Explicit, AxisType.Auto), repeat=2))[:-1]
ENTRIES = (None, "x", "y", ("x", "y"), ("y", "x"))
# An axis cuts one dimension.
SPECS = [
    P(*pair)
    for pair in itertools.product(ENTRIES, repeat=2)
    if not set(pair[0] or ()) & set(pair[1] or ())
]
OPERATIONS = {
    "identity": lambda jit: lambda a: a,
    "elementwise": lambda jit: lambda a: (jnp.sin(a) * 2, a, a.sum(1)),
    "constant": lambda jit: lambda a: a + np.ones((8, 8), np.float32),
    "matmul": lambda jit: lambda a: a @ a.T,
    "transpose": lambda jit: lambda a: a.T,
    "reshape": lambda jit: lambda a: a.reshape(8, 2, 4),
    "scan": lambda jit: lambda a: jax.lax.scan(lambda c, _: (c * 2, c.sum()), a, None, length=2),
    "cond": lambda jit: lambda a: jax.lax.cond(True, lambda b: b, lambda b: b * 2, a),
    "vmap": lambda jit: jax.vmap(lambda row: row * 2 + row.sum()),
    "nested": lambda jit: lambda a: jit(lambda b: (b * 2, b.sum(0)))(a),
    "grad": lambda jit: jax.grad(lambda a: (a * a).sum()),
    "remat": lambda jit: jax.grad(jax.checkpoint(lambda a: jnp.sin(jnp.sin(a)).sum())),
    "shard_map": lambda jit: jax.shard_map(
        lambda b: b * 2, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    ),
}


def test_errors_under_vmap_advise_what_fits_the_operands():
    """Operands that `jax.vmap` does not map have the advice of the operation."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    a, b, x = put(f32(8, 8), mesh, "x"), put(f32(8, 8), mesh, None, "x"), put(f32(8, 8), mesh)
    cases = {
        "counting that of jax.vmap": lambda: jax.vmap(lambda row: a @ row)(a),
        "out_sharding=P('x', None)": lambda: jax.vmap(lambda row: (a @ a.T)[0] + row)(x),
        "the mapped dimension is sharded over 'x' in a": lambda: jax.vmap(jnp.add)(a, b),
        "dimension 0 is sharded over 'x' in a": (
            lambda: jax.vmap(lambda row: jnp.concatenate([a, b])[0] + row)(x)
        ),
    }
    with jax.set_mesh(mesh), Together() as all_of:
        for words, function in cases.items():
            with all_of.case(words), pytest.raises(ShardingTypeError, match=re.escape(words)):
                pjit(function)()


@pytest.mark.slow
@pytest.mark.own_partitioner  # GSPMD leaves automatic axes out of results where JAX's keeps them
@pytest.mark.parametrize("types", AXIS_TYPES, ids=str)
def test_results_are_sharded_as_by_jax(types):
    """One program has all operations that JAX accepts: compiling each takes longer."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    value, together = f32(8, 8), Together()
    with jax.set_mesh(mesh), together:
        for spec in SPECS:
            x = jax.device_put(value, NamedSharding(mesh, spec))
            accepted = {}
            for name, operation in OPERATIONS.items():
                with together.case(f"{spec}: {name}"):
                    if is_traced_as_by_jax(operation, x):
                        accepted[name] = operation
            with together.case(str(spec)):
                assert accepted
                assert_same_results(join_operations(accepted), x)


def join_operations(operations):
    """Return an operation with the results of several, by their names."""

    def join(jit):
        functions = {name: operation(jit) for name, operation in operations.items()}
        return lambda a: {name: function(a) for name, function in functions.items()}

    return join


def is_traced_as_by_jax(operation, x):
    """Return whether an operation is traced, under both `pjit` and `jax.jit`, and not by one."""
    found = []
    for jit in (pjit, jax.jit):
        try:
            jit(operation(jit)).trace(x)
        except Exception:  # the class that JAX raises is private
            found.append(False)
        else:
            found.append(True)
    ours, theirs = found
    assert ours == theirs
    return ours


def test_automatic_axes_cut_dimensions_of_explicit_axes(mixed):
    with jax.set_mesh(mixed):
        for spec in (P(("x", "y")), P(("y", "x"))):
            assert_same_results(OPERATIONS["identity"], put(f32(8, 8), mixed, *spec))


def assert_same_results(operation, x):
    """Compare the results of `pjit` with those of `jax.jit`."""
    ours, theirs = (jax.tree.leaves_with_path(jit(operation(jit))(x)) for jit in (pjit, jax.jit))
    for (path, own), (_, other) in zip(ours, theirs, strict=True):
        assert own.sharding == other.sharding and own.sharding.spec == other.sharding.spec, path
        assert jax.typeof(own) == jax.typeof(other), path
        np.testing.assert_allclose(own, other, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_reshard_and_shard_map_return_xlashard_arrays(explicit):
    with xs.set_mesh(explicit):
        tree = xs.reshard({"a": X, "b": xs.device_put(X)}, {"a": P("x"), "b": P(None, "y")})
        assert [type(v) for v in tree.values()] == [xs.Array] * 2
        assert [v.sharding for v in tree.values()] == [
            NamedSharding(explicit, P("x", None)),
            NamedSharding(explicit, P(None, "y")),
        ]
        typed = []

        @jax.jit
        def inside(x):
            typed.append(jax.typeof(xs.reshard(x, P(None, "y"))).sharding.spec)
            return xs.reshard(x, P(None, "y"))

        np.testing.assert_array_equal(inside(tree["a"]), X)
        assert typed == [P(None, "y")]

        def total(x):
            return jax.lax.psum(x, "x")

        options = {"in_specs": P("x"), "out_specs": P()}
        for made in (xs.shard_map(total, **options), xs.shard_map(**options)(total)):
            sums = made(tree["a"])
            assert made.__name__ == "total" and type(sums) is xs.Array
            np.testing.assert_allclose(sums, X.reshape(4, 2, 4).sum(0), rtol=1e-6)
    assert inspect.signature(xs.shard_map) == inspect.signature(jax.shard_map)
    with pytest.raises(TypeError):
        xs.shard_map(3, **options)


TYPES = {
    "a value computed from two arguments": (
        lambda w, x: jnp.sin(x) @ jnp.tanh(w["k"] * x[0, 0]),
        ("float32[8,4@x] computed from x", "float32[4@x,8] computed from w['k'] and x"),
        "jnp.matmul(x, y, out_sharding=P(None, None))",
    ),
    "a local variable": (
        lambda w, x: (lambda h: jax.sharding.reshard(x, P("x")) + h)(jnp.sin(x)),
        ("h (float32[8,4@x], computed from x)", "dimensions 0 and 1"),
        "jax.sharding.reshard(h, P('x', None))",
    ),
    "a closed-over array": (
        lambda w, x: x + CLOSED["rows"],
        ("x (float32[8,4@x])", "dimensions 0 and 1"),
        "P(None, 'x')",
    ),
    "inside a function of JAX": (
        lambda w, x: jnp.linalg.inv(w["k"][:, :4]),
        ("lu", "computed from w['k']"),
        "jax.sharding.reshard(w['k'], P()) before the call",
    ),
    "the batch of a product": (
        lambda w, x: jnp.einsum("ab,ab->b", x, jax.sharding.reshard(x, P("x"))),
        ("batch dimension", "over 'x' in x"),
        "P(None, 'x')",
    ),
}
CLOSED = {}


@pytest.mark.parametrize("case", TYPES)
def test_type_errors_name_operands_and_fix(explicit, case):
    f, facts, fix = TYPES[case]
    w = {"k": put(f32(4, 8), explicit, "x")}
    x = put(X, explicit, None, "x")
    CLOSED["rows"] = put(X, explicit, "x")
    with jax.set_mesh(explicit):
        for traced in (pjit(f).trace, functools.partial(xs.explain, jax.jit(f))):
            with pytest.raises(ShardingTypeError, match=naming(*facts, fix)) as caught:
                traced(w, x)
            assert caught.value.source.startswith(__file__)
            assert set(caught.value.paths) <= {"w['k']", "x"}
            assert isinstance(caught.value, ValueError | TypeError)


def test_a_variable_that_jax_renames_hides_no_error(explicit, monkeypatch):
    monkeypatch.setattr(type_errors, "_problem", lambda error, last: {}["pspec"])
    x, y = put(X, explicit, "x"), put(X, explicit, None, "x")
    with jax.set_mesh(explicit), pytest.raises(Exception, match="mul") as caught:
        pjit(lambda x, y: x * y)(x, y)
    assert not isinstance(caught.value, KeyError | ShardingTypeError)
    assert any("'pspec'" in note for note in caught.value.__notes__)


def test_errors_of_nested_functions_are_explained_once(explicit):
    inner = pjit(lambda a, b: a * b)
    with jax.set_mesh(explicit), pytest.raises(ShardingTypeError) as caught:
        pjit(lambda x, y: inner(x, y) + 1)(put(X, explicit, "x"), put(X, explicit, None, "x"))
    assert caught.value.operation == "mul" and caught.value.paths == ("a", "b")
    with pytest.raises(TypeError, match="carry") as caught:
        pjit(lambda x: jax.lax.scan(lambda c, _: (c[None], None), x, length=2))(X)
    assert not isinstance(caught.value, ShardingTypeError)
    with pytest.raises(ValueError, match="not found in mesh") as caught:
        pjit(lambda x: jnp.zeros(4, device=jax.NamedSharding(auto_mesh(), P("z"))))(X)
    assert not isinstance(caught.value, ShardingTypeError)


def auto_mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
