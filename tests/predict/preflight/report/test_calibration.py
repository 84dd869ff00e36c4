"""Files of measured rates, and their effect on operations, collectives and searches."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from tests.message_patterns import naming
from tests.predict.costs.gpu.test_gpu_costs import MIB, cluster, cost
from tests.predict.costs.test_network_model import MB, collective, groups_along
from tests.predict.preflight.examples import FITTING, LAYER, LINES
from tests.predict.preflight.report.test_measured import write_profile
from xlashard import P, preflight, tpu
from xlashard.auto.problem import machine_of
from xlashard.errors import ArgumentError
from xlashard.geometry.groups import SourceTargetPairs
from xlashard.predict.costs.models_by_target import rates_for
from xlashard.predict.costs.network_model import NetworkModel
from xlashard.predict.costs.operation import OperationModel
from xlashard.predict.costs.rates import rates_of
from xlashard.predict.preflight.report.measured import (
    Calibration,
    calibration_text,
    compare_with_profile,
    read_calibrations,
)
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.tpu.generations import BY_NAME

POD = tpu.topology("v6e-16", slices=2)
MESH = POD.mesh({"slices": 2, "x": 4, "y": 4})


def rates(chip: Chip = POD.chip, **slowdown: float):
    return Calibration(chip.name, slowdown).rates(chip)


def seconds(kind, axes, **slowdown):
    """Return the bytes' time of a collective, without latencies."""
    usual = rates(**slowdown)
    still = replace(usual, hop_seconds=0.0, collective_seconds=0.0)
    if still.reductions is not None:
        apart = replace(still.reductions, hop_seconds=0.0, collective_seconds=0.0)
        still = replace(still, reductions=apart)
    model = NetworkModel(POD, MESH, still)
    return model.of(collective(kind, groups_along(MESH, axes), 8 * MB)).expected_seconds


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("axes", [["x"], ["x", "y"]])
def test_ici_collectives_have_the_measured_slowdown_of_ici(kind, axes):
    assert seconds(kind, axes, ici=1.7) == pytest.approx(1.7 * seconds(kind, axes))
    assert seconds(kind, axes, dcn=3.0, matrix=2.0) == seconds(kind, axes)


def test_dcn_collectives_have_the_measured_slowdown_of_dcn():
    usual = seconds("all-reduce", ["slices"])
    assert seconds("all-reduce", ["slices"], dcn=2.5) == pytest.approx(2.5 * usual)
    assert seconds("all-reduce", ["slices"], ici=2.5) == pytest.approx(usual)
    apart = seconds("all-reduce", ["slices"], dcn=2.5, reduction=4.0)
    assert apart == pytest.approx(2.5 * usual)


def test_permutations_have_the_measured_slowdown_of_ici():
    pairs = SourceTargetPairs(tuple((n, n ^ 1) for n in range(32)))
    times = [
        NetworkModel(POD, MESH, rates(ici=ratio))
        .of(collective("collective-permute", pairs, 8 * MB))
        .expected_seconds
        for ratio in (1.0, 2.0)
    ]
    share = rates_of(POD.generation).link_share
    assert times[1] - times[0] == pytest.approx(8 * MB / POD.generation.ici_bandwidth / share)


def test_reductions_have_a_separate_slowdown():
    for kind in ("all-reduce", "reduce-scatter"):
        both = seconds(kind, ["x"], ici=1.2, reduction=3.0)
        assert both == pytest.approx(3.0 * seconds(kind, ["x"]))
    gather = seconds("all-gather", ["x"])
    assert seconds("all-gather", ["x"], ici=1.2, reduction=3.0) == pytest.approx(1.2 * gather)
    # Both take the same links, of which reductions alone were measured.
    assert seconds("all-gather", ["x"], reduction=3.0) == pytest.approx(3.0 * gather)


def test_kernels_have_a_separate_slowdown():
    usual, measured = rates(), rates(matrix=2.0, kernel=1.5)
    assert measured.kernels is not None
    for name in ("hbm_bytes", "kernel_transcendentals"):
        assert getattr(measured.kernels, name) == pytest.approx(getattr(usual, name) / 1.5)
        assert getattr(measured, name) == getattr(usual, name)
    # The slowdown of XLA's products does not count twice.
    matrix = dict(usual.matrix_flops)["bfloat16"]
    assert dict(measured.kernels.matrix_flops)["bfloat16"] == pytest.approx(matrix / 1.5)
    assert dict(measured.matrix_flops)["bfloat16"] == pytest.approx(matrix / 2)


