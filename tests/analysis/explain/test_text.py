"""Printed reports."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.goldens import check_golden, join_sections
from xlashard import ProgramReport
from xlashard.analysis.explain.model import (
    CollectiveReport,
    CostReport,
    DonationReport,
    MemoryReport,
    MoveReport,
    PlaceReport,
    RepeatedReport,
    UnmetRequest,
    ValueReport,
)
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.analysis.report.texts import line_text, operation_text, short_path
from xlashard.hlo.module import Frame
from xlashard.support.formatting import in_bytes, in_flop

MIB = 1 << 20
HERE = SourceLine("/home/me/project/model.py", 12, "layer", True)


def collective(kind="all-gather", sent=3 * MIB, **changes):
    facts = {
        "kind": kind,
        "along": "fsdp",
        "axes": ("fsdp",),
        "count": 1,
        "times": 6,
        "times_known": True,
        "conditional": False,
        "asynchronous": False,
        "operands": ("f32[64,256]",),
        "results": ("f32[256,256]",),
        "operand_bytes": MIB,
        "result_bytes": 4 * MIB,
        "payload_bytes": 4 * MIB,
        "sent_bytes": sent,
        "op_name": "",
        "argument": "",
        "source": None,
        "needed_by": "step/jvp()/while/body/bd,df->bf/dot_general",
        "needed_by_source": HERE,
    }
    return CollectiveReport(**facts | changes)


def value(path, device_bytes=MIB, **changes):
    facts = {"spec": "P('fsdp')", "decided_by": "caller", "nbytes": 4 * device_bytes, "copies": 2}
    return ValueReport(path, (256, 1024), "bfloat16", device_bytes=device_bytes, **facts | changes)


def report(**changes):
    facts = {
        "name": "step",
        "place": PlaceReport(
            "tpu", "TPU v5p", 8, 2, (("data", 2), ("fsdp", 4)), "shardy", "0", "1", "2", "3"
        ),
        "cost": CostReport(2.5e12, 3 * MIB),
        "memory": MemoryReport(8 * MIB, 5 * MIB, 4 * MIB, 2 * MIB, 0, None, 0),
        "inputs": (value("state['w']"), value("batch", decided_by="argument")),
        "outputs": (value("result[0]['w']"),),
        "collectives": (collective(),),
        "moves": (MoveReport("batch", "host", "P('data')", 0, 7 * MIB),),
        "donations": (DonationReport("state['w']", True, "result[0]['w']", MIB),),
        "unmet": (),
    }
    return ProgramReport(**facts | changes)


def printed(found, width=100, **options):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    found.print(console=console, **options)
    return console.file.getvalue()


def words(text):
    return re.sub(r"\s+", " ", text)


def test_printed_reports(update_goldens):
    donations = (
        DonationReport("a", True, "result[0]", MIB),
        DonationReport("b", True, "", 2 * MIB),
        DonationReport("c", False, "result[1]", 3 * MIB),
    )
    unmet = (
        WASTE,
        UnmetRequest("result", "result", "unspecified", "P()", 1, "REASON"),
        UnmetRequest("donation", "w[0]", "donated", "not reused", MIB, "REASON", "ADVICE"),
        UnmetRequest("donation", "w[1]", "donated", "not reused", MIB, "REASON", "ADVICE"),
    )
    reduce = collective(
        "all-reduce", op_name="step/transpose(jvp())/mul", source=HERE, operands=("f32[2]",) * 3
    )
    collectives = (
        collective(),
        reduce,
        collective(argument="params['w']", op_name="params['w']"),
        collective(needed_by="", needed_by_source=None, times=1, times_known=False),
    )
    empty = report(
        cost=None, memory=None, inputs=(), outputs=(), collectives=(), moves=(), donations=()
    )
    reports = {
        "plain": report(),
        "unmet": report(unmet=unmet),
        "collectives": report(collectives=collectives),
        "in a branch": report(collectives=(collective(conditional=True),)),
        "donations": report(donations=donations),
        "empty": empty,
    }
    texts = {
        name: "\n".join(line.rstrip() for line in printed(found, 160).splitlines())
        for name, found in reports.items()
    }
    path = Path(__file__).parent / "goldens" / "reports.txt"
    check_golden(path, join_sections(texts), update=update_goldens)


def test_the_largest_costs_come_first():
    text = printed(report(unmet=(WASTE,)))
    facts = [
        "along fsdp",
        "float32[8,8]:",
        "all-gather",
        "host →",
        "state['w']",
        "result[0]['w']",
    ]
    places = [text.index(fact) for fact in facts]
    assert places == sorted(places)


WASTE = UnmetRequest(
    "constraint that gathers",
    "float32[8,8]",
    "P('x')",
    "gathered along y",
    5 * MIB,
    "it unshards dimension 1",
    "ADVICE",
    HERE,
)


def test_many_rows_are_summed_up_and_all_can_be_shown():
    inputs = tuple(value(f"w[{i}]", (i + 1) * MIB) for i in range(20))
    short, whole = printed(report(inputs=inputs)), printed(report(inputs=inputs), all=True)
    assert re.search(r"\b12 .*\b78\.0 MiB.*report\.print\(all=True\)", words(short))
    shown = re.findall(r"w\[(\d+)\]", short)
    assert shown == [str(i) for i in range(19, 11, -1)]
    # All of them, in their own order.
    assert re.findall(r" w\[(\d+)\]", whole) == [str(i) for i in range(20)]
    assert "report.print" not in whole


def test_rows_that_differ_only_in_an_index_are_merged():
    layers = [f"layers[{i}].w" for i in range(12)]
    gathers = tuple(
        collective(argument=path, op_name=path, times=1, sent=i * MIB)
        for i, path in enumerate(layers)
    )
    found = report(
        inputs=(*map(value, layers), value("head[0].w", spec="P()"), value("tail[3]")),
        collectives=(collective("all-reduce", 4 * MIB), *gathers),
        moves=tuple(MoveReport(path, "host", "P('data')", 0, MIB) for path in layers),
        donations=tuple(DonationReport(p, False, f"result[0]{p[6:]}", MIB) for p in layers),
    )
    text = words(printed(found, 130))
    for row in (
        "66.0 MiB all-gather ×12 fsdp f32[64,256] → f32[256,256] project/model.py:12 layers[*].w",
        "12.0 MiB layers[*].w (12) host → P('data')",
        "12.0 MiB 48.0 MiB layers[*].w (12) bf16[256,1024] P('fsdp') ×2",
        "1.0 MiB 4.0 MiB head[0].w bf16[256,1024] P() ×2",
        "1.0 MiB 4.0 MiB tail[3] bf16[256,1024] P('fsdp') ×2",
    ):
        assert row in text
    assert re.search(r"12\.0 MiB layers\[\*\]\.w \(12\) .*result\[0\]\[\*\]\.w", text)
    assert text.index("66.0 MiB all-gather") < text.index("4.0 MiB all-reduce")
    whole = printed(found, 130, all=True)
    assert whole.count("layers[0].w") == 5
    assert "[*]" not in whole


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width):
    deep = value("state['optimizer'][1][0].mu['layers']['attention']['query']")
    text = printed(report(inputs=(deep,), unmet=(WASTE,)), width)
    assert max(map(len, text.splitlines())) <= width


def test_shortened_paths_stay_distinct():
    deep = [f"state['optimizer'][1][0].{m}['layers']['{i}']['down']" for m in "mn" for i in "pq"]
    found = report(inputs=tuple(map(value, deep)))
    for width in (80, 100, 140):
        table = printed(found, width).split("Arguments")[1].split("Results")[0]
        for mark in (".m[", ".n[", "['p']['down']", "['q']['down']"):
            assert re.sub(r"\s", "", table).count(mark) == 2


def test_print_and_rich_console_give_equal_output(monkeypatch, capsys):
    def bare(text):
        return [line.rstrip() for line in text.rstrip().splitlines()]

    monkeypatch.setenv("COLUMNS", "90")
    found = report()
    expected = bare(printed(found, 90))
    print(found)
    assert capsys.readouterr().out.splitlines() == expected
    console = Console(file=io.StringIO(), width=90, color_system=None)
    console.print(found)
    assert bare(console.file.getvalue()) == expected
    assert repr(found) == (
        "<ProgramReport of step on 8 devices: 2 inputs, 1 output, 1 collective; print it>"
    )


def test_brackets_in_paths_are_not_parsed_as_markup():
    text = printed(report(inputs=(value("state[red]['bold']"),)))
    assert "state[red]['bold']" in text


@pytest.mark.parametrize(
    ("path", "most", "short"),
    [
        ("x", 24, "x"),
        ("state['optimizer'][0].mu['w']", 24, "state…[0].mu['w']"),
        ("state['a.b[c]']['w']", 16, "state…['w']"),
        ("x" * 30, 24, "x" * 30),
    ],
)
def test_long_paths_are_shortened_in_the_middle(path, most, short):
    assert short_path(path, most) == short


def test_files_are_named_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = SourceLine(str(tmp_path / "src" / "model.py"), 3, "", True)
    assert line_text(mine) == "src/model.py:3"
    assert line_text(SourceLine("<stdin>", 3, "", True)) == "<stdin>:3"


@pytest.mark.parametrize("width", [10, 40, 60, 80, 120])
def test_lines_are_not_broken_in_a_narrow_terminal(width):
    callers = (Frame("/home/me/project/attention.py", 40), Frame("/home/me/project/train.py", 123))
    place = SourceLine("/home/me/project/layers/linears_of_all.py", 110, "f", True, callers, (0, 1))
    findings = {
        "unmet": (
            replace(WASTE, source=place),
            UnmetRequest("device_put", "float32[8,8]", "P('x')", "ignored", 256, "", "", place),
        ),
        "repeated": (
            RepeatedReport(
                *("dot_general", ("f32[256,256]",) * 2, "f32[256,256]", 8, 1, 1, 2**20, 0.5),
                *("", "", place, place),
            ),
        ),
        "collectives": (
            collective(needed_by_source=place),
            collective(source=place, argument="params['layers'][0]['attention']['q']"),
        ),
    }
    found = report(**findings)
    names = r"[\w./]+\.py:\d+"
    wide, narrow = (re.findall(names, printed(found, n, all=True)) for n in (400, width))
    assert width == 10 or (len(wide) >= 15 and sorted(narrow) == sorted(wide))
    assert all(len(line) <= width for line in printed(found, width).splitlines())


@pytest.mark.parametrize(
    ("op_name", "text"),
    [
        ("f/dot_general", "dot_general"),
        ("f/transpose(jvp(bd,df->bf))/transpose", "bd,df->bf, backward"),
        ("f/while/body/(bd,df->bf/dot_general:add)", "bd,df->bf and 1 more"),
        ("f/(transpose(jvp())/dot_general:jvp()/reduce_sum)", "dot_general and 1 more, backward"),
        ("", ""),
    ],
)
def test_operations_are_shown_by_the_last_part_of_their_name(op_name, text):
    assert operation_text(op_name) == text


def test_units():
    assert [in_bytes(n) for n in (0, 1023, 1024, 5 << 30, 7 << 40, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "7.0 TiB",
        "3072.0 TiB",
    ]
    assert [in_flop(n) for n in (7, 2000, 3e6, 4e12, 5e16)] == [
        "7 FLOP",
        "2.0 kFLOP",
        "3.0 MFLOP",
        "4.0 TFLOP",
        "50.0 PFLOP",
    ]
