"""Preflight reports made by hand, with every field filled in, for tests of renderers.

They are the shapes that reports come in: a step of training that fits (`FITTING`), the same too
large for its chips (`OUT_OF_MEMORY`), two slices (`TWO_SLICES`), 6,144 chips (`HUGE`), and a small
function without loops, tokens or price (`SMALL`).
"""

from dataclasses import replace

from tests.predict.preflight.example_parts import (
    ADVICE,
    COUNT,
    GIB,
    INPUTS,
    MEMORY,
    OUTPUTS,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    TEMPORARY_BYTES,
    TRAFFIC,
    along_axes,
    line,
    value,
)
from xlashard.analysis.explain.model import (
    ConstantReport,
    DonationReport,
    RepeatedReport,
    UnmetRequest,
)
from xlashard.predict.preflight.report.preflight_model import (
    AxisReport,
    MemoryBreakdown,
    TimeEstimate,
    TopologyReport,
    VersionsReport,
)
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import PriceReport, ThroughputReport, Workload
from xlashard.predict.preflight.report.step_model import (
    LineTime,
    SpillReport,
    Timeline,
    TimelineBlock,
    TimelineSpan,
)

OP = "jit(train_step)/jvp(model)/while/body/{}/dot_general"

SECONDS = 6.9 * PARAMETERS * 64 * 8192 / 32 / 459e12 * 1.21
"""Time of the training step that fits."""
LAYER = SECONDS * 0.9 / 32
LINES = (
    LineTime(
        line(131, "mlp"),
        OP.format("bld,df->blf"),
        "product",
        SECONDS * 0.6,
        64,
        "matrix",
        0.0,
        1.1e12,
    ),
    LineTime(
        line(134, "mlp"),
        OP.format("blf,fd->bld"),
        "product",
        SECONDS * 0.25,
        32,
        "matrix",
        0.0,
        5e11,
    ),
    LineTime(
        line(134, "mlp"),
        OP.format("blf,fd->bld"),
        "all-reduce",
        SECONDS * 0.09,
        32,
        "ici",
        SECONDS * 0.09,
    ),
    LineTime(None, "", "fusion", SECONDS * 0.05, 1, "hbm"),
)
TIMELINE = Timeline(
    blocks=(
        TimelineBlock(
            "main",
            SECONDS,
            (
                TimelineSpan("fusion.1", "cores", 0.0, SECONDS * 0.05, "hbm", line=3),
                TimelineSpan(
                    "while.2", "cores", SECONDS * 0.05, 32 * LAYER, "loop", block=1, times=32
                ),
                TimelineSpan("fusion.9", "cores", SECONDS * 0.95, SECONDS * 0.05, "vector"),
            ),
        ),
        TimelineBlock(
            "body",
            LAYER,
            (
                TimelineSpan("copy-start.3", "HBM copies", 0.0, LAYER * 0.4, "hbm"),
                TimelineSpan("fusion.4", "cores", 0.0, LAYER * 0.6, "matrix", line=0),
                TimelineSpan("fusion.5", "cores", LAYER * 0.6, LAYER * 0.3, "matrix", line=1),
                TimelineSpan("all-reduce.6", "cores", LAYER * 0.9, LAYER * 0.1, "ici", line=2),
                TimelineSpan(
                    "all-reduce.6", "along tensor", LAYER * 0.9, LAYER * 0.1, "ici", line=2
                ),
            ),
        ),
    ),
    memory=((0.0, 10 * GIB), (SECONDS * 0.05 + LAYER / 2, 19 * GIB), (SECONDS * 0.1, 12 * GIB)),
    left_out=3,
)
FLOPS = 6.9 * PARAMETERS * 64 * 8192 / 32
TIME = TimeEstimate(
    flops=FLOPS,
    flops_by_dtype=(("bfloat16", FLOPS * 0.985), ("float32", FLOPS * 0.003)),
    hbm_bytes=1.9e12,
    traffic=along_axes(TRAFFIC),
    compute_seconds=FLOPS / 459e12,
    hbm_seconds=1.9e12 / 2.765e12,
    ici_seconds=sum(t.seconds for t in TRAFFIC),
    dcn_seconds=0.0,
    roofline_seconds=FLOPS / 459e12,
    bound="compute",
    seconds=FLOPS / 459e12 * 1.21,
    below=-0.12,
    above=0.15,
    shares=(("matrix", FLOPS / 459e12 * 1.1), ("hbm", FLOPS / 459e12 * 0.11)),
    lines=LINES,
    other_lines_seconds=SECONDS * 0.01,
    timeline=TIMELINE,
)
V5P = TopologyReport(
    name="v5p:4x4x2",
    generation="v5p",
    slices=1,
    shape=(4, 4, 2),
    wraps=(True, True, False),
    chips=32,
    devices=32,
    hosts=8,
    hbm_bytes=int(95.74 * GIB),
    available_bytes=int(95.73 * GIB),
    peak_flops=(("bfloat16", 459e12), ("int8", 918e12)),
    hbm_bandwidth=2.765e12,
    ici_bandwidth=90e9,
    dcn_bandwidth=6.25e9,
)
WORKLOAD = Workload(
    tokens=64 * 8192,
    model_flops=6.0 * PARAMETERS * 64 * 8192,
    parameters=PARAMETERS,
    active_parameters=PARAMETERS,
)


