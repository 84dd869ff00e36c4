"""The closed formulas against the model's declared shapes, and against the compiled programs."""

import math

import jax
import pytest

from benchmarks._preflights import read_facts, topology_settings
from tests.train.examples import MESHES, settings
from tests.train.step_formulas import step_flops
from xlashard.train import formulas
from xlashard.train.config.settings import ModelSettings
from xlashard.train.model.layout import declare, declared_arrays

REAL = topology_settings()
FACTS = read_facts()
EXPERTS = ["model.experts=4", "model.mlp=48"]


def declared(model: ModelSettings) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(declare(model)))


@pytest.mark.parametrize("words", [[], EXPERTS, ["model.kv_heads=8", "model.vocab=512"]])
def test_parameter_count_equals_the_declared_shapes(words: list[str]) -> None:
    model = settings(*words).model
    assert formulas.parameters(model) == declared(model)


@pytest.mark.parametrize(
    ("name", "count", "active"),
    [
        ("1b_v5e_16", 1.14e9, 1.14e9),
        # The published sizes of Llama 3 8B, 70B, Llama 3.1 405B and Mixtral 8x7B.
        ("8b_v5p_64", 8.03e9, 8.03e9),
        ("70b_v5p_512", 70.6e9, 70.6e9),
        ("405b_v5p_4096", 405.9e9, 405.9e9),
        ("moe_v5p_128", 46.7e9, 12.9e9),
    ],
)
def test_parameter_counts_match_published_sizes(name: str, count: float, active: float) -> None:
    model = REAL[name].model
    assert formulas.parameters(model) == pytest.approx(count, rel=2e-3)
    assert formulas.active_parameters(model) == pytest.approx(active, rel=3e-3)


@pytest.mark.parametrize("name", MESHES)
def test_parameter_and_state_bytes_equal_the_bytes_of_shards(name: str) -> None:
    run = settings(**MESHES[name])
    expected = 0
    for one in jax.tree.leaves(declare(run.model)):
        spread = [formulas.ways(run, [axis]) for axis in one.axes]
        expected += 4 * math.prod(
            size // count for size, count in zip(one.shape, spread, strict=True)
        )
    assert formulas.parameter_bytes(run) == expected
    assert formulas.state_bytes(run) == 3 * expected


def test_state_bytes_depend_on_parameter_and_moment_dtypes() -> None:
    wide = formulas.parameter_bytes(settings())
    short = settings("model.parameters=bfloat16")
    assert 2 * formulas.parameter_bytes(short) == wide
    assert formulas.state_bytes(short) == wide // 2 + 2 * wide
    assert formulas.state_bytes(settings("optimizer.moments=bfloat16")) == 2 * wide


def test_saved_residuals_are_not_recomputed() -> None:
    def again(*words: str) -> float:
        return step_flops(settings("model.remat=true", *words)).recomputed

    plain, some = again(), again("model.kept=['gate']")
    run = settings().model
    tokens = settings().training.batch * run.length
    assert plain - some == 2 * run.layers * tokens * run.width * run.mlp
    assert step_flops(settings()).recomputed == 0
    # Results of experts are multiplied by their shares, whose gradient needs them again.
    experts = ["model.experts=4", "model.active_experts=1", "model.dropless=true"]
    whole = again(*experts)
    assert whole - again(*experts, "model.kept=['down']") == plain - some


