"""Preflight reports made by hand, with every field filled in: for tests of what shows them.

They are the shapes that reports come in: a step of training that fits (`FITTING`), the same too
large for its chips (`OUT_OF_MEMORY`), two slices (`TWO_SLICES`), 8,960 chips (`HUGE`), and a small
function without loops, tokens or price (`SMALL`).
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from xlashard.pjit.report.parts import (
    CollectiveReport,
    DonationReport,
    ReplicationReport,
    SourceLine,
    ValueReport,
)
from xlashard.tpu.preflight.parts import (
    AxisReport,
    AxisTraffic,
    HeldBytes,
    MemoryBreakdown,
    PriceReport,
    TemporaryReport,
    ThroughputReport,
    TimeEstimate,
    TopologyReport,
    TrafficReport,
    VersionsReport,
    Workload,
)
from xlashard.tpu.preflight.report import PreflightReport

GIB = 2**30
MODEL = "/home/user/project/model.py"
WIDTHS = {"float32": 4, "bfloat16": 2, "int32": 4}


def line(number: int, function: str = "block", *, file: str = MODEL) -> SourceLine:
    return SourceLine(file, number, function, in_user_file=True)


def value(path: str, dtype: str, shape: tuple[int, ...], spec: str, parts: int, **fields: Any):
    """One argument or result, cut into `parts` on 32 devices unless `devices` says otherwise."""
    devices = fields.pop("devices", 32)
    nbytes = prod(shape) * WIDTHS[dtype]
    return ValueReport(
        path=path,
        shape=shape,
        dtype=dtype,
        spec=spec,
        decided_by=fields.pop("decided_by", "caller"),
        nbytes=nbytes,
        device_bytes=nbytes // parts,
        copies=devices // parts,
        **fields,
    )


# A transformer of 8 billion parameters; its layers are stacked.
LEAVES: Mapping[str, tuple[tuple[int, ...], str, int]] = {
    "['embed']": ((128256, 4096), "P('tensor', 'fsdp')", 16),
    "['layers']['attention']['key']": ((32, 4096, 1024), "P(None, 'fsdp', 'tensor')", 16),
    "['layers']['attention']['out']": ((32, 4096, 4096), "P(None, 'tensor', 'fsdp')", 16),
    "['layers']['attention']['query']": ((32, 4096, 4096), "P(None, 'fsdp', 'tensor')", 16),
    "['layers']['attention']['value']": ((32, 4096, 1024), "P(None, 'fsdp', 'tensor')", 16),
    "['layers']['mlp']['down']": ((32, 14336, 4096), "P(None, 'tensor', 'fsdp')", 16),
    "['layers']['mlp']['gate']": ((32, 4096, 14336), "P(None, 'fsdp', 'tensor')", 16),
    "['layers']['mlp']['up']": ((32, 4096, 14336), "P(None, 'fsdp', 'tensor')", 16),
    "['layers']['norms']": ((32, 2, 4096), "P()", 1),
    "['unembed']": ((4096, 128256), "P('fsdp', 'tensor')", 16),
}
PARTS = ("['params']", "['optimizer'][0].mu", "['optimizer'][0].nu")
PARAMETERS = sum(prod(shape) for shape, _, _ in LEAVES.values())
STATE = tuple(
    value(f"state{part}{leaf}", "float32", *LEAVES[leaf]) for part in PARTS for leaf in LEAVES
)
COUNT = value("state['optimizer'][0].count", "int32", (), "P()", 1)
TOKENS = value("tokens", "int32", (64, 8193), "P(('data', 'fsdp'))", 8)
LOSS = value("result[1]", "float32", (), "P()", 1, decided_by="partitioner")
INPUTS = (*STATE, COUNT, TOKENS)
OUTPUTS = (*(replace(v, path=v.path.replace("state", "result[0]")) for v in (*STATE, COUNT)), LOSS)


def held(v: ValueReport, **fields: Any) -> HeldBytes:
    return HeldBytes(v.path, v.type, v.spec, v.device_bytes, v.copies, **fields)


def largest(found: list[HeldBytes]) -> tuple[HeldBytes, ...]:
    return tuple(sorted(found, key=lambda h: -h.device_bytes))


ARGUMENTS = largest(
    [
        *(
            held(v, aliased=v.path.replace("state", "result[0]"), donated=True)
            for v in (*STATE, COUNT)
        ),
        held(TOKENS),
    ]
)
RESULTS = largest(
    [*(held(v, aliased=v.path.replace("result[0]", "state")) for v in OUTPUTS[:-1]), held(LOSS)]
)
TEMPORARIES = (
    TemporaryReport(
        "fusion.1742",
        "f32[8,8192,32064]",
        8 * 8192 * 32064 * 4,
        "jit(train_step)/jvp(loss)/log_softmax",
        line(212, "loss"),
    ),
    TemporaryReport(
        "dynamic-update-slice.31",
        "bf16[32,8,8192,1024]",
        32 * 8 * 8192 * 1024 * 2,
        "jit(train_step)/jvp(model)/while/body/checkpoint/add",
        line(148),
    ),
    TemporaryReport(
        "convolution.88",
        "bf16[8,8192,3584]",
        3 * 8 * 8192 * 3584 * 2,
        "jit(train_step)/transpose(jvp(model))/while/body/checkpoint/bld,df->blf/dot_general",
        line(131, "mlp"),
        count=3,
    ),
    TemporaryReport(
        "all-gather.12", "bf16[4096,3584]", 4096 * 3584 * 2, "", line(131, "mlp"), count=1
    ),
    TemporaryReport("copy.7", "f32[2,4096]", 2 * 8 * 128 * 4 * 8, "", None),
)
ARGUMENT_BYTES = sum(h.device_bytes for h in ARGUMENTS)
ALIAS_BYTES = ARGUMENT_BYTES - TOKENS.device_bytes
TEMPORARY_BYTES = sum(t.device_bytes for t in TEMPORARIES) + 512 * 2**20
MEMORY = MemoryBreakdown(
    available_bytes=int(95.73 * GIB),
    total_bytes=ARGUMENT_BYTES + LOSS.device_bytes + TEMPORARY_BYTES + 38 * 2**20 + 24_576,
    argument_bytes=ARGUMENT_BYTES,
    result_bytes=LOSS.device_bytes,
    alias_bytes=ALIAS_BYTES,
    temporary_bytes=TEMPORARY_BYTES,
    constant_bytes=24_576,
    code_bytes=38 * 2**20,
    arguments=ARGUMENTS,
    results=RESULTS,
    temporaries=TEMPORARIES,
)


def collective(kind: Any, along: str, times: int, sent: int, **fields: Any) -> CollectiveReport:
    """A collective; what it puts in and gets out follows from what it sends."""
    source = fields.pop("source", line(131, "mlp"))
    axes = tuple(along.split(", "))
    made: dict[str, Any] = {
        "count": 1,
        "times_known": True,
        "conditional": False,
        "asynchronous": True,
        "operands": ("bf16[1024,3584]",),
        "results": ("bf16[4096,3584]",),
        "operand_bytes": sent // 3,
        "result_bytes": sent // 3 * 4,
        "payload_bytes": sent // 3 * 4,
        "op_name": "jit(train_step)/jvp(model)/while/body/bld,df->blf/dot_general",
        "argument": "",
        "needed_by": "",
        "needed_by_source": None,
    }
    return CollectiveReport(
        kind=kind,
        along=along,
        axes=axes,
        times=times,
        sent_bytes=sent,
        source=source,
        **{**made, **fields},
    )


TRAFFIC = (
    TrafficReport(
        collective(
            "all-reduce",
            "tensor",
            128,
            128 * 96 * 2**20,
            operands=("bf16[8,8192,4096]",),
            results=("bf16[8,8192,4096]",),
            op_name="jit(train_step)/jvp(model)/while/body/blf,fd->bld/dot_general",
            source=line(134, "mlp"),
        ),
        network="ici",
        seconds=0.0716,
        origin="reduction",
        asked_for=True,
    ),
    TrafficReport(
        collective(
            "all-gather",
            "fsdp",
            448,
            448 * 21 * 2**20,
            argument="state['params']['layers']['mlp']['up']",
            needed_by="jit(train_step)/jvp(model)/while/body/bld,df->blf/dot_general",
            needed_by_source=line(131, "mlp"),
        ),
        network="ici",
        seconds=0.0548,
        origin="argument",
        asked_for=True,
    ),
    TrafficReport(
        collective(
            "reduce-scatter",
            "fsdp",
            224,
            224 * 42 * 2**20,
            operands=("f32[4096,3584]",),
            results=("f32[1024,3584]",),
            op_name="jit(train_step)/transpose(jvp(model))/while/body/bld,df->blf/dot_general",
        ),
        network="ici",
        seconds=0.0548,
        origin="gradient",
        asked_for=True,
    ),
    TrafficReport(
        collective(
            "all-reduce",
            "data",
            9,
            2 * 2**30,
            count=9,
            operands=("f32[32,1024,3584]",),
            results=("f32[32,1024,3584]",),
            op_name="jit(train_step)/transpose(jvp(model))/psum",
        ),
        network="ici",
        seconds=0.0119,
        origin="gradient",
        asked_for=True,
    ),
    TrafficReport(
        collective(
            "all-to-all",
            "tensor",
            64,
            64 * 24 * 2**20,
            operands=("bf16[8,8192,8,128]",),
            results=("bf16[8,2048,32,128]",),
            op_name="jit(train_step)/jvp(model)/while/body/transpose",
            source=line(97, "attention"),
        ),
        network="ici",
        seconds=0.0089,
        origin="resharding",
        asked_for=False,
        remedy="with_sharding_constraint(x, P(('data', 'fsdp'), None, 'tensor', None)) at "
        "model.py:97 keeps the operand cut as the next operation reads it",
    ),
    TrafficReport(
        collective(
            "all-gather",
            "tensor",
            1,
            3 * 8 * 2**20,
            operands=("f32[8,8192]",),
            results=("f32[8,8192]",),
            op_name="jit(train_step)/jvp(loss)/reduce_max",
            source=line(212, "loss"),
        ),
        network="ici",
        seconds=0.00014,
        origin="resharding",
        asked_for=False,
        remedy="reduce over the vocabulary before the logits are gathered",
    ),
)


def along_axes(traffic: tuple[TrafficReport, ...]) -> tuple[AxisTraffic, ...]:
    """What these send, by mesh axes."""
    sums: dict[tuple[str, Any], list[TrafficReport]] = {}
    for t in traffic:
        sums.setdefault((t.collective.along, t.network), []).append(t)
    made = [
        AxisTraffic(
            along,
            network,
            sum(t.collective.sent_bytes for t in found),
            sum(t.seconds for t in found),
        )
        for (along, network), found in sums.items()
    ]
    return tuple(sorted(made, key=lambda a: -a.sent_bytes))


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
    compiler_seconds=FLOPS / 459e12 * 1.21,
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
    return ThroughputReport(workload, tokens / seconds, flops / (seconds * chips * 459e12))


def price(seconds: float, chips: int, tokens: int = WORKLOAD.tokens) -> PriceReport:
    step = 4.2 * chips * seconds / 3600
    return PriceReport(4.2, "USD", step, 4.2 * chips, step / tokens * 1e9)


FITTING = PreflightReport(
    name="train_step",
    title="configs/8b_v5p.toml",
    outcome="fits",
    topology=V5P,
    mesh=(
        AxisReport("data", 2, (("z", 2),), ring=False),
        AxisReport("fsdp", 4, (("x", 4),), ring=True),
        AxisReport("tensor", 4, (("y", 4),), ring=True),
    ),
    partitioner="shardy",
    memory=MEMORY,
    time=TIME,
    traffic=TRAFFIC,
    inputs=INPUTS,
    outputs=OUTPUTS,
    donations=(
        *(
            DonationReport(v.path, True, v.path.replace("state", "result[0]"), v.device_bytes)
            for v in (*STATE, COUNT)
        ),
    ),
    replications=(
        ReplicationReport(
            "constraint",
            "f32[64,8192,4096]",
            "P(('data', 'fsdp'))",
            (2,),
            ("tensor",),
            64 * 2**20,
            line(97, "attention"),
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
)
"""An 8B training step on 32 chips: fits, and two of its collectives were not asked for."""

_LOGITS = replace(
    TEMPORARIES[0], type="f32[64,8192,64128]", device_bytes=64 * 8192 * 64128 * 4, count=1
)
_TOO_MUCH = TEMPORARY_BYTES - TEMPORARIES[0].device_bytes + _LOGITS.device_bytes
_SLOW = replace(TIME, hbm_seconds=TIME.compute_seconds * 1.4, bound="hbm", compiler_seconds=None)
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
    time=replace(_SLOW, roofline_seconds=_SLOW.hbm_seconds, unknown_loops=1),
    donations=(
        *FITTING.donations[1:],
        DonationReport(STATE[0].path, True, "", STATE[0].device_bytes, "no result has its type"),
    ),
    throughput=throughput(_SLOW.hbm_seconds, 32),
    price=price(_SLOW.hbm_seconds, 32),
)
"""The same with logits for the whole batch on each device: too large, bound by HBM."""

_ACROSS = replace(
    TRAFFIC[3],
    collective=replace(TRAFFIC[3].collective, along="slice", axes=("slice",)),
    network="dcn",
    seconds=2 * 2**30 / 6.25e9,
)
_TWO_TRAFFIC = (_ACROSS, *TRAFFIC[:3], *TRAFFIC[4:])
_TWO_TIME = replace(
    TIME,
    traffic=along_axes(_TWO_TRAFFIC),
    compute_seconds=TIME.compute_seconds / 16,
    compiler_seconds=TIME.compute_seconds / 15,
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
        AxisReport("slice", 2, (("slice", 2),), ring=False),
        AxisReport("fsdp", 8, (("x", 4), ("z", 2)), ring=False),
        AxisReport("tensor", 4, (("y", 4),), ring=True),
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
        name="v5p:16x20x28",
        shape=(16, 20, 28),
        wraps=(True, True, True),
        chips=8960,
        devices=8960,
        hosts=2240,
    ),
    mesh=(
        AxisReport("data", 28, (("z", 28),), ring=True),
        AxisReport("fsdp", 20, (("y", 20),), ring=True),
        AxisReport("tensor", 16, (("x", 16),), ring=True),
    ),
    time=replace(TIME, ici_seconds=TIME.compute_seconds * 1.1, bound="ici"),
    price=price(TIME.seconds, 8960),
)
"""All 8,960 chips of the largest v5p."""

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
        arguments=(held(_W), held(_X)),
        results=(held(_Y),),
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
        compiler_seconds=3.1e-5,
    ),
    traffic=(),
    inputs=(_X, _W),
    outputs=(_Y,),
    donations=(),
    replications=(),
    replicated=(),
    replicated_above=2**20,
    throughput=None,
    price=None,
    compile_seconds=0.6,
    versions=replace(FITTING.versions, flags=()),
)
"""A matrix product on 16 chips that sends nothing."""

ALL = {
    "fitting": FITTING,
    "out of memory": OUT_OF_MEMORY,
    "two slices": TWO_SLICES,
    "huge": HUGE,
    "small": SMALL,
}
