"""`record_programs`: the programs that it records, and `explain` and `preflight` of them."""

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import pjit as jax_pjit
from jax.sharding import AxisType

import xlashard
from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import NamedSharding, P, explain, pjit, record_programs
from xlashard.errors import ArgumentError

pytestmark = pytest.mark.jax_version


def step(w, x):
    """Run a step of a layer, `[8,16]` parameters and `[64,8]` examples."""
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, loss


def named(mesh, *spec):
    return jax.sharding.NamedSharding(mesh, P(*spec))


def jitted(programs):
    return [program for program in programs if not program.is_operation]


def test_calls_of_jax_jit_are_counted_and_located():
    def double(x):
        return x * 2

    fast = jax.jit(double)
    with record_programs() as programs:
        for _ in range(3):
            y = fast(f32(4))  # the recorded line
        fast(f32(8))
        y + 1.5
    first, other = jitted(programs)
    assert (first.name, first.calls, other.calls) == ("double", 3, 1)
    assert (first.argument_bytes, other.result_bytes) == (16, 32)
    lines = Path(__file__).read_text().splitlines()
    start = double.__code__.co_firstlineno
    assert first.source == f"tests/analysis/programs/test_from_script.py:{start}"
    file, _, line = first.caller.rpartition(":")
    assert file == "tests/analysis/programs/test_from_script.py"
    assert lines[int(line) - 1].endswith("# the recorded line")
    assert {p.name for p in programs if p.is_operation} == {"add"}
    assert "double at tests/analysis/programs" in repr(first)
    assert "3 calls" in repr(first)


LIBRARY = """\
import functools
import jax

@jax.tree_util.register_pytree_node_class
class Named:
    def __init__(self, array): self.array = array
    def tree_flatten(self): return (self.array,), None
    @classmethod
    def tree_unflatten(cls, _, children): return cls(*children)

class Jit:
    def __init__(self, fun):
        self.__wrapped__ = fun
        self._jitted = jax.jit(lambda dynamic: (self.__wrapped__(*dynamic[1]), dynamic[0]))
    def __call__(self, *args):
        return self._jitted((0, args))[0]

def jit(fun):
    @functools.wraps(fun)
    def call(*args): return jax.jit(lambda dynamic: fun(*dynamic))(args)
    return call

class Trainer:
    def train(self, state, *batch):
        return jax.jit(lambda packed: packed[0] @ packed[1][0])((state, batch))
"""


def test_programs_of_a_librarys_wrapper_are_named_as_the_users_call():
    library: dict[str, Any] = {}
    file = Path(np.__file__).parents[1] / "wrapping" / "jit.py"
    exec(compile(LIBRARY, str(file), "exec"), library)

    def train(weights, x):
        return x.array @ weights["w"]

    weights, x = {"w": f32(8, 16)}, library["Named"](f32(4, 8))
    with record_programs() as programs:
        library["Jit"](train)(weights, x)
        library["jit"](train)(weights, x)
        library["Trainer"]().train(x.array, weights["w"])
    place = f"tests/analysis/programs/test_from_script.py:{train.__code__.co_firstlineno}"
    by_object, by_closure, by_method = jitted(programs)
    for program in (by_object, by_closure):
        assert (program.name, program.source) == ("train", place)
        paths = [value.path for value in program.program.arguments]
        assert [path for path in paths if "dynamic" not in path] == ["weights['w']", "x[0]"]
    assert (by_method.name, by_method.source) == ("<lambda>", "")
    assert [value.path for value in by_method.program.arguments] == ["state", "batch[0]"]


@pytest.mark.devices(8)
def test_programs_of_pmap_are_named_as_the_users_function():
    def scale(x, power, *, by):
        return x**power * jax.lax.psum(by["rate"], "i")

    class Scale:
        def __call__(self, x):
            return x * 2

    x, devices = f32(2, 4), jax.devices()
    statics = {"static_broadcasted_argnums": 1, "axis_name": "i", "devices": devices[2:4]}
    mapped = jax.pmap(scale, **statics)
    with record_programs() as programs:
        mapped(x, 3, by={"rate": x})
        mapped.lower(x, 2, by={"rate": x})
        jax.pmap(partial(scale, power=1), "i")(x, by={"rate": x})
        jax.pmap(Scale(), devices=devices[2:4])(x)
    called, lowered, by_partial, by_object = jitted(programs)
    place = f"tests/analysis/programs/test_from_script.py:{scale.__code__.co_firstlineno}"
    for program in (called, lowered, by_partial):
        assert (program.name, program.source) == ("scale", place)
        paths = [value.path for value in program.program.arguments]
        assert (program.program.name, paths) == ("scale", ["x", "by['rate']"])
    assert (by_object.name, by_object.source, by_object.num_devices) == ("Scale", "", 2)
    assert [value.path for value in by_object.program.arguments] == ["x"]


def test_recording_restores_jax_and_its_fast_path():
    names = ("_resolve_and_lower", "_pjit_call_impl_python")
    before = [getattr(jax_pjit, name) for name in names]
    fast = jax.jit(lambda x: x + 3)
    with record_programs() as outer:
        with record_programs() as inner:
            fast(f32(4))
        assert [getattr(jax_pjit, name) for name in names] != before
        fast(f32(4))
    assert [getattr(jax_pjit, name) for name in names] == before
    assert ([p.calls for p in jitted(outer)], [p.calls for p in jitted(inner)]) == ([2], [1])
    fast(f32(4))
    size = fast._cache_size()
    fast(f32(4))
    assert (size, fast._cache_size()) == (1, 1)
    with record_programs() as later:
        fast(f32(4))  # the dispatcher has cached it before
    assert [p.calls for p in jitted(later)] == [1]


