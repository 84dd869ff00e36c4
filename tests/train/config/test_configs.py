"""The settings files for real runs, and the checked-in facts of their preflights."""

import math

import pytest

from benchmarks import _preflights as preflights
from benchmarks._published_runs import published_runs
from xlashard.predict.targets.gpu.gpu_names import parse_gpu_name
from xlashard.predict.targets.tpu.topology_names import parse_topology_name
from xlashard.train.formulas import workload
from xlashard.train.model.checks import check_settings

REAL = preflights.topology_settings()
FACTS = preflights.read_facts()
RUNS = published_runs()
ADVICE = "write them again: make preflights"


def test_every_model_size_has_settings_and_facts() -> None:
    assert set(REAL) == {
        *("1b_v5e_16", "8b_v5p_64", "8b_v6e_64", "70b_v5p_512", "405b_v5p_4096", "moe_v5p_128"),
        *("8b_h100_32", "70b_h100_256"),
    }
    assert set(FACTS) == {*REAL, preflights.SMALL}


@pytest.mark.parametrize("name", REAL)
def test_preflight_facts_are_up_to_date_with_the_settings(name: str) -> None:
    facts, settings = FACTS[name], REAL[name]
    assert facts.settings == preflights.digest(name), ADVICE
    expected = workload(settings)
    assert facts.tokens == expected.tokens, ADVICE
    assert facts.model_flops == expected.model_flops, ADVICE
    assert facts.parameters == expected.parameters, ADVICE
    assert facts.active_parameters == expected.active_parameters, ADVICE
    assert facts.mesh == settings.mesh


@pytest.mark.parametrize("name", REAL)
def test_every_config_fits_with_memory_to_spare(name: str) -> None:
    facts = FACTS[name]
    assert facts.outcome == "fits"
    assert facts.spare >= 0.08
    # The new state reuses the memory of the old one.
    assert facts.alias_bytes > 0.99 * facts.argument_bytes


def test_the_table_of_the_guide_has_a_row_for_each_file() -> None:
    rows = preflights.table().splitlines()[2:]
    assert len(rows) == len(REAL)
    for name, row in zip(REAL, rows, strict=True):
        assert f"`{name}.toml`" in row
        assert f"{FACTS[name].chips:,} of {FACTS[name].generation}" in row


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [preflights.SMALL, "1b_v5e_16"])
def test_compiled_facts_equal_the_checked_in_facts(
    name: str, request: pytest.FixtureRequest
) -> None:
    if name in REAL and not request.config.getoption("--full-size"):
        pytest.skip("a minute and a half of compilation: --full-size, as in make test-all")
    before = FACTS[name]
    again = preflights.compile_facts(name, REAL.get(name) or preflights.small_settings())
    assert again.settings == before.settings, ADVICE
    assert again.outcome == "fits"
    assert again.spare >= 0.08
    assert again.argument_bytes == pytest.approx(before.argument_bytes, rel=1e-3)
    # Other versions of the compiler place temporaries otherwise, and do the same work.
    assert again.total_bytes == pytest.approx(before.total_bytes, rel=0.2)
    assert again.product_flops == pytest.approx(before.product_flops, rel=0.01)


def test_published_runs_have_valid_settings_for_the_chips() -> None:
    assert len(RUNS) >= 40
    tpus = {run.chip for run in RUNS.values() if run.target == "tpu"}
    assert tpus == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    gpus = {run.chip for run in RUNS.values() if run.target == "gpu"}
    assert gpus == {"a100", "h100", "h200", "b200"}
    for name, run in RUNS.items():
        check_settings(run.settings)
        devices = run.settings.devices
        if run.target == "gpu":
            group = parse_gpu_name(devices.topology, 1)
            assert group.model.name.partition("-")[0] == run.chip, name
            chips = group.nodes * group.gpus
        else:
            place = parse_topology_name(devices.topology)
            assert place.generation.name == run.chip, name
            chips = math.prod(place.shape) * devices.slices
        assert chips == int(name.split("_")[2]), name
        # A chip of tpu7x is two devices, one of the others is one.
        assert math.prod(run.settings.mesh.values()) == chips * (1 + (run.chip == "tpu7x")), name
        assert run.seconds > 0
        assert run.reliability in ("A", "B")
        assert run.source
