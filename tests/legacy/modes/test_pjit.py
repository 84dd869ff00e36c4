"""The era's `pjit` and `with_sharding_constraint` on one process."""

import logging
import pickle
from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import make_mesh
from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard import AUTO, FROM_GDA, UNSPECIFIED, NamedSharding, P, legacy
from xlashard._jax.runtime.transfer import HandleType
from xlashard.errors import (
    ArgumentError,
    DeletedError,
    MeshError,
    RefusedError,
    ResourceError,
)
from xlashard.legacy.arrays.device_arrays import ShardedDeviceArray
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.shardings.op_shardings import get_pspec_from_executable
from xlashard.legacy.shardings.partition_spec import PartitionSpec as EraSpec

pytestmark = pytest.mark.partitioner

X = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
EmptyState = namedtuple("EmptyState", [])


@contextmanager
def off(*, gda: bool = False) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(legacy.jax_array(False))
        stack.enter_context(legacy.parallel_functions_output_gda(gda))
        yield


def gda_of(mesh: Any, spec: Any, value: np.ndarray = X) -> GlobalDeviceArray:
    return GlobalDeviceArray.from_callback(value.shape, mesh, spec, lambda i: value[i])


def test_none_replicates_and_empty_containers_are_subtrees(mesh: Any) -> None:
    state = {"w": X, "opt": (EmptyState(), None)}
    axes = {"w": EraSpec("x", None), "opt": (EmptyState(), None)}
    f = legacy.pjit(lambda s, b: (s, b.sum()), [axes, P("y")], (axes, None))
    for mode in (off(), off(gda=True), legacy.jax_array(True)):
        with mesh, mode:
            out, total = f(state, X)
        assert out["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
        assert total.is_fully_replicated and np.asarray(total.addressable_data(0)) == X.sum()
        assert out["opt"] == (EmptyState(), None)


def test_identity_pjit_shards_host_data(mesh: Any) -> None:
    with mesh, off():
        out = legacy.pjit(lambda x: x, None, EraSpec("x"))(X)
    assert out.sharding == NamedSharding(mesh, P("x"))


def test_pjit_uses_the_mesh_of_each_call(mesh: Any) -> None:
    f = legacy.pjit(lambda x: x + 1, P("x"), P("x"))
    other = make_mesh((2, 4), ("x", "y"))
    for mode in (off(), off(gda=True)):
        for _ in range(2):
            for each in (mesh, other, make_mesh((4, 2), ("x", "y"))):
                with each, mode:
                    assert f(X).sharding == NamedSharding(each, P("x"))
                mode = off(gda=True)
    assert f._cache_size() >= 2


def test_static_arguments_shift_donate_argnums_but_not_axis_resources(mesh: Any) -> None:
    f = legacy.pjit(
        lambda n, x, flag, y: x * n + y if flag else x,
        (P("x"), None),
        P("x"),
        static_argnums=(0, 2),
        donate_argnums=(1,),
    )
    with mesh, off(gda=True):
        x = gda_of(mesh, P("x"))
        out = f(3, x, True, X[0])
        np.testing.assert_array_equal(out.to_array(), X * 3 + X[0])
        with pytest.raises(DeletedError, match="donated"):
            f(3, x, True, X[0])
        compiled = f.lower(2, out, True, X[0]).compile()
        np.testing.assert_array_equal(compiled(out, X[0]).to_array(), X * 6 + 3 * X[0])
    assert x.is_deleted()


@pytest.mark.parametrize("gda", [False, True], ids=["parts", "gdas"])
def test_donated_arrays_of_each_class_are_deleted(mesh: Any, gda: bool) -> None:
    f = legacy.pjit(lambda x: x + 1, P("x"), P("x"), donate_argnums=0)
    with mesh, off(gda=gda):
        first = f(X)
        second = f(first)
        third = f(second)
    assert first.is_deleted() and second.is_deleted()
    np.testing.assert_array_equal(np.asarray(third.addressable_data(0)), X[:2] + 3)


@pytest.mark.slow
def test_host_local_arguments_are_resharded_to_their_axis_resources(mesh: Any) -> None:
    f = legacy.pjit(lambda x: x * 2, P("y"), P("y"))
    with mesh, off():
        elsewhere = legacy.pjit(lambda x: x, P("x"), P("x"))(X)
        alone = jax.device_put(X, jax.devices()[5])
        for x in (elsewhere, alone, jnp.asarray(X)):
            for _ in range(2):
                np.testing.assert_array_equal(f(x), X * 2)
    with mesh, pytest.raises(ResourceError, match="device_put"):
        f(elsewhere)


def test_from_gda_is_accepted_in_every_prefix(mesh: Any) -> None:
    x, y = gda_of(mesh, P("x")), gda_of(mesh, P(None, "y"))
    again = pickle.loads(pickle.dumps(FROM_GDA))
    body = lambda state, batch: state["a"] + state["b"] + batch  # noqa: E731
    prefixes = [
        FROM_GDA,
        (FROM_GDA, FROM_GDA),
        ({"a": FROM_GDA, "b": P(None, "y")}, again),
        ({"a": again, "b": FROM_GDA}, P("x")),
    ]
    for prefix in prefixes:
        f = legacy.pjit(body, prefix, P("x"))
        for mode in (off(gda=True), off(), legacy.jax_array(True)):
            with mesh, mode:
                out = f({"a": x, "b": y}, x)
            assert out.sharding == NamedSharding(mesh, P("x"))
            np.testing.assert_array_equal(np.asarray(out.addressable_data(0)), 3 * X[:2])
    mixed = legacy.pjit(body, (FROM_GDA, P("x")), P("x"))
    with mesh, off(gda=True):
        assert type(mixed({"a": x, "b": y}, X)) is GlobalDeviceArray


def test_equivalent_specs_of_a_gda_are_accepted(mesh: Any) -> None:
    x = gda_of(mesh, P("x"))
    with mesh, off(gda=True):
        for spec in (P("x"), P("x", None), P(("x",)), EraSpec("x", None), P("x", ())):
            legacy.pjit(lambda x: x, spec, None)(x)
        wrong = legacy.pjit(lambda state: state["w"], ({"w": P("y")},), None)
        with pytest.raises(ResourceError, match=r"state\['w'\].*FROM_GDA.*P\('x'\)"):
            wrong({"w": x})


def test_meshes_are_compared_under_jax_enable_checks(mesh: Any) -> None:
    renamed = make_mesh((4, 2), ("x", "z"))
    x = gda_of(renamed, P("x"))
    f = legacy.pjit(lambda x: x * 2, FROM_GDA, P("x"))
    with mesh, off(gda=True):
        for _ in range(2):
            f(x)
        with jax.enable_checks(True), pytest.raises(ResourceError, match="x.mesh"):
            f(x)
        f(x)
    backwards = make_mesh((4, 2), ("x", "y"), jax.devices()[::-1])
    with backwards, off(gda=True), pytest.raises(ResourceError, match="x.mesh"):
        legacy.pjit(lambda x: x, P("x"), None)(x)


def test_invalid_calls_are_refused(mesh: Any) -> None:
    f = legacy.pjit(lambda x, scale: x * scale, (P("x"), None), P("x"))
    with off():
        with pytest.raises(MeshError, match="`with mesh:`"):
            f(X, 2.0)
        with pytest.raises(RuntimeError, match="mesh"):
            f.lower(X, 2.0)
        for kind in (ArgumentError, NotImplementedError):
            with mesh, pytest.raises(kind, match=r"scale.*<lambda>\(x, scale\)"):
                f(X, scale=2.0)
        with mesh, pytest.raises(ResourceError, match="FROM_GDA"):
            legacy.pjit(lambda x: x, FROM_GDA, None)(X)
        with (
            mesh,
            pytest.raises(
                ResourceError,
                match=naming(
                    "in_axis_resources of x ", "FROM_GDA", "ShardedDeviceArray", "GlobalDeviceArray"
                ),
            ),
        ):
            legacy.pjit(lambda x: x, FROM_GDA, None)(f(X, 2.0))
    with mesh:
        np.testing.assert_array_equal(f(X, scale=2.0), X * 2)


@pytest.mark.parametrize(
    ("resources", "name"),
    [
        ((UNSPECIFIED, UNSPECIFIED), "in_axis_resources"),
        ((P("x"), UNSPECIFIED), "out_axis_resources"),
        (((P("x"), UNSPECIFIED), None), "in_axis_resources"),
    ],
)
def test_axis_resources_are_required_without_jax_array(
    mesh: Any, resources: Any, name: str
) -> None:
    body = lambda x, y: x + y  # noqa: E731
    with off(), pytest.raises(ValueError, match=f"{name}.*jax_array"):
        legacy.pjit(body, *resources)
    f = legacy.pjit(body, *resources)
    with mesh:
        np.testing.assert_array_equal(f(X, X), X + X)
        with off(), pytest.raises(ResourceError, match=f"{name}.*jax_array"):
            f(X, X)


@pytest.mark.parametrize("jax_array", [True, False])
def test_resources_fit_trees_of_the_same_containers(mesh: Any, jax_array: bool) -> None:
    spec, values = P("x"), {"list": [X, X], "tuple": (X, X)}
    fit = [((spec,), spec, "list"), ((spec,), spec, "tuple"), (spec, None, "list")]
    trees = {"list": [spec, spec], "tuple": (spec, spec)}
    with mesh, legacy.jax_array(jax_array), Together() as all_of:
        for ins, outs, kind in fit:
            with all_of.case(f"{kind}: {ins}, {outs}"):
                legacy.pjit(lambda x: x, ins, outs)(values[kind])
        for kind, other in (("list", "tuple"), ("tuple", "list")):
            value, same, differs = values[kind], trees[kind], trees[other]
            for wrap in (lambda tree: tree, lambda tree: {"a": tree}):
                with all_of.case(f"{kind} as {wrap(kind)}"):
                    good = legacy.pjit(lambda x: x, (wrap(same),), wrap(same))
                    assert jax.tree.structure(good(wrap(value))) == jax.tree.structure(wrap(value))
                    with pytest.raises(ResourceError, match=f"has a {other} where x.* is a {kind}"):
                        legacy.pjit(lambda x: x, (wrap(differs),), None)(wrap(value))
                    with pytest.raises(ValueError, match=f"has a {other} where result.*a {kind}"):
                        legacy.pjit(lambda x: x, None, wrap(differs))(wrap(value))
        # The arguments themselves are a tuple, which a list of resources fits.
        with all_of.case("the arguments"):
            legacy.pjit(lambda *xs: xs, [spec, None], spec)(X, X)
            with pytest.raises(ResourceError, match="3 entries.*2 arguments"):
                legacy.pjit(lambda *xs: xs, [spec, None, None], spec)(X, X)


@pytest.mark.parametrize("spec", [EraSpec("x", "x"), P("x", ("y", "x"))])
def test_an_axis_twice_in_a_resource_is_refused_before_any_call(spec: Any) -> None:
    for on, (ins, outs) in product((True, False), ((spec, None), (None, {"a": spec}))):
        name = "out_axis_resources" if ins is None else "in_axis_resources"
        with legacy.jax_array(on), pytest.raises(ValueError, match=f"{name}.*'x'"):
            legacy.pjit(lambda x: x, ins, outs)


@pytest.mark.parametrize("kind", ["static", "donated"])
def test_static_and_donated_arguments_have_no_defaults_without_jax_array(
    mesh: Any, kind: str
) -> None:
    option = {"static": {"static_argnums": 1}, "donated": {"donate_argnums": (0, 1)}}[kind]
    f = legacy.pjit(lambda x, y=2: x * y, P("x"), P("x"), **option)
    with mesh, off():
        for call in (f, f.lower):
            with pytest.raises(ValueError, match=f"without the {kind} argument y"):
                call(np.ones((8, 4), np.float32))
    with mesh:
        assert f(np.ones((8, 4), np.float32)).shape == (8, 4)


@pytest.mark.slow
def test_auto_requires_global_avals(mesh: Any) -> None:
    f = legacy.pjit(lambda x: x * 2, AUTO, AUTO)
    with mesh:
        assert f(X).shape == X.shape
        with off(gda=True):
            x = gda_of(mesh, P("x"))
            for call in (f, f.lower):
                with pytest.raises(ResourceError, match="_global_avals=True"):
                    call(x)
            compiled = f.lower(jax.ShapeDtypeStruct(x.shape, x.dtype), _global_avals=True).compile()
            taken = jax.device_put(x, compiled.input_shardings[0][0])
            assert type(compiled(taken)) is GlobalDeviceArray


def test_example_of_the_docstring_of_2022() -> None:
    blur = jnp.asarray([0.5, 1.0, 0.5])
    f = legacy.pjit(lambda x: jnp.convolve(x, blur, "same"), None, EraSpec("devices"))
    for mode in (off(), off(gda=True), legacy.jax_array(True)):
        with legacy.installed(), jax.sharding.Mesh(np.array(jax.devices()), ("devices",)), mode:
            out = f(jnp.arange(8, dtype=jnp.float32))
        assert np.asarray(out).tolist() == [0.5, 2, 4, 6, 8, 10, 12, 10]


@pytest.mark.parametrize("jax_array", [True, False])
def test_unused_arguments_are_kept(mesh: Any, jax_array: bool) -> None:
    f = legacy.pjit(lambda x, y: x * 2, (P("x"), P("y")), P("x"))
    with mesh, legacy.jax_array(jax_array):
        compiled = f.lower(X, X).compile()
        lean = legacy.pjit(lambda x, y: x * 2, (P("x"), P("y")), P("x"), keep_unused=False)
        assert lean.lower(X, X).compile().input_shardings[0][1] is None
    assert get_pspec_from_executable(compiled, mesh)[0] == (P("x"), P("y"))
    assert compiled.input_shardings[0] == (NamedSharding(mesh, P("x")), NamedSharding(mesh, P("y")))


@pytest.mark.slow
def test_chosen_layouts_are_required_under_jax_enable_checks(mesh: Any) -> None:
    f = legacy.pjit(lambda x: x @ x.T, AUTO, AUTO)
    with mesh:
        compiled = f.lower(jax.ShapeDtypeStruct((8, 8), np.float32), _global_avals=True).compile()
        (taken,) = compiled.input_shardings[0]
        for spec in (P("x"), P("y", "x"), P("y")):
            x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, spec))
            if taken.is_equivalent_to(x.sharding, 2):
                continue
            with jax.enable_checks(True):
                for call in (compiled, f):
                    with pytest.raises(ResourceError, match=naming("x", f"{spec}", "device_put")):
                        call(x)
            assert compiled(x).shape == f(x).shape == (8, 8)
        with jax.enable_checks(True):
            assert compiled(jax.device_put(x, taken)).shape == (8, 8)


