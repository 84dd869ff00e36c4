"""Mistakes in StableHLO programs that the catalogue (tests/errors) lacks."""

import jax
import numpy as np
import pytest

from tests.core.pjit.helpers import make_mesh
from tests.core.pjit.stages.test_stablehlo import MATMUL, X, double
from tests.grouped_cases import sweep
from xlashard import NamedSharding, P, compile_stablehlo
from xlashard.errors import (
    ArgumentError,
    DeviceMismatchError,
    MeshError,
    ResourceError,
)


def other_mesh():
    return make_mesh((4,), ("x",))


BAD = {
    "no mesh": (
        lambda m: compile_stablehlo(MATMUL, in_shardings=P("x")),
        MeshError,
        r"args\[0\] is P",
    ),
    "unknown axis": (
        lambda m: compile_stablehlo(MATMUL, in_shardings=(P(), P("z")), mesh=m),
        ResourceError,
        r"in_shardings of args\[1\] is P\('z',?\): dimension 0 names the axis 'z'",
    ),
    "not divisible": (
        lambda m: compile_stablehlo(MATMUL, out_shardings=(P(None, "x"), None), mesh=m),
        ResourceError,
        r"results\[0\].*dimension 1 of shape \(8, 2\) has size 2",
    ),
    "rank": (
        lambda m: compile_stablehlo(MATMUL, in_shardings=(P("x", None, "y"), None), mesh=m),
        ResourceError,
        r"args\[0\].*at least 3 dimensions",
    ),
    "count": (
        lambda m: compile_stablehlo(MATMUL, in_shardings=(P("x"),), mesh=m),
        ResourceError,
        "in_shardings has 1 entr",
    ),
    "no sharding": (
        lambda m: compile_stablehlo(MATMUL, in_shardings=("x", None)),
        ResourceError,
        r"in_shardings\[0\] is 'x' .*write P\('x'\)",
    ),
    "two meshes": (
        lambda m: compile_stablehlo(
            MATMUL, in_shardings=(NamedSharding(other_mesh(), P()), None), mesh=m
        ),
        DeviceMismatchError,
        r"the mesh names 8 .* in_shardings of args\[0\] names 4",
    ),
    "shape": (
        lambda m: compile_stablehlo(MATMUL)(X, X),
        ArgumentError,
        r"args\[1\].* float32\[4,2\].* float32\[8,4\]",
    ),
    "a struct": (
        lambda m: compile_stablehlo(MATMUL)(X, jax.ShapeDtypeStruct((4, 2), np.float32)),
        ArgumentError,
        r"args\[1\] is a ShapeDtypeStruct",
    ),
    "a complex number": (
        lambda m: compile_stablehlo(double("f32"))(1j),
        ArgumentError,
        r"args\[0\].* float32\[\].* complex64\[\]",
    ),
}


@pytest.mark.parametrize("name", sweep(BAD, quick=BAD, several=("not divisible", "two meshes")))
def test_errors_name_the_argument(mesh, name):
    attempt, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        attempt(mesh)