@pytest.mark.devices(8)
def test_gpu_collectives_have_the_measured_slowdown():
    chip = cluster("h100", 1, 8)._topology.chip
    slow = rates(chip, ici=2.0, dcn=3.0, reduction=4.0, kernel=2.0)
    for nodes, gpus, kind, ratio in (
        (1, 8, "all-gather", 2.0),
        (1, 8, "all-reduce", 4.0),
        (8, 1, "all-gather", 3.0),
    ):
        network = cluster("h100", nodes, gpus)
        measured = cluster("h100", nodes, gpus, slow)
        group, large = list(range(8)), 4096 * MIB
        ratios = [
            cost(measured, kind, n, group).expected_seconds
            - cost(measured, kind, n // 2, group).expected_seconds
            for n in (large,)
        ]
        usual = cost(network, kind, large, group).expected_seconds
        usual -= cost(network, kind, large // 2, group).expected_seconds
        assert ratios[0] == pytest.approx(ratio * usual)
    assert slow.kernels is not None
    assert slow.kernels.scores == pytest.approx(rates_for(chip).scores / 2)


def test_layout_search_uses_measured_rates():
    usual, slow = machine_of(MESH, POD), machine_of(MESH, POD, rates(ici=2.0, dcn=3.0))
    found = [
        a.bytes_per_second / b.bytes_per_second for a, b in zip(usual.axes, slow.axes, strict=True)
    ]
    assert found == pytest.approx([3.0, 2.0, 2.0])
    apart = machine_of(MESH, POD, rates(ici=2.0, reduction=3.0))
    assert [a.reduction_slowdown for a in apart.axes[1:]] == pytest.approx([1.5, 1.5])
    slowdowns = [machine.join(machine.axes).reduction_slowdown for machine in (usual, apart)]
    assert slowdowns[1] == pytest.approx(1.5 * slowdowns[0])
    assert machine_of(MESH, POD, rates(hbm=2.0)).rates.hbm_bytes == usual.rates.hbm_bytes / 2


def test_preflight_uses_and_reports_measured_rates():
    x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    words = {"topology": "v5e-4", "mesh": {"data": 4}, "estimate": True}
    fun = jax.jit(lambda x: jax.lax.with_sharding_constraint(x.T, P("data")) @ x)
    usual = preflight(fun, x, **words)
    slow = {"chip": "v5e", "slowdown": dict.fromkeys(("matrix", "hbm", "vector", "ici"), 2.0)}
    measured = preflight(fun, x, **words, rates=slow)
    assert 1.8 < measured.time.seconds / usual.time.seconds < 2.0
    assert measured.time.roofline_seconds == usual.time.roofline_seconds
    assert ("rates", "v5e, measured by published time: matrix 2 hbm 2 vector 2 ici 2") in (
        measured.versions.flags
    )
    assert not [flag for flag in usual.versions.flags if flag[0] == "rates"]


def test_each_chip_has_one_file_of_rates(tmp_path: Path):
    files = []
    for chip, ratio in (("v5e", 1.1), ("v5p", 1.3)):
        files.append(tmp_path / f"{chip}.toml")
        files[-1].write_text(f"chip = '{chip}'\n[slowdown]\nhbm = {ratio}\n")
    chips = [BY_NAME["v5e"], BY_NAME["v5p"]]
    found = read_calibrations(files, chips)
    assert {name: dict(c.slowdown) for name, c in found.items()} == {
        "v5e": {"hbm": 1.1},
        "v5p": {"hbm": 1.3},
    }
    assert read_calibrations(files[:1], chips).keys() == {"v5e"}
    assert read_calibrations(None, chips) == read_calibrations([], chips) == {}
    with pytest.raises(ArgumentError, match=naming("v5p.toml", "is of v5p", "has v5e")):
        read_calibrations(files, chips[:1])
    with pytest.raises(ArgumentError, match="is the second of v5e"):
        read_calibrations([files[0], str(files[0])], chips)


def test_profile_calibrates_kernels_separately_from_matmuls(tmp_path: Path):
    kernel = replace(LINES[1], kind="kernel")
    report = replace(FITTING, time=replace(FITTING.time, lines=(LINES[0], kernel, *LINES[2:])))
    events = [
        ("fusion.4", 0.0, 0.6 * LAYER, ""),
        ("fusion.5", 0.6 * LAYER, 0.3 * LAYER * 1.5, ""),
        ("all-reduce.6", 1.1 * LAYER, 0.2 * LAYER, ""),
    ]
    step = compare_with_profile(report, write_profile(tmp_path, events, []))
    found = step.slowdowns()
    assert (found["matrix"], found["kernel"]) == pytest.approx((1.0, 1.5), rel=1e-3)
    file = tmp_path / "v5p.toml"
    file.write_text(calibration_text(step, "v5p"))
    assert "kernel = 1.500  # 1" in file.read_text()
    (calibration,) = read_calibrations(file, [BY_NAME["v5p"]]).values()
    measured = calibration.rates(BY_NAME["v5p"])
    assert measured.kernels is not None and measured.reductions is not None
    assert math.isclose(calibration.slowdown["reduction"], 2.0, rel_tol=1e-3)


def test_calibrated_kernels_add_no_uncertainty():
    from tests.predict.costs.test_kernel_work import accumulate, arrays, kernels_in, module_of
    from xlashard.predict.costs.schedule import walk_schedule
    from xlashard.predict.preflight.error_bar import KernelSpread, measure_kernel_spread

    module = module_of(accumulate, *arrays((1024, 1024), (1024, 1024)))
    chip = BY_NAME["v4"]
    measured = rates(chip, kernel=1.5)
    ((computation, call),) = kernels_in(module)
    usual = OperationModel(module, rates_of(chip)).of(computation, call)
    slow = OperationModel(module, measured).of(computation, call)
    launch = usual.launch - slow.launch
    assert slow.matrix + slow.hbm == pytest.approx(1.5 * (usual.matrix + usual.hbm), rel=0.01)
    assert abs(launch) < 0.5 * usual.launch
    schedule = walk_schedule(module, [], OperationModel(module, measured), measured)
    assert measure_kernel_spread(module, schedule, chip, rates=measured) == KernelSpread()
