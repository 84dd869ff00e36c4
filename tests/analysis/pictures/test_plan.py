"""The plan of a picture agrees with the sharding on every tile."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xlashard
from tests.analysis.pictures.pods import CountingList, Pod, PodDevice, pod
from tests.analysis.pictures.specs import specs
from tests.core.array.cases import SHAPE, SHARDINGS, Stripes
from xlashard import AbstractMesh, GSPMDSharding, Mesh, NamedSharding, P, Sharding
from xlashard.analysis.pictures.picture_plan import BLANK, plan_picture
from xlashard.analysis.pictures.picture_text import index_text
from xlashard.analysis.pictures.subject import LISTED
from xlashard.analysis.pictures.subject_reader import read_subject
from xlashard.geometry import Tiling, replica_runs

DEVICES = jax.devices()


def plan(x, sharding=None, most=16):
    return plan_picture(read_subject(x, sharding), most)


def check_against(picture, shape, index_of, whole):
    """Each cell has the slices of each of its devices; together the cells have all devices."""
    seen = []
    for cell in picture.cells:
        for number in cell.ids:
            seen.append(number)
            index = index_of(number)
            found = [cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True)]
            assert [(cut.start, cut.stop) for cut in cell.index] == found
    assert len(seen) == len(set(seen))
    if whole:
        assert sorted(seen) == list(range(picture.subject.placement.num_devices))


@pytest.mark.slow
@given(specs(), st.lists(st.integers(0, 30), min_size=5, max_size=5))
def test_every_tile_has_its_slices_and_devices(case, sizes):
    grid, spec, ndim = case
    tiling = Tiling.from_spec(grid, spec, ndim)
    shape = tuple(sizes[:ndim])
    devices = [PodDevice(i, i // 4) for i in range(grid.size)]
    picture = plan(shape, Pod(devices, tiling), most=300)
    indices = tiling.indices(shape, uneven=True)
    check_against(picture, shape, indices.__getitem__, whole=True)
    for cell in picture.cells:
        assert {host for host, _ in cell.by_host} == {i // 4 for i in cell.ids} == set(cell.hosts)
        assert [i for _, ids in cell.by_host for i in ids] == list(cell.ids)
        assert (cell.colour == BLANK) == any(cut.start == cut.stop for cut in cell.index) or (
            picture.subject.placement.is_even
        )


@pytest.mark.slow
@given(specs(), st.integers(2, 6))
def test_omitted_cells_are_counted(case, most):
    grid, spec, ndim = case
    tiling = Tiling.from_spec(grid, spec, ndim)
    picture = plan((64,) * ndim, Pod([PodDevice(i, 0) for i in range(grid.size)], tiling), most)
    check_against(
        picture, (64,) * ndim, tiling.indices((64,) * ndim, uneven=True).__getitem__, whole=False
    )
    rows = [(picture.rows, picture.row_dim), (picture.columns, picture.column_dim)]
    for shown, dim in rows:
        count = 1 if dim is None else tiling.counts[dim]
        assert len(shown.first) + len(shown.last) + shown.left_out == count
        assert len(shown) <= most + 1
        assert shown.left_out != 1
        assert next(iter(shown)) == 0 and list(shown)[-1] == count - 1
    across = len(picture.columns)
    assert all(len(row) == across for panel in picture.panels if panel for row in panel.cells)


@pytest.mark.slow
@given(specs(), st.integers(2, 8))
def test_holders_of_a_tile_in_closed_form(case, most):
    grid, spec, ndim = case
    tiling = Tiling.from_spec(grid, spec, ndim)
    for tile in range(tiling.num_tiles):
        whole = tiling.replicas(tile)
        runs = replica_runs(tiling, tile, grid.size)
        assert (list(runs), runs.count, runs.is_whole) == (whole, len(whole), True)
        ends = [(run.start, run.stop) for run in runs.first]
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ends))
        some = replica_runs(tiling, tile, most)
        assert some.count == len(whole)
        assert next(iter(some)) == whole[0] and list(some)[-1] == whole[-1]
        assert set(some) <= set(whole)
        assert some.is_whole == (list(some) == whole)
        assert len(some.first) + len(some.last) <= most + 1


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings_of_every_kind(name):
    sharding = SHARDINGS[name]
    picture = plan(SHAPE, sharding)
    by_id = {d.id: index for d, index in sharding.devices_indices_map(SHAPE).items()}
    seen = 0
    for cell in picture.cells:
        for number in cell.ids:
            found = [cut.indices(n)[:2] for cut, n in zip(by_id[number], SHAPE, strict=True)]
            assert [(cut.start, cut.stop) for cut in cell.index] == found
            seen += 1
    assert seen == len(by_id)


class Overlapping(Sharding):
    """Sharding whose pieces differ in size and overlap."""

    devices = tuple(DEVICES[:3])

    def devices_indices_map(self, shape):
        cuts = [slice(0, 6), slice(4, 10), slice(0, 6)]
        return {d: (cut,) for d, cut in zip(self.devices, cuts, strict=True)}


class JaxHalves(jax.sharding.Sharding):
    """Sharding that implements JAX's interface only."""

    _device_assignment = tuple(DEVICES[:2])
    memory_kind = None

    def devices_indices_map(self, shape):
        half = shape[0] // 2
        return dict(zip(DEVICES, [(slice(half, None),), (slice(0, half),)], strict=False))


