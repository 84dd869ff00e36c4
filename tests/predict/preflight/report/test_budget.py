"""Limits on memory, traffic and time of a program."""

import re
from dataclasses import replace

import pytest

from tests.predict.preflight.examples import FITTING, OUT_OF_MEMORY, SMALL, TWO_SLICES
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.report.comparison import KEYS, broken_limits, read_budget
from xlashard.predict.preflight.report.preflight_report import PreflightReport


@pytest.mark.parametrize(
    ("word", "quantity", "value"),
    [
        ("hbm=90%", "part", 0.9),
        ("hbm=80GiB", "bytes", 80 * 2**30),
        ("all_gather_bytes=2GB", "bytes", 2e9),
        ("all-gather-bytes=2 GiB", "bytes", 2 * 2**30),
        ("dcn_bytes=1e6", "bytes", 1e6),
        ("unrequested_bytes=0", "bytes", 0),
        ("time=250ms", "seconds", 0.25),
        ("time=2min", "seconds", 120),
        ("time=7µs", "seconds", 7e-6),
        ("flops=3PFLOP", "flop", 3e15),
        ("mfu=40%", "part", 0.4),
        ("step_price=0.5", "number", 0.5),
    ],
)
def test_limit_is_parsed(word: str, quantity: str, value: float) -> None:
    (limit,) = read_budget([word])
    assert limit.quantity == quantity
    assert limit.value == pytest.approx(value)
    assert limit.text == word


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("hbm", "budget 'hbm' has no value: write KEY=VALUE, such as hbm=90%"),
        ("hmb=90%", "budget 'hmb=90%' has an unknown key; did you mean hbm?"),
        ("allgather_bytes=1", "did you mean all_gather_bytes or"),
        ("zzz=1", "has an unknown key: the keys are hbm, argument_bytes"),
        ("hbm=90", "has the invalid value '90': write hbm=90% or hbm=2GB"),
        ("hbm=lots", "has the invalid value 'lots': write hbm=90% or hbm=2GB"),
        ("time=3", "has the invalid value '3': write time=250ms"),
        ("time=3GB", "write time=250ms"),
        ("all_gather_bytes=-1", "has the invalid value '-1': write all_gather_bytes=2GB"),
        ("all_gather_bytes=1.2.3", "has the invalid value '1.2.3'"),
        ("all_gather_bytes=1e999", "has the invalid value '1e999'"),
        ("all_gather_bytes=", "has the invalid value ''"),
    ],
)
def test_invalid_limits_are_refused(word: str, expected: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(expected)):
        read_budget(["hbm=90%", word])


def test_program_within_its_budget_breaks_no_limit() -> None:
    words = ["hbm=90%", "all_gather_bytes=10GiB", "time=1min", "mfu=40%", "dcn_bytes=0"]
    assert broken_limits(FITTING, read_budget(words)) == ()


def test_a_degraded_report_meets_no_budget() -> None:
    degraded = replace(FITTING, degraded="the dump is cut off")
    (breach,) = broken_limits(degraded, read_budget(["hbm=90%"]))
    assert str(breach) == "hbm=90% can't be checked: the dump is cut off"
    assert broken_limits(degraded, ()) == ()
    assert "the dump is cut off" in str(degraded) and "the dump is cut off" in degraded.to_html()
    assert PreflightReport.from_json(degraded.to_json()) == degraded


def test_broken_limit_names_the_responsible_source_lines() -> None:
    words = ["hbm=90%", "all_gather_bytes=2GB", "unrequested_bytes=0", "mfu=90%", "time=1min"]
    broken = broken_limits(FITTING, read_budget(words))
    assert [breach.limit.key for breach in broken] == [
        "all_gather_bytes",
        "unrequested_bytes",
        "mfu",
    ]
    gathers, unasked, slow = map(str, broken)
    assert gathers.splitlines() == [
        "all_gather_bytes=2GB is not met: the all-gather traffic of a device is 9.2 GiB, more "
        "than 1.9 GiB",
        "  9.2 GiB all-gather along fsdp for state['params']['layers']['mlp']['up'] at "
        "project/model.py:131 ×448",
        "  24.0 MiB all-gather along tensor for reduce_max at project/model.py:212",
    ]
    assert "1.5 GiB all-to-all along tensor for transpose at project/model.py:97 ×64" in unasked
    assert "model FLOP utilisation is 71.9%, less than 90.0%" in slow
    assert "1.98 s of arithmetic" in slow


def test_program_that_does_not_fit_breaks_every_memory_limit() -> None:
    (part, size) = broken_limits(OUT_OF_MEMORY, read_budget(["hbm=100%", "hbm=95GiB"]))
    assert "hbm=100% is not met: HBM use is 142.8%, more than 100.0%" in str(part)
    assert str(part).splitlines()[1] == (
        "  125.2 GiB f32[64,8192,64128] of log_softmax at project/model.py:212"
    )
    assert "is 136.7 GiB, more than 95.0 GiB" in str(size)


def test_a_missing_figure_breaks_its_limit() -> None:
    (breach,) = broken_limits(SMALL, read_budget(["mfu=40%"]))
    assert "mfu=40%" in str(breach) and "model FLOP utilisation" in str(breach)


def test_every_key_measures_a_full_report() -> None:
    for name, key in KEYS.items():
        value = key.measure(TWO_SLICES)
        assert value is not None and value >= 0, name
        assert all(key.contributors(TWO_SLICES)), name
    assert KEYS["dcn_bytes"].measure(TWO_SLICES) == 2 * 2**30
    assert KEYS["ici_bytes"].measure(TWO_SLICES) == sum(
        t.sent_bytes for t in TWO_SLICES.traffic[1:]
    )


def test_temporary_without_an_op_name_is_listed_by_hlo_name() -> None:
    temporary = replace(FITTING.memory.temporaries[-1], device_bytes=2**50)
    report = replace(FITTING, memory=replace(FITTING.memory, temporaries=(temporary,)))
    (breach,) = broken_limits(report, read_budget(["temporary_bytes=1GiB"]))
    assert breach.lines == ("1024.0 TiB f32[2,4096] of copy.7",)
