"""The parts of the preflight reports that are made by hand: an 8B transformer on 32 chips."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from xlashard.analysis.explain.model import CollectiveReport, ValueReport
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.predict.preflight.report.preflight_model import (
    AdviceReport,
    AxisTraffic,
    MemoryBreakdown,
    Suggestion,
    TemporaryReport,
)

GIB = 2**30
MODEL = "/home/user/project/model.py"
WIDTHS = {"float32": 4, "bfloat16": 2, "int32": 4}


def line(number: int, function: str = "block", *, file: str = MODEL) -> SourceLine:
    return SourceLine(file, number, function, in_user_file=True)


def value(path: str, dtype: str, shape: tuple[int, ...], spec: str, parts: int, **fields: Any):
    """Return an argument or result, sharded into `parts` over 32 devices by default."""
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
INPUTS = (
    *(
        replace(v, aliased=v.path.replace("state", "result[0]"), donated=True)
        for v in (*STATE, COUNT)
    ),
    TOKENS,
)
OUTPUTS = (*(replace(v, path=v.aliased, aliased=v.path, donated=False) for v in INPUTS[:-1]), LOSS)
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
ARGUMENT_BYTES = sum(v.device_bytes for v in INPUTS)
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
    temporaries=TEMPORARIES,
)


def collective(kind: Any, along: str, times: int, sent: int, **fields: Any) -> CollectiveReport:
    """Return a collective, whose operand and result bytes follow from its sent bytes."""
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


SUGGESTION = Suggestion(
    path="",
    line=(MODEL, 97),
    shape=(64, 8192, 32, 128),
    before=(("data", "fsdp"), ("tensor",), (), ()),
    after=(("data", "fsdp"), (), ("tensor",), ()),
)
UNTRIED = Suggestion(
    path="batch['mask']",
    line=None,
    shape=(64, 8192),
    before=(("data",), ("tensor",)),
    after=(("data", "tensor"), ()),
    returned=True,
)

TRAFFIC = (
    collective(
        "all-reduce",
        "tensor",
        128,
        128 * 96 * 2**20,
        operands=("bf16[8,8192,4096]",),
        results=("bf16[8,8192,4096]",),
        op_name="jit(train_step)/jvp(model)/while/body/blf,fd->bld/dot_general",
        source=line(134, "mlp"),
        network="ici",
        seconds=0.0716,
        origin="reduction",
    ),
    collective(
        "all-gather",
        "fsdp",
        448,
        448 * 21 * 2**20,
        argument="state['params']['layers']['mlp']['up']",
        needed_by="jit(train_step)/jvp(model)/while/body/bld,df->blf/dot_general",
        needed_by_source=line(131, "mlp"),
        network="ici",
        seconds=0.0548,
        origin="argument",
    ),
    collective(
        "reduce-scatter",
        "fsdp",
        224,
        224 * 42 * 2**20,
        operands=("f32[4096,3584]",),
        results=("f32[1024,3584]",),
        op_name="jit(train_step)/transpose(jvp(model))/while/body/bld,df->blf/dot_general",
        network="ici",
        seconds=0.0548,
        origin="gradient",
    ),
    collective(
        "all-reduce",
        "data",
        9,
        2 * 2**30,
        count=9,
        operands=("f32[32,1024,3584]",),
        results=("f32[32,1024,3584]",),
        op_name="jit(train_step)/transpose(jvp(model))/psum",
        network="ici",
        seconds=0.0119,
        origin="gradient",
    ),
    collective(
        "all-to-all",
        "tensor",
        64,
        64 * 24 * 2**20,
        operands=("bf16[8,8192,8,128]",),
        results=("bf16[8,2048,32,128]",),
        op_name="jit(train_step)/jvp(model)/while/body/transpose",
        source=line(97, "attention"),
        network="ici",
        seconds=0.0089,
        origin="resharding",
        suggestion=SUGGESTION.text,
    ),
    collective(
        "all-gather",
        "tensor",
        1,
        3 * 8 * 2**20,
        operands=("f32[8,8192]",),
        results=("f32[8,8192]",),
        op_name="jit(train_step)/jvp(loss)/reduce_max",
        source=line(212, "loss"),
        network="ici",
        seconds=0.00014,
        origin="resharding",
    ),
)


ADVICE = (
    AdviceReport(SUGGESTION.text, (SUGGESTION,), 0.0089, "within the error", -0.0061, 12 * 2**20),
    AdviceReport(UNTRIED.text, (UNTRIED,), 0.00014),
)


def along_axes(traffic: tuple[CollectiveReport, ...]) -> tuple[AxisTraffic, ...]:
    """Return the traffic of collectives, by mesh axes."""
    sums: dict[tuple[str, Any], list[CollectiveReport]] = {}
    for t in traffic:
        sums.setdefault((t.along, t.network), []).append(t)
    made = [
        AxisTraffic(
            along,
            network,
            sum(t.sent_bytes for t in found),
            sum(t.seconds for t in found),
        )
        for (along, network), found in sums.items()
    ]
    return tuple(sorted(made, key=lambda a: -a.sent_bytes))