def test_lowered_programs_and_other_threads_are_recorded():
    fast = jax.jit(lambda x: jnp.sin(x))
    with record_programs() as programs:
        fast.lower(f32(4)).compile()
        thread = threading.Thread(target=lambda: fast(f32(4)))
        thread.start()
        thread.join()
    (program,) = jitted(programs)
    assert program.calls == 1


@pytest.mark.devices(8)
def test_errors_about_explicit_axes_have_a_note():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rows, columns = (
        jax.device_put(np.ones((8, 8)), jax.NamedSharding(mesh, spec))
        for spec in (P("data"), P(None, "data"))
    )

    @jax.jit
    def add(state, batch):
        return state["w"] + batch

    outer = jax.jit(lambda x: add({"w": x}, columns))
    with record_programs():
        for call in (lambda: add({"w": rows}, columns), lambda: outer(rows)):
            with pytest.raises(Exception, match="illegally sharded") as caught:
                call()
            (note,) = [n for n in caught.value.__notes__ if n.startswith("xlashard")]
            facts = (
                "test_from_script.py",
                "state['w'] (",
                "batch (",
                "reshard(batch, P('data', None))",
            )
            assert re.search(naming(*facts), note)
        with pytest.raises(TypeError) as other:
            add(1, 2)
    with pytest.raises(Exception, match="illegally sharded") as after:
        add({"w": rows}, columns)
    for error in (other.value, after.value):
        assert "xlashard" not in str(getattr(error, "__notes__", ""))


def test_error_of_a_recorded_call_propagates():
    def fails(x):
        raise LookupError("no such layer")

    with record_programs() as programs, pytest.raises(LookupError, match="no such layer"):
        jax.jit(fails)(f32(4))
    assert not programs


@pytest.mark.slow
def test_report_of_a_recorded_program_equals_report_of_its_call(mesh):
    shardings = named(mesh), named(mesh, "x")
    fast = jax.jit(step, in_shardings=shardings, donate_argnums=0)
    x = jax.device_put(f32(64, 8), shardings[1])
    with record_programs() as programs:
        w, _ = fast(jax.device_put(f32(8, 16), shardings[0]), x)
    (program,) = jitted(programs)
    assert program.num_devices == mesh.size
    assert program.mesh == mesh
    recorded, called = explain(program), explain(fast, w, x)
    assert recorded.collectives == called.collectives
    assert recorded.inputs == called.inputs
    assert recorded.memory == called.memory
    # Names of results come from the tree, which a jaxpr lacks.
    assert [(v.type, v.spec) for v in recorded.outputs] == [
        (v.type, v.spec) for v in called.outputs
    ]


def test_programs_of_pjit_are_recorded_without_their_arrays(mesh):
    own = pjit(step, in_shardings=(P(), P("x")), donate_argnums=0)
    with jax.set_mesh(mesh), record_programs() as programs:
        w = xlashard.device_put(f32(8, 16), NamedSharding(mesh, P()))
        for _ in range(3):
            w, loss = own(w, f32(64, 8))
        own.lower(w, f32(32, 8))
    called, lowered = programs
    assert isinstance(w, xlashard.Array)
    assert isinstance(loss, xlashard.Array)
    assert (called.name, called.calls, lowered.calls) == ("step", 3, 0)
    assert all(isinstance(v, jax.ShapeDtypeStruct) for v in called._program.call.values)
    with jax.set_mesh(mesh):
        assert explain(called).inputs == explain(own, w, f32(64, 8)).inputs


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_recorded_program_is_compiled_for_a_topology(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    hidden = named(mesh, "data", "model")
    table = jax.device_put(f32(8, 16), hidden)

    def layer(x):
        if kind is AxisType.Auto:
            x = jax.lax.with_sharding_constraint(x, hidden)
        on = {"mesh": mesh, "in_specs": P("data", "model"), "out_specs": P("data", "model")}
        x = jax.shard_map(lambda x: x + jax.lax.psum(x, "model"), **on)(x)
        return jax.lax.scan(lambda c, _: (jnp.sin(c + table), None), x, None, length=3)[0]

    with record_programs() as programs:
        jax.jit(layer)(jax.device_put(f32(8, 16), hidden))
    (program,) = jitted(programs)
    report = xlashard.preflight(program, topology="v5e-8")
    assert report.outcome == "fits"
    # The table is a constant of the program.
    assert [(v.type, v.spec) for v in report.inputs] == [("float32[8,16]", "P('data', 'model')")]
    assert "all-reduce" in {t.kind for t in report.traffic}


def test_a_recorded_program_needs_a_mesh_and_no_arguments(mesh):
    with record_programs() as programs:
        jax.jit(lambda x: x + 1)(f32(8))
    alone = jitted(programs)[0]
    with pytest.raises(ArgumentError, match=naming("without a mesh", "8 emulated devices")):
        xlashard.preflight(alone, topology="v5e-8")
    table = xlashard.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x")))
    own = pjit(lambda x: x @ table)
    with record_programs() as programs:
        own(table)
    closing = jitted(programs)[-1]
    report = xlashard.preflight(closing, topology="v5e-8")
    assert [value.path for value in report.inputs] == ["x", "closed over [0]"]
    with pytest.raises(ArgumentError, match=naming("RecordedProgram", "without arguments")):
        explain(alone, f32(8))
