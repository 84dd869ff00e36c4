"""Published operations: the table, and predictions of a few of its programs."""

import pytest

from benchmarks import operations
from benchmarks._operation_programs import PROGRAMS


def test_every_published_operation_has_a_program_and_a_source() -> None:
    rows = list(operations.published_operations())
    assert {row.program for row in rows} <= set(PROGRAMS)
    assert len(rows) > 100 and all(row.source and row.microseconds > 0 for row in rows)
    chips = {row.group.partition(" ")[0] for row in rows}
    assert chips == {"v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200", "gb200"}


@pytest.mark.slow
def test_predicted_times_of_large_matmuls_and_copies_match_published() -> None:
    # The largest of each, whose time isn't that of a launch.
    largest: dict[str, operations.PublishedOperation] = {}
    for row in operations.published_operations():
        if row.program in ("product", "copy") and row.group.startswith(("v", "tpu")):
            largest[row.group] = max(
                row, largest.get(row.group, row), key=lambda one: one.microseconds
            )
    for row in largest.values():
        found = operations.predict(row).time.seconds * 1e6
        assert found == pytest.approx(row.microseconds, rel=0.1), row.group


def test_published_operation_matches_its_program_by_memory() -> None:
    row = next(row for row in operations.published_operations() if row.group == "v5p gated linear")
    assert row.megabytes == 1410 and row.is_program_of(operations.predict(row))


def test_summary_uses_the_median_of_each_group() -> None:
    text = operations.summary({"v6e copy": [0.1, -0.3, 0.2], "v6e product": [-0.05]})
    assert "v6e copy" in text and "median error  20.0%, from  -30.0% to  +20.0%" in text
    assert text.endswith("2 groups: median of the groups' median errors 12.5%, goal 10%: not met")
