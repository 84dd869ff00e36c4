"""Programs written without xlashard run unchanged under its tools."""

import json

import pytest

import xlashard
from tests.ecosystem.programs import PROGRAMS, UserProgram, libraries, plain

pytestmark = pytest.mark.integration
# Their import registers the programs.
assert libraries and plain


def test_catalogue_has_enough_programs():
    jitted = [name for name, make in PROGRAMS.items() if name not in NOT_FUNCTIONS_ALONE]
    assert len(PROGRAMS) >= 20 and len(jitted) >= 10


# Made by a wrapper of jax.jit, by jax.pmap or of a method, which pjit has no equivalent of.
NOT_FUNCTIONS_ALONE = ("nnx_transformer", "equinox_transformer", "pmapped", "method_of_a_trainer")


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_and_preflight(name):
    made = PROGRAMS[name]()
    check_preflight(made)
    report = xlashard.explain(made.function, *made.args)
    assert report.place.num_devices == 8
    assert report.memory.argument_bytes > 0
    assert all(value.path for value in report.inputs)
    if name in NOT_FUNCTIONS_ALONE:
        return
    if report.constants:
        # pjit passes closed-over arrays as arguments.
        return
    # None in out_shardings is unspecified for jit, as for jax.jit, which names operations after
    # itself.
    ours = xlashard.explain(xlashard.jit(made.fun, **made.options), *made.args)
    assert json.loads(report.to_json().replace(f"jit({report.name})/", f"{report.name}/")) == (
        json.loads(ours.to_json())
    )


def check_preflight(made: UserProgram) -> None:
    report = xlashard.preflight(made.function, *made.args, topology="v5e-8", estimate=True)
    assert report.outcome == "fits"
    assert report.topology.devices == 8
    assert {value.path for value in report.inputs} and report.memory.argument_bytes > 0
