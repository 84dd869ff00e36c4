"""Arguments, results and collectives in a report: origin, moves, traffic and reuse."""

import importlib
import sys
import sysconfig
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xlashard
from tests.core.pjit.helpers import f32
from tests.jax_releases import since_jaxlib
from xlashard import UNSPECIFIED, GSPMDSharding, NamedSharding, P, explain, pjit
from xlashard._jax.runtime import compiler
from xlashard.analysis.programs.source_lines import SourceLine, SourceLocator, distinguish_lines
from xlashard.analysis.report.texts import line_text
from xlashard.hlo import hlo_program
from xlashard.hlo.module import Frame
from xlashard.support.tracebacks import is_users_file
from xlashard.testing import assert_collectives

pytestmark = pytest.mark.usefixtures("partitioner")


def named(mesh, *spec, kind=None):
    return NamedSharding(mesh, P(*spec), memory_kind=kind)


def put(mesh, value, *spec):
    return xlashard.device_put(value, named(mesh, *spec))


def line_of(mark):
    with open(__file__) as source:
        return next(i for i, line in enumerate(source, 1) if line.endswith(f"# {mark}\n"))


def test_the_hlo_is_parsed_and_searched_once(mesh, monkeypatch):
    parsed, searched = [], []
    read, find = hlo_program.read_proto, hlo_program.find_collectives
    monkeypatch.setattr(
        hlo_program, "read_proto", lambda *proto: parsed.append(proto) or read(*proto)
    )
    monkeypatch.setattr(
        hlo_program, "find_collectives", lambda *args: searched.append(args) or find(*args)
    )
    total = pjit(lambda x: x.sum(), in_shardings=named(mesh, "x"))
    explain(total, f32(64, 8))
    assert (len(parsed), len(searched)) == (1, 1)
    assert_collectives(total, (f32(64, 8),), all_reduce=1)
    assert (len(parsed), len(searched)) == (2, 2)


@since_jaxlib("0.11.1", "XLA keeps no source of its own gathers")
def test_gathered_argument_has_the_source_line_of_its_use(mesh):
    def project(x, params):
        return x @ params["w"]  # PROJECT

    ins = named(mesh, "x"), {"w": named(mesh, None, "x")}
    fun = pjit(project, in_shardings=ins, out_shardings=named(mesh, "x"))
    (gather,) = explain(fun, f32(64, 8), {"w": f32(8, 16)}).collectives
    assert (gather.kind, gather.axes, gather.argument) == ("all-gather", ("x",), "params['w']")
    assert gather.needed_by.endswith("dot_general")
    source = gather.needed_by_source
    assert (source.file, source.line) == (__file__, line_of("PROJECT"))
    assert source.in_user_file


@pytest.mark.slow
def test_collectives_in_loops_count_once_for_each_run(mesh):
    def f(x):
        def body(x, _):
            return jax.lax.pmean(x, "y") * 2, None

        return jax.lax.scan(body, x, None, length=7)[0]

    spec = P("x")
    body = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    (found,) = explain(pjit(body, in_shardings=named(mesh, "x")), f32(16)).collectives
    assert (found.count, found.times, found.times_known, found.conditional) == (1, 7, True, False)
    assert (found.payload_bytes, found.sent_bytes) == (7 * 16, 7 * 16)


def test_collectives_of_one_source_line_share_a_row(mesh):
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def f(x):
        once = jax.lax.ppermute(x, "x", ring)
        return jax.lax.ppermute(jax.lax.ppermute(once, "x", ring) * 2, "x", ring)  # TWICE

    body = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    rows = explain(pjit(body, in_shardings=named(mesh, "x")), f32(16)).collectives
    counts = {row.source.line: (row.count, row.times, row.sent_bytes) for row in rows}
    assert counts == {line_of("TWICE"): (2, 2, 32), line_of("TWICE") - 1: (1, 1, 16)}
    # The collectives with the most bytes come first.
    assert [row.count for row in rows] == [2, 1]


USER, LIBRARY = "/home/me/train.py", "/usr/lib/site-packages/flax/linear.py"


@pytest.mark.parametrize(
    ("stack", "shown"),
    [
        # The innermost line of user code inside the function.
        (
            [
                (LIBRARY, 5, "Dense.call"),
                (USER, 9, "model"),
                (USER, 20, "step"),
                (USER, 30, "main"),
            ],
            9,
        ),
        # A function of a library: its callers do not matter.
        ([(USER, 20, "step"), (USER, 30, "main")], 20),
        ([(LIBRARY, 5, "Dense.call"), (LIBRARY, 7, "apply")], 5),
        ([], None),
    ],
)
def test_location_is_the_innermost_user_line_of_the_function(stack, shown):
    sources = SourceLocator.of(f"step at {USER}:19")
    line = sources.line([Frame(*frame) for frame in stack])
    assert (None if line is None else line.line) == shown
    assert line is None or line.in_user_file == (line.file == USER)


