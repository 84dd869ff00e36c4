"""Predictions beside profiles: one of JAX on CPU, and hand-made ones as TPUs write them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from tests.predict.preflight.examples import FITTING, LAYER, LINES, SECONDS
from xlashard.errors import ArgumentError
from xlashard.predict.costs.gpu.gpu_operation import gpu_rates
from xlashard.predict.costs.rates import rates_of
from xlashard.predict.preflight.report.measured import (
    calibration_text,
    compare_with_profile,
    read_calibrations,
)
from xlashard.predict.preflight.report.profile_reader import read_profile
from xlashard.predict.preflight.report.step_model import TimelineSpan
from xlashard.predict.targets.gpu.gpu_models import BY_NAME as GPUS
from xlashard.support.formatting import plain_text
from xlashard.tpu import topology

type Event = tuple[str, float, float, str]
"""Name, start and duration in seconds, JAX name."""


def write_names(kind: str, names: Sequence[str]) -> str:
    """Return the table of a plane that numbers names of events or of stats."""
    return "".join(
        f'{kind}_metadata {{ key: {n} value {{ id: {n} name: "{name}" }} }}\n'
        for n, name in enumerate(names, 1)
    )


def write_profile(folder: Path, operations: list[Event], modules: list[Event]) -> Path:
    """Write a profile as TPU's profiler does, and return its file."""
    names = sorted({name for name, *_ in (*operations, *modules)})
    lines = ""
    for number, (title, events) in enumerate((("XLA Modules", modules), ("XLA Ops", operations))):
        lines += f'lines {{ id: {number} name: "{title}" timestamp_ns: 1000\n'
        for name, start, seconds, op_name in events:
            stat = f'stats {{ metadata_id: 1 str_value: "{op_name}" }}' if op_name else ""
            lines += (
                f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {round(start * 1e12)} "
                f"duration_ps: {round(seconds * 1e12)} {stat} }}\n"
            )
        lines += "}\n"
    metadata = write_names("event", names)
    stats = write_names("stat", ["tf_op"])
    text = f'planes {{ id: 1 name: "/device:TPU:0" {lines} {metadata} {stats} }}'
    file = folder / "plugins" / "profile" / "now" / "host.xplane.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


type Kernel = tuple[str, str, float, float]
"""Operation, name of the kernel, start and duration in seconds."""


def write_gpu_profile(folder: Path, streams: dict[str, list[Kernel]], device: int = 0) -> Path:
    """Write a profile as that of a GPU is: kernels by stream, operation and program as stats.

    A kernel without an operation is of another program.
    """
    names: list[str] = []
    lines = ""
    for number, (title, kernels) in enumerate(streams.items()):
        lines += f'lines {{ id: {number} name: "{title}" timestamp_ns: 1000\n'
        for operation, kernel, start, seconds in kernels:
            names.append(kernel)
            op, module, program = (operation, "jit_step", 7) if operation else ("x", "jit_other", 8)
            lines += (
                f"events {{ metadata_id: {len(names)} offset_ps: {round(start * 1e12)} "
                f"duration_ps: {round(seconds * 1e12)} "
                f'stats {{ metadata_id: 1 str_value: "{op}" }} '
                f'stats {{ metadata_id: 2 str_value: "{module}" }} '
                f"stats {{ metadata_id: 3 uint64_value: {program} }} }}\n"
            )
        lines += "}\n"
    metadata = write_names("event", names)
    metadata += write_names("stat", ["hlo_op", "hlo_module", "program_id"])
    text = f'planes {{ id: 1 name: "/device:GPU:{device}" {lines} {metadata} }}'
    file = folder / "gpu.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


def step_events(begin: float, slow: float = 1.2, prefix: str = "") -> list[Event]:
    """Return the events of a step of the example in which products take longer than predicted."""
    events = [("fusion.1", begin, SECONDS * 0.05, "")]
    start = begin + SECONDS * 0.05
    layer = LAYER * (0.9 * slow + 0.2)
    events.append(("while.2", start, 32 * layer, ""))
    for number in range(32):
        at = start + number * layer
        for name, seconds, line in (
            ("fusion.4", 0.6 * LAYER * slow, LINES[0]),
            ("fusion.5", 0.3 * LAYER * slow, LINES[1]),
            ("all-reduce.6", 0.2 * LAYER, LINES[2]),
        ):
            text = f"%{name} = bf16[8,8]{{1,0}} {name.partition('.')[0]}(%p)"
            events.append((prefix + text, at, seconds, f"{line.op_name}:"))
            at += seconds
    events.append(("fusion.77", start + 32 * layer, SECONDS * 0.05, "jit(train_step)/other:"))
    return events


LENGTH = SECONDS * 0.1 + 32 * LAYER * (0.9 * 1.2 + 0.2)
TWO_STEPS = [*step_events(0.0), *step_events(LENGTH), ("fusion.1", 3 * LENGTH, 1.0, "")]
MODULES = [
    ("jit_train_step(17)", 0.0, LENGTH, ""),
    ("jit_train_step(17)", LENGTH, LENGTH, ""),
    ("jit_other(3)", 3 * LENGTH, 1e-3, ""),
]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tmp_path_factory.mktemp("profile"), TWO_STEPS, MODULES)


