"""What can be wrong with a StableHLO program or its call, and how it is told."""

from pathlib import Path

import jax
import numpy as np
import pytest

import xlashard
from tests.pjit.helpers import make_mesh
from tests.pjit.test_stablehlo import MATMUL, W, X, double
from xlashard import NamedSharding, P, compile_stablehlo
from xlashard.errors import (
    ArgumentError,
    DeviceMismatchError,
    MeshError,
    ModuleError,
    ResourceError,
)


def other_mesh():
    return make_mesh((4,), ("x",))


BAD = {
    "no text": (
        lambda m: compile_stablehlo(Path("x.mlir")),
        ArgumentError,
        "not PosixPath: .*read_b",
    ),
    "a line": (
        lambda m: compile_stablehlo(MATMUL.replace("%x,", "%q,")),
        ModuleError,
        "line 3, col",
    ),
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
    "devices and mesh": (
        lambda m: compile_stablehlo(MATMUL, mesh=m, devices=jax.devices()[:2]),
        DeviceMismatchError,
        r"devices names 2 \[0, 1\] and the mesh names 8",
    ),
    "no devices": (lambda m: compile_stablehlo(MATMUL, devices=[]), ArgumentError, "at least one"),
    "a mesh that is none": (
        lambda m: compile_stablehlo(MATMUL, mesh="x"),
        ArgumentError,
        "not str",
    ),
    "donation": (
        lambda m: compile_stablehlo(MATMUL, donate_argnums=2),
        ArgumentError,
        "argument 2",
    ),
    "fewer arguments": (
        lambda m: compile_stablehlo(MATMUL)(X),
        ArgumentError,
        "takes 2 arguments, 1",
    ),
    "keywords": (lambda m: compile_stablehlo(MATMUL)(X, w=W), TypeError, "unexpected keyword"),
    "shape": (
        lambda m: compile_stablehlo(MATMUL)(X, X),
        ArgumentError,
        r"args\[1\] as float32\[4,2\], but float32\[8,4\] was given",
    ),
    "dtype": (
        lambda m: compile_stablehlo(MATMUL)(X, W.astype(np.int32)),
        ArgumentError,
        r"args\[1\] as float32\[4,2\], but int32\[4,2\] was given: pass x.astype\('float32'\)",
    ),
    "a text": (
        lambda m: compile_stablehlo(MATMUL)(X, "w"),
        ArgumentError,
        r"args\[1\] is 'w' \(str\)",
    ),
    "a struct": (
        lambda m: compile_stablehlo(MATMUL)(X, jax.ShapeDtypeStruct((4, 2), np.float32)),
        ArgumentError,
        r"args\[1\] is a ShapeDtypeStruct",
    ),
    "a complex number": (
        lambda m: compile_stablehlo(double("f32"))(1j),
        ArgumentError,
        r"args\[0\] as float32\[\], but complex64\[\] was given: compile",
    ),
    "a trace": (
        lambda m: jax.jit(lambda x: compile_stablehlo(MATMUL)(x, W))(X),
        ArgumentError,
        r"args\[0\] is a tracer",
    ),
    "another place": (
        lambda m: compile_stablehlo(MATMUL, in_shardings=P("x"), mesh=m)(
            xlashard.device_put(X, NamedSharding(m, P("y"))), W
        ),
        ResourceError,
        r"args\[0\].*committed as .*device_put\(x, NamedSharding\(mesh, P",
    ),
}


@pytest.mark.parametrize(("attempt", "kind", "text"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_told_by_its_place(mesh, attempt, kind, text):
    with pytest.raises(kind, match=text):
        attempt(mesh)