def test_package_of_the_program_counts_as_the_users():
    own, other = "/usr/lib/site-packages/trainer/step.py", "/usr/lib/site-packages/trainer/model.py"
    sources = SourceLocator.of(f"step at {own}:19")
    stack = [
        Frame("/usr/lib/python3/dist-packages/einops.py", 3, "rearrange"),
        Frame(LIBRARY, 5, "Dense.call"),
        Frame(other, 9, "Model.apply"),
        Frame(own, 20, "step"),
        Frame(USER, 30, "main"),
    ]
    found = sources.line(stack)
    assert (found.file, found.line, found.in_user_file) == (other, 9, True)
    assert found.callers == (stack[3],)
    # A function of the user's inside of it comes first.
    stack.insert(1, Frame(USER, 12, "loss"))
    assert sources.line(stack).line == 12


def test_stack_of_the_users_files_is_kept():
    stack = [(LIBRARY, 5, "call"), (USER, 9, "dense"), (LIBRARY, 8, "scan"), (USER, 14, "layer")]
    frames = [*(Frame(*frame) for frame in stack), Frame(USER, 20, "step"), Frame(USER, 30, "main")]
    found = SourceLocator.of(f"step at {USER}:19").line(frames)
    assert (found.line, [frame.line for frame in found.callers]) == (9, [14, 20])


@pytest.mark.parametrize(
    ("globs", "line"),
    [
        ("", 9),
        ("layers.py", 14),
        ("model/*.py", 20),
        ("/home/me/model/*:other.py", 20),
        ("*", 20),
    ],
)
def test_skipped_files_are_not_the_users(monkeypatch, globs, line):
    monkeypatch.setenv("XLASHARD_SKIP_FILES", globs)
    frames = [
        Frame("/home/me/model/layers.py", 9, "dense"),
        Frame("/home/me/model/blocks.py", 14, "block"),
        Frame(USER, 20, "step"),
    ]
    found = SourceLocator.of(f"step at {USER}:19").line(frames)
    assert (found.line, found.in_user_file) == ((9, False) if globs == "*" else (line, True))


def test_packages_are_installed_by_their_place():
    lib = sysconfig.get_path("stdlib")
    installed = [LIBRARY, jax.__file__, f"{lib}/functools.py", xlashard.__file__]
    own = [USER, __file__, "<stdin>", "/src/editable/pkg/model.py"]
    assert not any(map(is_users_file, installed)) and all(map(is_users_file, own))


@st.composite
def stacks(draw):
    depth = draw(st.lists(st.integers(0, 2), max_size=5))
    return tuple(Frame(USER, line, "f") for line in depth)


@given(st.lists(stacks(), min_size=1, max_size=8, unique=True))
def test_callers_distinguish_all_stacks_of_a_line(found):
    lines = tuple(SourceLine("/a/b.py", 1, "f", True, stack) for stack in found)
    named = distinguish_lines(lines)
    assert named == lines
    assert len(set(map(line_text, named))) == len(lines)
    assert len(found) > 1 or named[0].distinct == ()


LINEAR = "def dense(x, w):\n    return x @ w\n"
MODEL = """
from linear import dense

def attention(x, p):
    return dense(x, p["q"])

def mlp(x, p):
    return dense(x, p["up"])
"""


def test_rows_of_one_line_name_their_callers(mesh, tmp_path, monkeypatch):
    for name, text in (("linear", LINEAR), ("model", MODEL)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = importlib.import_module("model")

    def step(p, x):
        return model.attention(x, p) + model.mlp(x, p)

    ins = {"q": named(mesh, "x"), "up": named(mesh, "y")}, named(mesh)
    args = {"q": f32(8, 4), "up": f32(8, 4)}, f32(6, 8)
    fun = jax.jit(step, in_shardings=ins, out_shardings=named(mesh))
    report = explain(fun, *args)
    causes = {line_text(c.source or c.needed_by_source) for c in report.collectives}
    assert causes == {"linear.py:2 from model.py:5", "linear.py:2 from model.py:8"}
    assert "linear.py:2 from model.py:5" in str(report)
    assert "linear.py:2 from model.py:8" in report.to_html()
    written = report.to_dict()["collectives"][0]
    frames = (written["source"] or written["needed_by_source"])["callers"]
    assert [frame["function"] for frame in frames[1:]] == [f"{step.__qualname__}"]
    assert type(report).from_json(report.to_json()) == report
    monkeypatch.setenv("XLASHARD_SKIP_FILES", "linear.py")
    causes = {line_text(c.source or c.needed_by_source) for c in explain(fun, *args).collectives}
    assert causes == {"model.py:5", "model.py:8"}


def test_gradient_reduction_has_the_source_line_of_the_gradient(mesh):
    def gradient(w, x):
        return jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)  # GRADIENT

    ins = named(mesh), named(mesh, "x")
    fun = pjit(gradient, in_shardings=ins, out_shardings=named(mesh))
    (reduce,) = explain(fun, f32(8, 8), f32(16, 8)).collectives
    assert "transpose" in reduce.op_name
    assert reduce.source.line == line_of("GRADIENT")
    assert replace(reduce, axes=None) != reduce