def test_profile_lines_are_matched_with_predictions(profile: Path) -> None:
    step = compare_with_profile(FITTING, profile.parents[3])
    assert (step.profile.module, step.profile.executions) == ("jit_train_step", 2)
    assert step.profile.seconds == pytest.approx(LENGTH)
    measured = [each.seconds for each in step.lines]
    # The loop's own event has no time besides its operations; the last line's runs once.
    assert measured == pytest.approx(
        [32 * 0.6 * LAYER * 1.2, 32 * 0.3 * LAYER * 1.2, 32 * 0.2 * LAYER, SECONDS * 0.05]
    )
    assert dict(step.unmatched) == pytest.approx({"fusion.77": SECONDS * 0.05}, abs=1e-6)
    text = plain_text(step, 120)
    assert "1.20" in text and "fusion.77" in text and "2 executions" in text


def test_profile_with_renamed_instructions_matches_by_op_name(tmp_path: Path) -> None:
    events = [
        (name.replace("fusion.4", "fusion.104"), start, seconds, op_name)
        for name, start, seconds, op_name in step_events(0.0)
    ]
    step = compare_with_profile(FITTING, write_profile(tmp_path, events, MODULES[:1]))
    assert step.lines[0].seconds == pytest.approx(32 * 0.6 * LAYER * 1.2)


def test_measured_rates_round_trip_through_a_calibration_file(
    profile: Path, tmp_path: Path
) -> None:
    step = compare_with_profile(FITTING, profile)
    found = step.slowdowns()
    assert found == pytest.approx({"hbm": 1.0, "matrix": 1.2, "reduction": 2.0}, rel=1e-4)
    file = tmp_path / "v5p.toml"
    file.write_text(calibration_text(step, "v5p"), encoding="utf-8")
    generation = topology("v5p-8").generation
    usual = rates_of(generation)
    rates = read_calibrations(file, [generation])["v5p"].rates(generation)
    assert rates.hbm_bytes == pytest.approx(usual.hbm_bytes)
    assert rates.link_share == pytest.approx(usual.link_share / 2)
    assert dict(rates.matrix_flops)["bfloat16"] == pytest.approx(
        dict(usual.matrix_flops)["bfloat16"] / 1.2
    )
    assert rates.vector_ops == usual.vector_ops


def test_an_asynchronous_collective_is_measured_from_start_to_done(tmp_path: Path) -> None:
    timeline = FITTING.time.timeline
    assert timeline is not None
    main = timeline.blocks[0]
    spans = (
        TimelineSpan("all-gather-start.1", "along fsdp", 0.0, 2e-3, "ici", line=2),
        TimelineSpan("fusion.1", "cores", 0.0, 1e-3, "hbm", line=3),
        TimelineSpan("all-gather-done.1", "cores", 1e-3, 1e-3, "ici", line=2),
    )
    made = replace(timeline, blocks=(replace(main, spans=spans),))
    gather = replace(LINES[2], kind="all-gather")
    lines = (*LINES[:2], gather, LINES[3])
    report = replace(FITTING, time=replace(FITTING.time, timeline=made, lines=lines))
    events = [
        ("all-gather-start.1", 0.0, 1e-6, ""),
        ("fusion.1", 1e-6, 1e-3, ""),
        ("all-gather-done.1", 1.001e-3, 2e-3, ""),
    ]
    step = compare_with_profile(report, write_profile(tmp_path, events, []))
    assert step.slowdowns()["ici"] == pytest.approx(3.001e-3 / 2e-3, rel=1e-3)
    assert step.lines[2].seconds == pytest.approx(2e-3, rel=1e-3)


def gpu_step(begin: float) -> list[Kernel]:
    """Return the kernels of a step: a product in two kernels, a loop of three runs, a copy."""
    kernels = [
        ("gemm.1", "splitk", begin, 4e-6),
        ("gemm.1", "reduce", begin + 5e-6, 1e-6),
        ("", "elsewhere", begin + 6e-6, 1e-6),
    ]
    for n in range(3):
        at = begin + (10 + 10 * n) * 1e-6
        kernels += [("loop.2", "sort", at, 1e-6), ("loop.2", "sort", at + 2e-6, 1e-6)]
        kernels += [("fusion.3", "fusion_3", at + 4e-6, 3e-6)]
    return [*kernels, ("copy.4", "MemcpyD2D", begin + 40e-6, 2e-6)]