def throughput(seconds: float, chips: int, tokens: int = WORKLOAD.tokens) -> ThroughputReport:
    flops = WORKLOAD.model_flops / WORKLOAD.tokens * tokens
    workload = replace(WORKLOAD, tokens=tokens, model_flops=flops)
    rate, utilisation = tokens / seconds, flops / (seconds * chips * 459e12)
    return ThroughputReport(workload, rate, utilisation, rate / chips, 459e12)


def price(seconds: float, chips: int, tokens: int = WORKLOAD.tokens) -> PriceReport:
    step = 4.2 * chips * seconds / 3600
    return PriceReport(4.2, "USD", step, 4.2 * chips, step / tokens * 1e9)


FITTING = PreflightReport(
    name="train_step",
    title="configs/8b_v5p.toml",
    outcome="fits",
    topology=V5P,
    mesh=(
        AxisReport("data", 2, (("z", 2),), ring=False, strides=(1,)),
        AxisReport("fsdp", 4, (("x", 4),), ring=True, strides=(1,)),
        AxisReport("tensor", 4, (("y", 4),), ring=True, strides=(1,)),
    ),
    partitioner="shardy",
    memory=MEMORY,
    time=TIME,
    traffic=TRAFFIC,
    advice=ADVICE,
    inputs=INPUTS,
    outputs=OUTPUTS,
    donations=(
        *(
            DonationReport(v.path, True, v.path.replace("state", "result[0]"), v.device_bytes)
            for v in (*STATE, COUNT)
        ),
    ),
    constants=(
        ConstantReport("params['scale']", (4096, 1024), "float32", "P('data',)", 2**24, 2**22),
        ConstantReport("table", (1024,), "float32", "", 2**12, 2**12),
    ),
    unmet=(
        UnmetRequest(
            kind="constraint that gathers",
            path="f32[64,8192,4096]",
            requested="P(('data', 'fsdp'))",
            actual="gathered along tensor",
            nbytes=64 * 2**20,
            reason="the constraint unshards dimension 2",
            advice="keep tensor in its spec",
            source=line(97, "attention"),
        ),
        UnmetRequest(
            kind="uneven constraint",
            path="bfloat16[64,8192,50257]",
            requested="P(None, None, 'tensor')",
            actual="padded to 50260, 4 tiles of 12565 along tensor",
            nbytes=64 * 8192 * 3 * 2,
            reason="dimension 2 of 50257 does not divide by 4",
            advice="pad it with pad_to_mesh",
            source=line(131, "logits"),
        ),
        UnmetRequest(
            kind="device_put",
            path="bfloat16[64,8192]",
            requested="P('data', None)",
            actual="nothing changes",
            nbytes=2**20,
            reason="device_put inside of a program shards nothing over automatic axes",
            advice="write with_sharding_constraint(x, NamedSharding(mesh, P('data', None)))",
            source=line(140, "batch"),
        ),
    ),
    replicated=tuple(v for v in (*INPUTS, *OUTPUTS) if v.copies == 32 and v.nbytes >= 2**20),
    replicated_above=2**20,
    throughput=throughput(TIME.seconds, 32),
    price=price(TIME.seconds, 32),
    compile_seconds=38.4,
    versions=VersionsReport(
        xlashard="0.6.0",
        jax="0.12.0.1",
        jaxlib="0.12.0.1",
        libtpu="0.0.50.1",
        runtime="PJRT C API, libtpu built on Sep 14 2026",
        flags=(("LIBTPU_INIT_ARGS", "--xla_tpu_enable_latency_hiding_scheduler=true"),),
    ),
    spills=(
        SpillReport(
            type="f32[8,8,8192,8192]",
            device_bytes=16 * GIB,
            vmem_bytes=128 * 2**20,
            runs=64,
            block=256,
            op_name=OP.format("bqhd,bkhd->bhqk"),
            source=line(96, "attention"),
        ),
    ),
    repeated=(
        RepeatedReport(
            operation="dot_general",
            operands=("bfloat16[2048,4096]", "bfloat16[4096,4096]"),
            result="bfloat16[2048,4096]",
            devices=32,
            count=1,
            times=32,
            flops=32 * 2 * 2048 * 4096 * 4096,
            share=0.02,
            argument="batch['positions']",
            spec="P(('data', 'fsdp'))",
            constraint=None,
            source=line(140, "rotary"),
        ),
    ),
)
"""An 8B training step on 32 chips that fits, with two collectives that it does not require."""

