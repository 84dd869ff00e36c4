"""What a person sees of a report."""

import io
import re

import pytest
from rich.console import Console

from xlashard import ProgramReport
from xlashard.pjit.report import (
    CollectiveReport,
    CostReport,
    DonationReport,
    MemoryReport,
    MoveReport,
    PlaceReport,
    ReplicationReport,
    SourceLine,
    ValueReport,
)
from xlashard.pjit.report.words import line_text, operation_text, short_path
from xlashard.wording import in_bytes, in_flop

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
        "replications": (),
    }
    return ProgramReport(**facts | changes)


def printed(found, width=100, **options):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    found.print(console=console, **options)
    return console.file.getvalue()


def words(text):
    return re.sub(r"\s+", " ", text)


def test_the_head_says_where_it_runs_and_what_it_costs():
    head = words(printed(report())[:600])
    for fact in (
        "step 8 devices (tpu TPU v5p) · 2 processes · data=2 × fsdp=4 · shardy",
        "sends 3.0 MiB in 1 collective, run 6 times: 3.0 MiB along fsdp",
        "holds 8.0 MiB arguments + 1.0 MiB other results + 2.0 MiB temporary",
        "computes 2.5 TFLOP, 3.0 MiB of memory read or written; XLA counts the body of a loop once",
    ):
        assert fact in head


def test_what_costs_most_stands_first():
    text = printed(report(replications=(WASTE,)))
    titles = ["sends", "Replicated silently", "Collectives", "Moved before", "Arguments", "Results"]
    places = [text.index(title) for title in [*titles, "Donated"]]
    assert places == sorted(places)


WASTE = ReplicationReport("constraint", "float32[8,8]", "P('x')", (1,), ("y",), 5 * MIB, HERE)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (WASTE, "the constraint at project/model.py:12 closes dimension 1: gathered along y"),
        (
            ReplicationReport("open dimension", "x", "P()", (0, 1), ("y",), 1),
            "dimensions 0, 1 left open, and left whole by the partitioner; y could cut it",
        ),
        (
            ReplicationReport("result", "result", "P()", (0,), ("x",), 1),
            "unspecified; x, which cuts an argument, could cut dimension 0",
        ),
    ],
)
def test_every_kind_of_replication_is_told(found, says):
    assert says in words(printed(report(replications=(found,)), 160))


def test_a_gather_is_told_by_who_needs_it_and_others_by_themselves():
    reduce = collective(
        "all-reduce", op_name="step/transpose(jvp())/mul", source=HERE, operands=("f32[2]",) * 3
    )
    gathered = collective(argument="params['w']", op_name="params['w']")
    unknown = collective(needed_by="", needed_by_source=None, times=1, times_known=False)
    text = printed(report(collectives=(collective(), reduce, gathered, unknown)), 120)
    rows = [words(line) for line in text.splitlines() if "3.0 MiB all" in words(line)]
    assert rows == [
        " 3.0 MiB all-gather ×6 fsdp f32[64,256] → f32[256,256] project/model.py:12 bd,df->bf ",
        " 3.0 MiB all-reduce ×6 fsdp 3 × f32[2] → f32[256,256] project/model.py:12 mul, backward ",
        " 3.0 MiB all-gather ×6 fsdp f32[64,256] → f32[256,256] project/model.py:12 params['w'] ",
        " 3.0 MiB all-gather ×? fsdp f32[64,256] → f32[256,256] XLA doesn't say ",
    ]


def test_what_is_not_certain_is_said():
    found = (collective(times_known=False), collective(conditional=True))
    text = words(printed(report(collectives=found)))
    assert "a loop without a known count is taken as one run" in text
    assert "every branch is taken as run" in text
    assert "in a branch" in text


def test_many_rows_are_summed_up_and_all_can_be_shown():
    inputs = tuple(value(f"w[{i}]", (i + 1) * MIB) for i in range(20))
    short, whole = printed(report(inputs=inputs)), printed(report(inputs=inputs), all=True)
    assert "and 12 more, 78.0 MiB: report.print(all=True)" in words(short)
    shown = re.findall(r"w\[(\d+)\]", short)
    assert shown == [str(i) for i in range(19, 11, -1)]
    # All of them, in their own order.
    assert re.findall(r" w\[(\d+)\]", whole) == [str(i) for i in range(20)]
    assert "report.print" not in whole


def test_what_differs_in_an_index_only_is_one_row():
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
        "12.0 MiB layers[*].w (12) could be donated to result[0][*].w",
    ):
        assert row in text
    assert text.index("66.0 MiB all-gather") < text.index("4.0 MiB all-reduce")
    whole = printed(found, 130, all=True)
    assert whole.count("layers[0].w") == 4
    assert "[*]" not in whole


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width):
    deep = value("state['optimizer'][1][0].mu['layers']['attention']['query']")
    text = printed(report(inputs=(deep,), replications=(WASTE,)), width)
    assert max(map(len, text.splitlines())) <= width


def test_shortened_paths_can_still_be_told_apart():
    deep = [f"state['optimizer'][1][0].{m}['layers']['{i}']['down']" for m in "mn" for i in "pq"]
    found = report(inputs=tuple(map(value, deep)))
    for width in (80, 100, 140):
        table = printed(found, width).split("Arguments")[1].split("Results")[0]
        for mark in (".m[", ".n[", "['p']['down']", "['q']['down']"):
            assert re.sub(r"\s", "", table).count(mark) == 2


def test_who_decided_is_a_column_only_where_it_differs():
    text = printed(report())
    assert "decided by" in text.split("Results")[0]
    assert "shardings by you" in text.split("Results")[1]
    assert "decided by" not in text.split("Results")[1]


def test_donations_say_what_was_lost_and_what_could_be():
    donations = (
        DonationReport("a", True, "result[0]", MIB),
        DonationReport("b", True, "", 2 * MIB, "no result has its 2 MiB"),
        DonationReport("c", False, "result[1]", 3 * MIB),
    )
    text = words(printed(report(donations=donations)).split("Donated")[1])
    assert "1 reused for results, 1.0 MiB on each device" in text
    assert "b donated, but not reused: no result has its 2 MiB" in text
    assert "c could be donated to result[1]" in text


def test_a_report_without_anything_to_say_prints():
    empty = report(
        cost=None, memory=None, inputs=(), outputs=(), collectives=(), moves=(), donations=()
    )
    assert words(printed(empty)).endswith("shardy sends nothing to other devices ")


def test_every_way_to_print_shows_the_same(monkeypatch, capsys):
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


def test_brackets_in_paths_are_no_markup():
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
def test_long_paths_lose_their_middle(path, most, short):
    assert short_path(path, most) == short


def test_files_are_named_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = SourceLine(str(tmp_path / "src" / "model.py"), 3, "", True)
    assert line_text(mine) == "src/model.py:3"
    assert line_text(SourceLine("<stdin>", 3, "", True)) == "<stdin>:3"


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
def test_operations_go_by_the_last_part_of_their_name(op_name, text):
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