def test_partitioning_of_a_gda_is_compared_in_every_mode(mesh: Any) -> None:
    x = gda_of(mesh, P("x", "y"))
    for jax_array in (True, False):
        with mesh, legacy.jax_array(jax_array), pytest.raises(ValueError, match="FROM_GDA"):
            legacy.pjit(lambda x: x, P("y"), None)(x)


def test_stages_keep_the_mode_of_their_lowering(mesh: Any) -> None:
    f = legacy.pjit(lambda x: x * 2, P("x"), P("x"))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with mesh:
        for mode, kind in (
            (legacy.jax_array(True), HandleType),
            (off(), ShardedDeviceArray),
            (off(gda=True), GlobalDeviceArray),
        ):
            with mode:
                compiled = f.lower(x).compile()
                traced = f.trace(x)
                assert f.eval_shape(x).shape == X.shape == jax.eval_shape(f, x).shape
                assert type(f.lower(X, _global_avals=True).compile()(X)) is kind
            for _ in range(2):
                assert type(compiled(X)) is kind
            assert type(traced(X)) is kind
            data = compiled.serialize()
            assert np.array_equal(type(compiled).deserialize(data)(X), X * 2)
        with off():
            compiled = f.lower(x).compile()
            elsewhere = legacy.pjit(lambda x: x, P("y"), P("y"))(X)
            np.testing.assert_array_equal(compiled(elsewhere), X * 2)
            np.testing.assert_array_equal(compiled(elsewhere), X * 2)
            with pytest.raises(ResourceError):
                compiled(gda_of(mesh, P("y")))
            for kind in (TypeError, NotImplementedError):
                with pytest.raises(kind, match="scale by name.*positional"):
                    compiled(X, scale=2)


