"""The planner of `AUTO`: its plans, and its cache."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.core.pjit.helpers import f32, make_mesh
from tests.message_patterns import naming
from xlashard import AUTO, UNSPECIFIED, NamedSharding, P, explain_recompile, pjit, record_programs
from xlashard.auto import planner
from xlashard.auto.problem import ConstraintSite, ProgramLayout
from xlashard.errors import DamagedCacheWarning, ProcessesError

SITE = ConstraintSite((0,), "result", 0)
INSIDE = (SITE, P(None, ("x", "y")))
LAYOUT = ProgramLayout("auto", (P("x"), P("x")), (P("x"), P()), (INSIDE,), 1e-3, 2e6)


@pytest.fixture
def mesh():
    return make_mesh((4, 2), ("x", "y"))


def make_step():
    """Return a new function: JAX caches traces by function."""

    def step(state, batch):
        return jnp.tanh(batch @ state), batch.sum()

    return step


STATE, BATCH = f32(8, 8), f32(8, 8)


@pytest.fixture
def solved(monkeypatch):
    """Replacement of the search and the compilations that lists the programs that they get."""
    programs = []

    def solve(program, problem, **_):
        programs.append((program, problem))
        return SimpleNamespace(proven=(SimpleNamespace(layout=LAYOUT),))

    planner._LAYOUTS.cache_clear()
    monkeypatch.setattr(planner, "solve", solve)
    yield programs
    planner._LAYOUTS.cache_clear()


def call(mesh, *args, **options):
    f = pjit(make_step(), in_shardings=AUTO, out_shardings=AUTO, **options)
    with jax.set_mesh(mesh):
        return f, f(*args)


@pytest.mark.slow
def test_equal_programs_share_a_plan(mesh, solved):
    f, (out, _) = call(mesh, STATE, BATCH)
    np.testing.assert_allclose(out, np.tanh(BATCH @ STATE), rtol=1e-6)
    with jax.set_mesh(mesh):
        f(out, BATCH)  # another jaxpr: the type of an array has a mesh
        f(out, out)
        f.clear_cache()
        f(STATE, BATCH)
    call(mesh, STATE, BATCH)
    assert len(solved) == 1
    call(mesh, f32(16, 8), f32(8, 16))
    call(mesh, STATE, BATCH, keep_unused=True, donate_argnums=1)
    call(make_mesh((2, 4), ("x", "y")), STATE, BATCH)
    assert len(solved) == 4


def test_problem_has_fixed_specs_tied_values_and_donations(mesh, solved):
    def train(state, batch):
        return {"w": state["w"] * 2 + batch}, batch.sum()

    f = pjit(train, in_shardings=(AUTO, P("y")), out_shardings=(AUTO, P()), donate_argnums=0)
    with jax.set_mesh(mesh):
        compiled = f.lower({"w": STATE}, BATCH).compile()
    ((_, problem),) = solved
    assert problem.in_specs == (None, P("y")) and problem.out_specs == (None, P())
    assert problem.tied == ((0, 0),) and problem.donated == (True, False)
    (state, batch), _ = compiled.input_shardings
    assert (state["w"].spec, batch.spec) == (P("x"), P("y"))


@pytest.fixture
def cache_folder(tmp_path):
    """Set the folder of JAX's persistent cache, of which JAX keeps the first until a reset."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_compilation_cache_stores_the_layout(mesh, solved, cache_folder, monkeypatch):
    first, _ = call(mesh, STATE, BATCH)
    planner._LAYOUTS.cache_clear()
    second, _ = call(mesh, STATE, BATCH)
    assert len(solved) == 1
    (file,) = cache_folder.glob("xlashard_layouts/*.json")
    bodies = [next(iter(f._function.planned)) for f in (first, second)]
    assert str(bodies[0]) == str(bodies[1]) and "sharding_constraint" in str(bodies[0])
    file.write_text("{")
    planner._LAYOUTS.cache_clear()
    with pytest.warns(DamagedCacheWarning, match=naming(file.name, "step")):
        call(mesh, STATE, BATCH)
    assert len(solved) == 2 and file.read_text() != "{"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    planner._LAYOUTS.cache_clear()
    call(mesh, STATE, BATCH)
    assert len(solved) == 3 and len(list(cache_folder.glob("xlashard_layouts/*.json"))) == 2


@pytest.mark.slow
def test_a_layout_with_open_dimensions_is_kept(mesh, cache_folder):
    """An abstract argument that is committed keeps its own spec."""
    sharding = NamedSharding(mesh, P(P.UNCONSTRAINED, "x"))
    state = jax.ShapeDtypeStruct(STATE.shape, STATE.dtype, sharding=sharding)
    texts = []
    for _ in range(2):
        planner._LAYOUTS.cache_clear()
        f = pjit(make_step(), in_shardings=(UNSPECIFIED, AUTO), out_shardings=AUTO)
        with jax.set_mesh(mesh):
            texts.append(f.lower(state, BATCH).as_text())
    assert texts[0] == texts[1] and len(list(cache_folder.glob("xlashard_layouts/*.json"))) == 1