def test_attention_kernels_visit_only_unmasked_blocks() -> None:
    base = ["model.length=2048", "model.heads=2", "model.head_dim=64", "model.layers=4"]
    blocks = ["block_q=512", "block_kv=512", "block_q_dkv=1024", "block_kv_dkv=512"]
    words = [*base, "model.kernel.attention=splash", *(f"model.kernel.{x}" for x in blocks)]
    batch, heads = settings().training.batch, 2 * 64

    def change(*more: str) -> tuple[float, float]:
        """Return the FLOP of attention, by hand those of all scores less."""
        plain = step_flops(settings(*base))
        scores = 2 * batch * heads * 4 * 2048**2
        found = step_flops(settings(*words, *more))
        forward = found.forward - plain.forward + 2 * scores
        return forward, found.backward - plain.backward + 4 * scores

    one = 2 * batch * heads * 512**2
    # Of 4 x 4 blocks of 512 x 512, 10 are not above the diagonal; of 2 x 4 of 1024 x 512, 6.
    wide = (4 * one * 10 * 2, 4 * one * (12 * 4 + 10 * 3))
    assert change() == pytest.approx(wide)
    assert change("model.kernel.fused_backward=true") == pytest.approx((wide[0], 4 * one * 12 * 5))
    # A window of 512 positions reaches one block back: 1 + 2 + 2 + 2, and 2 + 3 of the larger.
    near = ["model.window=512", "model.window_cycle=2"]
    expected = (2 * one * (10 + 7) * 2, 2 * one * ((12 + 10) * 4 + (10 + 7) * 3))
    assert change(*near) == pytest.approx(expected)
    # Of cuDNN's 16 x 16 blocks of 128 x 128, 136 are not above the diagonal.
    some = 4 * 2 * batch * heads * 128**2 * 136
    assert change("model.kernel.attention=cudnn") == pytest.approx((2 * some, 5 * some))
    fused = ["model.kernel.attention=fused", "model.compute=bfloat16"]
    assert change(*fused, "devices.topology=v5e-8") == pytest.approx(wide)
    assert change(*fused, "devices.topology=h100-8") == pytest.approx((2 * some, 5 * some))
    kept = [*words, "model.remat=true", "model.kept=['attention']"]
    again = step_flops(settings(*words, "model.remat=true")).recomputed
    assert again - step_flops(settings(*kept)).recomputed == pytest.approx(wide[0])


@pytest.mark.parametrize("name", REAL)
def test_flops_of_compiled_programs_match_the_formula(name: str) -> None:
    facts = FACTS[name]
    expected = step_flops(REAL[name]).total / facts.devices
    assert facts.product_flops == pytest.approx(expected, rel=1e-2)
    assert facts.unknown_loops == 0


@pytest.mark.parametrize("name", REAL)
def test_state_bytes_of_compiled_programs_match_the_formula(name: str) -> None:
    expected = formulas.state_bytes(REAL[name])
    assert FACTS[name].state_bytes == pytest.approx(expected, rel=1e-2)


# On v5e and v5p, whose compilers scatter each sum of gradients in steps during its product.
@pytest.mark.parametrize("name", ["1b_v5e_16", "8b_v5p_64"])
def test_sent_bytes_of_compiled_programs_match_the_formula(name: str) -> None:
    run = REAL[name]
    count = formulas.ways(run, ("embed",))
    item = formulas.ITEM_BYTES[run.model.compute]
    spread = [
        x
        for path, x in declared_arrays(run.model).items()
        if "embed" in x.axes and path != "embedding"
    ]
    whole = (
        run.training.accumulate
        * item
        * sum(
            x.size / formulas.ways(run, [axis for axis in x.axes if axis != "embed"])
            for x in spread
        )
    )
    # Remat gathers each matrix in the forward pass and again in the backward pass.
    gathered = 2 * (count - 1) / count * whole
    # Windowed einsum (Wang et al. 2023, doi:10.1145/3567955.3567959) overlaps the reduce-scatter
    # with the product: a device sends a shard in both directions per step, and two for alignment.
    scattered = (count + 1) / count * whole
    # Each device looks up the tokens of all devices (int32, once more for the gradient) in its
    # slice of the width, and sends the features on.
    own = run.training.batch * run.model.length / formulas.ways(run, ("batch", "length"))
    looked_up = 2 * (own * run.model.width * item * (count - 1) / count + 4 * own * (count - 1))
    expected = gathered + scattered + looked_up
    assert FACTS[name].sent_bytes == pytest.approx(expected, rel=1e-2)
