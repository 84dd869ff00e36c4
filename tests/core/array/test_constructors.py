"""The three constructors: their callbacks, their aliasing, and their errors."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import xlashard
from tests.core.array.cases import (
    DEVICES,
    HALF,
    MESH,
    SHARDINGS,
    Columns,
    Stripes,
    named,
    same,
    value,
)
from tests.message_patterns import naming
from xlashard import (
    Array,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    P,
    Shard,
    Sharding,
    SingleDeviceSharding,
    device_put,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
    pjit,
    with_sharding_constraint,
)
from xlashard.errors import (
    ArgumentError,
    DeletedError,
    GeometryError,
    PlacementError,
    XlashardError,
)

V = value(np.float32)


def raises(kind: type[Exception], *texts: str) -> Any:
    """Expect an error whose message has all of these texts."""
    return pytest.raises(kind, match=naming(*texts))


class TestFromCallback:
    @pytest.mark.parametrize("kind", list(SHARDINGS))
    def test_callback_is_called_once_per_distinct_index(self, kind: str) -> None:
        asked: list[Any] = []

        def piece(index: Any) -> np.ndarray:
            asked.append(index)
            return V[index]

        sharding = SHARDINGS[kind]
        x = make_array_from_callback(V.shape, sharding, piece)
        indices = sharding.devices_indices_map(V.shape).values()
        normal = {tuple(s.indices(n)[:2] for s, n in zip(i, V.shape, strict=True)) for i in indices}
        got = [tuple(s.indices(n)[:2] for s, n in zip(i, V.shape, strict=True)) for i in asked]
        assert sorted(got) == sorted(normal)
        assert same(x, V)

    @pytest.mark.parametrize("kind", ["rows", "partly replicated", "replicated", "single", "own"])
    def test_callback_may_return_one_buffer_for_all_pieces(self, kind: str) -> None:
        sharding = SHARDINGS[kind]
        buffer = np.empty(sharding.shard_shape(V.shape), np.float32)

        def piece(index: Any) -> np.ndarray:
            buffer[...] = V[index]
            return buffer

        x = make_array_from_callback(V.shape, sharding, piece)
        buffer[...] = -1
        assert same(x, V)

    @pytest.mark.slow
    def test_pieces_of_any_kind(self) -> None:
        rows = named("x")
        whole = device_put(V, named("y"))
        for piece in (
            lambda index: jnp.asarray(V)[index],
            lambda index: device_put(V[index]),
            lambda index: device_put(V[index], DEVICES[7]),
            lambda index: whole[index],
            lambda index: V[index].tolist(),
        ):
            assert same(make_array_from_callback(V.shape, rows, piece), V)
        numbers = make_array_from_callback((), named(), lambda index: 3)
        assert numbers.dtype == np.int32 and not numbers.weak_type
        assert make_array_from_callback((), named(), lambda i: 3, jnp.bfloat16).dtype == "bfloat16"
        assert make_array_from_callback((4,), rows, lambda i: np.arange(4.0)[i]).dtype == "float32"

    def test_a_layout(self) -> None:
        columns_first = Format(Layout((1, 0)), named("x"))
        x = make_array_from_callback(V.shape, columns_first, lambda index: V[index])
        assert x.layout.major_to_minor == (1, 0)
        assert x.format.sharding == named("x")
        assert same(x, V)
        assert same(device_put(x, named("y")), V)
        with raises(ArgumentError, "sharding", "layout", "Format(Layout("):
            make_array_from_callback(
                V.shape, Format(Layout.AUTO, named("x")), lambda index: V[index]
            )

    def test_errors_of_the_callback_propagate(self) -> None:
        def fails(index: Any) -> np.ndarray:
            raise LookupError("no such file")

        with raises(LookupError, "no such file"):
            make_array_from_callback(V.shape, named("x"), fails)

    @pytest.mark.devices(8)
    def test_a_wrong_shape_names_the_index(self) -> None:
        with raises(
            PlacementError, "data_callback", "[0:4, :]", "shape (8, 16)", "pieces", "(4, 16)"
        ):
            make_array_from_callback(V.shape, named("x"), lambda index: V)

    @pytest.mark.devices(8)
    def test_a_wrong_dtype_names_the_index(self) -> None:
        with raises(PlacementError, "[4:8, :]", "int32", "float32", ".astype("):
            make_array_from_callback(
                V.shape,
                named("x"),
                lambda index: V[index].astype(np.int32 if index[0].start else np.float32),
            )
        with raises(PlacementError, "[0:4, :]", "float32", "int32"):
            make_array_from_callback(V.shape, named("x"), lambda index: V[index], np.int32)

    @pytest.mark.devices(8)
    def test_invalid_callback_results_and_dtypes(self) -> None:
        for piece, kind in ((lambda i: "text", "str"), (lambda i: None, "NoneType")):
            with raises(ArgumentError, "data_callback's piece for index [0:2]", kind):
                make_array_from_callback((4,), named("x"), piece)
        with raises(ArgumentError, "dtype object"):
            make_array_from_callback((4,), named("x"), lambda i: np.array([None, None]))
        with raises(ArgumentError, "dtype 'colour'"):
            make_array_from_callback((4,), named("x"), lambda i: np.zeros(2), "colour")
        with raises(ArgumentError, "dtype <class 'object'>"):
            make_array_from_callback((4,), named("x"), lambda i: 1, object)

    @pytest.mark.devices(8)
    def test_a_traced_piece(self) -> None:
        def inside(t: Any) -> Any:
            return make_array_from_callback((4,), named("x"), lambda index: t[index]).sum()

        for transform in (jax.jit, jax.grad):
            for kind in (ArgumentError, jax.errors.UnexpectedTracerError):
                with raises(kind, "[0:2]", "traced", "jit, grad and vmap"):
                    transform(inside)(jnp.arange(4.0))

    def test_known_values_inside_a_trace_are_constants(self) -> None:
        @jax.jit
        def inside(t: Any) -> Any:
            x = make_array_from_callback((4,), named("x"), lambda index: np.ones(4)[index])
            return x * t

        assert inside(2.0).tolist() == [2.0] * 4

    def test_a_deleted_piece(self) -> None:
        gone = device_put(V[:4])
        gone.delete()
        with raises(DeletedError, "float32[4,16]"):
            make_array_from_callback(V.shape, named("x"), lambda index: gone)


@pytest.mark.parametrize(
    "make",
    [
        lambda shape, s: make_array_from_callback(shape, s, lambda i: np.zeros(shape)[i]),
        lambda shape, s: make_array_from_single_device_arrays(shape, s, [device_put(1.0)]),
    ],
    ids=["callback", "single-device arrays"],
)
class TestShapesAndShardings:
    def test_a_shape(self, make: Callable[..., Any]) -> None:
        with raises(ArgumentError, "shape ", "tuple of integers", "'text'", "(8, 128)"):
            make("text", named("x"))
        with raises(ArgumentError, "shape ", "tuple of integers", "(2.5, 4)"):
            make((2.5, 4), named("x"))
        with raises(PlacementError, "shape (-1, 4)", "negative"):
            make((-1, 4), named("x"))

    def test_a_sharding(self, make: Callable[..., Any]) -> None:
        for wrong in (None, DEVICES[0], "x", 3, [named("x")]):
            with raises(ArgumentError, "sharding ", "NamedSharding(mesh, P('data'))"):
                make((4,), wrong)
        with raises(ArgumentError, "P('x'", "NamedSharding(mesh, "):
            make((4,), P("x"))

    @pytest.mark.devices(8)
    def test_indivisible_shapes_are_refused(self, make: Callable[..., Any]) -> None:
        with raises(GeometryError, "dimension 0", "shape (6, 3)", "4 tiles ('y'=4)"):
            make((6, 3), named("y"))
        with raises(GeometryError, "at least 1 dimension", "0"):
            make((), named("y"))

    def test_overlapping_tiles(self, make: Callable[..., Any]) -> None:
        class Overlapping(Sharding):
            devices = tuple(DEVICES[:2])
            is_fully_replicated = False

            def devices_indices_map(self, shape: Any) -> Any:
                return {DEVICES[0]: (slice(0, 3),), DEVICES[1]: (slice(1, 4),)}

        class Forgetful(Overlapping):
            def devices_indices_map(self, shape: Any) -> Any:
                return {DEVICES[0]: (slice(0, 3),)}

        with pytest.raises(GeometryError):
            make((4,), Overlapping())
        with raises(ValueError, "Forgetful.devices_indices_map((4,))", "cpu:"):
            make((4,), Forgetful())


class TestFromSingleDeviceArrays:
    def pieces(self, sharding: Any = None) -> list[Array]:
        sharding = sharding or named("x", "y")
        indices = sharding.devices_indices_map(V.shape)
        return [device_put(V[index], device) for device, index in indices.items()]

    @pytest.mark.devices(8)
    def test_pieces_in_any_order_are_not_copied(self) -> None:
        pieces = self.pieces()
        shuffled = [pieces[i] for i in (3, 1, 7, 0, 2, 6, 4, 5)]
        x = make_array_from_single_device_arrays(V.shape, named("x", "y"), shuffled)
        assert same(x, V)
        for shard, piece in zip(x.addressable_shards, pieces, strict=True):
            assert shard.data.unsafe_buffer_pointer() == piece.unsafe_buffer_pointer()

    def test_jax_arrays_and_uncommitted_arrays_are_accepted(self) -> None:
        pieces = [p.to_jax() for p in self.pieces()]
        assert same(make_array_from_single_device_arrays(V.shape, named("x", "y"), pieces), V)
        one = make_array_from_single_device_arrays(
            (2,), SingleDeviceSharding(DEVICES[0]), (jnp.zeros(2),)
        )
        assert one.committed

    def make(self, pieces: Any, sharding: Any = None, **rest: Any) -> Any:
        return make_array_from_single_device_arrays(
            V.shape, sharding or named("x", "y"), pieces, **rest
        )

    @pytest.mark.devices(8)
    def test_missing_devices(self) -> None:
        pieces = self.pieces()
        with raises(PlacementError, "6 arrays", "8 addressable", "cpu:2", "cpu:5"):
            self.make([p for n, p in enumerate(pieces) if n not in (2, 5)])

    @pytest.mark.devices(8)
    def test_surplus_devices(self) -> None:
        half = NamedSharding(HALF, P("z"))
        pieces = [device_put(V[:2], d) for d in DEVICES[3:]]
        with raises(PlacementError, "5 arrays", "4 addressable", "cpu:3 (arrays[0])"):
            self.make(pieces, half)

    @pytest.mark.devices(8)
    def test_a_device_twice(self) -> None:
        pieces = self.pieces()
        with raises(PlacementError, "arrays[1]", "arrays[8]", "cpu:1"):
            self.make([*pieces, pieces[1]])

    def test_shapes_and_dtypes(self) -> None:
        pieces = self.pieces()
        pieces[3] = device_put(V[:4, :5], DEVICES[3])
        with raises(PlacementError, "arrays[3]", "cpu:3", "shape (4, 5)", "shape (4, 4)"):
            self.make(pieces)
        pieces[3] = device_put(V[:4, :4].astype(np.int32), DEVICES[3])
        with raises(PlacementError, "arrays[3]", "cpu:3", "int32", "float32"):
            self.make(pieces)
        with raises(PlacementError, "arrays[0]", "float32", "bfloat16"):
            self.make(self.pieces(), dtype=jnp.bfloat16)

    def test_memories(self) -> None:
        pieces = self.pieces()
        with raises(PlacementError, "arrays[0]", "'device'", "'pinned_host'", "with_memory_kind("):
            self.make(pieces, named("x", "y", memory_kind="pinned_host"))

    @pytest.mark.devices(8)
    def test_errors_of_invalid_pieces(self) -> None:
        with raises(ArgumentError, "arrays[0]", "ndarray", "device_put(value, device)"):
            self.make([V])
        with raises(ArgumentError, "arrays[0]", "8 devices", "addressable_shards"):
            self.make([device_put(V, named("x"))])
        with raises(ArgumentError, "arrays ", "list of arrays", "not Array"):
            self.make(device_put(V))
        with raises(ArgumentError, "arrays[0]", "traced"):
            jax.jit(lambda t: self.make([t]))(V)

    @pytest.mark.devices(8)
    def test_deleted(self) -> None:
        pieces = self.pieces()
        pieces[2].delete()
        with raises(DeletedError, "arrays[2]", "float32[4,4]", "deleted"):
            self.make(pieces)

    def test_layouts_are_refused(self) -> None:
        with raises(ArgumentError, "layout"):
            self.make(self.pieces(), Format(Layout((1, 0)), named("x", "y")))


class TestFromLocalData:
    """Tests in one process; several processes have their own test."""

    def test_local_data_of_one_process_is_the_global_array(self) -> None:
        for shape in (None, V.shape, list(V.shape)):
            x = make_array_from_process_local_data(named("x", "y"), V, shape)
            assert same(x, V)

    def test_trees(self) -> None:
        data = {"x": V, "y": [np.arange(8), np.zeros(())]}
        shardings = {"x": named("x"), "y": [named("y"), named()]}
        out = make_array_from_process_local_data(shardings, data)
        assert out["y"][0].sharding == named("y")
        out = make_array_from_process_local_data(named(), data, {"x": (8, 16), "y": [(8,), ()]})
        assert out["x"].is_fully_replicated and out["y"][1].shape == ()

    @pytest.mark.devices(8)
    def test_an_invalid_dimension_names_the_valid_sizes(self) -> None:
        with raises(PlacementError, "local_data['x']", "dimension 0", "8", "accepted: 16"):
            make_array_from_process_local_data(named("x"), {"x": V}, {"x": (16, 16)})
        with raises(PlacementError, "(8, 16)", "2 dimensions", "(8, 16, 1)", "3"):
            make_array_from_process_local_data(named("x"), V, (8, 16, 1))
        with raises(PlacementError, "local_data[1]", "dimension 0", "2 tiles ('x'=2)"):
            make_array_from_process_local_data(named("x"), [V, V[:3]])

    def test_errors_of_invalid_local_data(self) -> None:
        with raises(ArgumentError, "local_data['a']", "str"):
            make_array_from_process_local_data(named("x"), {"a": "text"})
        with raises(ArgumentError, "local_data['a']", "sharding"):
            make_array_from_process_local_data({"a": None}, {"a": V})
        with raises(ArgumentError, "sharding", "local_data"):
            make_array_from_process_local_data({"b": named("x")}, {"a": V})
        with raises(ArgumentError, "global_shape", "tuple of integers"):
            make_array_from_process_local_data(named("x"), V, (None, 16))

    def test_later_changes_of_the_data_stay_outside(self) -> None:
        for kind in ("rows", "replicated", "single", "partly replicated"):
            data = V.copy()
            x = make_array_from_process_local_data(SHARDINGS[kind], data)
            data[...] = -1
            assert same(x, V)


def test_a_traced_piece_is_an_error_of_the_class_that_jax_raises() -> None:
    whole = named()
    for module in (jax, xlashard):
        with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
            jax.jit(lambda x, m=module: m.make_array_from_callback(V.shape, whole, lambda _: x))(V)
    assert isinstance(caught.value, ArgumentError) and "See https" not in str(caught.value)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is type(caught.value) and str(copied) == str(caught.value)


def test_a_replicated_array_of_a_callback_is_the_result() -> None:
    whole, turned = named(), named(mesh=Mesh(MESH.devices[::-1], ("x", "y")))
    x = device_put(V, whole)
    make = make_array_from_callback
    assert make(V.shape, whole, lambda _: x) is x
    assert make(V.shape, whole, lambda _: x.to_jax(), np.float32).to_jax() is x.to_jax()
    assert make(V.shape, Format(x.layout, whole), lambda _: x) is x
    alone = device_put(V, DEVICES[2])
    assert make(V.shape, SingleDeviceSharding(DEVICES[2]), lambda _: alone) is alone
    others: list[tuple[Any, Any]] = [
        (turned, x),
        (Format(Layout((1, 0)), whole), x),
        (whole, device_put(V, named("x"))),
        (SingleDeviceSharding(DEVICES[0]), device_put(V)),
        (whole, V),
    ]
    for sharding, piece in others:
        made = make(V.shape, sharding, lambda _, piece=piece: piece)
        assert made is not piece and made.committed and same(made, V)


def test_user_defined_shardings_work_with_every_constructor() -> None:
    own = Stripes(DEVICES[:4], (1, 0, 3, 2))
    made = [
        make_array_from_callback(V.shape, own, lambda index: V[index]),
        make_array_from_process_local_data(own, V),
        device_put(V, own),
        device_put(device_put(V, named("x")), own),
        device_put(jnp.asarray(V), own),
        make_array_from_single_device_arrays(
            V.shape, own, [s.data for s in device_put(V, own).addressable_shards]
        ),
    ]
    for x in made:
        assert x.sharding == GSPMDSharding(own.devices, "{devices=[4,1]1,0,3,2}")
        assert x.addressable_shards[0].index == (slice(2, 4), slice(None))
        assert same(x.addressable_data(0), V[2:4])
        assert same(x * 2, V * 2)
    assert MESH.size == 8


class Complete(Columns):
    """Sharding with the private members that JAX's constructors read."""

    num_devices = 4
    is_fully_addressable = has_addressable_devices = True
    is_fully_replicated = False
    _device_assignment = property(lambda self: self._devices)
    _addressable_device_assignment = property(lambda self: self._devices)
    addressable_devices = property(lambda self: self.device_set)
    _internal_device_list = property(lambda self: self._named._internal_device_list)

    @property
    def _named(self) -> Any:
        mesh = jax.sharding.Mesh(np.array(self._devices), "d")
        return jax.sharding.NamedSharding(mesh, P(None, "d"))

    def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
        return self._named._to_xla_hlo_sharding(num_dimensions)

    def addressable_devices_indices_map(self, global_shape: Any) -> Any:
        return self.devices_indices_map(global_shape)

    def shard_shape(self, global_shape: Any) -> Any:
        return global_shape[0], global_shape[1] // 4

    def check_compatible_aval(self, aval_shape: Any) -> None: ...

    def is_equivalent_to(self, other: Any, ndim: int) -> bool:
        return self == other

    def __hash__(self) -> int:
        return 1


