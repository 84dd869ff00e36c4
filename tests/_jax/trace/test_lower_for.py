"""Programs traced with emulated devices, lowered for those of a topology: as plain JAX lowers them.

`program_kinds.py` has the kinds. Plain JAX lowers them in a process of its own, without xlashard,
for the devices of the topology.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests._jax.trace.plain_lowering import describe, without_sources
from tests._jax.trace.program_kinds import KINDS, Kind, Program, mesh_of, struct
from tests.core.processes import run_many
from tests.fork_server import python_command
from tests.predict.targets.gpu.plugin import HAS_PLUGIN, needs_plugin
from xlashard._jax.runtime.topologies import request_of
from xlashard._jax.trace.lower_for import lower_for, move_lowered
from xlashard._jax.trace.target_chip import trace_for_chip
from xlashard.gpu import topology as gpu_topology
from xlashard.tpu import topology as tpu_topology

LAYOUTS = re.compile(r', mhlo\.layout_mode = "[^"]*"|mhlo\.layout_mode = "[^"]*"(, )?')


def topology_devices(platform: str) -> list[Any]:
    """Return the eight devices to lower for."""
    name = "v5e-8" if platform == "tpu" else "h100-8"
    return list((tpu_topology if platform == "tpu" else gpu_topology)(name).devices)


def described_topology(platform: str) -> dict[str, str]:
    """Return the keywords by which plain JAX makes the same devices."""
    name, options = request_of(topology_devices(platform)[0])
    if platform == "tpu":
        return {"topology_name": name, "platform": platform}
    sizes = {"target_config": options["target"], "topology": options["layout"]}
    return {"topology_name": name, "platform": platform, **sizes}


def cases(chosen: Callable[[Kind], bool] = lambda kind: True, *, slow: bool = False) -> list[Any]:
    """Return platform and name of the chosen kinds."""
    return [
        pytest.param(
            *(platform, name),
            id=f"{platform}-{name}",
            marks=[
                *([needs_plugin] if platform == "cuda" else []),
                *([pytest.mark.slow] if slow or kind.is_slow else []),
            ],
        )
        for platform in ("tpu", "cuda")
        for name, kind in KINDS.items()
        if platform in kind.platforms and not kind.queries_chip and chosen(kind)
    ]


@pytest.fixture(scope="module")
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, Any]]:
    """Return what plain JAX lowers and compiles for a platform and kind of the selected tests."""
    folder = tmp_path_factory.mktemp("plain")
    chosen = [
        (item.callspec.params, item.originalname)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and "plain" in item.fixturenames
    ]
    started = {}
    environment = dict(os.environ)
    if not jax.config.jax_use_shardy_partitioner:
        environment["JAX_USE_SHARDY_PARTITIONER"] = "0"
    platforms = {params["platform"] for params, _ in chosen}
    for platform in platforms if HAS_PLUGIN else platforms - {"cuda"}:
        ours = [each for each in chosen if each[0]["platform"] == platform]
        wanted = {
            "topology": described_topology(platform),
            "kinds": sorted({params["name"] for params, _ in ours}),
            "compiled": [p["name"] for p, test in ours if "module" not in test],
        }
        files = folder / f"{platform}.json", folder / f"{platform}-answer.json"
        files[0].write_text(json.dumps(wanted), "utf-8")
        words = (
            *python_command(environment),
            *("-m", "tests._jax.trace.plain_lowering"),
            *map(str, files),
        )
        process = subprocess.Popen(words, env=environment)
        started[platform] = files[1], process
    answers: dict[str, dict[str, Any]] = {}

    def read(platform: str, name: str) -> dict[str, Any]:
        if platform not in answers:
            file, process = started[platform]
            assert process.wait() == 0
            answers[platform] = json.loads(file.read_text("utf-8"))
        return answers[platform][name]

    return read


def trace(program: Program, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what JAX traced of a program."""
    with program.make_context():
        if hasattr(program.function, "trace"):
            return program.function.trace(*program.args)
        # A function of `jax.pmap` has a method `lower` only, which passes by this one.
        with monkeypatch.context() as patch, pytest.raises(_Reached) as reached:
            patch.setattr(jax.stages.Traced, "lower", stop)
            program.function.lower(*program.args)
        return reached.value.args[0]


class _Reached(Exception):
    """Ends a `lower` where JAX would lower what it has traced."""


def stop(traced: Any, **_: Any) -> None:
    """Stand in for `jax.stages.Traced.lower`."""
    raise _Reached(traced)


