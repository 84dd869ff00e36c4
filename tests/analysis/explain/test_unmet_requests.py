"""Requests that a program does not follow, and values that are whole without a request."""

import json
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32
from tests.fork_server import python_command
from xlashard import NamedSharding, P, explain, pjit
from xlashard.hlo.compiler_log import captured_log, read_general_warnings, read_warnings

pytestmark = pytest.mark.usefixtures("partitioner")

U = P.UNCONSTRAINED


def named(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def found(report, kind):
    return [(u.path, u.actual, u.advice, u.nbytes) for u in report.unmet if u.kind == kind]


def test_result_replicated_over_an_axis_of_an_argument_is_listed(mesh):
    fun = pjit(lambda x: x.sum(0), in_shardings=named(mesh, "x"))
    # Each device has all 8 sums, and needs only 2 of them.
    assert found(explain(fun, f32(16, 8)), "result") == [
        ("result", "P()", "shard dimension 0 over x by out_shardings", 6 * 4)
    ]
    (reason,) = [unmet.reason for unmet in explain(fun, f32(16, 8)).unmet]
    assert reason == "XLA leaves it whole along x, over which an argument is sharded"
    # Three sums can't be sharded over four devices.
    assert found(explain(fun, f32(16, 3)), "result") == []


@pytest.mark.slow
def test_requested_or_argument_like_replication_is_not_listed(mesh):
    sort = lambda x: jnp.sort(x, axis=0)  # noqa: E731
    asked = pjit(sort, in_shardings=named(mesh, "x"), out_shardings=named(mesh))
    assert found(explain(asked, f32(16, 8)), "result") == []

    def update(w, batch):
        return w + (batch.sum(0)[:, None] * w), batch.mean()

    # Data parallelism: parameters are replicated, as arguments and as results.
    fun = pjit(update, in_shardings=(named(mesh), named(mesh, "x")))
    assert found(explain(fun, f32(8, 4), f32(16, 8)), "result") == []


def test_unsharded_open_dimension_of_a_constraint_is_listed(mesh):
    def f(x):
        y = jnp.ones((8, 6)) + x.sum()
        return xlashard.with_sharding_constraint(y, named(mesh, U, None))

    report = explain(pjit(f, in_shardings=named(mesh, "x")), f32(16))
    assert found(report, "unconstrained dimension") == [
        ("result", "P()", "shard dimension 0 over x, y by its spec", 8 * 6 * 4 * 7 // 8)
    ]


def test_a_sharded_open_dimension_is_not_listed(mesh):
    def f(x):
        return xlashard.with_sharding_constraint(x * 2, named(mesh, U))

    assert explain(pjit(f, in_shardings=named(mesh, "x")), f32(16)).unmet == ()


def test_unsharded_open_dimension_of_an_argument_is_listed(mesh):
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=named(mesh, U, "y"))
    report = explain(pjit(lambda x: x * 2), x)
    ((path, _, advice, _),) = found(report, "unconstrained dimension")
    assert path == "x" and advice.startswith("shard dimension 0")


UNSHARDED = "gathered along y", "the constraint unshards dimension 1"


def line_of(mark):
    with open(__file__) as source:
        return next(i for i, line in enumerate(source, 1) if line.endswith(f"# {mark}\n"))


def test_constraint_that_causes_a_gather_has_its_source_line(mesh):
    def f(x):
        x = xlashard.with_sharding_constraint(jnp.sin(x), named(mesh, "x", "y"))
        x = jnp.tanh(x) * 2
        x = xlashard.with_sharding_constraint(x, named(mesh, "x", None))  # CLOSED
        return xlashard.with_sharding_constraint(jnp.cos(x), named(mesh, "x", "y"))

    report = explain(pjit(f, in_shardings=named(mesh, "x", "y")), f32(16, 8))
    (constraint,) = (u for u in report.unmet if u.kind == "constraint that gathers")
    assert (constraint.path, constraint.requested) == ("float32[16,8]", "P('x')")
    assert (constraint.actual, constraint.reason) == UNSHARDED
    # A quarter of the rows, of which the other half comes from the neighbour.
    assert constraint.nbytes == 4 * 4 * 4
    assert (constraint.source.file, constraint.source.line) == (__file__, line_of("CLOSED"))
    assert constraint.source.in_user_file


def test_a_constraint_that_closes_a_dimension_of_an_argument_is_found(mesh):
    def f(w):
        return xlashard.with_sharding_constraint(jnp.sin(w), named(mesh, "x"))

    report = explain(pjit(f, in_shardings=named(mesh, "x", "y")), f32(16, 8))
    (constraint,) = (u for u in report.unmet if u.kind == "constraint that gathers")
    assert (constraint.actual, constraint.reason) == UNSHARDED
    assert [c.argument for c in report.collectives] in (["w"], [""])


def test_moving_an_axis_to_another_dimension_replicates_nothing(mesh):
    def f(x):
        x = xlashard.with_sharding_constraint(jnp.sin(x), named(mesh, "x", None))
        return xlashard.with_sharding_constraint(x * 2, named(mesh, None, "x"))

    report = explain(pjit(f, in_shardings=named(mesh, "x")), f32(16, 8))
    assert found(report, "constraint that gathers") == []
    assert [c.kind for c in report.collectives] == ["all-to-all"]


def test_a_gather_for_another_operation_is_not_attributed_to_the_constraint(mesh):
    def f(x, w):
        x = xlashard.with_sharding_constraint(jnp.sin(x), named(mesh, "x", "y"))
        return xlashard.with_sharding_constraint(x @ w, named(mesh, "x"))

    fun = pjit(f, in_shardings=(named(mesh, "x", "y"), named(mesh)))
    report = explain(fun, f32(16, 8), f32(8, 8))
    assert found(report, "constraint that gathers") == []


def test_constraints_of_jax_and_in_loops_are_found(mesh):
    def f(x):
        def layer(x, _):
            x = jax.lax.with_sharding_constraint(jnp.sin(x), named(mesh, "x", "y"))
            x = jax.lax.with_sharding_constraint(x * 2, named(mesh, "x", None))
            return jax.lax.with_sharding_constraint(jnp.cos(x), named(mesh, "x", "y")), None

        return jax.lax.scan(layer, x, None, length=3)[0]

    report = explain(pjit(f, in_shardings=named(mesh, "x", "y")), f32(16, 8))
    (constraint,) = (u for u in report.unmet if u.kind == "constraint that gathers")
    assert (constraint.actual, constraint.nbytes) == ("gathered along y", 3 * 4 * 4 * 4)


def test_a_callbacks_result_is_listed_as_unspecified(mesh):
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=named(mesh, "x"))
    called = jax.jit(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((16, 8), "f4"), x))
    for f in (called, jax.jit(lambda x: called(x))):
        report = explain(f, x)
        assert found(report, "result of a callback") == [
            ("result", "P()", "shard dimension 0 over x, y by out_shardings, or shard_map", 448)
        ]
        assert report.outputs[0].decided_by == "partitioner"
    requested = jax.jit(called, out_shardings=named(mesh))
    assert found(explain(requested, x), "result of a callback") == []


