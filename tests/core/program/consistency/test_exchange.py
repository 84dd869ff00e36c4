"""Processes compare a program before they run it for the first time: in pods of real processes."""

import json
from pathlib import Path
from typing import Any

import pytest

import xlashard
from tests.core.processes import run_many
from tests.core.program.consistency import differing_programs

SCRIPT = Path(differing_programs.__file__)
ODD = 1


def run_cases(processes: int, devices: int, *names: str) -> dict[str, list[dict[str, Any]]]:
    """Return the outcome of each case, in every process."""
    outputs = run_many(SCRIPT, processes, devices, *names)
    found: dict[str, list[dict[str, Any]]] = {}
    for output in outputs:
        for line in output.splitlines():
            if line.startswith("CASE "):
                outcome = json.loads(line.removeprefix("CASE "))
                found.setdefault(outcome["case"], []).append(outcome)
    return found


@pytest.fixture(scope="module")
def cases() -> dict[str, list[dict[str, Any]]]:
    return run_cases(2, 2)


DIFFERENT = {
    "shapes": ("argument", ["train_step(float32[8], float32[8,4])", "The argument batch"]),
    "dtypes": ("argument", ["process 0: float32[8]", "process 1: int32[8]"]),
    "counts": ("argument", ["2 arguments", "3 arguments"]),
    "order": ("order", ["process 0: train_step", "process 1: evaluate", "same order"]),
    "constants": ("operation", ["3.5", "2.5", "in constants.<locals>.scaled: return y * factor"]),
    "branch": ("operation", ["+     %1 = stablehlo.exponential", "step: y = jnp.exp(y)"]),
    "inner_function": ("operation", ["-     %1 = stablehlo.add", "+     %1 = stablehlo.subtract"]),
    "in_shardings": ("sharding", ["argument x", "P('data',)", "P(None, 'data')"]),
    "out_shardings": ("sharding", ["result['b']", "(data=4)"]),
    "devices": ("devices", ["cpu 0, 1, 2048, 2049", "cpu 2049, 2048, 1, 0"]),
    "options": ("option", ["xla_cpu_enable_fast_math", "False", "True"]),
    "donations": ("donation", ["argument x", "nothing", "donated"]),
    "closed_over": ("closed over", ["model.weights, an array that apply closes over"]),
    "closed_over_on_a_device": ("closed over", ["weights, an array that apply closes over"]),
    "small_closed_over": ("closed over", ["table, an array that look_up closes over"]),
    "callbacks": ("callback", ["_twice", "_thrice"]),
    "movements": ("sharding", ["reshard(float32[8,8])", "{replicated}"]),
    "gradients": ("operation", ["loss = pjit(lambda x: (x**power).sum())"]),
    "compiled": ("operation", ["5.0", "4.0"]),
    "bound": ("operation", ["7.0", "6.0"]),
    "stablehlo": ("operation", ["stablehlo.multiply", "stablehlo.add"]),
    "huge": ("operation", ["line 6000", "stablehlo.log", "stablehlo.exponential"]),
    "jit_shapes": ("argument", ["train_step(float32[8], float32[8,4])", "The argument batch"]),
    "jit_branch": ("operation", ["stablehlo.sine", "step: y = jnp.sin(y)"]),
    "jit_closed_over": ("operation", ["1.0", "2.0"]),
    "flags": ("flags", ["LIBTPU_INIT_ARGS", "--xla_some_flag=1", "--xla_some_flag=2"]),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", DIFFERENT)
def test_differing_programs_raise_in_every_process(cases, name):
    kind, facts = DIFFERENT[name]
    outcomes = cases[name]
    assert [outcome["error"] for outcome in outcomes] == ["ProgramsDifferError"] * 2
    text = outcomes[0]["text"]
    assert text == outcomes[1]["text"], "every process raises the same error"
    assert all(outcome["seconds"] < 60 for outcome in outcomes)
    assert all(outcome["difference"] == kind for outcome in outcomes), text
    assert all(outcome["processes"] == [ODD] for outcome in outcomes)
    assert not [fact for fact in facts if fact not in text], text
    assert "To fix this, " in text
    assert "XLASHARD_CHECK_PROGRAMS=0" in text


@pytest.mark.integration
def test_differing_operation_has_its_source_line_in_both_processes(cases):
    lines = cases["branch"][0]["text"].splitlines()
    source = SCRIPT.read_text().splitlines()
    for process, code in ((0, "return y.sum()"), (1, "y = jnp.exp(y)")):
        shown = next(x for x in lines if x.startswith(f"  process {process}: {SCRIPT}:"))
        number = int(shown.split(f"{SCRIPT}:")[1].split()[0])
        assert source[number - 1].strip() == code
    assert len(lines) < 20


@pytest.mark.integration
def test_flags_that_may_differ_are_ignored(cases):
    assert "xla_dump_to" not in cases["flags"][0]["text"]


@pytest.mark.integration
def test_processes_run_a_common_program_after_each_case(cases):
    assert set(cases) == set(differing_programs.CASES)
    for number, name in enumerate(differing_programs.CASES):
        if name != "unchecked":
            assert [outcome["after"] for outcome in cases[name]] == [8.0 * number] * 2, name


SAME = {
    "same": 64.0,
    "jit_same": [576.0, 576.0, 576.0, 1, 2.0],
    "threads": [12.0, 12.0, 13.0, 13.0],
    "forgotten": 22.0,
    "analysed": True,
    "all_unchecked": 62.0,
}


@pytest.mark.integration
@pytest.mark.parametrize("name", SAME)
def test_processes_with_equal_programs_continue(cases, name):
    assert [outcome.get("result", outcome) for outcome in cases[name]] == [SAME[name]] * 2


@pytest.mark.integration
def test_missing_process_is_named(cases):
    waited, other = cases["missing"]
    assert "error" not in other
    assert waited["error"] == "ProcessesError"
    assert waited["processes"] == [1]
    assert "waited 2 s for process 1 of 2" in waited["text"]
    assert "XLASHARD_PROGRAMS_TIMEOUT" in waited["text"]


@pytest.mark.integration
def test_process_with_disabled_comparison_is_named(cases):
    waited, other = cases["unchecked"]
    assert other["result"] == 52.0
    assert waited["error"] == "ProcessesError"
    assert waited["seconds"] < 60
    assert "turned off in process 1 (XLASHARD_CHECK_PROGRAMS=0" in waited["text"]


@pytest.mark.integration
def test_minority_process_is_reported_as_differing():
    found = run_cases(4, 1, "branch", "order")
    for name, function in (("branch", "step"), ("order", "train_step")):
        texts = {outcome["text"] for outcome in found[name]}
        assert len(texts) == 1
        text = texts.pop()
        assert f"processes 0, 1, 2: {function}(float32[8])" in text
        assert "process 3: " in text
        assert [outcome["processes"] for outcome in found[name]] == [[3]] * 4


@pytest.mark.integration
def test_deadlock_error_names_waiting_and_ended_processes():
    script = SCRIPT.with_name("branching.py")
    assert "all found out" in run_many(script, 2, 2)[0]


@pytest.mark.integration
def test_unchanged_jax_script_is_compared(monkeypatch):
    monkeypatch.setenv("XLASHARD_CHECK_PROGRAMS", "1")
    command = Path(xlashard.__file__).with_name("__main__.py")
    script = SCRIPT.with_name("plain_programs.py")
    outputs = run_many(command, 2, 1, "run", "--", "python", str(script))
    for output in outputs:
        assert "SAME 8.0" in output and "ERROR ProgramsDifferError" in output
    # Long before the timeout of an hour.
    assert "ENDED DeadlockError" in outputs[0]
    assert "process 1 has ended (its program has completed)" in outputs[0]
