"""Pages of incomplete and of very large reports."""

from dataclasses import replace

import pytest

from tests.browser import Browser
from tests.predict.preflight.examples import FITTING, SMALL
from tests.predict.preflight.render.test_roofline import IDLE
from xlashard.analysis.report.html_page import MOST_ROWS
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.report.comparison import page
from xlashard.predict.preflight.report.preflight_model import AxisReport

ELEMENTWISE = replace(
    SMALL.time, flops_by_dtype=(), compute_seconds=0.0, elementwise_flops=SMALL.time.flops
)
ONE_CHIP = replace(
    SMALL.topology, name="v5e:1x1", shape=(1, 1), chips=1, devices=1, hosts=1, hbm_bytes=2**34
)
NOWHERE = replace(
    FITTING.traffic[0],
    axes=None,
    along="2 groups of 2 devices",
    groups=((0, 3), (1, 2)),
    source=None,
    op_name="",
    conditional=True,
    times_known=False,
)
ODD = {
    "no mesh": replace(SMALL, mesh=()),
    "one chip": replace(SMALL, topology=ONE_CHIP, mesh=(AxisReport("x", 1, (), ring=False),)),
    "nothing to do": replace(SMALL, time=IDLE),
    "no matrix products": replace(SMALL, time=ELEMENTWISE),
    "no values": replace(
        SMALL,
        inputs=(),
        outputs=(),
        memory=replace(SMALL.memory, argument_bytes=0, total_bytes=0),
    ),
    "groups of no axes": replace(FITTING, traffic=(NOWHERE,)),
    "unknown calls": replace(
        SMALL, time=replace(SMALL.time, unknown_loops=2, unknown_calls=(("my_kernel", 32),))
    ),
    "not understood": replace(SMALL, time=replace(SMALL.time, not_understood=(("line", 3),))),
}


SHOWN = {
    "no mesh": "4 × 4 chips; no rings.",
    "one chip": "1 × 1 chips; no rings. 1 chip, 1 device, 1 host.",
    "nothing to do": "The program does no arithmetic: there is nothing to plot.",
    "no matrix products": "2.1 GFLOP besides, which count as free",
    "no values": "arguments\t0 B",
    "groups of no axes": "2 groups of 2 devices: 0,3 …",
    "unknown calls": "the calls of unknown cost: my_kernel ×32",
    "not understood": "Not understood in the compiled program: line ×3.",
}


@pytest.mark.slow
def test_incomplete_reports_are_rendered(browser: Browser) -> None:
    with browser.page(page([replace(r, title=name) for name, r in ODD.items()])) as tab:
        for number, name in enumerate(ODD, 1):
            panel = f"document.querySelectorAll('.panel')[{number}]"
            tab.run(f"location.hash = {panel}.id")
            tab.until(f"!{panel}.hidden")
            body = tab.text(".panel")
            assert name in body
            assert SHOWN[name] in body
            assert not {"nan", "inf"} & set(body.lower().split())
        assert tab.complaints() == []


@pytest.mark.slow
def test_long_tables_show_the_first_rows_and_count_the_rest() -> None:
    value = FITTING.inputs[0]
    many = tuple(replace(value, path=f"state[{n}]") for n in range(MOST_ROWS + 2345))
    html = page(replace(FITTING, inputs=many))
    assert "and 2,345 more, in the report's JSON" in html
    assert f"state[{MOST_ROWS - 1}]" in html.split("application/json")[0]
    assert f"state[{MOST_ROWS}]" not in html.split("application/json")[0]


def test_page_without_reports_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"reports is empty.*page\(report\)"):
        page([])


@pytest.mark.slow
def test_reports_with_equal_titles_get_distinct_names() -> None:
    other = replace(FITTING, topology=replace(FITTING.topology, name="v5p:2x2x8"))
    html = page([FITTING, other])
    assert "on v5p:2x2x8" in html
    assert ">1. configs/" in page([FITTING, FITTING]).replace("<wbr>", "")