def test_overlapping_pieces_are_drawn_unchanged():
    picture = plan((10,), Overlapping())
    cells = [(cell.index, list(cell.ids)) for cell in picture.cells]
    assert cells == [((slice(0, 6),), [0, 2]), ((slice(4, 10),), [1])]


def test_dimension_with_one_common_slice_is_not_whole():
    class Window(Sharding):
        devices = tuple(DEVICES[:2])

        def devices_indices_map(self, shape):
            return dict.fromkeys(self.devices, (slice(2, 5), slice(None)))

    picture = plan((8, 4), Window())
    (cell,) = picture.cells
    assert (picture.whole_dims, index_text(picture, cell)) == ((1,), "[2:5, :]")


def test_sharded_empty_dimension_is_not_whole():
    mesh = AbstractMesh((4,), ("d",))
    assert plan((0, 4), NamedSharding(mesh, P("d"))).whole_dims == (1,)


def test_an_index_without_a_device_is_blank():
    class Diagonal(Sharding):
        devices = tuple(DEVICES[:2])

        def devices_indices_map(self, shape):
            return {self.devices[i]: (slice(i, i + 1), slice(i, i + 1)) for i in range(2)}

    cells = list(plan((2, 2), Diagonal()).cells)
    assert [list(cell.ids) for cell in cells] == [[0], [], [], [1]]
    assert [cell.colour == BLANK for cell in cells] == [False, True, True, False]


def test_subclass_of_a_jax_sharding_is_drawn():
    picture = plan((6,), JaxHalves())
    assert [list(cell.ids) for cell in picture.cells] == [[1], [0]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("both", "P('x', 'y')"),
        ("bare tiles", "GSPMDSharding {devices=[4,1,2]<=[8] last_tile_dim_replicate}"),
        ("pmap", "PmapSharding of ShardingSpec((Chunked((8,)), NoSharding()), (ShardedAxis(0),))"),
        ("own", "Stripes"),
    ],
)
def test_shardings_in_words(name, words):
    assert read_subject(SHAPE, SHARDINGS[name]).sharding == words


def test_a_long_list_of_tiles_is_cut_off():
    dims = ",".join(["2", *"1" * 19, "4"])
    sharding = GSPMDSharding(DEVICES, f"{{devices=[{dims}]1,0,2,3,4,5,6,7}}")
    words = read_subject((8,) * 21, sharding).sharding
    assert len(words) == 80 and words.endswith("…")


def test_stripes_in_an_order_of_their_own():
    picture = plan((8, 2), Stripes(DEVICES[:4], (2, 0, 3, 1)))
    assert [list(cell.ids) for cell in picture.cells] == [[1], [3], [0], [2]]
    assert (picture.row_dim, picture.column_dim) == (0, None)


