"""Names of processes in messages."""

from types import SimpleNamespace

from xlashard.support.formatting import format_by_process, format_processes, format_two_device_lists


def test_long_lists_are_truncated() -> None:
    assert format_processes([3]) == "process 3"
    assert format_processes(range(8)) == "processes 0, 1, 2, 3, 4, 5, 6, 7"
    assert format_processes(range(10)) == "processes 0 to 9"
    assert format_processes([*range(9), 11]) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_processes_with_equal_texts_are_grouped() -> None:
    texts = dict.fromkeys(range(64), "step 8")
    assert format_by_process({**texts, 3: "step 9"}) == (
        "processes 0, 1, 2, 4, 5, 6, 7, 8 and 55 more: step 8; process 3: step 9"
    )
    assert format_by_process({1: "b", 0: "a"}) == "process 0: a; process 1: b"


def test_long_lists_of_devices_show_their_first_difference() -> None:
    devices = [SimpleNamespace(id=i, platform="tpu") for i in range(32)]
    swapped = [*devices[:2], devices[3], devices[2], *devices[4:]]
    assert format_two_device_lists(devices, swapped) == (
        "32 devices [0, 1, ..., 31] (tpu), 2 at position 2",
        "32 devices [0, 1, ..., 31] (tpu), 3 at position 2",
    )
    assert format_two_device_lists(devices[:2], swapped[1:3]) == (
        "2 devices [0, 1] (tpu)",
        "2 devices [1, 3] (tpu)",
    )
