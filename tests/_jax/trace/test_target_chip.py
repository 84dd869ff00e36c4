"""Kernels that query the chip are traced and lowered for that of a topology; JAX keeps its own."""

import json
import subprocess
from typing import Any

import jax
import numpy as np
import pytest

from tests._jax.trace.chip_process import attempt
from tests._jax.trace.program_kinds import KINDS, mesh_of
from tests.fork_server import python_command
from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard._jax.trace import target_chip
from xlashard._jax.trace.lower_for import lower_for
from xlashard._jax.trace.target_chip import KEYED_ANEW, assume_chip, trace_for_chip
from xlashard.gpu import topology as gpu_topology
from xlashard.tpu import topology as tpu_topology

QUERYING = [name for name, kind in KINDS.items() if kind.queries_chip]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Lower the kinds in a process whose caches JAX keys anew, and return what it printed."""
    words = [*python_command(), "-m", "tests._jax.trace.chip_process"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", QUERYING)
def test_kernel_is_lowered_for_the_chip_of_the_topology(name: str, facts: dict[str, Any]) -> None:
    outcome = KINDS[name].outcomes.get("tpu")
    if outcome is None:
        assert facts[name]["module"] == facts[name]["plain"]
    else:
        assert outcome.text in facts[name]["plain"]
        assert outcome.found in facts[name]["module"]
    assert facts[name]["compiled"] > 1000


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", QUERYING)
def test_traces_for_a_chip_stay_out_of_jax_s_other_traces(name: str, facts: dict[str, Any]) -> None:
    for own in ("own", "own_wrapped"):
        assert "Unsupported TPU device kind: cpu" in facts[name][own]
    assert facts["own_chip"] == "cpu"


@pytest.mark.devices(8)
@pytest.mark.slow
def test_programs_of_a_process_are_traced_anew_once_and_the_caller_learns_of_it(
    facts: dict[str, Any],
) -> None:
    assert facts["note_of_another"] == ""
    assert [facts[name]["note"] for name in QUERYING] == [KEYED_ANEW, ""]
    # Before; then before and after a call, for each kind.
    assert facts["programs"] == [1, 1, 2, 2, 2]


@pytest.mark.devices(8)
@pytest.mark.slow
def test_one_function_is_traced_for_several_chips(facts: dict[str, Any]) -> None:
    assert facts["others"] == [True, False, True]


@pytest.mark.devices(8)
@pytest.mark.slow
def test_script_is_traced_for_the_chip_at_will(facts: dict[str, Any]) -> None:
    assert "pallas_call" in facts["script"]


@pytest.mark.slow
def test_kernels_of_the_chips_at_hand_are_traced_again_for_another_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    v5e, v5p = (tpu_topology(name).devices[0] for name in ("v5e-8", "v5p-8"))
    kernel, plain = (
        KINDS[name].make(jax.devices(), True) for name in ("pallas_kernel", "automatic_axes")
    )
    traced, untouched = (program.function.trace(*program.args) for program in (kernel, plain))
    assert target_chip.has_kernels(traced) and not target_chip.has_kernels(untouched)
    assert not target_chip._has_other_chips(v5e)  # a CPU reports errors by itself
    monkeypatch.setattr(jax, "devices", lambda: [v5e])
    assert not target_chip._has_other_chips(v5e)
    assert target_chip._has_other_chips(v5p)


def test_errors_of_the_user_are_raised_after_one_trace() -> None:
    traces = []

    def fail(x):
        traces.append(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace_for_chip(lambda: jax.jit(fail).trace(np.ones(2)), tpu_topology("v5e-8").devices[0])
    assert len(traces) == 1


def test_programs_for_the_devices_at_hand_are_traced_once() -> None:
    def query(x):
        raise ValueError("Unsupported TPU device kind: cpu")

    for device in (None, jax.devices()[0]):
        with pytest.raises(ValueError, match="Unsupported TPU device kind"):
            trace_for_chip(lambda: jax.jit(query).trace(np.ones(2)), device)
        traced, note = trace_for_chip(lambda: jax.jit(lambda x: x).trace(np.ones(2)), device)
        assert (traced.fun_name, note) == ("<lambda>", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "platform"),
    [("pallas_kernel", "tpu"), pytest.param("triton_kernel", "cuda", marks=needs_plugin)],
)
def test_lowerings_of_the_user_have_the_chip_of_their_mesh(name: str, platform: str) -> None:
    find = tpu_topology if platform == "tpu" else gpu_topology
    devices = find("v5e-8" if platform == "tpu" else "h100-8").devices
    program = KINDS[name].make(jax.devices(), True)
    traced = program.function.trace(*program.args)

    def lower_own() -> str:
        fresh = jax.jit(lambda *args: program.function(*args)).trace(*program.args)
        return attempt(lambda: fresh.lower(lowering_platforms=(platform,)).as_text())

    before = lower_own()
    assert lower_for(traced, dict(zip(jax.devices(), devices, strict=True))).as_text() != before
    assert lower_own() == before


def test_meshes_have_their_own_chip_outside_and_in_other_scopes() -> None:
    device, mesh = tpu_topology("v5e-8").devices[0], mesh_of(jax.devices()).abstract_mesh
    own = mesh.abstract_device
    with assume_chip(device):
        assert mesh.abstract_device == own
    with assume_chip(device, in_kernels=True):
        assert mesh.abstract_device.device_kind == device.device_kind
        assert mesh.update_axis_types(dict.fromkeys("xy", mesh.axis_types[0])) is mesh
        with assume_chip(tpu_topology("v5p-8").devices[0], in_kernels=True):
            assert mesh.abstract_device.device_kind == "TPU v5"
        assert mesh_of(jax.devices(), (2,), ("z",)).abstract_mesh.abstract_device != own
    assert mesh.abstract_device == own
    assert mesh_of(jax.devices(), (2,), ("z",)).abstract_mesh.abstract_device == own
    with assume_chip(jax.devices()[0], in_kernels=True):
        assert mesh.abstract_device == own