@pytest.mark.slow
@pytest.mark.parametrize("gda", [False, True], ids=["parts", "gdas"])
def test_nested_pjit_receives_tracers(mesh: Any, gda: bool, partitioner: str) -> None:
    inner = legacy.pjit(lambda x: jnp.sin(x), P("x"), P("x"))
    outer = legacy.pjit(lambda x: inner(x).sum(), P("x"), None)
    with mesh, off(gda=gda):
        want = np.sin(X).sum()
        np.testing.assert_allclose(np.asarray(outer(X).addressable_data(0)), want, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(lambda x: inner(x).sum())(X), want, rtol=1e-5)
        np.testing.assert_allclose(jax.grad(lambda x: outer(x))(X), np.cos(X), rtol=1e-5)
        grad = legacy.pjit(jax.grad(outer), P("x"), P("x"))
        np.testing.assert_allclose(grad(X).addressable_data(0), np.cos(X[:2]), rtol=1e-5)
        both = jax.vmap(inner)(np.stack([X, X]))
        np.testing.assert_allclose(both[1], np.sin(X), rtol=1e-5)
        assert jax.eval_shape(outer, X).shape == ()


def test_pjit_keeps_name_docstring_and_attributes(mesh: Any) -> None:
    @legacy.pjit(in_axis_resources=P("x"), out_axis_resources=P("x"))
    def step(x):
        """Doubles."""
        return x * 2

    with mesh, off():
        step(X)
    with mesh:
        step(X)
    assert (step.__name__, step.__doc__) == ("step", "Doubles.")
    assert step.__wrapped__(2) == 4
    assert step._cache_size() == 2
    assert "jax_array" in str(xlashard.explain_recompile(step))
    step.clear_cache()
    assert step._cache_size() == 0
    with mesh, off():
        np.testing.assert_array_equal(step(X), X * 2)
    with pytest.raises(ResourceError, match=naming("in_axis_resources", "in_shardings")):
        legacy.pjit(lambda x: x, P("x"), None, in_shardings=P("x"))