def lower(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return a traced program of eight emulated devices, and what it is lowered to for others."""
    devices = topology_devices(platform)
    program = KINDS[name].make(jax.devices(), True)
    traced, _ = trace_for_chip(lambda: trace(program, monkeypatch), devices[0])
    return traced, lower_for(traced, dict(zip(jax.devices(), devices, strict=True)))


def comparable(module: str) -> str:
    """Return a module without the numbers of Python objects that `custom_partitioning` writes."""
    return re.sub(r'(backend_config = ")\d{9,}"', r'\1N"', module)


@pytest.mark.partitioner
@pytest.mark.parametrize(("platform", "name"), cases())
@pytest.mark.devices(8)
def test_module_is_that_of_plain_jax(
    platform: str, name: str, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, found = KINDS[name].outcomes.get(platform), plain(platform, name)
    if outcome is not None and outcome.what == "refused" and "error" in found:
        with pytest.raises(Exception, match=re.escape(outcome.text)) as raised:
            lower(platform, name, monkeypatch)
        assert found["error"].startswith(f"{raised.type.__name__}: ")
        assert outcome.text in found["error"]
        return
    traced, lowered = lower(platform, name, monkeypatch)
    module = comparable(lowered.as_text())
    if outcome is None or outcome.what == "refused":
        assert module == comparable(found["module"])
    elif outcome.what == "portable":
        on_cpu = traced.lower(lowering_platforms=(platform,)).as_text()
        assert LAYOUTS.sub("", module) == LAYOUTS.sub("", on_cpu)
        assert found.get("module") != module
    else:
        assert outcome.text in found["error"]
        assert outcome.found in module


@pytest.mark.parametrize(("platform", "name"), cases(lambda kind: kind.is_compiled, slow=True))
def test_compiled_program(
    platform: str, name: str, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lowered = lower(platform, name, monkeypatch)
    compiled = describe(lowered.compile())
    found = plain(platform, name)
    if "error" in found:
        assert compiled["hlo"].startswith("HloModule")
    else:
        assert compiled == {key: found[key] for key in compiled}


NOT_LOWERED_FROM_A_CPU = {
    *("attention_of_cudnn", "pure_callback", "references_beside_an_ordered_effect"),
    "triton_kernel",
}


def can_be_moved(kind: Kind) -> bool:
    """Return True for a compiled kind that the user's own `lower` takes for the platform."""
    return kind.is_compiled and kind.make.__name__ not in NOT_LOWERED_FROM_A_CPU


OTHER_MEMORY = {
    # JAX has dropped the layout, since it is the default one of the CPU.
    "layout_that_is_the_default_of_a_cpu",
    # The kernel has the format that older versions of libtpu read, too.
    "pallas_kernel",
}


@pytest.mark.parametrize(("platform", "name"), cases(can_be_moved, slow=True))
def test_lowered_function_of_the_user_is_moved(platform: str, name: str, plain: Any) -> None:
    pairs = dict(zip(jax.devices(), topology_devices(platform), strict=True))
    program = KINDS[name].make(jax.devices(), True)
    with program.make_context():
        lowered = program.function.trace(*program.args).lower(lowering_platforms=(platform,))
    moved, found = move_lowered(lowered, pairs), plain(platform, name)
    compiled = describe(moved.compile())
    if "error" in found:
        assert "layout_mode" not in moved.as_text()
        return
    assert compiled["shardings"] == found["shardings"]
    if name not in OTHER_MEMORY:
        assert compiled == {key: found[key] for key in compiled}


def has_native_form(kind: Kind) -> bool:
    """Return True for a compiled kind without references, which need arrays."""
    return kind.is_compiled and "reference" not in kind.make.__name__


@pytest.mark.parametrize(("platform", "name"), cases(has_native_form, slow=True))
def test_program_of_the_topology_is_lowered_alike(platform: str, name: str) -> None:
    devices = topology_devices(platform)
    modules = []
    for own in (jax.devices(), devices):
        program = KINDS[name].make(own, own is not devices)
        with program.make_context():
            traced, _ = trace_for_chip(lambda p=program: p.function.trace(*p.args), devices[0])
        lowered = lower_for(traced, dict(zip(own, devices, strict=True)))
        modules.append((comparable(lowered.as_text()), tuple(lowered._lowering._device_list)))
    assert modules[0] == modules[1]


@needs_plugin
@pytest.mark.slow
def test_arguments_are_passed_as_a_tuple_where_the_platform_requires_it() -> None:
    program = KINDS["many_arguments"].make(jax.devices(), True)
    traced = program.function.trace(*program.args)
    for platform in ("tpu", "cuda"):
        pairs = dict(zip(jax.devices(), topology_devices(platform), strict=True))
        moved = move_lowered(traced.lower(lowering_platforms=(platform,)), pairs)
        for lowered in (moved, lower_for(traced, pairs)):
            assert lowered._lowering.compile_args["tuple_args"] == (platform == "tpu")


@pytest.mark.slow
def test_own_programs_of_the_process_are_as_before() -> None:
    traces = []

    def double(x):
        traces.append(x)
        return x * 2

    function = jax.jit(double)
    mesh = mesh_of(jax.devices())
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x", "y")))
    pairs = dict(zip(jax.devices(), topology_devices("tpu"), strict=True))
    function(x)
    traced = function.trace(x)
    own = traced.lower().as_text(), traced.lower(lowering_platforms=("tpu",)).as_text()
    with recorded_events() as events:
        lowered = lower_for(traced, pairs)
        assert lower_for(traced, pairs)._lowering is not lowered._lowering
        assert sorted(events) == [LOWERING] * 2
    with recorded_events() as events:
        assert function(x).sharding == x.sharding
        assert (function._cache_size(), len(traces), events) == (1, 1, [])
        again = function.lower(x), function.trace(x).lower(lowering_platforms=("tpu",))
        assert (len(traces), events) == (1, [])
    assert tuple(stage.as_text() for stage in again) == own
    for stage in again:
        assert stage._lowering.compile_args["backend"].platform == "cpu"
        assert tuple(stage._lowering._device_list) == tuple(jax.devices())
    np.testing.assert_array_equal(again[0].compile()(x), 2 * np.asarray(x))
    fresh = jax.jit(lambda x: double(x))
    assert lower_for(fresh.trace(x), pairs)._lowering._device_list[0].platform == "tpu"
    np.testing.assert_array_equal(fresh(x), 2 * np.asarray(x))


LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@contextmanager
def recorded_events() -> Iterator[list[str]]:
    """Record the stages of programs that JAX goes through in a block: traces excepted."""
    events: list[str] = []

    def record(event: str, seconds: float, **_: Any) -> None:
        if event in (LOWERING, "/jax/core/compile/backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


@pytest.mark.slow
def test_threads_lower_for_their_own_devices() -> None:
    mesh = mesh_of(jax.devices())
    x = struct((64, 64), mesh, "x", "y")
    targets = {"tpu": topology_devices("tpu"), "tpu v6e": list(tpu_topology("v6e-8").devices)}

    def choose(factor: int) -> Any:
        return jax.jit(
            lambda a: jax.lax.platform_dependent(
                a, cpu=lambda a: a + factor, tpu=lambda a: a * factor
            )
        )

    def lower_as(target: str, factor: int) -> tuple[str, Any]:
        traced = choose(factor).trace(x)
        if target == "cpu":
            lowered = traced.lower()
        else:
            pairs = dict(zip(jax.devices(), targets[target], strict=True))
            lowered = lower_for(traced, pairs)
        return lowered.as_text(), lowered._lowering._device_list[0].device_kind

    wanted = [(target, factor) for factor in range(2, 8) for target in ("cpu", *targets)]
    expected = [lower_as(*each) for each in wanted]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda each: lower_as(*each), wanted)) == expected
    assert len({kind for _, kind in expected}) == 3


