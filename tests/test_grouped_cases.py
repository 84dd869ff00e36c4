"""Many cases in one test: all run, and failed cases are named."""

import re
import traceback

import pytest

from tests.grouped_cases import Together, at_once, sweep


class Numbers:
    def test_small(self, number: int, most: int) -> None:
        assert number < most

    def test_reported(self, number: int) -> None:
        with pytest.raises(ValueError, match="at all"):
            if number != 3:
                raise ValueError("at all")


def subjects(*numbers: int):
    return {f"the number {n}": lambda n=n: {"number": n, "most": 5, "rest": 0} for n in numbers}


def test_all_cases_run_and_failed_cases_are_named() -> None:
    suite = at_once(Numbers)()
    suite.test_small(subjects(1, 2, 3))
    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed") as caught:
        suite.test_small(subjects(7, 1, 9, 3))
    shown = "".join(traceback.format_exception(caught.value))
    assert re.findall("in the case: .*", shown) == [
        "in the case: the number 7",
        "in the case: the number 9",
    ]
    assert "assert 7 < 5" in shown and "assert 9 < 5" in shown


def test_pytest_failures_count_as_failed_cases() -> None:
    with pytest.raises(BaseExceptionGroup, match="1 of 2 cases failed") as caught:
        at_once(Numbers)().test_reported(subjects(2, 3))
    assert "DID NOT RAISE" in str(caught.value.exceptions[0])
    assert caught.value.exceptions[0].__notes__ == ["in the case: the number 3"]


def test_failure_to_build_a_subject_names_the_case() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        at_once(Numbers)().test_small(
            {"none": lambda: {}["number"], "one": subjects(1)["the number 1"]}
        )
    assert caught.value.exceptions[0].__notes__ == ["in the case: none"]


def test_no_case_at_all_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="no case"), Together():
        pass


def test_interrupt_ends_the_remaining_cases() -> None:
    with pytest.raises(KeyboardInterrupt), Together() as together:
        with together.case("first"):
            raise ValueError
        with together.case("second"):
            raise KeyboardInterrupt


def test_sweep_marks_all_but_the_quick_cases_slow() -> None:
    one, two, three = sweep(["one", "two", "three"], quick=["two"])
    assert two == "two"
    assert [[mark.name for mark in case.marks] for case in (one, three)] == [["slow"]] * 2
    assert (one.values, three.values) == (("one",), ("three",))
    with pytest.raises(AssertionError, match="four"):
        sweep(["one"], quick=["four"])
