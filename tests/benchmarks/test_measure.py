"""The benchmark helper, run on a clock that the candidates themselves advance."""

import argparse
import dataclasses
import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console

from benchmarks import _measure
from benchmarks._measure import (
    ExtraGoal,
    Line,
    Measurement,
    Options,
    RatioGoal,
    Report,
    TimeGoal,
    compare,
    format_quantity,
    format_seconds,
    interleave,
    read_options,
)


class FakeTime:
    """Clock that advances only by the tasks that `task` makes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def task(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.calls.append(name)
            self.now += seconds

        return run


def quiet_report(name: str = "bench") -> Report:
    return Report(name, console=Console(file=io.StringIO(), width=120))


def test_seconds_per_call_and_ratio_are_exact() -> None:
    clock = FakeTime()
    tasks = {"slow": clock.task("slow", 0.004), "fast": clock.task("fast", 0.001)}
    measured = interleave(tasks, rounds=5, inner=3, clock=clock)
    assert list(measured) == ["slow", "fast"]
    assert measured["slow"].samples == pytest.approx([0.004] * 5)
    assert measured["fast"].median == pytest.approx(0.001)
    assert measured["slow"].ratio_to(measured["fast"]) == pytest.approx(4.0)
    assert measured["slow"].extra_over(measured["fast"]) == pytest.approx(0.003)


def test_short_calls_are_repeated_until_a_sample_is_long_enough() -> None:
    clock = FakeTime()
    tasks = {"short": clock.task("short", 1e-5), "long": clock.task("long", 0.5)}
    measured = interleave(tasks, rounds=1, warmup=0, clock=clock)
    assert measured["short"].inner == 256
    assert measured["short"].inner * 1e-5 >= _measure.MIN_SAMPLE_SECONDS
    assert measured["long"].inner == 1


def test_constant_clock_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_measure, "MAX_INNER", 64)
    measured = interleave({"idle": lambda: None}, rounds=1, clock=lambda: 0.0)
    assert measured["idle"].inner == 64


def test_every_round_runs_each_candidate_once_in_changing_order() -> None:
    clock = FakeTime()
    tasks = {name: clock.task(name, 1.0) for name in "abc"}
    interleave(tasks, rounds=6, inner=1, warmup=0, clock=clock)
    rounds = ["".join(clock.calls[start : start + 3]) for start in range(0, 18, 3)]
    assert rounds == ["abc", "bca", "cab", "cba", "acb", "bac"]


def test_warmup_calls_are_not_timed() -> None:
    clock = FakeTime()
    durations = iter([100.0, 100.0, 1.0, 1.0])

    def settle() -> None:
        clock.now += next(durations)

    measured = interleave({"settle": settle}, rounds=2, inner=1, warmup=2, clock=clock)
    assert measured["settle"].samples == (1.0, 1.0)


def test_paired_ratio_ignores_a_slow_moment_that_hits_both() -> None:
    slow_moments = (1.0, 9.0, 1.0, 9.0, 9.0)
    ours = Measurement("ours", 1, tuple(2.0 * moment for moment in slow_moments))
    theirs = Measurement("theirs", 1, slow_moments)
    assert ours.ratio_to(theirs) == 2.0
    assert ours.median == 18.0


def test_measurements_of_different_rounds_do_not_pair() -> None:
    one, two = Measurement("one", 1, (1.0,)), Measurement("two", 1, (1.0, 1.0))
    with pytest.raises(ValueError, match="'one' .*1.* 'two' 2"):
        one.ratio_to(two)
    with pytest.raises(ValueError, match="'one' and 'two'"):
        one.extra_over(two)


@pytest.mark.parametrize(
    ("candidates", "rounds", "inner", "message"),
    [
        ({}, 1, None, "candidate"),
        ({"a": int}, 0, None, "rounds=0"),
        ({"a": int}, 1, 0, "inner=0"),
    ],
)
def test_empty_measurements_are_refused(
    candidates: dict[str, Callable[[], object]], rounds: int, inner: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        interleave(candidates, rounds=rounds, inner=inner)


def test_a_row_reports_the_ratio_to_the_lower_bound() -> None:
    times = {"theirs": (4.0, 8.0), "ours": (2.0, 2.0), "copy": (1.0, 1.0)}
    measured = {name: Measurement(name, 1, samples) for name, samples in times.items()}
    report = quiet_report()
    rows = report.add("move", measured, baseline="theirs", floor="copy")
    ours = rows[1].as_json()
    assert (ours["floor"], ours["floor_ratio"]) == ("copy", 2.0)
    assert ours["ratio"] == pytest.approx(0.375)
    assert "to copy" in report.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="'nothing'"):
        report.add("other", measured, baseline="theirs", floor="nothing")


def test_goals_compare_ratios_times_and_differences() -> None:
    slow, base = Measurement("slow", 1, (3.0, 3.0)), Measurement("base", 1, (2.0, 2.0))
    assert RatioGoal(1.5).met(slow, base)
    assert not RatioGoal(1.4).met(slow, base)
    assert TimeGoal(3.0).met(slow, base)
    assert not TimeGoal(2.9).met(slow, base)
    assert ExtraGoal(1.0).met(slow, base)
    assert not ExtraGoal(0.9).met(slow, base)


def test_report_prints_the_table_and_writes_json(tmp_path) -> None:
    measured = {
        "base": Measurement("base", 7, (1e-3, 1e-3, 1e-3)),
        "good": Measurement("good", 7, (9e-4, 9e-4, 9e-4)),
        "bad": Measurement("bad", 7, (2e-3, 2e-3, 2e-3)),
    }
    report = quiet_report("dispatch")
    report.add("one leaf", measured, baseline="base", goals={"good": 1.0, "bad": TimeGoal(1e-3)})
    path = tmp_path / "deep" / "figures.json"
    status = report.finish(Options(rounds=3, json=path, strict=False))
    assert status == 0
    assert report.missed() == ["one leaf: bad"]

    printed = report.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "0.900 ×" in printed
    assert "baseline" in printed
    assert "1 of 2 goals met" in printed

    written = json.loads(path.read_text())
    assert written["benchmark"] == "dispatch"
    assert written["environment"]["processors"] >= 1
    rows = {row["name"]: row for row in written["tables"][0]["rows"]}
    assert rows["good"]["ratio"] == pytest.approx(0.9)
    assert rows["good"]["ok"] is True
    assert rows["bad"]["ok"] is False
    assert rows["base"]["ok"] is None
    assert rows["base"]["calls_per_sample"] == 7


def growth_lines(row: str, exponents: tuple[float, float]) -> list[Line]:
    """Lines of a row whose sides grow by two exponents from 1 ms and 0.9 ms at one leaf."""
    theirs, ours = exponents
    return [
        Line(
            row,
            Measurement("jax", 1, (1e-3 * size**theirs,)),
            Measurement("xlashard", 1, (9e-4 * size**ours,)),
            RatioGoal(1.1),
            (size, "leaves"),
        )
        for size in (1, 10, 100)
    ]


def test_growth_is_the_slope_of_logarithms_and_marked_where_it_exceeds_jax(tmp_path) -> None:
    report = quiet_report()
    lines = [*growth_lines("steady", (1.0, 1.02)), *growth_lines("faster", (0.5, 0.8))]
    single = Measurement("jax", 1, (1e-3,)), Measurement("xlashard", 1, (2e-3,))
    report.add_growth("calls", [*lines, Line("x[index]", *single, RatioGoal(1.1))])
    steady, faster, without_size = (report.tables["calls"][number] for number in (2, 5, 6))
    assert isinstance(steady, Line) and isinstance(faster, Line)
    assert steady.growth == pytest.approx((1.0, 1.02)) and steady.ok
    assert faster.growth == pytest.approx((0.5, 0.8)) and faster.is_faster_growth
    assert not without_size.ok
    missed = ["faster, 10 leaves", "faster, 100 leaves", "x[index]"]
    assert report.missed() == [f"calls: {row}" for row in missed]
    printed = report.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "1 leaf " in printed and "grows" in printed and "x[index]" in printed
    report.finish(Options(rounds=1, json=tmp_path / "figures.json", strict=False))
    written = json.loads((tmp_path / "figures.json").read_text())["tables"][0]["rows"]
    assert [row["growth"] for row in written[:2]] == [None, None]
    assert (written[5]["size"], written[5]["growth"]) == ("100 leaves", pytest.approx(0.8))
    with pytest.raises(ValueError, match="'calls'"):
        report.add_growth("calls", lines)


def test_growth_may_have_a_limit_of_its_own() -> None:
    [*_, last] = _measure.fit_exponents(growth_lines("report", (0.5, 0.8)))
    assert last.is_faster_growth
    assert not dataclasses.replace(last, growth_limit=1.0).is_faster_growth


def test_a_floor_is_the_goal_where_it_exceeds_it_and_limits_the_growth() -> None:
    clock, lines = FakeTime(), []
    for size, floor in ((1, 1.5), (10, 30.0)):
        seconds = {"jax": float(size), "xlashard": floor, "floor": floor}
        work = {name: clock.task(name, second) for name, second in seconds.items()}
        line = compare("a call", work, rounds=3, inner=1, clock=clock, size=(size, "leaves"))
        lines.append(line)
    assert [line.goal.limit for line in lines] == pytest.approx([1.545, 3.09])
    assert [line.floor_ratio for line in lines] == pytest.approx([1.5, 3.0])
    assert all(line.ok for line in _measure.fit_exponents(lines))
    slower = dataclasses.replace(lines[-1], ours=Measurement("xlashard", 1, (31.0,) * 3))
    assert not slower.ok
    report = quiet_report()
    report.add_growth("calls", lines)
    assert "floor" in report.console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert lines[0].as_json()["floor_ratio"] == pytest.approx(1.5)
    low = {name: clock.task(name, 1.0) for name in ("jax", "xlashard", "floor")}
    assert compare("a call", low, rounds=3, inner=1, clock=clock).goal == RatioGoal(1.1)


def test_rounds_end_after_three_once_the_time_is_over() -> None:
    clock = FakeTime()
    work = {"jax": clock.task("jax", 2.0), "xlashard": clock.task("xlashard", 1.0)}
    line = compare("a call", work, rounds=9, inner=1, clock=clock, seconds=0)
    assert len(line.ours.samples) == 3
    assert (line.name, line.size_text, line.ok) == ("a call", "", True)


def test_tiny_ratio_is_not_rounded_to_zero() -> None:
    measured = {"a": Measurement("a", 1, (1.0,)), "b": Measurement("b", 1, (1.5e-4,))}
    report = quiet_report()
    report.add("table", measured, baseline="a")
    assert "0.00015 ×" in report.console.file.getvalue()  # pyright: ignore


def test_strict_turns_a_missed_goal_into_a_failing_exit() -> None:
    measured = {"a": Measurement("a", 1, (1.0,)), "b": Measurement("b", 1, (2.0,))}
    report = quiet_report()
    report.add("table", measured, baseline="a", goals={"b": 1.5})
    assert report.finish(Options(rounds=1, json=None, strict=True)) == 1


def test_report_refuses_unknown_baselines_and_repeated_titles() -> None:
    measured = {"a": Measurement("a", 1, (1.0,))}
    report = quiet_report()
    with pytest.raises(ValueError, match=r"\['c'\].* \['a'\]"):
        report.add("table", measured, baseline="c")
    report.add("table", measured, baseline="a")
    with pytest.raises(ValueError, match="'table'"):
        report.add("table", measured, baseline="a")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5, "1.500 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 µs"), (7e-9, "7 ns"), (0, "0 ns")],
)
def test_times_are_formatted_in_a_suitable_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_quantities_have_units() -> None:
    assert format_quantity(2.5e-3, "s") == "2.5 ms"
    assert format_quantity(1536, "bytes") == "1.5 KiB"
    assert format_quantity(3 * 2**30, "bytes") == "3,072.0 MiB"
    assert format_quantity(20_000, "objects") == "20,000 objects"


def test_options_are_parsed(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--rounds", "5", "--json", str(tmp_path / "x.json"), "--strict"]
    assert read_options("demo", argv=argv) == Options(5, tmp_path / "x.json", True)
    assert read_options("demo", rounds=9, argv=[]) == Options(9, None, False)
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--mb", type=int)
    assert read_options("demo", argv=["--mb", "4"], own=own) == Options(31, None, False)
    with pytest.raises(SystemExit):
        read_options("demo", argv=["--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