@pytest.mark.devices(8)
@pytest.mark.slow
def test_arrays_of_jax_on_a_user_defined_sharding_are_accepted() -> None:
    own = Complete(DEVICES[7::-2])
    theirs = jax.make_array_from_callback(V.shape, own, lambda index: V[index])
    tiles = GSPMDSharding(DEVICES[7::-2], "{devices=[1,4]<=[4]}")
    identity = pjit(lambda x: x)
    for x in (
        Array.from_jax(theirs),
        device_put(theirs),
        device_put(theirs, own),
        *(identity(theirs), identity(theirs)),
        pjit(lambda x: x, in_shardings=own, out_shardings=own)(V),
    ):
        assert x.sharding == tiles and x.sharding.devices == own._devices
        assert same(x, V) and same(x[:, 4:8], V[:, 4:8])
    assert same(device_put(theirs, named("x")), V)
    # JAX reads the arrays of such a sharding as well.
    assert same(jax.jit(lambda x: x + 1)(device_put(V, own)), V + 1)
    near = with_sharding_constraint(device_put(V, named("x")), Columns(DEVICES[::-1]))
    assert same(near, V) and near.sharding.devices == tuple(DEVICES)


def test_shards_of_any_sharding_have_an_index() -> None:
    class Unknown:
        pass

    class Undefined(jax.sharding.Sharding):
        device_set = property(lambda _: set(DEVICES))

    rows = jax.sharding.NamedSharding(MESH, P("x"))
    shard = Shard(DEVICES[5], rows, V.shape)
    assert (shard.index, shard.replica_id) == ((slice(4, 8), slice(None)), 1)
    assert Shard(DEVICES[5], Columns(DEVICES), V.shape).index == (slice(None), slice(10, 12))
    for sharding in (Unknown(), Undefined()):
        shard = Shard(DEVICES[5], sharding, V.shape)
        with pytest.raises(ValueError, match=naming(type(sharding).__name__, "NamedSharding")):
            _ = shard.index
        assert "index unknown" in repr(shard)