def test_specs_are_kept_as_they_are():
    specs = P(P.UNCONSTRAINED, "x"), P(("x", "y"), None), P()
    layout = replace(LAYOUT, in_specs=specs, constraints=((SITE, specs[0]),))
    assert planner._read(planner._text(layout)) == layout


X = [["x"]]
WRONG_FILES = {
    "another type": [1],
    "no object": None,
    "specs of another type": {"in_specs": 5},
    "an unknown axis": {"in_specs": [X, [["nosuch"]]]},
    "an axis twice": {"out_specs": [[["x"], ["x"]], []]},
    "too few specs": {"in_specs": [X]},
    "too many specs": {"out_specs": [X, [], []]},
    "more entries than dimensions": {"in_specs": [X, [["x"], [], []]]},
    "an object in place of a spec": {"in_specs": [X, {"entries": X}]},
    "a site that does not exist": {"constraints": [[[99], "result", 0, X]]},
    "a site in no inner program": {"constraints": [[[0, 5, 1], "result", 0, X]]},
    "a site from the end": {"constraints": [[[-1], "result", 0, X]]},
    "a value that does not exist": {"constraints": [[[0], "result", 7, X]]},
    "an unknown kind": {"constraints": [[[0], "neither", 0, X]]},
    "a site of another type": {"constraints": [["x", "result", "y", None]]},
    "text in place of a number": {"seconds": "1"},
}


@pytest.mark.parametrize("changes", WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_of_the_cache_is_planned_again(changes, mesh, tmp_path, monkeypatch):
    jaxpr = jax.make_jaxpr(make_step())(STATE, BATCH)
    program = SimpleNamespace(jaxpr=jaxpr, mesh=mesh, program=SimpleNamespace(name="step"))
    monkeypatch.setattr(planner, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(planner, "plan_program", lambda program: LAYOUT)
    kept = planner._LayoutStore(program)
    assert kept._stored_layout("digest") == kept._stored_layout("digest") == LAYOUT
    (file,) = tmp_path.iterdir()
    good = file.read_text()
    content = json.loads(good) | changes if isinstance(changes, dict) else changes
    file.write_text(json.dumps(content))
    with pytest.warns(DamagedCacheWarning, match=naming(file.name, "step")):
        assert kept._stored_layout("digest") == LAYOUT
    assert file.read_text() == good


def test_one_process_plans_and_the_others_receive_the_layout(mesh, solved, monkeypatch):
    written = {}
    store = SimpleNamespace(
        write=lambda key, value, overwrite: written.update({key: value}),
        read=lambda key, seconds: written.get(key),
    )
    monkeypatch.setattr(planner, "store", store)
    monkeypatch.setattr(planner, "processes_of", lambda devices: (0, 1))

    def as_process(index):
        planner._LAYOUTS.cache_clear()
        peer = SimpleNamespace(process_index=lambda: index, client=lambda: 1)
        monkeypatch.setattr(planner, "coordination", peer)
        f = pjit(make_step(), in_shardings=AUTO, out_shardings=AUTO)
        with jax.set_mesh(mesh):
            return f.lower(STATE, BATCH).as_text()

    with pytest.raises(ProcessesError, match="step.*process 0") as error:
        as_process(1)
    assert error.value.processes == (0,)
    assert as_process(0) == as_process(1) and len(solved) == 1

    def refuse(program, problem, **_):
        raise ValueError("no room")

    monkeypatch.setattr(planner, "solve", refuse)
    with pytest.raises(ValueError, match="no room"):
        as_process(0)
    with pytest.raises(ProcessesError, match="process 0.*no room"):
        as_process(1)


@pytest.mark.slow
def test_candidate_programs_are_not_recorded(mesh, recwarn):
    def train(w, unused, x):
        return jnp.tanh(x @ w).sum(0)

    f = pjit(train, in_shardings=AUTO, out_shardings=AUTO, donate_argnums=1)
    with jax.set_mesh(mesh), record_programs() as programs:
        out = f(STATE, f32(3, 5), BATCH)
    np.testing.assert_allclose(out, np.tanh(BATCH @ STATE).sum(0), rtol=1e-5)
    assert [p.name for p in programs if not p.is_operation] == ["train"]
    assert len(explain_recompile(f).explanations) == 1
    assert len([w for w in recwarn if "donat" in str(w.message)]) == 1
    with jax.set_mesh(mesh):
        compiled = f.lower(STATE, f32(3, 5), BATCH).compile()
    chosen = [compiled.input_shardings[0][i] for i in (0, 2)]
    assert all(isinstance(s, NamedSharding) and s.mesh == mesh for s in chosen)
    assert out.sharding.is_equivalent_to(compiled.output_shardings, 1)
