"""Products of cuBLAS and attention of cuDNN in modules of XLA for GPUs, against counts by hand."""

import pytest

from tests.predict.costs.test_schedule import RATES
from xlashard.hlo import read
from xlashard.hlo.module import HloModule
from xlashard.predict.costs.cost_analysis import analyze_cost
from xlashard.predict.costs.gpu.cuda_calls import attention_call
from xlashard.predict.costs.gpu.gpu_operation import GpuOperationModel, gpu_rates
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.kernel_work import kernel_name
from xlashard.predict.costs.memory_traffic import hbm_bytes
from xlashard.predict.costs.operation import OperationModel
from xlashard.predict.costs.schedule import walk_schedule
from xlashard.predict.targets.gpu.gpu_models import BY_NAME

PRODUCT = """
HloModule product, is_scheduled=true

ENTRY main {
  a = bf16[4,1024,64]{2,1,0} parameter(0)
  b = bf16[4,2048,64]{2,1,0} parameter(1)
  call = (bf16[4,1024,2048]{2,1,0}, s8[4194304]{0}) custom-call(a, b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
  ROOT c = bf16[4,1024,2048]{2,1,0} get-tuple-element(call), index=0
}
"""  # noqa: E501
FUSED = """
HloModule fused, is_scheduled=true

slice_of_product {
  a = bf16[1024,64]{1,0} parameter(0)
  all = bf16[8,64,2048]{2,1,0} parameter(1)
  n = s32[] parameter(2)
  zero = s32[] constant(0)
  one = bf16[1,64,2048]{2,1,0} dynamic-slice(all, n, zero, zero), dynamic_slice_sizes={1,64,2048}
  b = bf16[64,2048]{1,0} bitcast(one)
  call = (bf16[1024,2048]{1,0}, s8[4194304]{0}) custom-call(a, b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  c = bf16[1024,2048]{1,0} get-tuple-element(call), index=0
  space = s8[4194304]{0} get-tuple-element(call), index=1
  ROOT both = (bf16[1024,2048]{1,0}, s8[4194304]{0}) tuple(c, space)
}

ENTRY main {
  a = bf16[1024,64]{1,0} parameter(0)
  all = bf16[8,64,2048]{2,1,0} parameter(1)
  n = s32[] parameter(2)
  both = (bf16[1024,2048]{1,0}, s8[4194304]{0}) fusion(a, all, n), kind=kCustom, calls=slice_of_product
  ROOT c = bf16[1024,2048]{1,0} get-tuple-element(both), index=0
}
"""  # noqa: E501
ATTENTION = """
HloModule attention, is_scheduled=true

ENTRY main {{
  q = bf16[2,4096,32,128]{{3,2,1,0}} parameter(0)
  k = bf16[2,4096,8,128]{{3,2,1,0}} parameter(1)
  v = bf16[2,4096,8,128]{{3,2,1,0}} parameter(2)
  call = (bf16[2,32,4096,128]{{3,1,2,0}}, f32[2,32,4096]{{2,1,0}}, u8[64]{{0}}) custom-call(q, k, v), custom_call_target="__cudnn$fmha{target}", metadata={{op_name="f/custom_partitioning"}}, backend_config={{"cudnn_fmha_backend_config":{{"intermediate_tensor_shape":{{"element_type":"BF16","dimensions":["2","32","4096","4096"],"tuple_shapes":[]}},"mask_type":"{mask}","sliding_window_length":{window}}}}}
  ROOT out = bf16[2,32,4096,128]{{3,1,2,0}} get-tuple-element(call), index=0
}}
"""  # noqa: E501
# A layer of ResNet-50 on 2 images, and its gradients, with the labels of the forward pass.
CONVOLUTION = """
HloModule convolution, is_scheduled=true

ENTRY main {{
  left = {left} parameter(0)
  right = {right} parameter(1)
  ROOT call = ({result}, u8[0]{{0}}) custom-call(left, right), window={{size=3x3 stride=2x2 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}", metadata={{op_name="f/conv_general_dilated"}}
}}
"""  # noqa: E501
IMAGES = {
    "input": "bf16[2,56,56,64]{3,2,1,0}",
    "filter": "bf16[128,3,3,64]{3,2,1,0}",
    "output": "bf16[2,28,28,128]{3,2,1,0}",
}
COPIES = """
HloModule copies, is_scheduled=true

one_layer {
  layers = f32[8,1024,1024]{2,1,0} parameter(0)
  n = s32[] parameter(1)
  zero = s32[] constant(0)
  ROOT layer = f32[1,1024,1024]{2,1,0} dynamic-slice(layers, n, zero, zero), dynamic_slice_sizes={1,1024,1024}
}

ENTRY main {
  layers = f32[8,1024,1024]{2,1,0} parameter(0)
  n = s32[] parameter(1)
  x = f32[1024,1024]{1,0} parameter(2)
  start = ((f32[8,1024,1024]{2,1,0}, s32[]), f32[1,1024,1024]{2,1,0}, u32[]) fusion-start(layers, n), kind=kLoop, calls=one_layer
  y = f32[1024,1024]{1,0} negate(x)
  layer = f32[1,1024,1024]{2,1,0} fusion-done(start)
  flat = f32[1024,1024]{1,0} bitcast(layer)
  ROOT z = f32[1024,1024]{1,0} add(flat, y)
}
"""  # noqa: E501
MIB = 2**20


def bytes_of(module: HloModule, name: str) -> int:
    main = module.computations[module.entry]
    return hbm_bytes(module, main, main.instructions[name])