def test_process_local_data_on_a_device():
    device = jax.devices()[2]
    for make in (jax.make_array_from_process_local_data, make_array_from_process_local_data):
        array = make(device, np.arange(4))
        assert array.sharding == SingleDeviceSharding(device)
        np.testing.assert_array_equal(array, np.arange(4))


@pytest.mark.devices(8)
@pytest.mark.parametrize("name", ["from_callback", "from_single_device_arrays", "from_local_data"])
def test_errors_are_value_errors_as_in_jax(name):
    """Uneven shapes; wrong shapes, counts, devices and ranks of the pieces."""
    rows = jax.sharding.NamedSharding(MESH, P(MESH.axis_names))
    cells = jax.sharding.NamedSharding(MESH, P(*MESH.axis_names))
    pieces = [jax.device_put(np.ones(2, np.float32), device) for device in MESH.devices.flat]
    wrong: dict[str, list[Callable[[Any], Any]]] = {
        "from_callback": [
            lambda m: m.make_array_from_callback((6,), rows, lambda i: np.ones(6)[i]),
            lambda m: m.make_array_from_callback((8,), rows, lambda i: np.ones(3)),
        ],
        "from_single_device_arrays": [
            lambda m: m.make_array_from_single_device_arrays((16,), rows, pieces[1:]),
            lambda m: m.make_array_from_single_device_arrays((17,), rows, pieces),
            lambda m: m.make_array_from_single_device_arrays((16,), rows, pieces[:1] * 8),
        ],
        "from_local_data": [
            lambda m: m.make_array_from_process_local_data(rows, np.ones(6)),
            lambda m: m.make_array_from_process_local_data(rows, np.ones(8), (16,)),
            lambda m: m.make_array_from_process_local_data(cells, np.ones(8)),
        ],
    }
    for call in wrong[name]:
        for module in (jax, xlashard):
            with pytest.raises(ValueError):
                call(module)