def test_error_of_an_unhashable_static_argument_names_the_argument(mesh: Any) -> None:
    f = legacy.pjit(lambda names, x: x, P("x"), P("x"), static_argnums=0)
    with mesh, off(), pytest.raises(ArgumentError, match="names"):
        f([1], X)


def test_distributed_debug_logs_every_run(mesh: Any, caplog: pytest.LogCaptureFixture) -> None:
    f = legacy.pjit(lambda x: x * 3, P("x"), P("x"))
    with mesh, caplog.at_level(logging.WARNING):
        f(X)
        legacy.config.update("jax_distributed_debug", True)
        try:
            f(X)
            with off():
                f(X)
                f(X)
        finally:
            legacy.config.update("jax_distributed_debug", False)
        f(X)
    messages = [r.getMessage() for r in caplog.records if "distributed_debug" in r.name]
    assert len(messages) == 3
    for part in ("<lambda>", "in_shardings", "P('x'", "float32[8,4]", "fingerprint"):
        assert part in messages[0]


def test_with_sharding_constraint_without_jax_array(mesh: Any, partitioner: str) -> None:
    def body(x):
        tree = {"a": x, "b": x + 1}
        return legacy.with_sharding_constraint(tree, {"a": EraSpec("y", "x"), "b": None})

    f = legacy.pjit(body, P("x"), {"a": P("y", "x"), "b": None})
    with off():
        with mesh:
            out = f(X)
            assert out["a"].sharding == NamedSharding(mesh, P("y", "x"))
            with pytest.raises(RefusedError, match=r"with_sharding_constraint .*pjit\(lambda x: x"):
                body(X)
        with pytest.raises(
            RefusedError,
            match=naming("with_sharding_constraint", "jax.config.update('jax_array', True)"),
        ):
            body(X)


