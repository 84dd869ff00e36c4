import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.geometry.oracle import all_specs, assignment_of, grid_id, small_grids
from tests.goldens import check_errors
from xlashard.errors import GeometryError, ShardingTextError, TilingError, UnknownAxisError
from xlashard.geometry import MeshGrid, Spec, TileAssignment, parse_spec

GOLDENS = Path(__file__).parent / "goldens"

GRID = MeshGrid(("x", "y", "z"), (2, 2, 2))


@pytest.mark.parametrize(
    ("entries", "ndim", "text"),
    [
        ([], 2, "{replicated}"),
        (["x"], 1, "{devices=[2,4]<=[8] last_tile_dim_replicate}"),
        (["y"], 1, "{devices=[2,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}"),
        (["z"], 2, "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"),
        ([None, ("x", "z")], 2, "{devices=[1,4,2]<=[2,2,2]T(0,2,1) last_tile_dim_replicate}"),
        ([("z", "x"), "y"], 2, "{devices=[4,2]<=[4,2]T(1,0)}"),
        ([("x", "y", "z")], 1, "{devices=[8]<=[8]}"),
    ],
)
def test_text_of_specs(entries, ndim, text):
    assert assignment_of(GRID, parse_spec(entries), ndim).to_text() == text


def test_axes_that_the_program_handles_and_partial_sums():
    def text(entries, **special):
        return str(assignment_of(GRID, parse_spec(entries), 1, **special))

    assert text([], manual=["x", "y", "z"]) == "{manual}"
    assert text([], unreduced=["x", "y", "z"]) == "{unreduced}"
    assert text(["x"], manual="y") == "{devices=[2,2,2]<=[8] last_tile_dims={manual, replicated}}"
    assert text(["y"], manual=["z"], unreduced=["x"]) == (
        "{devices=[2,2,2]<=[2,4]T(1,0) last_tile_dims={manual, unreduced}}"
    )
    assert text([], manual=["z", "x"]) == (
        "{devices=[1,4,2]<=[2,2,2]T(0,2,1) last_tile_dims={manual, replicated}}"
    )
    with pytest.raises(GeometryError, match="'y' is used"):
        text(["y"], manual=["y"])
    with pytest.raises(UnknownAxisError, match="'w'"):
        text(["y"], unreduced=["w"])


@pytest.mark.parametrize("grid", small_grids(), ids=grid_id)
def test_every_spec_round_trips_through_text(grid):
    for spec in all_specs(grid, 2):
        assignment = assignment_of(grid, spec, 2)
        assert TileAssignment.parse_text(assignment.to_text()) == assignment
        if assignment.kind == "replicated":
            continue
        order = [*spec.axes, *(a for a in grid.axis_names if a not in spec.axes)]
        mesh = np.arange(grid.size).reshape(grid.axis_sizes)
        turned = mesh.transpose([grid.axis_names.index(a) for a in order])
        assert assignment.device_array().reshape(-1).tolist() == turned.reshape(-1).tolist()


