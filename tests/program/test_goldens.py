"""What is written on `@main`, word by word, for each partitioner; and what is refused, and how."""

from pathlib import Path

import pytest

from tests.goldens import check_golden, check_no_others, join_sections
from tests.program.cases import INVALID, VALID
from tests.program.helpers import lower, text_of
from xlashard.errors import DonationError, XlashardError

GOLDENS = Path(__file__).parent / "goldens"
ERRORS = "errors.txt"


@pytest.mark.parametrize("case", VALID, ids=lambda c: c.name)
def test_module(case, partitioner, update_goldens):
    lowered = lower(case.source, case.plan(partitioner), case.tokens)
    text = f"// {case.says}\n{text_of(lowered)}"
    if lowered.donation.unusable:
        with pytest.raises(DonationError) as caught:
            lowered.report_donation("strict", "f")
        text += "\n" + "\n".join(f"// {line}" for line in str(caught.value).splitlines())
    check_golden(GOLDENS / partitioner.value / f"{case.name}.mlir", text, update=update_goldens)


def test_errors(partitioner, update_goldens):
    found = {}
    for case in INVALID:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            lower(case.source, case.plan(partitioner), case.tokens)
        assert isinstance(caught.value, XlashardError), case.name
        found[case.name] = f"{type(caught.value).__name__}: {caught.value}"
    path = GOLDENS / partitioner.value / ERRORS
    check_golden(path, join_sections(found), update=update_goldens)


def test_each_golden_has_its_case(partitioner, update_goldens):
    names = {f"{case.name}.mlir" for case in VALID} | {ERRORS}
    check_no_others(GOLDENS / partitioner.value, names, update=update_goldens)


def test_no_golden_holds_places_of_source_files():
    for path in GOLDENS.rglob("*.*"):
        assert "loc(" not in path.read_text(encoding="utf-8"), path.name