_LOGITS = replace(
    TEMPORARIES[0], type="f32[64,8192,64128]", device_bytes=64 * 8192 * 64128 * 4, count=1
)
_TOO_MUCH = TEMPORARY_BYTES - TEMPORARIES[0].device_bytes + _LOGITS.device_bytes
_SLOW = replace(
    TIME, hbm_seconds=TIME.compute_seconds * 1.4, bound="hbm", seconds=TIME.compute_seconds * 1.4
)
OUT_OF_MEMORY = replace(
    FITTING,
    outcome="out of memory",
    memory=replace(
        MEMORY,
        total_bytes=MEMORY.total_bytes - TEMPORARY_BYTES + _TOO_MUCH - MEMORY.code_bytes,
        temporary_bytes=_TOO_MUCH,
        code_bytes=0,
        temporaries=(_LOGITS, *TEMPORARIES[1:]),
        host_bytes=2**30,
    ),
    time=replace(_SLOW, roofline_seconds=_SLOW.hbm_seconds, unknown_loops=1, above=None),
    donations=(
        *FITTING.donations[1:],
        DonationReport(STATE[0].path, True, "", STATE[0].device_bytes),
    ),
    unmet=(
        UnmetRequest(
            kind="donation",
            path=STATE[0].path,
            requested="donated",
            actual="not reused",
            nbytes=STATE[0].device_bytes,
            reason="no result has its type",
        ),
    ),
    throughput=throughput(_SLOW.hbm_seconds, 32),
    price=price(_SLOW.hbm_seconds, 32),
)
"""The same with logits for the whole batch on each device: too large, bound by HBM."""