@pytest.mark.slow
def test_with_sharding_constraint_without_jax_array_or_a_mesh(mesh: Any) -> None:
    """A spec without axes has no effect; an axis is a ValueError."""

    def constrained(spec: Any) -> Any:
        return jax.jit(lambda x: legacy.with_sharding_constraint(x, spec) + 1)(X)

    with off():
        for spec in (EraSpec(), EraSpec(None, EraSpec.UNCONSTRAINED), None, P()):
            np.testing.assert_array_equal(constrained(spec), X + 1)
        on_mesh = constrained(NamedSharding(mesh, P("x")))
        assert on_mesh.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
        with pytest.raises(
            ResourceError, match=naming("with_sharding_constraint", "axis 'x'", "`with mesh:`")
        ):
            constrained(EraSpec(None, "x"))
        with pytest.raises(TypeError, match="axis_resources"):
            constrained("x")


@pytest.mark.slow
@pytest.mark.parametrize("jax_array", [True, False])
def test_lowered_function_returns_mhlo_and_hlo_modules(mesh: Any, jax_array: bool) -> None:
    f = legacy.pjit(lambda x: jnp.sin(x) @ x.T, P("x"), P("x"))
    with legacy.jax_array(jax_array), legacy.installed(), mesh:
        ours, of_jax = f.lower(X), jax.jit(lambda x: jnp.sin(x) @ x.T).lower(X)
        for lowered in (ours, of_jax):
            text = lowered.as_text(dialect="mhlo")
            assert "mhlo.sine" in text and "stablehlo.sine" not in text
            assert str(lowered.compiler_ir(dialect="mhlo")).count("mhlo.dot_general") == 1
            assert "stablehlo.sine" in lowered.as_text() == lowered.as_text("stablehlo")
            assert "HloModule" in lowered.as_text(dialect="hlo")
            compiled = lowered.compile()
            (module,) = compiled.compiler_ir()
            assert "dot" in module.to_string()
            costs = compiled.cost_analysis()
            assert costs[0]["flops"] == costs["flops"] > 0 and costs.get("none") is None
            with pytest.raises(KeyError, match="1"):
                costs[1]