@pytest.mark.integration
def test_processes_of_a_program_lower_it_by_themselves() -> None:
    script = Path(__file__).with_name("across_processes.py")
    outputs = [json.loads(text.splitlines()[-1]) for text in run_many(script, 2, 4)]
    assert [output["process"] for output in outputs] == [0, 1]
    for output in outputs:
        for name, (module, plain) in output["modules"].items():
            assert module == plain, name
        ours, plain = map(without_sources, output["compiled"])
        assert ours == plain


SIMPLIFIED = """
import jax
from tests._jax.trace.program_kinds import KINDS
from xlashard._jax.trace.lower_for import lower_for
from xlashard.tpu import topology
pairs = dict(zip(jax.devices(), topology("v5e-8").devices, strict=True))
for name in ("closed_over_array", "closed_over_by_inner_functions"):
    program = KINDS[name].make(jax.devices(), True)
    traced = program.function.trace(*program.args)
    lowered = lower_for(traced, pairs)
    assert "jax.const = true" in lowered.as_text()
    assert lowered.as_text() == traced.lower(lowering_platforms=("tpu",)).as_text()
    print(lowered.compile().memory_analysis().argument_size_in_bytes)
"""


@pytest.mark.devices(8)
@pytest.mark.slow
def test_closed_over_arrays_are_arguments_where_jax_makes_them_so() -> None:
    environment = {**os.environ, "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    words = [*python_command(environment), "-c", SIMPLIFIED]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    # Rows of [512, 256] and [512, 128] per device; rows of the weights, or the whole bias.
    whole, inner = 256 * 64 * 4, 256 * 128 * 4
    assert [int(size) for size in done.stdout.split()] == [whole + 64 * 128 * 4, inner + 128 * 4]