def test_cublas_matmul_costs_as_much_as_a_dot() -> None:
    module = read(PRODUCT)
    work = analyze_cost(module)
    assert work.matmul_flops == {"bfloat16": 2 * 4 * 1024 * 2048 * 64}
    assert not work.unknown_calls
    # Its workspace is no result.
    assert bytes_of(module, "call") == 2 * 4 * (1024 * 64 + 2048 * 64 + 1024 * 2048)


def test_matmul_fused_with_a_slice_reads_only_the_slice() -> None:
    module = read(FUSED)
    assert analyze_cost(module).matmul_flops == {"bfloat16": 2 * 1024 * 2048 * 64}
    assert bytes_of(module, "both") == 2 * (1024 * 64 + 2048 * 64 + 1024 * 2048) + 4


@pytest.mark.parametrize(
    ("target", "mask", "window", "keys", "products"),
    [
        ("Softmax", "NO_MASK", 0, 4096, 2),
        ("Softmax", "CAUSAL", 0, 2048 + 64, 2),
        ("Softmax", "CAUSAL", 1024, 1024 * (1 - 1 / 8) + 64, 2),
        ("SoftmaxBackward", "CAUSAL", 0, 2048 + 64, 5),
    ],
)
def test_cudnn_attention_counts_only_unmasked_tiles(
    target: str, mask: str, window: int, keys: float, products: int
) -> None:
    module = read(ATTENTION.format(target=target, mask=mask, window=window))
    rows = 2 * 32 * 4096
    work = analyze_cost(module)
    assert work.matmul_flops == {"bfloat16": pytest.approx(products * 2 * rows * keys * 128)}
    assert work.transcendental == pytest.approx(rows * keys)
    assert not work.unknown_calls
    # Queries and results of 32 heads, keys and values of 8, and a number per query.
    assert bytes_of(module, "call") == 2 * 4096 * (2 * 128 * (32 + 32 + 8 + 8) + 4 * 32)
    main = module.computations[module.entry]
    call = attention_call(main, main.instructions["call"])
    assert call is not None
    assert call.backward == (products == 5)
    name = kernel_name(main.instructions["call"])
    assert name == "cudnn_attention" + "_backward" * (products == 5)


@pytest.mark.parametrize(
    ("target", "left", "right", "result"),
    [
        ("Forward", "input", "filter", "output"),
        ("BiasActivationForward", "input", "filter", "output"),
        ("BackwardInput", "output", "filter", "input"),
        ("BackwardFilter", "input", "output", "filter"),
    ],
)
def test_cudnn_convolution_counts_only_window_positions_inside(
    target: str, left: str, right: str, result: str
) -> None:
    arrays = {"left": IMAGES[left], "right": IMAGES[right], "result": IMAGES[result]}
    module = read(CONVOLUTION.format(target=target, **arrays))
    work = analyze_cost(module)
    # Each side has 28 positions, of which the first meets two places of the window and not three.
    places = (28 * 3 - 1) ** 2
    assert work.matmul_flops == {"bfloat16": 2 * 2 * places * 64 * 128}
    assert not work.unknown_calls
    sizes = 2 * 56 * 56 * 64 + 128 * 9 * 64 + 2 * 28 * 28 * 128
    assert bytes_of(module, "call") == 2 * sizes
    main, rates = module.computations[module.entry], gpu_rates(BY_NAME["h100"])
    found = GpuOperationModel(module, rates).of(main, main.instructions["call"])
    assert found.matrix == pytest.approx(
        rates.product_seconds(2 * 2 * places * 64 * 128, "bfloat16")
    )


@pytest.mark.parametrize(
    "target",
    [
        *("__gpu$xla.gpu.triton", "mosaic_gpu_v2", "triton_kernel_call", "te_gemm_ffi"),
        *("cusolver_potrf_ffi", "__cublas$triangularSolve"),
    ],
)
def test_unknown_custom_calls_make_the_time_a_lower_bound(target: str) -> None:
    module = read(
        "HloModule m, is_scheduled=true\nENTRY main {\n"
        "x = f32[1024,1024]{1,0} parameter(0)\n"
        f'ROOT y = f32[1024,1024]{{1,0}} custom-call(x), custom_call_target="{target}", '
        'metadata={op_name="jit(f)/twice/pallas_call"}\n}\n'
    )
    main, rates = module.computations[module.entry], gpu_rates(BY_NAME["h100"])
    call = main.instructions["y"]
    unknown = GpuOperationModel(module, rates).of(main, call)
    assert not unknown.known
    assert unknown.seconds == pytest.approx(2 * 4 * MIB / rates.hbm_bytes)
    assert analyze_cost(module).unknown_calls == {"twice": 1}
    given = GpuOperationModel(module, rates, {"twice": KernelCost(seconds=1e-3)}).of(main, call)
    assert (given.known, given.seconds) == (True, 1e-3)


def test_asynchronous_layer_copies_overlap_with_operations() -> None:
    module = read(COPIES)
    assert bytes_of(module, "start") == 2 * 4 * MIB + 4
    found = walk_schedule(module, [], OperationModel(module, RATES), RATES)
    # The negation leaves no bandwidth, so that the copy ends after it.
    in_background = [o.instruction.name for o, _ in found if o.in_background]
    assert in_background == ["start"]
    moved = (2 + 2 + 3) * 4 * MIB / 1e12
    assert found.seconds == pytest.approx(moved, rel=0.2)