W = np.arange(32, dtype=np.float32).reshape(8, 4)
ROWS = named(("x", "y"))


def test_tiles_are_copied_before_the_next_is_requested():
    # Small tiles share one block of host memory, and others are among them.
    def checked(
        tile: Callable[[int, np.ndarray], Any], v: np.ndarray = W, dtype: Any = None
    ) -> Any:
        buffer, calls = np.empty(0), 0

        def one(index: Any) -> Any:
            nonlocal buffer, calls
            if buffer.shape != v[index].shape:
                buffer = v[index].copy()
            buffer[...] = v[index]
            calls += 1
            return tile(calls, buffer)

        x = make_array_from_callback(v.shape, ROWS, one, dtype)
        same(x, v)
        return x

    checked(lambda _, tile: tile)
    checked(lambda n, tile: tile if n % 2 else device_put(tile.copy()))
    checked(lambda n, tile: tile.tolist() if n > 1 else tile)
    checked(lambda _, tile: tile.astype(np.float64), dtype=np.float32)
    checked(lambda _, tile: tile[:, ::-1].copy()[:, ::-1])
    large = np.arange(8 * 4096, dtype=np.float32).reshape(8, 4096)
    checked(lambda _, tile: tile, large)
    checked(lambda _, tile: tile, np.arange(8) > 3)


