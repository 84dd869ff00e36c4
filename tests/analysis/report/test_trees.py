"""Treemaps and flame graphs of reports."""

from itertools import pairwise

import pytest

from tests.predict.preflight.examples import ALL, FITTING
from xlashard.analysis.report.trees import TreeDrawing, make_tree
from xlashard.predict.preflight.render.preflight_sections import list_memory_parts, list_parts
from xlashard.support.formatting import in_bytes, in_seconds


def drawing_of(report, section: str) -> TreeDrawing:
    return next(part for part in list_parts(report) if getattr(part, "id", "") == section).figure


@pytest.mark.parametrize("name", ALL)
def test_areas_of_a_treemap_are_in_proportion_to_the_memory(name):
    memory = ALL[name].memory
    drawing = drawing_of(ALL[name], "memory-map")
    parts = {part.name: part.nbytes for part in list_memory_parts(memory)}
    whole = drawing.boxes[0].height * 100 if len(drawing.tree.parts) == 1 else 100 * 340
    found = [box for box in drawing.boxes if box.text in parts and box.title.startswith(box.text)]
    for box in found:
        share = box.width * box.height / whole
        assert share == pytest.approx(parts[box.text] / memory.total_bytes, abs=0.003)
        assert box.kind == box.text
        assert f"{box.text}: {in_bytes(parts[box.text])}" in box.title
    assert {box.text for box in found} >= {"arguments", "temporaries"} & {
        k for k in parts if parts[k]
    }


def test_boxes_of_a_treemap_lie_inside_of_their_whole_without_overlap():
    paths = [[f"a{i % 7}", f"/b{i % 3}", f"/c{i}"] for i in range(60)]
    tree = make_tree("", [(path, float(i * i + 1)) for i, path in enumerate(paths)])
    boxes = {box.title.split(":")[0]: box for box in TreeDrawing(tree, str, is_map=True).boxes}

    def overlap(one, other):
        width = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
        height = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
        return max(0.0, width) * max(0.0, height)

    assert len(boxes) > 40
    for path, box in boxes.items():
        outer = boxes.get(path.rpartition("/")[0], box)
        assert overlap(box, outer) == pytest.approx(box.width * box.height)
        for other_path, other in boxes.items():
            if not other_path.startswith(path) and not path.startswith(other_path):
                assert overlap(box, other) < 1e-6


def test_the_largest_parts_are_at_the_left():
    amounts = [(["mlp", "/dot"], 6.0), (["loss"], 1.0), (["mlp", "/add"], 2.0), (["tiny"], 0.001)]
    drawing = TreeDrawing(make_tree("step", amounts), in_seconds)
    shown = [(box.text, box.x, box.width, box.y) for box in drawing.boxes]
    whole = 9.001
    expected = [
        ("step", 0.0, 100.0, 0.0),
        ("mlp", 0.0, 800 / whole, 20.0),
        ("dot", 0.0, 600 / whole, 40.0),
        ("add", 600 / whole, 200 / whole, 40.0),
        ("loss", 800 / whole, 100 / whole, 20.0),
        ("1 more", 900 / whole, 0.1 / whole, 20.0),
    ]
    for found, wanted in zip(shown, expected, strict=True):
        assert found[0] == wanted[0]
        assert found[1:] == pytest.approx(wanted[1:])
    assert drawing.words.startswith("step: 9.00 s, 100")
    assert "mlp/dot: 6.00 s" in drawing.words


def test_a_name_with_a_single_part_has_the_name_of_both():
    (part,) = make_tree("step", [(["model", "/mlp", "/dot"], 1.0)]).parts
    assert (part.name, part.amount, part.parts) == ("model/mlp/dot", 1.0, ())


def test_modules_have_the_time_of_the_lines():
    tree = drawing_of(FITTING, "time-by-module").tree
    time = FITTING.time
    assert tree.amount == pytest.approx(
        sum(each.seconds for each in time.lines) + time.other_lines_seconds
    )
    assert next(part.name for part in tree.parts) == "model"
    assert all(one.amount >= other.amount for one, other in pairwise(tree.parts))
    sent = drawing_of(FITTING, "sent-by-module").tree
    assert sent.amount == sum(each.sent_bytes for each in FITTING.traffic)
