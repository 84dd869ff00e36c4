"""`xlashard preflight --topology T -- python train.py`: a script's programs on other chips."""

import json
import re
import runpy
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental import mesh_utils

from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard.analysis.programs import from_script
from xlashard.cli.main import main
from xlashard.predict.preflight.report.comparison import PreflightReports
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.tpu import topology

TRAIN = """\
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import xlashard

jax.distributed.initialize()
assert jax.default_backend() == "tpu"
assert len(jax.devices("tpu")) == jax.device_count() == 8
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
print("order", [d.id for d in mesh.devices.flat])
sharded, rows = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("data"))
WIDTH = int(sys.argv[1])


@jax.jit
def init(key):
    w = jax.random.normal(key, (WIDTH, WIDTH))
    return jax.lax.with_sharding_constraint(w, sharded), jax.random.split(key)


@jax.jit
def schedule(step):
    return 1.0 / (1 + step)


def train_step(w, x, rate):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - rate * gradient, loss


train_step = jax.jit(train_step, donate_argnums=0)
doubled = xlashard.pjit(lambda w: w * 2, out_shardings=rows)
w, keys = init(jax.random.key(0))
assert w.sharding.is_equivalent_to(sharded, 2)
for number in range(int(sys.argv[2])):
    x = jax.device_put(np.ones((64, WIDTH), np.float32), rows)
    w, loss = train_step(w, x, schedule(number))
    print("step", number, float(loss), float(schedule(number)))
print(type(doubled(w)).__module__, keys.shape)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with `train.py` as the working folder; restore the process afterwards."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, value.copy() if isinstance(value, list) else value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return tmp_path


def preflight(*words: str) -> int:
    return main(["preflight", "--topology", "v5e-8", *words])


@pytest.mark.slow
def test_programs_are_compiled_for_the_topology_and_not_run(folder: Path, capsys) -> None:
    names = ("make_mesh", "default_backend", "devices", "device_count")
    before = [getattr(jax, name) for name in names]
    # 4 GiB of parameters, of which nothing is allocated.
    words = ("--estimate", "--json", "reports.json")
    assert preflight(*words, "--", "python", "train.py", "32768", "2") == 0
    printed = capsys.readouterr()
    made = PreflightReports.from_json(Path("reports.json").read_text()).reports
    reports = {report.name: report for report in made}
    assert set(reports) == {"init", "train_step", "<lambda>"}
    step = reports["train_step"]
    assert step.topology.name == "v5e:2x4" and all(r.is_estimate for r in reports.values())
    assert [(axis.name, axis.size) for axis in step.mesh] == [("data", 4), ("model", 2)]
    assert [(v.path, v.type, v.spec) for v in step.inputs] == [
        ("w", "float32[32768,32768]", "P(None, 'model')"),
        ("x", "float32[64,32768]", "P('data')"),
        ("rate", "float32[]", "P()"),
    ]
    assert ("all-reduce", "data") in {(t.kind, t.along) for t in step.traffic}
    # Values of one device are real, results on several devices are zeros.
    assert "step 0 0.0 1.0\nstep 1 0.0 0.5" in printed.out
    assert "xlashard.core.array" in printed.out
    assert "(2,)" in printed.out
    assert "8 emulated CPU devices" in printed.err
    # The order in which JAX lays out the chips.
    chips = topology("v5e-8").devices
    order = [chips.index(d) for d in mesh_utils.create_device_mesh((4, 2), chips).flat]
    assert f"order {order}" in printed.out
    assert [getattr(jax, name) for name in names] == before


@needs_plugin
@pytest.mark.slow
def test_script_for_gpus_sees_gpu_devices(folder: Path, capsys) -> None:
    script = TRAIN.replace('"tpu"', '"gpu"').replace(
        "jax.device_count()", 'jax.device_count("cuda")'
    )
    (folder / "train.py").write_text(script)
    words = ("--topology", "h100-8", "--programs", "train_step", "--json", "-")
    assert main(["preflight", *words, "--", "python", "train.py", "4096", "1"]) == 0
    report = PreflightReport.from_json(capsys.readouterr().out)
    assert report.topology.generation == "h100" and not report.is_estimate
    assert [(axis.name, axis.size) for axis in report.mesh] == [("data", 4), ("model", 2)]
    assert [v.spec for v in report.inputs] == ["P(None, 'model')", "P('data')", "P()"]
    assert ("all-reduce", "data") in {(t.kind, t.along) for t in report.traffic}


KERNEL = """\
import jax, numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def scale(x):
    scale = float(pltpu.get_tpu_info().vmem_capacity_bytes)

    def kernel(source, result):
        result[...] = source[...] * scale

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


