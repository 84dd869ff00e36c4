"""Modules and plans with golden files of their annotated text, or of their error."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.core.program.helpers import (
    U,
    identity,
    mesh,
    named,
    plan,
    single,
    tiles,
    value,
)
from xlashard.core.program.plan import Partitioner, ProgramPlan

T88 = "tensor<8x8xf32>"


@dataclass(frozen=True)
class Case:
    """Golden text.

    Attributes:
        name: Name of the file.
        summary: Subject of the case.
        source: The module before it is annotated.
        plan: Makes the plan for a partitioner.
        tokens: Ordering tokens in front of arguments and results.
    """

    name: str
    summary: str
    source: str
    plan: Callable[[Partitioner], ProgramPlan]
    tokens: int = 0


VALID = [
    Case(
        "named",
        "axes by name, a combined cut, and dimensions past the spec",
        identity(T88, T88, "tensor<8x8x2xf32>"),
        lambda p: plan(
            [
                value((8, 8), named("x", "y")),
                value((8, 8), named(None, ("y", "x"))),
                value((8, 8, 2), named("y")),
            ],
            [
                value((8, 8), named("x", "y")),
                value((8, 8), named()),
                value((8, 8, 2), named(None, "x")),
            ],
            p,
            mesh=mesh(),
        ),
    ),
    Case(
        "unspecified",
        "without shardings: the partitioner chooses",
        identity(T88),
        lambda p: plan([value((8, 8))], [value((8, 8))], p),
    ),
    Case(
        "open_dimensions",
        "UNCONSTRAINED dimensions of an argument and of a result",
        identity(T88, T88),
        lambda p: plan(
            [value((8, 8), named(U, "y")), value((8, 8), named("x", U))],
            [value((8, 8), named(U)), value((8, 8), named("x", None))],
            p,
        ),
    ),
    Case(
        "scalars",
        "values without dimensions",
        identity("tensor<f32>", "tensor<i1>"),
        lambda p: plan(
            [value((), named()), value((), tiles("{replicated}"), "bool")],
            [value((), tiles("{replicated}")), value((), None, "bool")],
            p,
        ),
    ),
    Case(
        "zero_sizes",
        "dimensions of size zero are cut like others",
        identity("tensor<0x8xf32>", "tensor<8x0xf32>"),
        lambda p: plan(
            [value((0, 8), named("x", "y")), value((8, 0), tiles("{devices=[8,1]<=[8]}"))],
            [value((0, 8), named("y")), value((8, 0))],
            p,
        ),
    ),
    Case(
        "tiles",
        "bare tiles: transposed, partly replicated, listed, and across two dimensions at once",
        identity(T88, T88, T88, "tensor<8xf32>"),
        lambda p: plan(
            [
                value((8, 8), tiles("{devices=[4,2]<=[2,4]T(1,0)}")),
                value((8, 8), tiles("{devices=[1,4,2]<=[8] last_tile_dim_replicate}")),
                value((8, 8), tiles("{devices=[2,4]3,1,2,0,5,4,7,6}")),
                value((8,), tiles("{devices=[8]<=[2,2,2]T(2,1,0)}")),
            ],
            [
                value((8, 8), tiles("{devices=[8,1]<=[8]}")),
                value((8, 8)),
                value((8, 8)),
                value((8,)),
            ],
            p,
        ),
    ),
    Case(
        "tiles_across_dimensions",
        "2 x 3 tiles over devices that count 3 x 2: no axis is part of one dimension only",
        identity("tensor<6x6xf32>"),
        lambda p: plan(
            [value((6, 6), tiles("{devices=[2,3]<=[2,3]T(1,0)}", 6))],
            [value((6, 6), tiles("{devices=[2,3]<=[6]}", 6))],
            p,
            count=6,
        ),
    ),
    Case(
        "two_meshes",
        "two meshes over the same devices get a symbol each, equal ones share theirs",
        identity(T88, T88, T88),
        lambda p: plan(
            [
                value((8, 8), named("x")),
                value((8, 8), named("a", "c", on=mesh((2, 2, 2), ("a", "b", "c")))),
                value((8, 8), named("y", on=mesh())),
            ],
            [
                value((8, 8), named("a", on=mesh((2, 2, 2), ("a", "b", "c")))),
                value((8, 8)),
                value((8, 8)),
            ],
            p,
        ),
    ),
    Case(
        "keys",
        "PRNG keys: the dimensions that only their buffers have are never cut",
        identity(*["tensor<8x2xui32>"] * 4, "tensor<2xui32>"),
        lambda p: plan(
            [
                value((8,), named("x"), "key<fry>", trailing=1),
                value((8,), named(U), "key<fry>", trailing=1),
                value(
                    (8,),
                    tiles("{devices=[4,2]<=[8] last_tile_dim_replicate}"),
                    "key<fry>",
                    trailing=1,
                ),
                value((8,), None, "key<fry>", trailing=1),
                value((), None, "key<fry>", trailing=1),
            ],
            [
                value((8,), named("y"), "key<fry>", trailing=1),
                value((8,), None, "key<fry>", trailing=1),
                value((8,), named(), "key<fry>", trailing=1),
                value((8,), None, "key<fry>", trailing=1),
                value((), named(), "key<fry>", trailing=1),
            ],
            p,
            mesh=mesh(),
        ),
    ),
    Case(
        "donation",
        "an alias where all is settled, an offer where it is not, nothing where nothing fits",
        identity(T88, T88, "tensor<4x8xf32>", "tensor<64xi32>", "tensor<3xf32>"),
        lambda p: plan(
            [
                value((8, 8), named("x"), name="alias"),
                value((8, 8), named("y"), name="open"),
                value((4, 8), name="kept"),
                value((64,), named("x"), "int32", name="other shape"),
                value((3,), name="too small"),
            ],
            [
                value((8, 8)),
                value((8, 8), named("x")),
                value((4, 8), named()),
                value((64,), named("x"), "int32"),
                value((3,), named()),
            ],
            p,
            donated=(True, True, False, True, False),
        ),
    ),
    Case(
        "donation_unusable",
        "other bytes, another memory, other pieces, and one argument too many",
        identity(T88, "tensor<16xf32>", "tensor<4x8xf32>", "tensor<4x8xf32>"),
        lambda p: plan(
            [
                value((8, 8), named("x"), name="halved"),
                value((16,), named("x"), name="moved"),
                value((4, 8), named(), name="first"),
                value((4, 8), named(), name="second"),
            ],
            [
                value((8, 8), named("y")),
                value((16,), named("x"), memory_kind="pinned_host"),
                value((4, 8), named()),
                value((4, 8), named("x", "y")),
            ],
            p,
            donated=(True,) * 4,
        ),
    ),
    Case(
        "layouts",
        "the order of dimensions in memory, asked for and left to the compiler",
        identity(T88, T88),
        lambda p: plan(
            [value((8, 8), named("x"), layout="{0,1}"), value((8, 8), named("x"), layout="auto")],
            [value((8, 8), named("x"), layout="{0,1}"), value((8, 8), named("x"), layout="auto")],
            p,
            donated=(True, True),
        ),
    ),
    Case(
        "memories",
        "arguments and results in other memories of the devices",
        identity(T88, T88),
        lambda p: plan(
            [
                value((8, 8), named("x", memory_kind="pinned_host"), memory_kind="pinned_host"),
                value((8, 8), named("x")),
            ],
            [
                value((8, 8), named("x")),
                value((8, 8), named("x", memory_kind="unpinned_host"), memory_kind="unpinned_host"),
            ],
            p,
        ),
    ),
    Case(
        "names",
        "names of the module, of results and of axes with letters that MLIR has to escape",
        identity("tensor<8xf32>"),
        lambda p: plan(
            [value((8,), named('a"b', on=mesh((8,), ('a"b',))))],
            [value((8,), named("ö\\", on=mesh((8,), ("ö\\",))), name="result['w'][\"v\"]")],
            p,
            name="<lambda> of größe",
        ),
    ),
    Case(
        "one_device",
        "a single device: shardings say nothing",
        identity(T88, T88),
        lambda p: plan(
            [value((8, 8), single()), value((8, 8))],
            [value((8, 8), named("x", on=mesh((1,), ("x",)))), value((8, 8))],
            p,
            donated=(True, True),
            count=1,
        ),
    ),
    Case(
        "tokens",
        "ordering tokens come first, and count where a result is named by position",
        identity("!stablehlo.token", T88),
        lambda p: plan(
            [value((8, 8), named("x"))], [value((8, 8), named("x"))], p, donated=(True,)
        ),
        tokens=1,
    ),
    Case(
        "nothing",
        "neither arguments nor results",
        identity(),
        lambda p: plan([], [], p),
    ),
    Case(
        "other_entry",
        "the only public function becomes @main; its own attributes are kept",
        """module @other {
          func.func private @inner(%a: tensor<8xf32>) -> tensor<8xf32> {
            return %a : tensor<8xf32>
          }
          func.func @start(%a: tensor<8xf32> {my.note = "kept"})
              -> (tensor<8xf32> {my.number = 3 : i32}) {
            %0 = call @inner(%a) : (tensor<8xf32>) -> tensor<8xf32>
            return %0 : tensor<8xf32>
          }
          func.func private @unused(%a: tensor<8xf32>) -> tensor<8xf32> {
            %0 = call @start(%a) : (tensor<8xf32>) -> tensor<8xf32>
            return %0 : tensor<8xf32>
          }
        }""",
        lambda p: plan([value((8,), named("x"))], [value((8,), named("y"))], p),
    ),
]
