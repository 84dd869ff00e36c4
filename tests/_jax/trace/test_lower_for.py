"""Programs traced with emulated devices, lowered for those of a topology: as plain JAX lowers them.

`program_kinds.py` has the kinds. Plain JAX lowers them in a process of its own, without xlashard,
for the devices of the topology.
"""

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import pytest

from tests._jax.trace.plain_lowering import describe
from tests._jax.trace.program_kinds import KINDS, Kind, Outcome, Program
from tests.fork_server import python_command
from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard._jax.runtime.topologies import request_of
from xlashard._jax.trace.lower_for import lower_for
from xlashard.gpu import topology as gpu_topology
from xlashard.tpu import topology as tpu_topology

EQUAL = Outcome("portable", "")
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
        if platform in kind.platforms and chosen(kind)
    ]


@pytest.fixture(scope="module")
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, Any]]:
    """What plain JAX lowers and compiles, by platform and kind: those of the selected tests."""
    folder = tmp_path_factory.mktemp("plain")
    chosen = [
        (item.callspec.params, item.originalname)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and "plain" in item.fixturenames
    ]
    started = {}
    for platform in {params["platform"] for params, _ in chosen}:
        ours = [each for each in chosen if each[0]["platform"] == platform]
        wanted = {
            "topology": described_topology(platform),
            "kinds": sorted({params["name"] for params, _ in ours}),
            "compiled": [p["name"] for p, test in ours if test == test_compiled_program.__name__],
        }
        files = folder / f"{platform}.json", folder / f"{platform}-answer.json"
        files[0].write_text(json.dumps(wanted), "utf-8")
        words = *python_command(), "-m", "tests._jax.trace.plain_lowering", *map(str, files)
        started[platform] = files[1], subprocess.Popen(words)
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
    traced = trace(KINDS[name].make(jax.devices(), True), monkeypatch)
    pairs = dict(zip(jax.devices(), topology_devices(platform), strict=True))
    return traced, lower_for(traced, pairs)


def comparable(module: str) -> str:
    """Return a module without the numbers of Python objects, which `custom_partitioning` puts in."""
    return re.sub(r'(backend_config = ")\d{9,}"', r'\1N"', module)


@pytest.mark.parametrize(("platform", "name"), cases())
def test_module_is_that_of_plain_jax(
    platform: str, name: str, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = KINDS[name].outcomes.get(platform)
    if outcome is not None and outcome.what == "refused":
        with pytest.raises(Exception, match=re.escape(outcome.text)):
            lower(platform, name, monkeypatch)
        assert outcome.text in plain(platform, name)["error"]
        return
    traced, lowered = lower(platform, name, monkeypatch)
    module = lowered.as_text()
    if outcome is None:
        assert comparable(module) == comparable(plain(platform, name)["module"])
    elif outcome.what == "portable":
        on_cpu = traced.lower(lowering_platforms=(platform,)).as_text()
        assert LAYOUTS.sub("", module) == LAYOUTS.sub("", on_cpu)
        assert plain(platform, name).get("module") != module
    else:
        assert outcome.text in plain(platform, name)["error"]
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
