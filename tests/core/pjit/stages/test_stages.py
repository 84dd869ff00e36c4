"""Traced, lowered, compiled: the properties of each stage, and errors of a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType

from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import (
    Array,
    Compiled,
    Lowered,
    NamedSharding,
    P,
    Traced,
    device_put,
    explain,
    pjit,
)
from xlashard.errors import ArgumentError, CompileError, DeletedError, MeshError, ResourceError


def affine(params, x, *, scale=1.0):
    return {"y": (x @ params["w"] + params["b"]) * scale}


PARAMS = {"w": f32(4, 8), "b": f32(8)}


@pytest.fixture
def f(mesh):
    named = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    return pjit(
        affine,
        in_shardings=({"w": named(None, "y"), "b": named("y")}, named("x")),
        out_shardings=named("x", "y"),
    )


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_tracing(f):
    traced = f.trace(PARAMS, f32(8, 4))
    assert isinstance(traced, Traced)
    assert traced.fun_name == "affine"
    assert "dot_general" in str(traced.jaxpr)
    assert traced.out_info["y"].shape == (8, 8)
    (params, x), kwargs = traced.in_avals
    assert params["w"].shape == (4, 8) and x.shape == (8, 4) and kwargs == {}
    assert isinstance(traced.lower(), Lowered)


def test_eval_shape(f, mesh, compilations):
    out = f.eval_shape(shapes(PARAMS), shapes(f32(8, 4)))
    placed = NamedSharding(mesh, P("x", "y"))
    assert out == {"y": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=placed)}
    assert jax.eval_shape(f, PARAMS, f32(8, 4))["y"].shape == (8, 8)
    assert compilations.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_abstract_mesh_takes_the_devices_of_compile(kind, partitioner):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    abstract = NamedSharding(mesh.abstract_mesh, P("x"))
    shape = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=abstract)
    traced = pjit(lambda x: x * 2).trace(shape)
    assert "num_partitions = 8" in traced.lower(lowering_platforms=("tpu",)).as_text()
    lowered = traced.lower(lowering_platforms=("cpu",))
    assert lowered.cost_analysis()["flops"] > 0
    backwards = jax.devices()[::-1]
    for options in (None, {"xla_embed_ir_in_executable": True}):
        compiled = lowered.compile(options, device_assignment=backwards)
        ((sharding,), _) = compiled.input_shardings
        assert sharding.spec == P("x") and list(sharding.mesh.devices.flat) == backwards
        x = jax.device_put(f32(8, 4), sharding)
        np.testing.assert_array_equal(compiled(x), f32(8, 4) * 2)
    with pytest.raises(
        CompileError, match=naming("device_assignment", "<lambda>", "4 devices", "8 devices")
    ):
        lowered.compile(device_assignment=backwards[:4])
    with pytest.raises(
        MeshError,
        match=naming("argument x ", "abstract mesh ('x': 4, 'y': 2)", "jax.set_mesh(mesh)"),
    ):
        traced.lower()


def test_lowering(f):
    lowered = f.lower(shapes(PARAMS), f32(8, 4))
    assert isinstance(lowered, Lowered)
    assert lowered.in_avals[0][0]["b"].dtype == np.float32
    assert lowered.in_tree == jax.tree.structure(((PARAMS, 0), {}))
    assert lowered.out_tree == jax.tree.structure({"y": 0})
    assert lowered.out_info["y"].shape == (8, 8)
    assert lowered.donate_argnums == ()
    assert lowered.cost_analysis()["flops"] > 500
    assert "stablehlo.dot_general" in lowered.as_text()
    assert "stablehlo.dot_general" in str(lowered.compiler_ir())
    assert lowered.as_text("stablehlo") == lowered.as_text()
    assert "HloModule" in lowered.as_text("hlo")
    assert "metadata=" in lowered.as_text("hlo", debug_info=True)
    assert "metadata=" not in lowered.as_text("hlo")
    assert "HloModule" in lowered.compiler_ir("hlo").as_hlo_text()
    assert "loc(" in lowered.as_text(debug_info=True) and "loc(" not in lowered.as_text()
    for refused in (lambda: lowered.as_text("mhlo2"), lambda: lowered.compiler_ir("tosa")):
        with pytest.raises(ArgumentError, match=naming("dialect", "'hlo' or 'stablehlo'")):
            refused()


def test_names_in_the_module(f):
    text = f.lower(PARAMS, f32(8, 4)).as_text(debug_info=True)
    assert "module @pjit_affine" in text
    assert "params['w']" in text and "result['y']" in text


def test_args_info():
    lowered = pjit(lambda a, b: (a, b), donate_argnums=1, static_argnums=()).lower(
        f32(3), {"k": f32(2)}
    )
    assert lowered.donate_argnums == (1,)
    (a, b), kwargs = lowered.args_info
    assert (a.donated, b["k"].donated, kwargs) == (False, True, {})
    assert b["k"].shape == (2,) and b["k"].dtype == np.float32


def test_compiling(f, mesh):
    compiled = f.lower(PARAMS, f32(8, 4)).compile()
    assert isinstance(compiled, Compiled)
    out = compiled(PARAMS, f32(8, 4))
    assert isinstance(out["y"], Array)
    np.testing.assert_allclose(out["y"], affine(PARAMS, f32(8, 4))["y"], rtol=1e-6)
    ((params, x), kwargs) = compiled.input_shardings
    assert (params["w"].spec, params["b"].spec, x.spec, kwargs) == (
        P(None, "y"),
        P("y"),
        P("x"),
        {},
    )
    assert compiled.output_shardings == {"y": NamedSharding(mesh, P("x", "y"))}
    assert compiled.out_info["y"].sharding == NamedSharding(mesh, P("x", "y"))
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert "HloModule" in compiled.as_text()
    assert compiled.runtime_executable().local_devices()
    assert compiled.in_tree == jax.tree.structure(((PARAMS, 0), {}))


def test_repeated_calls_of_a_compiled_program_equal_the_function(f):
    compiled = f.lower(PARAMS, f32(8, 4)).compile()
    for i in range(4):
        np.testing.assert_allclose(
            compiled(PARAMS, f32(8, 4) + i)["y"], affine(PARAMS, f32(8, 4) + i)["y"], rtol=1e-6
        )


@pytest.mark.devices(8)
def test_shapes_with_shardings(mesh, partitioner):
    struct = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("x", "y")))
    compiled = pjit(lambda x: x.T * 2).lower(struct).compile()
    assert compiled.input_shardings[0][0] == NamedSharding(mesh, P("x", "y"))
    assert compiled.output_shardings.spec == P("y", "x")
    theirs = jax.sharding.NamedSharding(mesh, P("y"))
    struct = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=theirs)
    assert pjit(lambda x: x).lower(struct).compile().input_shardings[0][0].spec == P("y")


def test_compiled_program_refuses_other_structures_and_types(f):
    compiled = f.lower(PARAMS, f32(8, 4)).compile()
    for call, facts in {
        lambda: compiled(PARAMS): "structure",
        lambda: compiled(PARAMS, f32(8, 4), f32(1)): "structure",
        lambda: compiled(PARAMS, x=f32(8, 4)): "structure",
        lambda: compiled({"w": f32(4, 8)}, f32(8, 4)): "with the key 'b', .* no 'b'",
        lambda: compiled(PARAMS | {"n": 1.0}, f32(8, 4)): "with no 'n', .* the key 'n'",
        lambda: compiled(PARAMS | {"b": None}, f32(8, 4)): r"\['b'\] with an array, .* None:",
        lambda: compiled(PARAMS | {"b": [1.0]}, f32(8, 4)): r"\['b'\] .* a list of 1:",
        lambda: compiled([*PARAMS.values()], f32(8, 4)): "a dict of 2, .* a list of 2",
        lambda: compiled(PARAMS, f32(16, 4)): r"x as float32\[8,4\], but.*float32\[16,4\]",
        lambda: compiled(PARAMS | {"b": np.zeros(8, np.int32)}, f32(8, 4)): (
            r"params\['b'\] as float32\[8\], but.*int32\[8\]"
        ),
        lambda: compiled(PARAMS, "text"): "x is 'text'",
        lambda: compiled(PARAMS | {"b": np.array(["a"] * 8)}, f32(8, 4)): r"params\['b'\]",
        lambda: compiled(PARAMS, jax.ShapeDtypeStruct((8, 4), np.float32)): "ShapeDtypeStruct",
    }.items():
        with pytest.raises(ArgumentError, match=facts):
            call()


@pytest.mark.devices(8)
def test_compiled_program_refuses_other_committed_shardings(f, mesh):
    compiled = f.lower(PARAMS, f32(8, 4)).compile()
    right = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    compiled(PARAMS, right)
    compiled(PARAMS, jnp.asarray(f32(8, 4)))
    for place in (NamedSharding(mesh, P("y")), jax.devices()[0]):
        with pytest.raises(
            ResourceError,
            match=r"x \(float32\[8,4\]\).*committed.*device_put\(x, NamedSharding\(",
        ):
            compiled(PARAMS, device_put(f32(8, 4), place))
    moved = device_put(device_put(f32(8, 4), place), compiled.input_shardings[0][1])
    compiled(PARAMS, moved)
    right.delete()
    with pytest.raises(DeletedError, match=r"x \(float32\[8,4\]\)"):
        compiled(PARAMS, right)


def test_compiled_program_refuses_tracers(f):
    compiled = f.lower(PARAMS, f32(8, 4)).compile()
    with pytest.raises(ArgumentError, match="x is a tracer.*affine"):
        jax.jit(lambda x: compiled(PARAMS, x))(f32(8, 4))
    with pytest.raises(ArgumentError, match="is a tracer"):
        jax.grad(lambda x: compiled(PARAMS, x)["y"].sum())(f32(8, 4))


def test_keywords_and_static_arguments():
    f = pjit(lambda x, n, *, scale: x * n * scale, static_argnames="n")
    compiled = f.lower(f32(3), n=2, scale=3.0).compile()
    np.testing.assert_allclose(compiled(f32(3), scale=3.0), f32(3) * 6)
    with pytest.raises(ArgumentError, match="structure"):
        compiled(f32(3), n=2, scale=3.0)


def test_weak_types_of_numbers():
    f = pjit(lambda x, s: x * s)
    compiled = f.lower(np.ones(2, np.float16), 2.0).compile()
    assert compiled(np.ones(2, np.float16), 3.0).dtype == np.float16


@pytest.mark.parametrize("keep", [False, True])
def test_unused_arguments(keep, mesh):
    f = pjit(lambda a, b, c: b * 2, keep_unused=keep, in_shardings=NamedSharding(mesh, P("x")))
    compiled = f.lower(f32(8), f32(4), f32(12)).compile()
    given = [s is not None for s in compiled.input_shardings[0]]
    assert given == ([True] * 3 if keep else [False, True, False])
    text = f.lower(f32(8), f32(4), f32(12)).as_text()
    assert ("%arg2" in text) == keep
    for _ in range(2):
        np.testing.assert_array_equal(compiled(f32(8), f32(4), f32(12)), f32(4) * 2)
        np.testing.assert_array_equal(f(f32(8), f32(4), f32(12)), f32(4) * 2)


def test_unused_arguments_may_be_on_any_device():
    f = pjit(lambda a, b: b * 2)
    b = device_put(f32(4), jax.devices()[2])
    for _ in range(2):
        assert f(f32(3), b).devices() == {jax.devices()[2]}


def test_compiler_options(f):
    lowered = f.lower(PARAMS, f32(8, 4))
    compiled = lowered.compile(
        {"xla_embed_ir_in_executable": True, "xla_cpu_enable_fast_math": False}
    )
    np.testing.assert_allclose(
        compiled(PARAMS, f32(8, 4))["y"], affine(PARAMS, f32(8, 4))["y"], rtol=1e-6
    )
    assert compiled.output_shardings == lowered.compile().output_shardings
    with pytest.raises(ArgumentError, match=naming("compiler_options", "dict")):
        lowered.compile(["xla"])


def test_stages_need_the_types_of_arguments_only(mesh):
    """Also those of arrays that are deleted; only a run needs their buffers."""
    f = pjit(lambda x, k: x + 1, donate_argnums=0)
    x, key = device_put(f32(8), NamedSharding(mesh, P("x"))), jax.random.key(0)
    x.delete()
    key.delete()
    for shape in (f.eval_shape(x, key), jax.eval_shape(f, x, key), f.trace(x, key).out_info):
        assert shape.shape == (8,)
    compiled = f.lower(x, key).compile()
    assert compiled.input_shardings[0][0].spec == P("x")
    assert explain(f, x, key).inputs[0].spec == "P('x')"
    for call in (f, compiled):
        with pytest.raises(DeletedError, match=naming("x (float32[8])")):
            call(x, key)


def test_effort_levels_are_compiler_options():
    levels = {"optimization_level": jax.CompilerEffortLevel.O1, "memory_fitting_level": "O1"}
    assert float(pjit(lambda x: x + 1, compiler_options=levels)(1.0)) == 2
    compiled = pjit(lambda x: x + 1).lower(1.0).compile(compiler_options=levels)
    assert float(compiled(1.0)) == 2


def test_lowering_inside_a_trace(f):
    seen = []

    @jax.jit
    def outer(x):
        seen.append(f.lower(PARAMS, x).as_text())
        return x

    outer(f32(8, 4))
    assert "dot_general" in seen[0]


@pytest.mark.slow
def test_compiled_program_outlives_its_function(mesh):
    def made():
        return (
            pjit(lambda x: x + 7, out_shardings=NamedSharding(mesh, P("x"))).lower(f32(8)).compile()
        )

    compiled = made()
    jax.clear_caches()
    np.testing.assert_array_equal(compiled(f32(8)), f32(8) + 7)


def stage_of(function, name):
    traced = function.trace(PARAMS, f32(8, 4), scale=2.0)
    return {
        "Traced": lambda: traced,
        "Lowered": traced.lower,
        "Compiled": lambda: traced.lower().compile(),
    }[name]()


# Functions by which JAX splits its own stages, on the way to its own programs.
INTERNAL = {"closure_convert", "lojax", "physicalize", "with_consts_as_arg"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*donated")
@pytest.mark.parametrize("name", ["Traced", "Lowered", "Compiled"])
def test_stages_have_the_attributes_of_jax_stages(name):
    kind = getattr(jax.stages, name)
    ours = stage_of(pjit(affine, donate_argnums=0), name)
    theirs = stage_of(jax.jit(affine, donate_argnums=0), name)
    assert isinstance(ours, kind) and isinstance(pjit(affine), jax.stages.Wrapped)
    public = {n for n in dir(kind) if not n.startswith("_")}
    assert public - INTERNAL == {n for n in public - INTERNAL if hasattr(ours, n)}
    same = {"in_avals", "out_avals", "in_tree", "out_tree", "args_info", "donate_argnums"}
    for attribute in (same | {"fun_name", "effects"}) & public:
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert jax.tree.map(lambda s: (s.shape, s.dtype), ours.out_info) == jax.tree.map(
        lambda s: (s.shape, s.dtype), theirs.out_info
    )
    assert ours.donate_argnums == (0, 1)
    assert "affine" in repr(ours)
    for attribute in {"lojax", "_executable", "no_such_thing"}:
        with pytest.raises(AttributeError, match=rf"xlashard's {name} .*jax.jit\(f\)"):
            getattr(ours, attribute)


@pytest.mark.slow
def test_jax_export_and_jax_jit_accept_pjitted_functions():
    f = pjit(lambda x: x * 2)
    for function in (f, jax.jit(f)):
        exported = jax.export.export(function)(f32(3))
        np.testing.assert_array_equal(exported.call(f32(3)), f32(3) * 2)
    assert jax.jit(f).lower(f32(3)).compile().in_tree == f.lower(f32(3)).in_tree


@pytest.mark.slow
def test_traced_stage_can_be_called(f):
    traced = f.trace(shapes(PARAMS), shapes(f32(8, 4)))
    wanted = affine(PARAMS, f32(8, 4))["y"]
    np.testing.assert_allclose(traced(PARAMS, f32(8, 4))["y"], wanted, rtol=1e-6)
    inside = jax.jit(lambda x: traced(PARAMS, x)["y"] + 1)
    np.testing.assert_allclose(inside(f32(8, 4)), wanted + 1, rtol=1e-6)
    gradient = jax.grad(lambda x: traced(PARAMS, x)["y"].sum())(f32(8, 4))
    np.testing.assert_allclose(gradient, np.ones((8, 8)) @ PARAMS["w"].T, rtol=1e-6)
    with pytest.raises(ArgumentError, match=naming("affine", "traced", "x as float32[8,4]")):
        traced(PARAMS, f32(4, 4))
    with pytest.raises(ArgumentError, match=naming("traced", "structure")):
        traced(PARAMS)


def test_lowering_for_another_platform():
    f = pjit(jnp.linalg.cholesky)
    traced = f.trace(np.eye(3, dtype=np.float32))
    assert "lapack" in traced.lower().as_text()
    there = traced.lower(lowering_platforms=("tpu",))
    assert "lapack" not in there.as_text()
    with pytest.raises(ArgumentError, match=naming("tpu", "cpu", "lowering_platforms")):
        there.compile()
    own = traced.lower(lowering_platforms=("cpu",))
    np.testing.assert_allclose(own.compile()(np.eye(3, dtype=np.float32)), np.eye(3))
    with pytest.raises(ArgumentError, match=naming("'vax'", "cpu, ")):
        traced.lower(lowering_platforms=("vax",))
    with pytest.raises(ArgumentError, match=r"one platform.*jax.export"):
        traced.lower(lowering_platforms=("tpu", "cpu"))


@pytest.mark.slow
def test_device_put_accepts_formats_of_a_compiled_program(mesh, compilations):
    columns = Format(Layout((1, 0)), NamedSharding(mesh, P("x")))
    f = pjit(lambda unused, x: x * 2, in_shardings=(None, columns), out_shardings=columns)
    compiled = f.lower(f32(1), f32(8, 4)).compile()
    unused, taken = compiled.input_formats[0]
    assert (unused.layout, unused.sharding) == (None, None)
    assert taken.layout.major_to_minor == compiled.output_formats.layout.major_to_minor == (1, 0)
    x = device_put(f32(8, 4), taken)
    assert x.format.layout.major_to_minor == (1, 0)
    assert compiled(f32(1), x).sharding == compiled.output_formats.sharding
    assert compiled.out_info.format.layout.major_to_minor == (1, 0)
    again = pjit(lambda x: x + 1).lower(compiled.out_info).compile()
    assert again.input_formats[0][0].layout.major_to_minor == (1, 0)
    assert again.input_shardings[0][0] == compiled.output_shardings


def test_compiled_program_shows_its_stablehlo_and_hlo(f):
    lowered = f.lower(PARAMS, f32(8, 4))
    compiled = lowered.compile()
    assert compiled.as_text("stablehlo") == lowered.as_text()
    assert compiled.as_text("hlo") == compiled.as_text()
    with pytest.raises(ArgumentError, match=naming("dialect", "'hlo' or 'stablehlo'")):
        compiled.as_text("mhlo")
    np.testing.assert_array_equal(
        compiled.call(PARAMS, f32(8, 4))["y"], compiled(PARAMS, f32(8, 4))["y"]
    )
    assert compiled.devices == tuple(compiled.output_shardings["y"].devices)


def test_compiled_program_moves_arguments_to_the_requested_device():
    there, elsewhere = jax.devices()[3], jax.devices()[1]
    compiled = pjit(lambda x: x + 1, device=there).lower(f32(4)).compile()
    for program in (compiled, Compiled.deserialize(compiled.serialize())):
        for _ in range(2):
            result = program(device_put(f32(4), elsewhere))
            np.testing.assert_array_equal(result, f32(4) + 1)
            assert result.devices() == {there}
    with pytest.raises(
        ResourceError,
        match=naming("x (float32[4])", "CpuDevice(id=3)", "committed", "CpuDevice(id=1)"),
    ):
        pjit(lambda x: x + 1).lower(device_put(f32(4), there)).compile()(
            device_put(f32(4), elsewhere)
        )
