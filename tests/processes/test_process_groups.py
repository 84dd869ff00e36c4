"""Names of processes in messages."""

from xlashard.wording import format_by_process, format_processes


def test_long_lists_are_truncated() -> None:
    assert format_processes([3]) == "process 3"
    assert format_processes(range(8)) == "processes 0, 1, 2, 3, 4, 5, 6, 7"
    assert format_processes(range(10)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_processes_with_equal_texts_are_grouped() -> None:
    texts = dict.fromkeys(range(64), "step 8")
    assert format_by_process({**texts, 3: "step 9"}) == (
        "processes 0, 1, 2, 4, 5, 6, 7, 8 and 55 more: step 8; process 3: step 9"
    )
    assert format_by_process({1: "b", 0: "a"}) == "process 0: a; process 1: b"