_ACROSS = replace(
    TRAFFIC[3],
    along="slice",
    axes=("slice",),
    network="dcn",
    seconds=2 * 2**30 / 6.25e9,
)
_TWO_TRAFFIC = (_ACROSS, *TRAFFIC[:3], *TRAFFIC[4:])
_TWO_TIME = replace(
    TIME,
    traffic=along_axes(_TWO_TRAFFIC),
    compute_seconds=TIME.compute_seconds / 16,
    seconds=_ACROSS.seconds * 1.1,
    ici_seconds=sum(t.seconds for t in _TWO_TRAFFIC[1:]),
    dcn_seconds=_ACROSS.seconds,
    hbm_seconds=TIME.hbm_seconds / 16,
    roofline_seconds=_ACROSS.seconds,
    bound="dcn",
)
TWO_SLICES = replace(
    FITTING,
    title="configs/8b_2x_v5p.toml",
    topology=replace(V5P, slices=2, chips=64, devices=64, hosts=16),
    mesh=(
        AxisReport("slice", 2, (("slice", 2),), ring=False, strides=(1,)),
        AxisReport("fsdp", 8, (("x", 4), ("z", 2)), ring=False, strides=(1, 1)),
        AxisReport("tensor", 4, (("y", 4),), ring=True, strides=(1,)),
    ),
    time=_TWO_TIME,
    traffic=_TWO_TRAFFIC,
    throughput=throughput(_TWO_TIME.seconds, 64, WORKLOAD.tokens // 16),
    price=price(_TWO_TIME.seconds, 64, WORKLOAD.tokens // 16),
)
"""Two slices, with the gradients summed over the network between them."""

HUGE = replace(
    FITTING,
    title="configs/405b_v5p.toml",
    topology=replace(
        V5P,
        name="v5p:16x16x24",
        shape=(16, 20, 28),
        wraps=(True, True, True),
        chips=6144,
        devices=6144,
        hosts=2240,
    ),
    mesh=(
        AxisReport("data", 28, (("z", 28),), ring=True, strides=(1,)),
        AxisReport("fsdp", 20, (("y", 20),), ring=True, strides=(1,)),
        AxisReport("tensor", 16, (("x", 16),), ring=True, strides=(1,)),
    ),
    time=replace(TIME, ici_seconds=TIME.compute_seconds * 1.1, bound="ici"),
    price=price(TIME.seconds, 6144),
)
"""All 6,144 chips of the largest v5p."""

_X = value("x", "bfloat16", (1024, 4096), "P('x', 'y')", 16, devices=16, decided_by="argument")
_W = value("w", "bfloat16", (4096, 4096), "P(None, 'y')", 2, devices=16, decided_by="argument")
_Y = value("result", "bfloat16", (1024, 4096), "P('x', None)", 8, devices=16)
SMALL = PreflightReport(
    name="f",
    title="",
    outcome="fits",
    topology=replace(
        V5P,
        name="v5e:4x4",
        generation="v5e",
        shape=(4, 4),
        wraps=(False, False),
        chips=16,
        devices=16,
        hosts=4,
        hbm_bytes=16 * GIB,
        available_bytes=int(15.75 * GIB),
        peak_flops=(("bfloat16", 197e12), ("int8", 394e12)),
        hbm_bandwidth=819e9,
        ici_bandwidth=45e9,
    ),
    mesh=(
        AxisReport("x", 8, (), ring=False),
        AxisReport("y", 2, (("y", 2),), ring=False, strides=(1,)),
    ),
    partitioner="gspmd",
    memory=MemoryBreakdown(
        available_bytes=int(15.75 * GIB),
        total_bytes=_X.device_bytes + _W.device_bytes + _Y.device_bytes + 90_112,
        argument_bytes=_X.device_bytes + _W.device_bytes,
        result_bytes=_Y.device_bytes,
        alias_bytes=0,
        temporary_bytes=0,
        constant_bytes=0,
        code_bytes=90_112,
        temporaries=(),
    ),
    time=TimeEstimate(
        flops=2.147e9,
        flops_by_dtype=(("bfloat16", 2.147e9),),
        hbm_bytes=18_000_000,
        traffic=(),
        compute_seconds=2.147e9 / 197e12,
        hbm_seconds=18e6 / 819e9,
        ici_seconds=0.0,
        dcn_seconds=0.0,
        roofline_seconds=18e6 / 819e9,
        bound="hbm",
        seconds=3.1e-5,
    ),
    traffic=(),
    inputs=(_X, _W),
    outputs=(_Y,),
    donations=(),
    unmet=(),
    replicated=(),
    replicated_above=2**20,
    throughput=None,
    price=None,
    compile_seconds=0.6,
    versions=replace(FITTING.versions, flags=()),
)
"""A matrix product on 16 chips without collectives."""

ALL = {
    "fitting": FITTING,
    "out of memory": OUT_OF_MEMORY,
    "two slices": TWO_SLICES,
    "huge": HUGE,
    "small": SMALL,
}