def test_gpu_profile_counts_the_executions_of_its_kernels(tmp_path: Path) -> None:
    kernels = [kernel for begin in (0.0, 100e-6) for kernel in gpu_step(begin)]
    reduce = [("all-reduce-start.5", "nccl", b + 20e-6, 30e-6) for b in (0.0, 100e-6)]
    streams = {"Stream #17(Compute,MemcpyD2D)": kernels, "Stream #20(Compute)": reduce}
    file = write_gpu_profile(tmp_path, streams)
    profile = read_profile(file)
    assert (profile.module, profile.executions) == ("jit_step", 2)
    # From the first kernel to the end of the collective on the other stream.
    assert profile.seconds == pytest.approx(50e-6)
    found = {o.name: (o.seconds * 1e6, o.runs) for o in profile.operations.values()}
    assert found["gemm.1"] == pytest.approx((5.0, 1))
    assert found["fusion.3"] == pytest.approx((9.0, 3))
    assert found["copy.4"] == pytest.approx((2.0, 1))
    assert found["all-reduce-start.5"] == pytest.approx((30.0, 1))
    assert "x" not in found
    # A program that is a loop alone needs the predicted number of its runs.
    loop = [k for k in kernels if k[0] in ("loop.2", "fusion.3")]
    loop_only = write_gpu_profile(tmp_path, {"Stream #1(Compute)": loop})
    profile = read_profile(loop_only, {"fusion.3": 3.0, "absent": 1.0})
    assert (profile.executions, profile.operations["fusion.3"].runs) == (2, 3)
    assert profile.seconds == pytest.approx(27e-6)
    assert read_profile(loop_only).executions == 6


def test_gpu_profile_gives_back_the_slowdowns_that_it_has(tmp_path: Path) -> None:
    timeline = FITTING.time.timeline
    assert timeline is not None
    factors = {"matrix": 1.25, "hbm": 1.1, "vector": 2.0, "launch": 3.0, "reduction": 1.5}
    units = ("matrix", "hbm", "vector", "launch")
    spans = [
        TimelineSpan(f"fusion.{n}", "cores", n * 1e-5, (1 + n % 7) * 1e-6, units[n % 4], line=3)
        for n in range(40)
    ]
    spans.append(TimelineSpan("all-reduce-start.1", "along data", 0.0, 2e-3, "ici", line=2))
    block = replace(timeline.blocks[0], spans=tuple(spans))
    time = replace(FITTING.time, timeline=replace(timeline, blocks=(block,)))
    kernels = [
        (s.name, s.name, s.start + run, s.seconds * factors.get(s.resource, 1.5))
        for run in range(3)
        for s in spans
    ]
    file = write_gpu_profile(tmp_path, {"Stream #14(Compute)": kernels})
    step = compare_with_profile(replace(FITTING, time=time), file)
    assert step.profile.executions == 3
    assert step.slowdowns() == pytest.approx(factors, rel=1e-3)
    (tmp_path / "h100.toml").write_text(calibration_text(step, "h100"))
    chip = GPUS["h100"]
    rates = read_calibrations(tmp_path / "h100.toml", [chip])["h100"].rates(chip)
    usual = gpu_rates(chip)
    assert rates.operation_seconds == pytest.approx(3 * usual.operation_seconds)
    assert rates.hbm_seconds == pytest.approx(3 * usual.hbm_seconds)
    assert rates.vector_ops == pytest.approx(usual.vector_ops / 2)


@pytest.mark.slow
def test_cpu_profile_is_matched_with_predictions(tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ x), x)

    x = jnp.ones((64, 64))
    step(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            step(x).block_until_ready()
    profile = read_profile(tmp_path)
    assert (profile.module, profile.executions) == ("jit_step", 3)
    tanh = next(o for o in profile.operations.values() if "tanh" in o.name or "fusion" in o.name)
    assert tanh.runs == pytest.approx(5)
    assert all(operation.seconds >= 0 for operation in profile.operations.values())
    assert 0 < sum(o.seconds for o in profile.operations.values()) == pytest.approx(profile.seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chip = 'v5p'\n", r"has no chip and \[slowdown\]"),
        ("chip = 'v6e'\n[slowdown]\nhbm = 1.1\n", "is of v6e, but the topology has v5p"),
        ("chip = 'v5p'\n[slowdown]\nhbm = 0\n", "slowdown.hbm = 0"),
        ("chip = 'v5p'\n[slowdown]\nsmem = 1.0\n", "slowdown.smem = 1.0"),
        ("chip = ", "can't be read"),
    ],
)
def test_invalid_calibration_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rates.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=message):
        read_calibrations(file, [topology("v5p-8").generation])


def test_profile_of_a_different_program_is_refused(tmp_path: Path) -> None:
    other = write_profile(tmp_path / "a", [("sort.1", 0.0, 1.0, "")], [])
    with pytest.raises(ArgumentError, match="has no operation of train_step"):
        compare_with_profile(FITTING, other)
    empty = tmp_path / "b"
    empty.mkdir()
    with pytest.raises(ArgumentError, match="has no profile"):
        read_profile(empty)
    (tmp_path / "c.xplane.pb").write_bytes(b"no profile")
    with pytest.raises(ArgumentError, match=r"can't be read as a profile|has no operations"):
        read_profile(tmp_path / "c.xplane.pb")
