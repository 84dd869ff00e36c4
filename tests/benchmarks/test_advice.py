"""The benchmark that follows the advice of preflights."""

import pytest

from benchmarks.advice import PROGRAMS, Followed, make_layered
from xlashard import P
from xlashard.predict.preflight.report.preflight_model import AdviceReport, Suggestion


def test_advice_changes_the_shardings_and_the_mesh_that_it_names() -> None:
    program = make_layered()
    rows = Suggestion("parameters['output']", None, (), (), (("data", "model"), ()))
    order = Suggestion("", None, (), (), (), order=("model", "data"))
    changed = program.follow(AdviceReport("", (rows, order), 0.0))
    assert changed.order == ("model", "data")
    assert changed.specs == {**program.specs, rows.path: P(("data", "model"), None)}
    assert program.specs[rows.path] == P(None, "model")
    other = Suggestion("parameters['none']", None, (), (), (("data",),))
    with pytest.raises(AssertionError, match="none"):
        program.follow(AdviceReport("", (other,), 0.0))


def test_a_program_that_does_not_change_as_predicted_is_named() -> None:
    followed = {"predicted_seconds": -0.1, "step_seconds": 1.0, "predicted_bytes": 5}
    for changes, is_right in (((-0.1, 5), True), ((-0.05, 5), False), ((-0.1, 6), False)):
        seconds, peak = changes
        row = Followed("gru", seconds=seconds, peak_bytes=peak, **followed)
        assert row.is_right is is_right
    assert "gru" in PROGRAMS