def test_a_callback_that_gathers_is_listed(mesh):
    def step(x):
        y = jnp.sin(x)
        jax.debug.print("{}", y)
        jax.debug.print("sum {}", y.sum())

        def layer(x, _):
            jax.debug.callback(lambda x: None, x)
            return jnp.sin(x), None

        y = jax.lax.scan(layer, y, None, length=3)[0]
        return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct((64, 128), "f4"), y * 2).sum()

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=named(mesh, "x", "y"))
    report = explain(jax.jit(step), x)
    rows = {u.requested: u for u in report.unmet if u.kind == "callback that gathers"}
    # Of 32 KiB each device holds an eighth; the loop runs three times.
    times = {"debug_print": 1, "debug_callback": 3, "pure_callback": 1}
    assert {name: u.nbytes for name, u in rows.items()} == {
        name: count * (28 << 10) for name, count in times.items()
    }
    for row in rows.values():
        assert (row.path, row.actual) == ("float32[64,128]", "gathered along x, y")
        assert "shard_map" in row.advice and row.is_whole
    assert rows["debug_print"].source.line == step.__code__.co_firstlineno + 2
    # XLA's own words of the same, "shard it as {maximal device=0}", would mislead.
    assert not any("maximal" in u.advice for u in report.unmet)

    def each(x):
        return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    specs = P("x", "y")
    per_shard = jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=specs)
    report = explain(jax.jit(per_shard), x)
    assert report.unmet == () and report.collectives == ()


def donated(report):
    return {u.path: (u.reason, u.advice) for u in report.unmet if u.kind == "donation"}


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_unused_donations_are_paired_by_path(mesh, inside):
    rows, whole = named(mesh, "x"), named(mesh)

    def step(state, x):
        moved = jax.tree.map(lambda m: m + x.sum() * jnp.ones_like(state["w"]), state["mu"])
        new = {"w": state["w"] * 2, "mu": moved, "count": state["count"].astype(float)}
        return (jax.lax.with_sharding_constraint(new, rows) if inside else new), x.sum()

    state = {
        "w": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=rows),
        "mu": {each: jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=whole) for each in "ab"},
        "count": jax.ShapeDtypeStruct((16, 8), jnp.int32, sharding=rows),
    }
    out = ({"w": rows, "mu": {"a": rows, "b": rows}, "count": rows}, None)
    f = jax.jit(step, donate_argnums=0, out_shardings=None if inside else out)
    unused = donated(explain(f, state, jax.ShapeDtypeStruct((16,), jnp.float32, sharding=rows)))
    for each in "ab":
        reason, advice = unused[f"state['mu']['{each}']"]
        assert reason.startswith(
            f"result[0]['mu']['{each}'] has its type, but is sharded as P('x')"
        )
        # The result has fewer bytes: to replicate it would be no advice.
        assert advice == f"pass state['mu']['{each}'] as P('x')"
    assert "state['w']" not in unused