@pytest.mark.parametrize(
    ("spec", "rows", "columns", "panels"),
    [
        (P(), None, None, ()),
        (P("a"), 0, None, ()),
        (P(None, None, None, "a"), None, 3, ()),
        (P("a", None, "b"), 0, 2, ()),
        (P("a", "b", "c"), 1, 2, (0,)),
        (P("d", "a", "b", "c"), 2, 3, (0, 1)),
    ],
)
def test_dimensions_find_their_place(spec, rows, columns, panels):
    mesh = AbstractMesh((2, 2, 2, 2), tuple("abcd"))
    picture = plan((4,) * 4, NamedSharding(mesh, spec))
    assert (picture.row_dim, picture.column_dim, picture.panel_dims) == (rows, columns, panels)
    cut = {rows, columns, *panels} - {None}
    assert set(picture.whole_dims) == set(range(4)) - cut


def test_neighbours_have_different_colours():
    mesh = AbstractMesh((3, 16, 16), tuple("abc"))
    picture = plan((48, 48, 48), NamedSharding(mesh, P("a", "b", "c")))
    for panel in picture.panels:
        colours = np.array([[cell.colour for cell in row] for row in panel.cells])
        assert (colours[1:] != colours[:-1]).all() and (colours[:, 1:] != colours[:, :-1]).all()
    few = plan((8, 8), NamedSharding(AbstractMesh((2, 4), ("x", "y")), P("x", "y")))
    assert len({cell.colour for cell in few.cells}) == 8


@pytest.mark.parametrize("spec", [P(), P("a"), P("c"), P("c", "a"), P("c", "b", "a")])
def test_huge_mesh_is_drawn_without_enumerating_devices(spec):
    mesh = AbstractMesh((1 << 10, 1 << 10, 1 << 10), tuple("abc"))
    picture = plan((1 << 20,) * 3, NamedSharding(mesh, spec))
    assert sum(1 for _ in picture.cells) <= 1024
    assert all(cell.ids.count * picture.num_tiles == 1 << 30 for cell in picture.cells)
    assert all(len(cell.ids.first) + len(cell.ids.last) <= LISTED for cell in picture.cells)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [(), ("a",), ("b",), ("b", "a"), (("a", "b"),)])
def test_few_devices_of_a_pod_are_looked_at(spec):
    sharding = pod({"a": 256, "b": 256}, spec, 2)
    sharding._devices = CountingList(sharding.devices)
    picture = plan((1 << 16, 1 << 16), sharding)
    cells = list(picture.cells)
    assert cells and sharding.devices.looks <= 2 * LISTED
    ends = [cell.ids.last or cell.ids.first for cell in cells]
    assert ends[-1][-1][-1] == 65535


def test_more_devices_than_are_looked_at_show_the_first_and_the_last():
    picture = plan((8,), pod({"a": 8192}, (), 1))
    (cell,) = picture.cells
    assert cell.ids.first == (range(3072),) and cell.ids.last == (range(7168, 8192),)
    assert cell.ids.count == 8192 and not cell.hosts.is_whole
    assert cell.hosts.first[0].start == 0 and cell.hosts.last[-1][-1] == 2047


def test_a_pod_of_jax_meshes():
    """JAX accepts fake devices for a mesh, so that NamedSharding itself is drawn with hosts."""
    devices = np.array([PodDevice(i, i // 2) for i in range(8)], object).reshape(4, 2)
    picture = plan((8, 8), NamedSharding(Mesh(devices, ("x", "y")), P("x")))
    assert picture.has_hosts and picture.subject.num_hosts == 4
    assert [list(cell.ids) for cell in picture.cells] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_public_names():
    assert xlashard.visualize is not None and xlashard.ShardingPicture is not None


@pytest.mark.slow
def test_panels_of_large_pictures_are_omitted():
    picture = plan((64, 64, 64), pod(dict.fromkeys("abc", 8), tuple("abc"), 3))
    assert [number for number in picture.panel_numbers] == [0, 1, 2, None, 7]
    all_of_them = plan((64, 64, 64), pod(dict.fromkeys("abc", 8), tuple("abc"), 3), most=24)
    assert len(list(all_of_them.cells)) == 512