@pytest.mark.parametrize(
    "text",
    [
        "{replicated}",
        "{manual}",
        "{unreduced}",
        "{unknown}",
        "{maximal device=3}",
        "{devices=[2,2]0,2,1,3}",
        "{devices=[2,1,2]2,3,0,1 last_tile_dim_replicate}",
        "{devices=[2,2,2]<=[8] last_tile_dims={unreduced, replicated}}",
        "{devices=[1,1]<=[1]}",
        "{}",
        "{{replicated}}",
        "{{manual}, {manual}, {manual}, {manual}, {manual}, /*index=5*/{manual}}",
        "{{maximal device=0}, {devices=[2,2]<=[2,2]T(1,0)}, {manual}}",
    ],
)
def test_canonical_texts_round_trip(text):
    assignment = TileAssignment.parse_text(text)
    assert assignment.to_text() == str(assignment) == text
    assert TileAssignment.parse_text(f"  {text}\n") == assignment


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("{ replicated }", "{replicated}"),
        ("{devices=[2,2] <= [2,2] T(0,1)}", "{devices=[2,2]<=[4]}"),
        ("{devices=[2,2]0, 2, 1, 3}", "{devices=[2,2]0,2,1,3}"),
        ("{devices=[2,2]<=[2,1,2]T(2,1,0)}", "{devices=[2,2]<=[2,2]T(1,0)}"),
        ("{devices=[1,4]3,2,1,0 last_tile_dim_replicate}", "{replicated}"),
        ("{devices=[2,1]<=[2] last_tile_dim_replicate}", "{devices=[2]<=[2]}"),
        ("{devices=[2]<=[2] last_tile_dims={}}", "{devices=[2]<=[2]}"),
        ('{devices=[2]<=[2] metadata={op_name="a}\\"{" source={x}}}', "{devices=[2]<=[2]}"),
        ("/* a */{/* { */devices/**/=[2]<=[2]} /* b */", "{devices=[2]<=[2]}"),
        ("{devices=[1,1]<=[1] last_tile_dim_replicate}", "{replicated}"),
        ("{devices=[1,1]<=[1] last_tile_dims={manual, replicated}}", "{replicated}"),
        ("{devices=[1,1,1]<=[1] last_tile_dims={manual, replicated}}", "{devices=[1]<=[1]}"),
        ("{devices=[1,1,1]0 last_tile_dims={manual, manual}}", "{manual}"),
        ("{{replicated},{manual metadata={}}}", "{{replicated}, {manual}}"),
        (
            "{devices=[1,2,2,2]<=[8] last_tile_dims={replicated, manual}}",
            "{devices=[1,2,2,2]<=[2,2,2]T(0,2,1) last_tile_dims={manual, replicated}}",
        ),
        (
            "{devices=[2,2,2,2]<=[16] last_tile_dims={manual, replicated, manual}}",
            "{devices=[2,4,2]<=[4,2,2]T(0,2,1) last_tile_dims={manual, replicated}}",
        ),
    ],
)
def test_longer_texts_are_read_into_the_short_form(text, short):
    assert TileAssignment.parse_text(text).to_text() == short


INVALID_TEXTS = [
    "",
    "replicated",
    "{replicated",
    "{replicated} x",
    "{replicate}",
    "{mesh[x=2], [{x}]}",
    "{replicated shard_as 3}",
    "{maximal}",
    "{maximal device=x}",
    "{devices}",
    "{devices=[2,]<=[2]}",
    "{devices=[2]}",
    "{devices=[2]<=2}",
    "{devices=[2]<=[2]T(0}",
    "{devices=[2]<=[2] last_tile_dims={maximal}}",
    "{devices=[2]<=[2] last_tile_dims={manual replicated}}",
    "{{replicated} {manual}}",
    "{{replicated}, {{manual}}}",
    "{replicated /* }",
    "{replicated metadata={a}",
    "{replicated metadata={a",
    "{devices=[9999999999999999999]<=[1]}",
]


def test_invalid_texts_are_refused(update_goldens):
    calls = {repr(text): lambda t=text: TileAssignment.parse_text(t) for text in INVALID_TEXTS}
    path = GOLDENS / "invalid_texts.txt"
    errors = check_errors(path, calls, ShardingTextError, update=update_goldens)
    for text, error in zip(INVALID_TEXTS, errors.values(), strict=True):
        assert isinstance(error, ShardingTextError)
        assert error.text == text
        assert 0 <= error.offset <= len(text)


def test_long_text_is_not_shown_in_full():
    text = "{devices=[9]" + "1," * 5000 + "}"
    with pytest.raises(ShardingTextError) as caught:
        TileAssignment.parse_text(text)
    assert len(str(caught.value)) < 300


INVALID_NUMBERS = [
    "{devices=[4]0,1}",
    "{devices=[4]0,1,1,3}",
    "{devices=[4]1,2,3,4}",
    "{devices=[]0}",
    "{devices=[2,0]<=[2]}",
    "{devices=[2]<=[4]}",
    "{devices=[2,2]<=[2,2]T(0,0)}",
    "{devices=[2,2]<=[2,2]T(0)}",
    "{devices=[2]<=[2] last_tile_dims={manual, replicated}}",
]