REMATERIALIZED = """
import json, random, sys
import jax, jax.numpy as jnp
import xlashard
from xlashard import NamedSharding, P
from xlashard.geometry.spec import resharding_steps
from xlashard.hlo.compiler_log import captured_log, read_warnings
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
jax.config.update("jax_use_shardy_partitioner", sys.argv[1] == "shardy")
def pin(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
def f(x, between):
    y = pin(jnp.sin(x), None, ("x", "y"))
    y = pin(y, *between) if between else y
    return jnp.cos(pin(y, "y", None))
x = jax.ShapeDtypeStruct((32, 32), "float32", sharding=NamedSharding(mesh, P(None, ("x", "y"))))
rows = []
for between in ((), ("y", "x")):
    report = xlashard.explain(jax.jit(lambda x: f(x, between)), x)
    rows.append([u for u in report.to_dict()["unmet"] if u["kind"] == "rematerialization"])

cube = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
def warns(*steps):
    placed = [NamedSharding(cube, P(*[axes or None for axes in dims])) for dims in steps]
    def move(x):
        for sharding in placed:
            x = jax.lax.with_sharding_constraint(jnp.sin(x), sharding)
        return x
    x = jax.ShapeDtypeStruct((16, 16, 16), "float32", sharding=placed[0])
    with captured_log() as log:
        jax.jit(move, out_shardings=placed[-1]).lower(x).compile()
    return any(warning.source for warning in read_warnings("".join(log)))
choice, followed = random.Random(1), []
for _ in range(40):
    pair = []
    for _ in range(2):
        dims = [(), (), ()]
        for axis in choice.sample("abc", choice.randint(1, 3)):
            dim = choice.randrange(3)
            dims[dim] = (*dims[dim], axis)
        pair.append(tuple(dims))
    if pair[0] != pair[1] and warns(*pair):
        followed.append(warns(pair[0], *resharding_steps(*pair), pair[1]))
print(json.dumps([rows, followed]))
"""


@pytest.mark.slow
def test_involuntary_rematerialization_names_value_line_and_constraint(partitioner):
    command = [*python_command(), "-c", REMATERIALIZED, partitioner]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    ((row,), pinned), followed = json.loads(run.stdout.splitlines()[-1])
    assert pinned == []
    assert len(followed) > 3 and not any(followed)  # random pairs of shardings
    assert (row["path"], row["requested"], row["nbytes"]) == ("float32[32,32]", "P('y')", 4096)
    assert "P(None, ('x', 'y'))" in row["actual"] and row["advice"] == (
        "constrain it to P('y', 'x') in between"
    )
    assert row["source"]["file"] == "<string>"
    assert "Involuntary full rematerialization" in run.stderr  # passed on


def test_warnings_without_an_operation_are_left_out():
    head = "W1128 14:59:14.89 6077 sharding_propagation.cc:3202] "
    assert (
        read_warnings(f"{head}GSPMD is deprecated, see %x.\nI1128 14:59:14.9 1 a.cc:1] a\n") == ()
    )
    sort = f"{head}Missing scratch size for sort. \nTo avoid this, compile with a GPU\n"
    others = f"{head}No hardware is found. Using a default\nE{head[1:]}Too large\n"
    assert read_general_warnings(f"noise\n{sort}I1128 14:59:14.9 1 a.cc:1] a\n{others}{sort}") == (
        "Missing scratch size for sort. To avoid this, compile with a GPU",
    )
    fft = (
        f"{head}[SPMD] Falling back. Operation: %fft.2 = c64[256,64]{{0,1}} fft(%a.2), "
        "fft_type=FFT, fft_length={64}, sharding={mesh['x'=8], [{}, {'x'}]}, "
        'metadata={op_name="f/fft" stack_frame_id=2}\n'
    )
    assert read_general_warnings(fft) == ()
    (warning,) = read_warnings(fft * 2)
    operation = warning.operation
    assert (operation.opcode, operation.op_name, str(operation.shape)) == (
        "fft",
        "f/fft",
        "c64[256,64]",
    )
    assert operation.attributes.sharding == "{mesh['x'=8], [{}, {'x'}]}" and not warning.source


def test_a_process_with_threads_collects_no_log():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with captured_log() as log:
        pass
    done.set()
    thread.join()
    assert log == []
