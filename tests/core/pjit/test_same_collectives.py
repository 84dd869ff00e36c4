"""pjit and jax.jit have the same collectives under the same shardings.

Checked twice: by this package's reader of a compiled program, and by a crude count in its text.
"""

import re
from collections import Counter

import jax
import pytest

import xlashard
from tests.core.pjit.helpers import make_mesh
from tests.core.pjit.named_programs import PROGRAMS, Library
from tests.grouped_cases import sweep
from xlashard import UNSPECIFIED, P
from xlashard.hlo.hlo_program import read_collectives

JAX = Library(jax.jit, jax.lax.with_sharding_constraint, jax.sharding.NamedSharding)
OURS = Library(xlashard.pjit, xlashard.with_sharding_constraint, xlashard.NamedSharding)

CRUDE = re.compile(
    r"^ *(?:ROOT )?%\S+ = (?P<result>.*?) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(",
    re.MULTILINE,
)
ELEMENTS = re.compile(r"\b(pred|[subf]+\d+|c\d+)\[([\d,]*)\]")


def compiled_text(library, program, mesh):
    """Return the optimised HLO of a program, with its shardings in a library's own classes."""

    def named(specs):
        return jax.tree.map(
            lambda spec: library.named(mesh, spec) if isinstance(spec, P) else spec,
            specs,
            is_leaf=lambda x: isinstance(x, P) or x is UNSPECIFIED,
        )

    f = library.jit(
        program.make(library, mesh),
        in_shardings=named(program.in_specs),
        out_shardings=named(program.out_specs),
    )
    return f.lower(*program.shapes).compile().as_text()


def read(text):
    """Count the collectives by kind, bytes, groups and runs."""
    return Counter(
        (c.kind, c.operand_bytes, c.result_bytes, str(c.groups), c.times)
        for c in read_collectives(text)
    )


def crude(text):
    """Count the collectives by kind and result shapes."""
    return Counter(
        (found["kind"], tuple(ELEMENTS.findall(found["result"]))) for found in CRUDE.finditer(text)
    )


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(PROGRAMS, quick=list(PROGRAMS)[::5]))
def test_collectives_match_jax(name, mesh, partitioner):
    program = PROGRAMS[name]
    mesh = make_mesh((4, 2), ("data", "model"))
    ours, theirs = (compiled_text(library, program, mesh) for library in (OURS, JAX))
    assert read(ours) == read(theirs)
    assert crude(ours) == crude(theirs)
    # Both readers agree, and find something where there are collectives.
    kinds = Counter(c.kind for c in read_collectives(ours))
    assert kinds == Counter(kind for kind, _ in crude(ours).elements())
    assert bool(kinds) != program.silent


@pytest.mark.devices(8)
@pytest.mark.slow
def test_each_kind_of_collective_occurs(partitioner):
    mesh = make_mesh((4, 2), ("data", "model"))
    names = (
        "matmul, row-parallel",
        "convolution over cut pictures",
        "experts, tokens sent to them and back",
        "matmul, fsdp gradient",
    )
    texts = [compiled_text(OURS, PROGRAMS[name], mesh) for name in names]
    kinds = {c.kind for text in texts for c in read_collectives(text)}
    assert kinds >= {"all-reduce", "all-gather", "all-to-all", "collective-permute"}


@pytest.mark.devices(8)
def test_comparison_detects_another_sharding():
    """The comparison detects programs that differ in one spec."""
    mesh = make_mesh((4, 2), ("data", "model"))
    row, column = (PROGRAMS[f"matmul, {name}-parallel"] for name in ("row", "column"))
    texts = [compiled_text(OURS, program, mesh) for program in (row, column)]
    assert read(texts[0]) != read(texts[1]) and crude(texts[0]) != crude(texts[1])