def test_axis_resources_of_an_invalid_type_raise_a_type_error() -> None:
    for wrong in ("x", 3, {"a": "x"}):
        with pytest.raises(TypeError, match=r"in_axis_resources.* is ") as caught:
            legacy.pjit(lambda x: x, in_axis_resources=wrong, out_axis_resources=None)
        assert isinstance(caught.value, ResourceError)


@pytest.mark.parametrize("jax_array", [True, False])
def test_different_mesh_inside_of_pjit_raises_a_runtime_error(mesh: Any, jax_array: bool) -> None:
    other = make_mesh((2, 4), ("x", "y"))
    inner = legacy.pjit(lambda x: x + 1, P("x"), P("x"))

    def calls_under(mesh: Any) -> Any:
        def body(x: Any) -> Any:
            with mesh:
                return inner(x)

        return legacy.pjit(body, P("x"), P("x"))

    with legacy.jax_array(jax_array), mesh:
        np.testing.assert_array_equal(calls_under(make_mesh((4, 2), ("x", "y")))(X), X + 1)
        with pytest.raises(RuntimeError, match=naming("<lambda> ", "'y': 4", "'y': 2")):
            calls_under(other)(X)
        np.testing.assert_array_equal(inner(X), X + 1)
    with legacy.jax_array(jax_array), other:
        np.testing.assert_array_equal(inner(X), X + 1)


def test_list_in_a_spec_equals_a_tuple(mesh: Any) -> None:
    f = legacy.pjit(
        lambda x: legacy.with_sharding_constraint(x, EraSpec(["y"])),
        EraSpec(["x", "y"]),
        EraSpec(None, ["y", "x"]),
    )
    y = np.zeros((8, 8), np.float32)
    for mode in (legacy.jax_array(True), off(), off(gda=True)):
        with mesh, mode:
            assert f(y).sharding == NamedSharding(mesh, P(None, ("y", "x")))


def test_with_sharding_constraint_with_jax_array(mesh: Any) -> None:
    with mesh:
        out = legacy.with_sharding_constraint(X, P("y"))
        assert out.sharding == NamedSharding(mesh, P("y"))
        assert legacy.with_sharding_constraint(X, shardings=None).is_fully_replicated
    for wrong in ({}, {"axis_resources": P("x"), "shardings": P("x")}):
        with pytest.raises(ResourceError, match="axis_resources"):
            legacy.with_sharding_constraint(X, **wrong)
