import io

import jax
import numpy as np
import pytest
from rich.console import Console

import xlashard
from tests.train.examples import devices, settings
from xlashard.train.drawing import (
    Tiling,
    bytes_per_device,
    parameter_table,
    picture,
    tiling,
)
from xlashard.train.layout import Layout, build_mesh
from xlashard.train.step import make_recipe, state_shardings

P = xlashard.PartitionSpec


def named(spec: object) -> object:
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2}, devices(8))
    return xlashard.NamedSharding(mesh, spec)


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (P(), (((0, 1, 2, 3, 4, 5, 6, 7),),)),
        (P("tensor"), (((0, 2, 4, 6), (1, 3, 5, 7)),)),
        (P("fsdp", "tensor"), (((0, 4), (1, 5)), ((2, 6), (3, 7)))),
        (P("tensor", "fsdp"), (((0, 4), (2, 6)), ((1, 5), (3, 7)))),
        (P(None, ("data", "tensor")), (((0, 2), (1, 3), (4, 6), (5, 7)),)),
        (P("data", "fsdp", "tensor"), (((0,), (1,)), ((2,), (3,)), ((4,), (5,)), ((6,), (7,)))),
    ],
)
def test_tiles_name_their_devices(spec: object, rows: tuple) -> None:
    sharding = named(spec)
    shape = (4, 8, 2)
    found = tiling(shape, sharding)
    assert found.rows == rows
    assert found.tile == sharding.shard_shape(shape)


def test_tiles_agree_with_the_shards_of_a_real_array() -> None:
    sharding = named(P("tensor", None, ("fsdp", "data")))
    shape = (4, 3, 8)
    tiles = tiling(shape, sharding)
    array = xlashard.device_put(np.arange(96).reshape(shape), sharding)
    for shard in array.addressable_shards:
        row = (shard.index[0].start or 0) // tiles.tile[0]
        column = (shard.index[2].start or 0) // tiles.tile[2]
        assert shard.device.id in tiles.rows[row][column]


def test_a_picture_has_a_line_per_row_and_a_colour_per_tile() -> None:
    drawn = picture(tiling((4, 8), named(P("fsdp", "tensor"))))
    assert drawn.plain.split() == ["0", "4", "1", "5", "2", "6", "3", "7"]
    assert len(drawn.plain.splitlines()) == 2
    assert len({span.style for span in drawn.spans}) == 4


def test_a_wide_picture_gives_way_to_numbers() -> None:
    mesh = build_mesh({"data": 8}, devices(8))
    ids = tuple((number,) for number in range(100, 140))
    assert picture(Tiling((1,), (ids,))).plain == "1 × 40 tiles, each on 1"
    narrow = picture(tiling((8,), xlashard.NamedSharding(mesh, P("data"))))
    assert narrow.plain.split() == list("01234567")


@pytest.mark.parametrize("width", [80, 100])
def test_the_biggest_parameters_are_shown_with_what_a_device_holds(width: int) -> None:
    run = settings()
    layout = Layout(build_mesh(run.mesh, devices(8)), run.sharding.rules)
    recipe = make_recipe(run)
    shapes = jax.eval_shape(recipe.initial_state, 0)["parameters"]
    console = Console(file=io.StringIO(), width=width)
    console.print(parameter_table(shapes, state_shardings(recipe, layout)["parameters"]))
    shown = console.file.getvalue()
    lines = shown.splitlines()
    number = next(i for i, line in enumerate(lines) if "embedding" in line)
    # 256 × 32 values in 2 × 2 tiles.
    for part in ("256 × 32", " 0 4 ", " 2 6 "):
        assert part in lines[number]
    for part in ("tensor, fsdp", "128 × 16", " 1 5 ", " 3 7 "):
        assert part in lines[number + 1]
    assert "layers.attention.key" not in shown
    assert "…" not in shown
    assert "\x1b" not in shown


def test_bytes_are_counted_whole_and_per_device() -> None:
    shapes = {"a": jax.ShapeDtypeStruct((8, 4), np.float32), "b": jax.ShapeDtypeStruct((), np.int8)}
    shardings = {"a": named(P("tensor")), "b": named(P())}
    assert bytes_per_device(shapes, shardings) == (129, 65)