def test_replica_groups_without_mesh_axes_are_listed(mesh):
    # Devices of the axis x (four of them) in pairs that no split of the axis produces.
    pairs = [[0, 3], [1, 2]]

    def f(x):
        return jax.lax.psum(x, "x", axis_index_groups=pairs)

    body = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    report = explain(pjit(body, in_shardings=named(mesh, "x")), f32(16))
    (found,) = report.collectives
    assert (found.along, found.axes) == ("4 groups of 2 devices", None)
    # Positions in the mesh of 4 by 2.
    assert sorted(map(sorted, found.groups)) == [[0, 6], [1, 7], [2, 4], [3, 5]]
    shown = str(report)  # in as many lines as the terminal's width requires
    assert "4 groups of 2 devices" in shown and "0,6 …" in shown


def test_permute_without_a_mesh_lists_its_device_pairs():
    devices = jax.devices()
    rows = GSPMDSharding(devices, "{devices=[8]<=[8]}")
    turned = GSPMDSharding(devices, "{devices=[8]1,2,3,4,5,6,7,0}")
    report = explain(pjit(lambda x: x * 2, in_shardings=rows, out_shardings=turned), f32(16))
    (found,) = report.collectives
    assert (found.kind, found.along) == ("collective-permute", "8 pairs of devices")
    assert sorted(found.groups) == [(i, (i + 1) % 8) for i in range(8)]


def test_functions_with_a_shared_executable_keep_their_source_lines(mesh):
    def made_of(reduce):
        def step(x):
            return reduce(x) + 1

        return pjit(step, in_shardings=named(mesh, "x"), out_shardings=named(mesh))

    def one(x):
        return x.sum(0)  # ONE

    def other(x):
        return x.sum(0)  # OTHER

    programs = [made_of(reduce).lower(f32(8, 4)).compile() for reduce in (one, other)]
    kept = [program._compiled for program in programs]
    assert kept[0].executable is kept[1].executable
    for reduce, mark in ((one, "ONE"), (other, "OTHER"), (one, "ONE")):
        (found,) = explain(made_of(reduce), f32(8, 4)).collectives
        assert (found.source.file, found.source.line) == (__file__, line_of(mark))


def test_retrace_under_a_mesh_reuses_the_executable(mesh, monkeypatch):
    def refuse(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "compile_uncached", refuse)
    f = pjit(lambda x: x.sum(0), in_shardings=named(mesh, "x"))
    report = explain(f, f32(8, 4))
    with mesh:
        again = explain(f, f32(8, 4))
        program = f.lower(f32(8, 4)).compile()._compiled
    assert program.source == "an equal program"
    assert program.loaded.module is not program.body.module
    assert again.collectives == report.collectives


def test_the_origin_of_each_sharding_is_reported(mesh):
    def mix(requested, lies, free, scalar):
        return requested + scalar, lies * 2, free[:4]

    fun = pjit(
        mix,
        in_shardings=(named(mesh, "x"), UNSPECIFIED, UNSPECIFIED, UNSPECIFIED),
        out_shardings=(named(mesh, "y"), UNSPECIFIED, UNSPECIFIED),
    )
    report = explain(fun, f32(8), put(mesh, f32(8), "y"), f32(8), np.float32(2))
    decided = {v.path: v.decided_by for v in (*report.inputs, *report.outputs)}
    assert decided == {
        "requested": "caller",
        "lies": "argument",
        "free": "partitioner",
        "scalar": "default",
        "result[0]": "caller",
        "result[1]": "partitioner",
        "result[2]": "partitioner",
    }


