"""Attention scores that leave VMEM, in hand-written modules."""

import pytest

from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.hlo import read
from xlashard.predict.preflight.attribution.vmem_spill import SpillFinder
from xlashard.predict.preflight.report.step_model import SpillReport
from xlashard.tpu import topology

LAYOUT = "{2,1,0:T(8,128)}"


def spills(rows: int, depth: int, between: str, space: str = "") -> tuple[SpillReport, ...]:
    """Return the spills of a product of 16 heads, an operation on it, and another product.

    Args:
        rows: Queries, and keys.
        depth: Contracted dimension of the first product.
        between: Opcode of the operation between the products.
        space: Memory space of the scores.
    """
    scores = f"f32[16,{rows},{rows}]{LAYOUT[:-1]}{space}}}"
    queries = f"bf16[16,{rows},{depth}]{LAYOUT}"
    module = read(
        f"""HloModule m, is_scheduled=true

ENTRY main {{
  q = {queries} parameter(0)
  k = {queries} parameter(1)
  s = {scores} dot(q, k), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, \
rhs_contracting_dims={{2}}, metadata={{op_name="step/bqd,bkd->bqk/dot_general"}}
  e = {scores} {between}(s)
  ROOT o = {queries} dot(e, k), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, \
lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}
}}
"""
    )
    return SpillFinder(module, topology("v5e-1").generation, SourceLocator("", "")).find()


def test_attention_scores_that_exceed_vmem_are_detected() -> None:
    (found,) = spills(4096, 128, "exponential")
    assert found.type == "f32[16,4096,4096]"
    assert found.device_bytes == 2**30 and found.vmem_bytes == 2**27
    assert (found.runs, found.op_name) == (1, "step/bqd,bkd->bqk/dot_general")
    # 16 x 512 x 512 x 4 bytes are 16 MiB, and a quarter of VMEM is 32 MiB.
    assert found.block == 512


@pytest.mark.parametrize(
    "case",
    [
        (1024, 128, "exponential"),  # 64 MiB
        (4096, 128, "negate"),
        (4096, 1024, "exponential"),  # Logits contract the width of a model.
        (4096, 128, "exponential", "S(1)"),
    ],
)
def test_matmuls_other_than_large_scores_are_ignored(case: tuple[int, int, str]) -> None:
    assert spills(*case) == ()
