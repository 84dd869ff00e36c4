"""Modules and plans that don't fit each other, with a golden file of their errors."""

from collections.abc import Callable

from tests.core.program.helpers import identity, mesh, named, plan, tiles, value
from xlashard.core.program.plan import Partitioner, ProgramPlan

T88 = "tensor<8x8xf32>"

INVALID: dict[str, tuple[str, Callable[[Partitioner], ProgramPlan]]] = {
    "no entry": (
        "module { func.func private @f() { return } }",
        lambda p: plan([], [], p),
    ),
    "two entries": (
        "module { func.func @f() { return } func.func @g() { return } }",
        lambda p: plan([], [], p),
    ),
    "an entry without a body": (
        "module { func.func private @main(tensor<8xf32>) -> tensor<8xf32> }",
        lambda p: plan([value((8,))], [value((8,))], p),
    ),
    "fewer arguments": (
        identity(T88, T88),
        lambda p: plan([value((8, 8))], [value((8, 8))] * 2, p),
    ),
    "more results": (
        identity(T88),
        lambda p: plan([value((8, 8))], [value((8, 8))] * 2, p),
    ),
    "other shape": (
        identity(T88),
        lambda p: plan([value((8, 4))], [value((8, 8))], p),
    ),
    "other rank of a result": (
        identity(T88),
        lambda p: plan([value((8, 8))], [value((8,))], p),
    ),
    "keys without buffers": (
        identity("tensor<8xui32>"),
        lambda p: plan(
            [value((8,), None, "key<fry>", trailing=1)], [value((8,), None, "key<fry>")], p
        ),
    ),
    "a token for an array": (
        identity("!stablehlo.token"),
        lambda p: plan([value((8, 8))], [value((8, 8))], p),
    ),
    "a size that is not known": (
        identity("tensor<?x8xf32>"),
        lambda p: plan([value((8, 8))], [value((8, 8))], p),
    ),
    "donation marks": (
        identity(T88),
        lambda p: plan([value((8, 8))], [value((8, 8))], p, donated=(True, False)),
    ),
    "fewer devices": (
        identity(T88),
        lambda p: plan(
            [value((8, 8), named("x", on=mesh((4,), ("x",))), name="state['w']")],
            [value((8, 8))],
            p,
        ),
    ),
    "devices in another order": (
        identity(T88),
        lambda p: plan(
            [value((8, 8), name="x")],
            [value((8, 8), named("x", on=mesh(order=(1, 0, 2, 3, 4, 5, 6, 7))), name="result[0]")],
            p,
        ),
    ),
    "rank too low": (
        identity("tensor<8xf32>"),
        lambda p: plan([value((8,), named("x", "y"), name="bias")], [value((8,))], p),
    ),
    "tiles of another rank": (
        identity("tensor<8xf32>"),
        lambda p: plan(
            [value((8,), name="x")], [value((8,), tiles("{devices=[2,4]<=[8]}"), name="y")], p
        ),
    ),
    "no tiles": (
        identity(T88),
        lambda p: plan([value((8, 8), tiles("{manual}"), name="x")], [value((8, 8))], p),
    ),
    "all on one of several devices": (
        identity(T88),
        lambda p: plan([value((8, 8), tiles("{maximal device=3}"), name="x")], [value((8, 8))], p),
    ),
    "text that is no sharding": (
        identity(T88),
        lambda p: plan([value((8, 8), tiles("{devices=[2,4]<=8}"))], [value((8, 8))], p),
    ),
    "numbers that do not fit": (
        identity(T88),
        lambda p: plan([value((8, 8), tiles("{devices=[2,4]<=[9]}"))], [value((8, 8))], p),
    ),
    "tiles for other devices": (
        identity(T88),
        lambda p: plan([value((8, 8), tiles("{devices=[2,2]<=[4]}"))], [value((8, 8))], p),
    ),
    "unknown axis": (
        identity(T88),
        lambda p: plan([value((8, 8), named("z"))], [value((8, 8))], p),
    ),
    "one axis twice": (
        identity(T88),
        lambda p: plan([value((8, 8), named("x", "x"))], [value((8, 8))], p),
    ),
}
