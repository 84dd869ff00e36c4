"""Times by source line and the timeline, held against the schedule of hand-written modules."""

import numpy as np
import pytest

from tests.predict.costs.test_schedule import ARRAY, LOOP, RATES
from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.geometry import MeshGrid
from xlashard.hlo import read
from xlashard.hlo.buffers import Allocation, BufferValue, bytes_in_use
from xlashard.predict.costs.cost_analysis import analyze_cost
from xlashard.predict.costs.network_model import NetworkCost
from xlashard.predict.costs.operation import OperationModel
from xlashard.predict.costs.schedule import walk_schedule
from xlashard.predict.preflight.attribution.step_lines import StepLines
from xlashard.predict.preflight.report.step_model import FoldedTimeline

LINES = """
FileNames
1 "/home/me/model.py"
FunctionNames
1 "layer"
FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=9}
2 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=1 end_column=9}
StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
"""


def step_lines(body: str, computations: str = "", seconds: float = 1e-3) -> StepLines:
    """Return the lines of a module, each of whose collectives occupies the links for some time."""
    module = read(
        f"HloModule m, is_scheduled=true, num_partitions=4\n{LINES}{computations}\nENTRY main {{\n"
        f"p = {ARRAY} parameter(0)\n{body}\n}}\n"
    )
    cost = NetworkCost(links=("x+", "x-"), expected_seconds=seconds)
    costs = [(c, cost) for c in module.collectives]
    schedule = walk_schedule(module, costs, OperationModel(module, RATES), RATES)
    grid = MeshGrid(("data",), (4,))
    return StepLines(module, schedule, module.collectives, grid, SourceLocator("", ""))


def meta(name: str, frame: int) -> str:
    return f'metadata={{op_name="step/{name}" stack_frame_id={frame}}}'


GATHER = (
    f"s = ({ARRAY}, {ARRAY}) all-gather-start(p), channel_id=1, replica_groups=[1,4]<=[4], "
    f"use_global_device_ids=true, dimensions={{0}}, {meta('all_gather', 1)}\n"
)


def test_line_times_add_up_to_the_schedule() -> None:
    found = step_lines(
        f"{GATHER}a = {ARRAY} exponential(p), {meta('exp', 2)}\n"
        f"d = {ARRAY} all-gather-done(s)\nROOT r = {ARRAY} add(d, a), {meta('add', 2)}"
    )
    lines = {line.kind: line for line in found.lines}
    assert sum(line.seconds for line in found.lines) == pytest.approx(found.schedule.seconds)
    assert found.other_seconds == pytest.approx(0.0, abs=1e-12)
    gather, exponential = lines["all-gather"], lines["exponential"]
    # The wait belongs to the line that needs the gathered value.
    assert gather.source is not None and gather.source.line == 20
    assert gather.exposed_seconds == gather.seconds == pytest.approx(1e-3 - exponential.seconds)
    assert (gather.bound, exponential.bound, exponential.exposed_seconds) == ("ici", "hbm", 0.0)
    assert found.lines[0] == gather
    assert sum(line.hbm_bytes for line in found.lines) == analyze_cost(found.module).hbm_bytes > 0
    assert lines["add"].hbm_bytes == 1.5 * exponential.hbm_bytes
    (span,) = [s for s in found.timeline().blocks[0].spans if s.track == "along data"]
    assert (span.start, span.seconds, found.lines[span.line]) == (0.0, 1e-3, gather)


def test_folded_timeline_shows_one_iteration_of_a_loop() -> None:
    found = step_lines(
        f"zero = s32[] constant(0)\nstate = (s32[], {ARRAY}) tuple(zero, p)\n"
        f"loop = (s32[], {ARRAY}) while(state), condition=condition, body=body\n"
        f"x = {ARRAY} get-tuple-element(loop), index=1\n"
        f"ROOT r = {ARRAY} exponential(x), {meta('exp', 1)}",
        LOOP,
    )
    timeline = found.timeline()
    folded = FoldedTimeline(timeline)
    assert [(block.name, len(block.spans)) for block in timeline.blocks] == [
        ("main", 2),
        ("body", 2),
    ]
    loop, exponential = timeline.blocks[0].spans
    assert (loop.block, loop.times, loop.resource) == (1, 7, "loop")
    body = timeline.blocks[1].seconds
    assert loop.seconds == pytest.approx(7 * body)
    assert folded.seconds == pytest.approx(body + exponential.seconds)
    lines = {line.kind: line for line in found.lines}
    assert lines["negate"].hbm_bytes == 7 * lines["exponential"].hbm_bytes > 0
    spans = {each.span.name: each for each in folded.spans()}
    assert spans["r"].start == pytest.approx(body)
    assert (spans["y"].depth, spans["y"].runs, spans["r"].runs) == (1, 7, 1)
    assert max(each.start + each.seconds for each in folded.spans()) == pytest.approx(
        folded.seconds
    )


def test_memory_over_time_counts_shared_bytes_once() -> None:
    shape = read(f"HloModule m\nENTRY e {{\nROOT p = {ARRAY} parameter(0)\n}}").computations["e"]
    array = shape.instructions["p"].shape
    values = [
        BufferValue(name, (), size, offset, array, live)
        for name, size, offset, live in (
            ("a", 100, 0, (0, 4)),
            ("b", 50, 50, (2, 6)),
            ("c", 30, 100, (6, 9)),
        )
    ]
    heap = Allocation(0, 130, values=tuple(values))
    assert bytes_in_use(heap, np.array([0, 3, 5, 6, 9])).tolist() == [100, 100, 50, 80, 30]