rows = P("data")
step = jax.shard_map(scale, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
x = jax.device_put(np.ones((1024, 128), np.float32), NamedSharding(mesh, rows))
print(jax.jit(step)(x).shape)
"""


@pytest.mark.slow
def test_kernels_of_a_script_query_the_chip_of_the_topology(folder: Path, capsys) -> None:
    (folder / "train.py").write_text(KERNEL)
    assert preflight("--topology", "v5e-8", "--", "train.py") == 0
    assert "(1024, 128)" in capsys.readouterr().out
    own = jax.sharding.Mesh(jax.devices(), ("data",)).abstract_mesh.abstract_device
    assert own.platform == jax.devices()[0].platform


@pytest.mark.slow
def test_a_program_that_does_not_fit_fails(folder: Path, capsys) -> None:
    words = ("--programs", "train_step", "--stop-after", "1", "--json", "-")
    assert preflight(*words, "--", "train.py", "131072", "100") == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["title"].startswith("train_step")
    assert report["outcome"] == "out of memory"
    # The script continues with zeros until it is stopped.
    assert "step 0 0.0" in printed.err
    assert "stopped: train_step was called 1 time" in printed.err


LOWERED = """\
import jax, numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def lower(step, name, slices):
    chips = get_topology_desc(name, "tpu", num_slices=slices).devices
    mesh = Mesh(np.reshape(chips[::-1], (4, -1)), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    return jax.jit(step, in_shardings=rows).lower(jax.ShapeDtypeStruct((64, 8), np.float32))


def step(x):
    return x - x.mean()


lower(step, "v5e:2x4", 1)
lower(lambda x: x + 1, "v5e:2x2", 2)
"""


@pytest.mark.slow
def test_scripts_lower_for_devices_of_a_topology_that_they_made(folder: Path, capsys) -> None:
    (folder / "aot.py").write_text(LOWERED)
    words = ("--estimate", "--json", "all.json", "--html", "all.html")
    assert preflight(*words, "--", "aot.py") == 1
    results = PreflightReports.from_json(Path("all.json").read_text())
    (step,), (other,) = results.reports, results.unreported
    assert (step.name, step.outcome) == ("step", "fits")
    assert [(axis.name, axis.size) for axis in step.mesh] == [("data", 4), ("model", 2)]
    assert [(value.path, value.spec) for value in step.inputs] == [("x", "P('data')")]
    assert [(traffic.kind, traffic.along) for traffic in step.traffic] == [("all-reduce", "data")]
    assert "8 devices of v5e:2x2, not" in other.reason
    assert "--topology v5e:2x2 --slices 2" in other.reason
    page = Path("all.html").read_text()
    assert "Without a report" in page and "--slices 2" in page


LOOP = """\
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())


@jax.jit
def init(key):
    return jax.lax.with_sharding_constraint(jax.random.normal(key, (32, 8)), rows)


@functools.partial(jax.jit, donate_argnums=1)
def decode(table, cache, token, position):
    cache = cache.at[:, position].set(table[token])
    token = (cache.sum(1) @ table.T).argmax(-1)
    return cache, jax.lax.with_sharding_constraint(token, rows)


@jax.jit
def refused(x):
    return jnp.linalg.eig(x)[0].sum()


@jax.jit
def count(reference):
    reference[...] = reference[...] + 1


table = init(jax.random.key(1))
cache, token = jax.device_put((np.zeros((8, 12, 8)), np.arange(8)), rows)
compiled = decode.lower(table, cache, token, 0).compile()
tokens = []
while len(tokens) < 12 and 31 not in tokens:
    step = compiled if len(tokens) % 2 else decode
    cache, token = step(table, cache, token, len(tokens))
    tokens.append(int(token[0]))
refused(jax.device_put(np.eye(8, dtype=np.complex64), rows))
reference = jax.new_ref(jax.device_put(np.zeros(8), rows))
count(reference)
count(reference)
moved = jax.device_put(cache, everywhere)
print("tokens", *tokens)
print("counted", float(reference[...].sum()), float(jnp.abs(moved).sum()))
print("shard", np.asarray(token.addressable_shards[0].data))
print("ratio", 1 / float(jnp.abs(cache).max()))
"""


def at(code: str) -> str:
    """Return file and line of the first line of the loop that has some code."""
    number = next(n for n, line in enumerate(LOOP.splitlines(), 1) if code in line)
    return f"loop.py:{number}"


@pytest.mark.slow
def test_programs_whose_results_are_read_run_on_the_cpu(folder: Path, capsys) -> None:
    (folder / "loop.py").write_text(LOOP)
    runpy.run_path("loop.py")
    printed = capsys.readouterr().out
    assert printed.startswith("tokens ") and "counted 16.0 " in printed
    code = preflight("--estimate", "--json", "all.json", "--", "loop.py")
    shown = capsys.readouterr()
    assert shown.out.startswith(printed), shown.err
    # One program can't be lowered for TPUs.
    assert code == 1
    assert re.search(r"Without a report.*refused +loop.py:\d+ ", shown.out, re.DOTALL)
    results = PreflightReports.from_json(Path("all.json").read_text())
    assert {report.name for report in results.reports} == {"init", "decode", "count"}
    (refused,) = results.unreported
    name, _, line = refused.source.partition(":")
    assert LOOP.splitlines()[int(line)] == "def refused(x):" and name == "loop.py"
    assert refused.caller == at("refused(jax")
    assert "'eig'" in refused.reason


@pytest.mark.slow
def test_libraries_read_the_values_of_a_real_run(folder: Path, capsys) -> None:
    script = str(Path(__file__).parent / "script_libraries.py")
    runpy.run_path(script)
    printed = capsys.readouterr().out
    assert "saved True" in printed and printed.count("\n") == 7
    code = preflight("--estimate", "--json", "all.json", "--", script)
    shown = capsys.readouterr()
    assert (code, shown.out[: len(printed)]) == (0, printed), shown.err
    results = PreflightReports.from_json(Path("all.json").read_text())
    names = {report.name for report in results.reports}
    assert names == {"nnx_step", "eqx_step", "outer", "<lambda>", "device_mean"}
    assert not results.unreported


@pytest.mark.slow
def test_closed_over_results_are_no_constants_that_the_compiler_folds(
    folder: Path, capsys, monkeypatch
) -> None:
    (folder / "closed.py").write_text(
        "import jax, numpy as np\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "mesh = jax.make_mesh((8,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "rows = NamedSharding(mesh, P('d'))\n"
        "key = jax.random.key(0)\n"
        "init = jax.jit(lambda: jax.random.normal(key, (64, 8)), out_shardings=rows)\n"
        "table = init()\n"
        "@jax.jit\n"
        "def use(x):\n"
        "    return x @ table\n"
        "use(jax.device_put(np.ones((8, 64), np.float32), rows))\n"
    )
    words = ("--estimate", "--run", "0", "--programs", "use", "--json", "-", "--", "closed.py")
    assert preflight(*words) == 0
    embedded = PreflightReport.from_json(capsys.readouterr().out)
    assert embedded.time.flops > 64 * 8
    assert [value.path for value in embedded.inputs] == ["x"]
    # Large ones are arguments of the program that is reported.
    monkeypatch.setattr(from_script, "_CONSTANTS_UP_TO", 2047)
    assert preflight(*words) == 0
    report = PreflightReport.from_json(capsys.readouterr().out)
    assert {(value.type, value.spec) for value in report.inputs} == {
        ("float32[8,64]", "P('d')"),
        ("float32[64,8]", "P()"),
    }
    assert "jax.jit puts 2.0 KiB into each device's program" in report.forgotten
    assert report.time.flops == embedded.time.flops


@pytest.mark.slow
def test_zeros_that_a_script_reads_are_named_with_the_program(folder: Path, capsys) -> None:
    (folder / "loop.py").write_text(LOOP)
    words = ("--estimate", "--run", "2kB", "--programs", "decode")
    assert preflight(*words, "--", "loop.py") == 1
    printed = capsys.readouterr()
    assert "tokens 0 0 0" in printed.out
    assert "loop.py failed: ZeroDivisionError" in printed.err
    line = next(line for line in printed.err.splitlines() if "read results of" in line)
    decode = at("@functools.partial(jax.jit")
    facts = (
        f"{at('tokens.append')} read",
        f"decode ({decode})",
        "KiB on all devices",
        "--run 1MiB runs it",
    )
    assert all(fact in line for fact in facts), line


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--json", "a.html"], ["a.html", ".json"]),
        (["--mesh", "data=8"], ["--mesh is invalid", "script"]),
        (["configs/tiny.toml"], ["configs/tiny.toml is invalid"]),
        (["--topology", "v5e-8,v5e-16"], ["2 topologies", "--topology v5e:2x4"]),
        (["--programs", "/(/"], ["/(/", "regular expression"]),
        (["--programs", ""], ["--programs is empty"]),
        (["--html", "."], [". can't be written: it is a folder"]),
        (["--budget", "hmb=1"], ["did you mean hbm?"]),
        (["--price", "cheap"], ["'cheap'"]),
        (["--folder", "x"], ["--folder", "--mesh auto"]),
        (["--option", "xla_no=1"], ["--option xla_no=1", "'xla_no'"]),
    ],
)
@pytest.mark.devices(8)
def test_invalid_arguments_before_a_script_are_named(
    folder: Path, capsys, words: list[str], facts: list[str]
) -> None:
    assert preflight(*words, "--", "train.py") == 2
    error = capsys.readouterr().err
    assert all(fact in error for fact in facts), error
    assert "runs on 8 emulated" not in error


@pytest.mark.devices(8)
def test_a_script_on_one_device_is_refused(folder: Path, capsys) -> None:
    (folder / "alone.py").write_text("import jax\njax.jit(lambda x: x + 1)(1.0)\n")
    assert preflight("--", "alone.py") == 2
    error = capsys.readouterr().err
    assert "has no program for v5e:2x4: <lambda> ran on one device" in error
    assert "jax.devices()" in error


SPLIT = """\
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

# Devices of a slice are neighbours: `model` lies between the slices.
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"))


def put(shape, *spec):
    return jax.device_put(jnp.zeros(shape, jnp.bfloat16), NamedSharding(mesh, P(*spec)))


@jax.jit
def step(up, down, x):
    return jax.grad(lambda up: ((jnp.tanh(x @ up) @ down) ** 2).mean())(up)


@jax.jit
def evaluate(up, down, x):
    return ((jnp.tanh(x @ up) @ down) ** 2).mean()


up, down = put((512, 2048), None, "model"), put((2048, 512), "model")
x = put((32768, 512), "data")
for _ in range(3):
    step(up, down, x)
evaluate(up, down, x)
"""


@pytest.mark.slow
def test_an_order_of_the_mesh_is_tried_over_the_programs_of_a_script(folder: Path, capsys) -> None:
    (folder / "split.py").write_text(SPLIT)
    words = ["--slices", "2", "--json", "reports.json", "--all", "--", "python", "split.py"]
    assert main(["preflight", "--topology", "v5e-4", *words]) == 0
    out = capsys.readouterr().out
    reports = PreflightReports.from_json((folder / "reports.json").read_text())
    advice = next(each for each in reports.advice if each.changes[0].order)
    assert not any(each.changes[0].order for r in reports.reports for each in r.advice)
    assert advice.changes[0].order == ("model", "data") and "2 programs" in advice.text
    assert advice.seconds < 0 and "Suggestions for the script" in out
    # Three calls of one program, one of the other.
    times = {r.name: r.time.seconds for r in reports.reports}
    assert -advice.seconds < 3 * times["step"] + times["evaluate"]
    assert -advice.seconds > times["step"] / 10