def test_numbers_that_do_not_fit(update_goldens):
    calls = {text: lambda t=text: TileAssignment.parse_text(t) for text in INVALID_NUMBERS}
    check_errors(GOLDENS / "invalid_numbers.txt", calls, TilingError, update=update_goldens)


def test_constructors_refuse_invalid_arguments():
    with pytest.raises(TilingError, match="got -1"):
        TileAssignment.maximal(-1)
    with pytest.raises(TilingError, match="element 1"):
        TileAssignment.tuple_of([TileAssignment.manual(), TileAssignment.tuple_of([])])
    with pytest.raises(TilingError, match="'maximal'.*manual, unreduced, replicated"):
        TileAssignment.iota((2, 2), subgroups=["maximal"])
    with pytest.raises(TilingError, match="manual"):
        TileAssignment.manual().device_array()


def test_properties_of_an_assignment():
    tiled = TileAssignment.parse_text("{devices=[2,1,4]<=[8] last_tile_dim_replicate}")
    assert (tiled.num_devices, tiled.ndim, tiled.tile_dims, tiled.is_iota) == (8, 2, (2, 1), True)
    listed = TileAssignment.listed((2, 2), [0, 2, 1, 3])
    assert (listed.num_devices, listed.ndim, listed.is_iota) == (4, 2, False)
    assert listed.device_array().tolist() == [[0, 2], [1, 3]]
    whole = TileAssignment.replicated()
    assert (whole.num_devices, whole.ndim, whole.tile_dims) == (None, None, ())


def test_text_with_too_many_devices_is_refused():
    text = "{devices=[3,1000000000000]<=[3,1000000000000]T(1,0) last_tile_dim_replicate}"
    with pytest.raises(GeometryError, match="3000000000000 devices"):
        TileAssignment.parse_text(text)


words = st.sampled_from(
    [*"{}[]()=<,T ", "<=", "devices=", "replicated", "maximal device=", "manual", "metadata=",
     "last_tile_dims=", "last_tile_dim_replicate", "0", "1", "2", "4", "2,2", "0,1", '"', "\\"]
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=500)
@given(st.lists(words, max_size=12).map("".join))
@example("{" * 5000)
def test_random_text_is_parsed_or_raises_a_geometry_error(text):
    try:
        assignment = TileAssignment.parse_text(text)
    except GeometryError as error:
        assert str(error)
    else:
        assert TileAssignment.parse_text(assignment.to_text()) == assignment


def test_reordered_subgroups_without_a_common_radix_become_a_list():
    # Sub-groups of 2 and 3 devices, out of digits 3 and 2: no digits produce both orders.
    moved = TileAssignment.iota((1, 3, 2, 2), (2, 6), (1, 0), ("replicated", "manual"))
    assert moved.device_array().shape == (1, 3, 2, 2)
    clash = TileAssignment.iota((2, 3), (2, 3), (1, 0), ("replicated", "manual"))
    expected = np.arange(6).reshape(2, 3).T.reshape(2, 3).T
    assert not clash.is_iota
    assert clash.subgroups == ("manual", "replicated")
    assert clash.device_array().tolist() == np.sort(expected, axis=-1).tolist()


def test_specs_of_any_rank_are_padded():
    for ndim in range(1, 5):
        assignment = assignment_of(GRID, Spec((("x", "y"),)), ndim)
        assert assignment.tile_dims == (4,) + (1,) * (ndim - 1)
    assert assignment_of(GRID, Spec(), 0) == TileAssignment.replicated()


def test_every_subgroup_order_has_equal_devices():
    """Each device keeps its tile and its kind in every order of the sub-groups."""
    for order in itertools.permutations(["manual", "unreduced", "replicated"]):
        dims = {"manual": 2, "unreduced": 3, "replicated": 4}
        sizes = (2, *(dims[kind] for kind in order))
        array = np.arange(48).reshape(sizes)
        canonical = array.transpose(0, *(1 + order.index(kind) for kind in dims))
        assignment = TileAssignment.iota(sizes, subgroups=order)
        assert assignment.dims == (2, 2, 3, 4)
        assert assignment.device_array().tolist() == canonical.tolist()
