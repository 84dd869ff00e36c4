import tomllib

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.train.examples import MESHES, WHOLE, settings
from xlashard.train.errors import SettingsError
from xlashard.train.model.checks import check_settings


def refusal(*words: str) -> str:
    with pytest.raises(SettingsError) as caught:
        check_settings(settings(*words))
    return str(caught.value)


@pytest.mark.parametrize("name", MESHES)
def test_settings_of_every_example_mesh_are_valid(name: str) -> None:
    check_settings(settings(**MESHES[name]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["mesh.tensor=4"],
            ["data=2 × fsdp=2 × tensor=4 takes 16 devices", "emulate is 8", "emulate = 16"],
        ),
        (["mesh={}"], ["[mesh] has no axes"]),
        (["model.heads=5"], ["model.width = 32 does not divide by model.heads = 5", "width = 30"]),
        (["model.heads=32"], ["= 1 must be even", "width = 64"]),
        (["model.kv_heads=3"], ["model.heads = 8 does not divide by model.kv_heads = 3"]),
        (
            ["model.kv_heads=1"],
            ["model.kv_heads = 1 does not divide over tensor=2", "kv_heads = 2"],
        ),
        (["model.mlp=33"], ["model.mlp = 33 does not divide over tensor=2", "mlp = 32"]),
        (
            ["training.batch=6"],
            ["training.batch = 6 does not divide over data=2 × fsdp=2 = 4 devices", "batch = 8"],
        ),
        (["training.accumulate=3"], ["training.batch = 8 does not divide", "batch = 9"]),
        (["training.accumulate=4"], ["/ training.accumulate = 2 does not divide", "batch = 16"]),
        (
            ["sharding.rules.mlp=tensr"],
            ["sharding.rules.mlp names 'tensr'", "'data', 'fsdp', 'tensor'", 'mlp = ["tensor"]'],
        ),
        (
            ["sharding.rules.embed=tensor"],
            ["sharding.rules.vocab and sharding.rules.embed both use the mesh axis 'tensor'"],
        ),
        (
            ["sharding.rules.batch=['data', 'tensor']"],
            ["sharding.rules.batch and sharding.rules.heads both use", "heads = []"],
        ),
        (
            ["sharding.rules.batch=['data', 'data']"],
            ["sharding.rules.batch", "names an axis twice", 'batch = ["data"]'],
        ),
        (
            [
                "mesh={data=1, fsdp=1, tensor=512}",
                "devices.emulate=512",
                "model.heads=512",
                "model.width=1024",
                "model.kv_heads=512",
                "model.mlp=512",
            ],
            ["model.vocab = 256 does not divide over tensor=512", "vocab = []"],
        ),
        (
            ["model.attention_block=12"],
            ["model.length = 32 does not divide by model.attention_block = 12", "block = 4"],
        ),
        (
            ["model.vocab=500", "model.vocab_parts=3", "generation.bytes=0"],
            ["model.vocab = 500 does not divide by model.vocab_parts = 3", "vocab = 501"],
        ),
        (["model.vocab=100"], ["less than 256", "vocab = 256"]),
        (["model.vocab=512"], ["requires a model of bytes", "bytes = 0"]),
        (["data.tokens=uint16"], ["requires a model of bytes", "bytes = 0"]),
        (
            ["model.remat=true", "model.kept=['query', 'gats']"],
            ["model.kept names 'gats'", "stream, gate, up", 'kept = ["query"]'],
        ),
        (["model.kept=['query']"], ["model.remat = false", "remat = true"]),
        (
            ["model.remat=true", "model.kept=['up']", "model.offloaded=['up', 'out']"],
            ["model.kept and model.offloaded both name 'up'", "kept = []"],
        ),
        (
            ["model.remat=true", "model.offloaded=['up']", "model.remat_policy=minimal"],
            ['model.remat_policy = "minimal"', "offloaded = []"],
        ),
        (["model.head_dim=7"], ["model.head_dim = 7 must be even", "head_dim = 8"]),
        (["model.window=4"], ["model.window_cycle = 1", "window_cycle = 2"]),
        (
            ["model.wide_head_dim=7", "model.wide_kv_heads=3"],
            ["model.wide_head_dim = 7 must be even", "wide_head_dim = 8", "wide_kv_heads = 3"],
        ),
        (
            ["model.latent=8", "model.kv_heads=8", "model.wide_kv_heads=4"],
            ["model.wide_kv_heads = 4", "a key for each of 8 query heads", "wide_kv_heads = 0"],
        ),
        (
            ["model.dense_layers=1", "model.dense_mlp=16"],
            ["model.dense_layers = 1", "model.dense_mlp = 16", "model.experts = 0"],
        ),
        (
            ["model.experts=4", "model.dense_layers=1", "model.expert_cycle=3"],
            ["none of model.layers = 2", "dense_layers = 0", "expert_cycle = 1"],
        ),
        (
            ["model.window=4", "model.window_cycle=3", "model.attention_block=8"],
            ["attention in blocks", "attention_block = 0"],
        ),
        (
            ["model.kernel.attention=flash", "model.window=4", "model.window_cycle=2"],
            ["the flash kernel has no windows", 'attention = "splash"'],
        ),
        (
            ["model.kernel.attention=splash", "model.kernel.block_q=12"],
            ["model.kernel.block_q = 12 does not divide model.length = 32", "block_q = 4"],
        ),
        (
            ["model.latent=8", "model.rope_size=5"],
            ["a key for each of 8 query heads", "kv_heads = 8", "rope_size = 6"],
        ),
        (
            ["model.latent=8", "model.kv_heads=8", "model.attention_block=8"],
            ["keys longer than values", "attention_block = 0"],
        ),
        (
            ["model.latent=8", "model.kv_heads=8", "model.kernel.attention=cudnn"],
            ["keys longer than values", 'attention = "splash"'],
        ),
        (["model.experts=4", "model.gated=false"], ["have a gate", "gated = true"]),
        (
            [
                "sharding=auto",
                "sharding.rules.batch=[]",
                "model.kernel.attention=splash",
                *(f"sharding.rules.{axis}=[]" for axis in WHOLE),
            ],
            ["sharding.rules has none", "whole batch", 'batch = ["data"]'],
        ),
        (
            ["sharding=auto", "model.experts=3", "model.dropless=true", "training.batch=6"],
            ["training.batch = 6 does not divide over data=2 × fsdp=2 = 4 devices", "batch = 8"],
        ),
        (
            ["model.experts=4", "model.dropless=true", "sharding.rules.experts=data"],
            ["sharding.rules.experts", "a device has all of them", "experts = []"],
        ),
        (
            ["model.experts=2", "model.active_experts=3"],
            ["model.active_experts = 3 of model.experts = 2", "active_experts = 2"],
        ),
        (
            ["model.experts=3", "sharding.rules.experts=data", "sharding.rules.batch=fsdp"],
            ["model.experts = 3 does not divide over data=2", "experts = 4"],
        ),
        (
            ["model.length=33", "sharding.rules.length=tensor", "sharding.rules.vocab=[]"],
            ["model.length = 33 does not divide over tensor=2", "length = 32"],
        ),
        (
            ["sharding.rules.length=data"],
            ["sharding.rules.batch and sharding.rules.length both use the mesh axis 'data'"],
        ),
    ],
)
def test_error_of_inconsistent_settings_names_their_keys(
    words: list[str], expected: list[str]
) -> None:
    text = refusal(*words)
    for part in expected:
        assert part in text


def test_sharding_rules_are_ignored_with_an_automatic_layout() -> None:
    check_settings(settings("sharding=auto", "sharding.rules.mlp=tensr", "training.batch=7"))


def test_each_problem_is_reported_once() -> None:
    text = refusal("model.kv_heads=1", "training.batch=6")
    assert text.count("Write:") == 2


SIZES = st.integers(1, 12)


@pytest.mark.slow
@hypothesis_settings(max_examples=200)
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from([1, 2, 4, 8]))
def test_suggested_batch_size_is_accepted(
    data: int, fsdp: int, batch: int, accumulate: int, tensor: int
) -> None:
    words = [
        f"mesh={{data={data}, fsdp={fsdp}, tensor={tensor}}}",
        f"devices.emulate={data * fsdp * tensor}",
        f"training.batch={batch}",
        f"training.accumulate={accumulate}",
        "sharding.rules.embed=[]",
        "sharding.rules.kv_heads=[]",
    ]
    for _ in range(3):
        try:
            check_settings(settings(*words))
        except SettingsError as error:
            corrected = tomllib.loads(str(error).partition("Write:")[2])
            words.append(f"training.batch={corrected['training']['batch']}")
        else:
            return
    pytest.fail(f"still refused after {words}")
