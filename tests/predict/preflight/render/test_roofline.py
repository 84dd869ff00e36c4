"""The roofline of a step."""

from dataclasses import replace

import pytest

from tests.predict.preflight.examples import FITTING, SMALL
from xlashard.predict.preflight.render.roofline import read_roofline

IDLE = replace(
    SMALL.time,
    flops=0.0,
    flops_by_dtype=(),
    hbm_bytes=0.0,
    compute_seconds=0.0,
    hbm_seconds=0.0,
    roofline_seconds=0.0,
    seconds=0.0,
    shares=(),
)


def test_roofline_uses_the_peak_of_the_matrix_units() -> None:
    mixed = replace(
        FITTING.time,
        flops=11e12,
        elementwise_flops=1e12,
        flops_by_dtype=(("bfloat16", 6e12), ("int8", 4e12)),
        compute_seconds=6e12 / 459e12 + 4e12 / 918e12,
        roofline_seconds=0.1,
    )
    roofline = read_roofline(mixed, FITTING.topology)
    assert roofline is not None
    assert roofline.roof == pytest.approx(10e12 / mixed.compute_seconds)
    assert roofline.reached == pytest.approx(10e12 / 0.1)
    assert read_roofline(IDLE, SMALL.topology) is None


def test_roofline_point_lies_on_the_slope_of_the_bound() -> None:
    for report in (FITTING, SMALL):
        roofline = read_roofline(report.time, report.topology)
        assert roofline is not None
        for slope in roofline.slopes:
            ceiling = min(roofline.roof, roofline.intensity(slope) * slope.bandwidth)
            assert roofline.reached <= ceiling * 1.0001
            if slope.name == report.time.bound:
                assert roofline.reached == pytest.approx(ceiling)