@pytest.mark.devices(8)
def test_an_invalid_tile_after_valid_ones_is_refused():
    for bad, word in ((W[:1, :1], "shape"), (W[:4].astype(np.int32), "int32"), ("text", "str")):
        tiles = iter([W[:4], bad] * 4)
        with pytest.raises(XlashardError, match=word):
            make_array_from_callback((8, 4), named("x"), lambda _, tiles=tiles: next(tiles))


@pytest.mark.devices(8)
def test_shards_of_arrays_make_arrays_in_any_order():
    x = device_put(W, ROWS)
    parts = [shard.data for shard in x.addressable_shards]
    for given in (parts, parts[::-1], tuple(parts), [part.to_jax() for part in parts]):
        y = make_array_from_single_device_arrays(W.shape, ROWS, given)
        same(y, W)
        assert y.sharding == ROWS
    one = device_put(np.zeros(W[:1].shape, np.float32), parts[0].device)
    z = make_array_from_single_device_arrays(W.shape, ROWS, [one, *parts[1:]])
    assert not np.asarray(z)[0].any()
    parts[-1].delete()
    assert x.is_deleted() and z.is_deleted()
    with pytest.raises(DeletedError, match=rf"arrays\[{len(parts) - 1}\]"):
        make_array_from_single_device_arrays(W.shape, ROWS, parts)
