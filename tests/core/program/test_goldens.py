"""Annotations of `@main` by each partitioner, as text; and errors."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.program.cases import VALID
from tests.core.program.helpers import lower, mesh, text_of
from tests.core.program.invalid_cases import INVALID
from tests.goldens import check_golden, check_no_others, join_sections
from xlashard import NamedSharding, P
from xlashard.errors import DonationError, XlashardError

GOLDENS = Path(__file__).parent / "goldens"
ERRORS = "errors.txt"
FUNCTION = "a_function.mlir"


@pytest.mark.parametrize("case", VALID, ids=lambda c: c.name)
@pytest.mark.devices(8)
def test_module(case, partitioner, update_goldens):
    lowered = lower(case.source, case.plan(partitioner), case.tokens)
    text = f"// {case.summary}\n{text_of(lowered)}"
    if lowered.donation.unusable:
        with pytest.raises(DonationError) as caught:
            lowered.report_donation("strict", "f")
        text += "\n" + "\n".join(f"// {line}" for line in str(caught.value).splitlines())
    check_golden(GOLDENS / partitioner.value / f"{case.name}.mlir", text, update=update_goldens)


@pytest.mark.devices(8)
def test_module_of_a_function(jax_partitioner, update_goldens):
    on = mesh()

    def layer(weights, x):
        hidden = xlashard.with_sharding_constraint(
            x @ weights["w"] + weights["b"], NamedSharding(on, P("x", P.UNCONSTRAINED))
        )
        return {"hidden": jnp.tanh(hidden), "mean": hidden.mean()}

    shardings = {"w": NamedSharding(on, P(None, "y")), "b": NamedSharding(on, P("y"))}
    lowered = xlashard.pjit(
        layer,
        in_shardings=(shardings, NamedSharding(on, P("x", "y"))),
        out_shardings={"hidden": NamedSharding(on, P("x", "y")), "mean": None},
        donate_argnums=1,
    ).lower(
        {"w": np.ones((8, 8), np.float32), "b": np.ones(8, np.float32)},
        np.ones((4, 8), np.float32),
    )
    text = "// a function of JAX, a constraint inside, a dict of results\n"
    text += text_of(lowered)
    check_golden(GOLDENS / jax_partitioner.value / FUNCTION, text, update=update_goldens)


@pytest.mark.devices(8)
def test_errors(partitioner, update_goldens):
    found = {}
    for name, (source, planned) in INVALID.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            lower(source, planned(partitioner))
        assert isinstance(caught.value, XlashardError), name
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    path = GOLDENS / partitioner.value / ERRORS
    check_golden(path, join_sections(found), update=update_goldens)


def test_each_golden_file_has_a_case(partitioner, update_goldens):
    names = {f"{case.name}.mlir" for case in VALID} | {ERRORS, FUNCTION}
    check_no_others(GOLDENS / partitioner.value, names, update=update_goldens)


def test_no_golden_contains_source_locations():
    for path in GOLDENS.rglob("*.*"):
        assert "loc(" not in path.read_text(encoding="utf-8"), path.name