def test_specs_are_short_and_paths_name_call_arguments(mesh):
    def pick(state, *rest):
        return {"out": state["layers"][0]["w"] + rest[0]}

    fun = pjit(pick)
    w = put(mesh, f32(8, 8), ("x", "y"), None)
    report = explain(fun, {"layers": [{"w": w}]}, put(mesh, f32(8, 8), None, "x"))
    assert {v.path: v.spec for v in report.inputs} == {
        "state['layers'][0]['w']": "P(('x', 'y'))",
        "rest[0]": "P(None, 'x')",
    }
    assert [v.path for v in report.outputs] == ["result['out']"]


def test_bytes_of_moved_arguments(mesh):
    first = jax.devices()[0]
    fun = pjit(lambda a, b, c, d: (a, b, c, d), in_shardings=named(mesh, "x"))
    at_home = put(mesh, f32(16), "x")
    report = explain(fun, f32(32), jax.device_put(f32(16)), at_home, np.float32(1).repeat(4))
    moves = {m.path: (m.source, m.target, m.device_bytes_moved, m.host_bytes) for m in report.moves}
    assert moves == {
        # Four tiles, each on two devices.
        "a": ("host", "P('x')", 0, 2 * 32 * 4),
        # One of the eight devices holds its tile already.
        "b": (f"device {first.id}", "P('x')", 7 * 16, 0),
        "d": ("host", "P('x')", 0, 2 * 4 * 4),
    }
    assert [m.path for m in report.moves] == ["a", "b", "d"]


def test_moves_of_uncommitted_arrays_are_reported(mesh):
    fun = pjit(lambda x: x * 2, in_shardings=named(mesh))
    report = explain(fun, jnp.ones(4))
    assert [(m.path, m.device_bytes_moved) for m in report.moves] == [("x", 7 * 16)]


def test_donated_buffer_is_reused_only_if_the_compiler_aliases_it(mesh):
    def f(a, b, c):
        return a + 1, b[:4]

    fun = pjit(
        f, in_shardings=named(mesh, "x"), out_shardings=named(mesh, "x"), donate_argnums=(0, 1)
    )
    report = explain(fun, f32(16), f32(8), f32(4))
    assert [(d.path, d.donated, d.result, d.device_bytes) for d in report.donations] == [
        ("a", True, "result[0]", 16),
        ("b", True, "", 8),
    ]
    assert [d.is_reused for d in report.donations] == [True, False]
    (unmet,) = report.unmet
    assert (unmet.kind, unmet.path) == ("donation", report.donations[1].path)
    assert "no result has its shape [8]" in unmet.reason


def test_explaining_an_unusable_donation_neither_warns_nor_raises(mesh, recwarn):
    fun = pjit(lambda x: x.sum(), donate_argnums=0, donation="strict")
    report = explain(fun, put(mesh, f32(16), "x"))
    assert [(d.path, d.is_reused) for d in report.donations] == [("x", False)]
    assert not recwarn.list
    with pytest.raises(xlashard.errors.DonationError):
        fun(put(mesh, f32(16), "x"))


def test_undonated_arguments_find_their_results_by_path_and_place(mesh):
    rows, whole = named(mesh, "x"), named(mesh)
    names = [f"w{i}" for i in range(6)]
    places = {name: rows if i % 2 else whole for i, name in enumerate(names)}
    step = pjit(
        lambda state, extra: ({name: state[name] + 1 for name in names}, extra * 2),
        in_shardings=(places, rows),
        out_shardings=(places, whole),
    )
    report = explain(step, dict.fromkeys(names, f32(8, 8)), f32(8, 8))
    found = {d.path: d.result for d in report.donations}
    assert found == {f"state['{name}']": f"result[0]['{name}']" for name in names}


def test_undonated_argument_with_a_matching_result_is_listed(mesh):
    def f(params, moments, batch):
        return params + batch.sum(), moments * 2

    ins = named(mesh, "x"), named(mesh, "y"), named(mesh)
    outs = named(mesh, "x"), named(mesh, "x")
    report = explain(pjit(f, in_shardings=ins, out_shardings=outs), f32(8), f32(8), f32(3))
    # The moments' result lies otherwise.
    found = [(d.path, d.donated, d.result, d.is_reused) for d in report.donations]
    assert found == [("params", False, "result[0]", False)]


def test_memory_kinds_are_reported(mesh):
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    other = sorted(kinds - {jax.devices()[0].default_memory().kind})
    if not other:
        pytest.fail(f"CPU devices have no second memory: {kinds}")
    held = NamedSharding(mesh, P("x"), memory_kind=other[0])
    report = explain(pjit(lambda x: x, in_shardings=held, out_shardings=held), f32(8))
    assert [(v.spec, v.memory_kind) for v in report.inputs] == [(f"P('x') in {other[0]}", other[0])]
