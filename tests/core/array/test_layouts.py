"""Arrays of another layout than the default one, to JAX and to programs of one layout."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback, multihost_utils
from jax.experimental.layout import Format, Layout, with_layout_constraint

import xlashard
from tests.core.array.cases import DEVICES, same
from tests.grouped_cases import Together, sweep
from xlashard import Array, P, make_device_array
from xlashard.legacy.arrays.gda import GlobalDeviceArray

MESH = jax.sharding.Mesh(np.array(DEVICES[:4]).reshape(2, 2), ("x", "y"))
TURNED = jax.sharding.Mesh(MESH.devices[::-1], ("x", "y"))
V = np.arange(64, dtype=np.float32).reshape(8, 8)
TYPE = jax.ShapeDtypeStruct(V.shape, V.dtype)
COLUMNS, ROWS, OPEN = Layout((1, 0)), Layout((0, 1)), Layout.AUTO


def on(*spec: Any, mesh: Any = MESH) -> Any:
    return jax.sharding.NamedSharding(mesh, P(*spec))


PLACES: dict[str, Any] = {
    "tiles": on("x", "y"),
    "replicated": on(),
    "rows": on("y"),
    "one device": jax.sharding.SingleDeviceSharding(DEVICES[0]),
}


def double(x: Any) -> Any:
    return x * 2


def compiled(x: Any, layout: Layout | None = None) -> Any:
    where = x.sharding if layout is None else Format(layout, x.sharding)
    return jax.jit(double, in_shardings=where).lower(TYPE).compile()


def usual(x: Any) -> Any:
    return jax.device_put(V[: x.shape[0], : x.shape[1]], x.sharding)


def after(function: Callable[[Any], Any], x: Any) -> Any:
    function(usual(x))
    return function(x)


def shards(x: Any) -> list[Any]:
    return [shard.data for shard in x.addressable_shards]


CONSUMERS: dict[str, Callable[[Any], Any]] = {
    # Programs that are compiled for one layout and sharding.
    "compiled": lambda x: compiled(x)(x),
    "compiled, called before": lambda x: after(compiled(x), x),
    "compiled for the layout": lambda x: compiled(x, COLUMNS)(x),
    "compiled for the layout, called with the usual one": lambda x: compiled(x, COLUMNS)(usual(x)),
    "compiled for x": lambda x: jax.jit(double).lower(x).compile()(x),
    "compiled for a struct like x": lambda x: (
        jax.jit(double).lower(jax.ShapeDtypeStruct.like(x)).compile()(x)
    ),
    "compiled for another sharding": lambda x: (
        jax.jit(double, in_shardings=on(("x", "y"))).lower(TYPE).compile()(x)
    ),
    "compiled for a turned mesh": lambda x: (
        jax.jit(double, in_shardings=on("x", "y", mesh=TURNED)).lower(TYPE).compile()(x)
    ),
    "compiled for another device": lambda x: (
        jax.jit(double).lower(jax.device_put(V, DEVICES[5])).compile()(x)
    ),
    "compiled and donated": lambda x: jax.jit(double, donate_argnums=0).lower(x).compile()(x),
    "compiled around x": lambda x: jax.jit(lambda: x * 2).lower().compile()(),
    "compiled with a callback": lambda x: (
        jax.jit(lambda a: jax.pure_callback(np.negative, TYPE, a), in_shardings=x.sharding)
        .lower(TYPE)
        .compile()(x)
    ),
    # Other programs.
    "jit": lambda x: jax.jit(double)(x),
    "jit, called before": lambda x: after(jax.jit(double), x),
    "jit under the sharding": lambda x: jax.jit(double, in_shardings=x.sharding)(x),
    "jit in the layout": lambda x: jax.jit(double, in_shardings=Format(COLUMNS, x.sharding))(x),
    "jit in the usual layout": lambda x: jax.jit(double, in_shardings=Format(ROWS, x.sharding))(x),
    "jit of the identity": lambda x: jax.jit(lambda a: a)(x),
    "jit to the layout": lambda x: jax.jit(double, out_shardings=Format(COLUMNS, x.sharding))(x),
    "jit and donated": lambda x: jax.jit(double, donate_argnums=0)(x),
    "jit around x": lambda x: jax.jit(lambda a: a * x)(usual(x)),
    "exported": lambda x: jax.export.export(jax.jit(double))(x).call(x),
    "exported for the usual layout": lambda x: jax.export.export(jax.jit(double))(usual(x)).call(x),
    "grad": jax.grad(lambda a: (a * a).sum()),
    "vjp": lambda x: jax.vjp(jnp.sin, x)[1](x),
    "linearize": lambda x: jax.linearize(jnp.sin, x)[1](x),
    "vmap": jax.vmap(double),
    "scan": lambda x: lax.scan(lambda carry, row: (carry + row.sum(), row * 2), 0.0, x),
    "while": lambda x: lax.while_loop(lambda a: a.sum() < 1e5, double, x),
    "cond": lambda x: lax.cond(True, double, jnp.sin, x),
    "callback": lambda x: jax.pure_callback(lambda a: np.asarray(a) * 2, TYPE, x),
    "io_callback": lambda x: io_callback(lambda a: np.asarray(a) * 2, TYPE, x),
    "callback that returns x": lambda x: jax.jit(lambda: jax.pure_callback(lambda: x, TYPE))(),
    "operator": double,
    "with a usual one": lambda x: jnp.concatenate([x, usual(x)]),
    "asarray": jnp.asarray,
    "copy": jnp.copy,
    "transposed": lambda x: x.T,
    "reshaped": lambda x: x.reshape(64),
    "row": lambda x: x[1],
    "slices": lambda x: x[1:3, ::2],
    "update": lambda x: x.at[1].set(0),
    "bits": lambda x: lax.bitcast_convert_type(x, np.int32),
    "filled": lambda x: jnp.full((4, 4), x[1, 1], device=x.sharding),
    "filled by lax": lambda x: lax.full((4, 4), x[1, 1], sharding=x.sharding),
    "reference": lambda x: jax.new_ref(x)[...],
    "type": lambda x: (str(jax.typeof(x)), jax.ShapeDtypeStruct.like(x)),
    "eval_shape": lambda x: jax.eval_shape(double, x),
    # Placement.
    "put": jax.device_put,
    "put in place": lambda x: jax.device_put(x, x.sharding),
    "put in a trace": lambda x: jax.jit(lambda a: jax.device_put(a, on("y")) * 2)(x),
    "put eagerly in a trace": lambda x: jax.jit(lambda: jax.device_put(x, on("y")) * 2)(),
    "put on another device": lambda x: jax.device_put(x, DEVICES[1]),
    "put on a turned mesh": lambda x: jax.device_put(x, on("x", mesh=TURNED)),
    "put on rows": lambda x: jax.device_put(x, on(("x", "y"))),
    "put in the usual layout": lambda x: jax.device_put(x, Format(ROWS, x.sharding)),
    "put in the layout": lambda x: jax.device_put(x, Format(COLUMNS, x.sharding)),
    "put elsewhere in the layout": lambda x: jax.device_put(x, Format(COLUMNS, on("y"))),
    "put and copied": lambda x: jax.device_put(x, x.sharding, may_alias=False),
    "put and donated": lambda x: jax.device_put(x, on("y"), donate=True),
    "put on the host": lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")),
    "gradient of put": lambda x: jax.grad(lambda a: jax.device_put(a, on("y")).sum())(x),
    "constrained": lambda x: lax.with_sharding_constraint(x, on("y")),
    "layout constraint": lambda x: with_layout_constraint(x, ROWS),
    "put together": lambda x: jax.make_array_from_single_device_arrays(
        V.shape, x.sharding, shards(x)
    ),
    "put together by name": lambda x: jax.make_array_from_single_device_arrays(
        shape=V.shape, sharding=x.sharding, arrays=tuple(shards(x)[::-1])
    ),
    "put together of too many": lambda x: jax.make_array_from_single_device_arrays(
        V.shape, x.sharding, [x, x, x, x, x]
    ),
    "made by a callback": lambda x: jax.make_array_from_callback(V.shape, on(), lambda _: x),
    "made by a callback of shards": lambda x: jax.make_array_from_callback(
        V.shape,
        x.sharding,
        lambda index: next(s.data for s in x.addressable_shards if s.index == index),
    ),
    "made of local data": lambda x: jax.make_array_from_process_local_data(x.sharding, x),
    # On the host.
    "device_get": jax.device_get,
    "block_until_ready": lambda x: jax.block_until_ready([x, usual(x)]),
    "process_allgather": lambda x: multihost_utils.process_allgather(x, tiled=True),
    "global to local": lambda x: multihost_utils.global_array_to_host_local_array(x, MESH, P()),
    "dlpack": jnp.from_dlpack,
    "dlpack of NumPy": np.from_dlpack,
    "pickle": lambda x: np.asarray(pickle.loads(pickle.dumps(x))),
    "deepcopy": copy.deepcopy,
    "tolist": lambda x: x.tolist(),
    "tobytes": lambda x: x.tobytes(),
    "item": lambda x: x.item(9),
    "ufunc": np.sin,
    "shards": shards,
    "format": lambda x: (x.format.layout, x.on_device_size_in_bytes()),
}


def describe(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.sharding, leaf.format.layout
    if not hasattr(leaf, "committed"):
        return (leaf.dtype, leaf.tobytes()) if isinstance(leaf, np.ndarray) else leaf
    tiles = leaf.sharding.devices_indices_map(leaf.shape)
    layout, typed = leaf.format.layout, (leaf.dtype, leaf.weak_type, leaf.committed)
    return np.asarray(leaf).tobytes(), leaf.shape, typed, layout, leaf.sharding.memory_kind, tiles


def outcome(consumer: Callable[[Any], Any], x: Any) -> Any:
    try:
        out = consumer(x)
        return [describe(leaf) for leaf in jax.tree.leaves(out)], x.is_deleted()
    except Exception as error:
        return error


def check_outcome(consumer: Callable[[Any], Any], sharding: Any) -> None:
    """Hand arrays of JAX and of this package to a function, and compare results or errors."""
    # Transfers are awaited: `is_ready` would compare how fast the two were.
    wanted = outcome(consumer, jax.device_put(V, Format(COLUMNS, sharding)).block_until_ready())
    got = outcome(consumer, xlashard.device_put(V, Format(COLUMNS, sharding)).block_until_ready())
    if isinstance(wanted, Exception):
        assert isinstance(got, type(wanted)), got
    else:
        assert got == wanted


@pytest.mark.parametrize("name", sweep(CONSUMERS, quick=["put", "put together", "format"]))
def test_jax_reads_an_array_of_another_layout_as_its_own(name: str) -> None:
    consumer = CONSUMERS[name]
    with Together() as together:
        for place, sharding in PLACES.items():
            with together.case(place):
                check_outcome(consumer, sharding)


HANDLE = type(jax.device_put(V))

CALLS: dict[str, list[tuple[Any, ...]]] = {
    **{"reshape": [(64,)], "astype": [(np.int32,)], "view": [(np.int32,)], "take": [([1, 2],)]},
    **{"repeat": [(2,)], "clip": [(1, 5)], "searchsorted": [(3,)], "choose": [([1, 2],)]},
    **{"compress": [([True, False],)], "dot": [(V,)], "swapaxes": [(0, 1)], "round": [()]},
    **{"item": [(3,), (1, 2)], "addressable_data": [(0,), (1,)], "to_device": [(DEVICES[1],)]},
    **{"transpose": [(), (1, 0)], "argpartition": [(2,)], "partition": [(2,)]},
    **{"tobytes": [(), ("F",)], "__getitem__": [(1,), (slice(0, 4),)], "__contains__": [(3,)]},
    **{"__array__": [(), (np.float16,)], "__format__": [("",)], "__pow__": [(2,)]},
    **{"__rpow__": [(2,)], "__matmul__": [(V,)], "__rmatmul__": [(V,)]},
}
"""Arguments of the methods that take others than none, or than a number and an array."""

OPERATORS = [(), (1.0,), (V,)]

# Properties of the object and its buffers, Python's own members, and those that differ by design:
# `imag` of real numbers keeps the sharding.
INCOMPARABLE = {
    *("delete", "traceback", "client", "unsafe_buffer_pointer", "unsafe_raw_buffer", "at", "flat"),
    *("addressable_shards", "global_shards", "imag", "__dlpack__", "__reduce__", "__getstate__"),
    *("__annotations__", "__array_ufunc__", "__buffer__", "__copy__", "__deepcopy__", "__iter__"),
    *("__cuda_array_interface__", "__firstlineno__", "__hash__", "__reduce_ex__", "__reversed__"),
    *("__del__", "__release_buffer__", "__repr__", "__setitem__", "__slots__", "__str__"),
    *("__static_attributes__", "__weakref__", *dir(object), "__annotate__", "__abstractmethods__"),
    *("__annotate_func__", "__annotations_cache__", "__dict__", "__module__", "__numpy_dtype__"),
}
COMPARED = [
    name
    for name in dir(HANDLE)
    if name in CALLS or not (name in INCOMPARABLE or re.match("_[^_]", name))
]
COMPARED += ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]


@pytest.mark.parametrize("name", sweep(COMPARED, quick=["nbytes", "format", "weak_type"]))
def test_members_read_an_array_of_another_layout_as_those_of_jax_do(name: str) -> None:
    def use(x: Any, arguments: tuple[Any, ...]) -> Any:
        member = getattr(x, name)
        return member(*arguments) if callable(member) else member

    calls = CALLS.get(name, OPERATORS if name.startswith("__") else [()])
    with Together() as together:
        for place in ("tiles", "one device"):
            for arguments in calls:
                with together.case(f"{place}, {len(arguments)} arguments"):
                    check_outcome(lambda x, a=arguments: use(x, a), PLACES[place])


@pytest.mark.slow
def test_uncommitted_arrays_have_the_usual_layout() -> None:
    tiles = xlashard.device_put(V, Format(COLUMNS, PLACES["tiles"]))
    alone = xlashard.device_put(V, Format(COLUMNS, PLACES["one device"]))
    device_array = make_device_array(TYPE, None, alone)
    gda = GlobalDeviceArray.from_batched_callback(
        V.shape, MESH, P("x", "y"), lambda _: shards(tiles)
    )
    cases: list[tuple[Any, np.ndarray]] = [
        (tiles[:4, 4:], V[:4, 4:]),
        (device_array, V),
        (gda.local_shards[3].data, V[4:, 4:]),
    ]
    for x, wanted in cases:
        assert issubclass(type(x), Array) and not x.committed
        assert x.format.layout == usual(x).format.layout
        assert same(jax.jit(double)(x), 2 * wanted)
        assert same(xlashard.jit(double)(x), 2 * wanted)
        assert same(x + x, 2 * wanted)
        assert same(jax.device_put(x, Format(COLUMNS, x.sharding)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3])
def test_shards_of_different_layouts_become_an_array_of_one(number: int) -> None:
    def placed(index: Any, device: Any) -> Any:
        alone = jax.sharding.SingleDeviceSharding(device)
        return jax.device_put(
            V[index], Format(COLUMNS, alone) if device is DEVICES[number] else alone
        )

    places = PLACES["tiles"].devices_indices_map(V.shape)
    pieces = {str(index): placed(index, device) for device, index in places.items()}
    for x in (
        xlashard.make_array_from_single_device_arrays(
            V.shape, PLACES["tiles"], list(pieces.values())
        ),
        xlashard.make_array_from_callback(
            V.shape, PLACES["tiles"], lambda index: pieces[str(index)]
        ),
    ):
        assert same(xlashard.jit(double)(x), 2 * V) and same(jax.jit(double)(x), 2 * V)
        assert same(x, V) and same(x + x, 2 * V)


def jit(library: Any, layout: Any, place: str, **options: Any) -> Any:
    sharding = PLACES[place]
    where = sharding if layout is None else Format(layout, sharding)
    return library.jit(double, in_shardings=where, **options)


STAGES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "call": lambda f: f,
    "compiled": lambda f: f.lower(TYPE).compile(),
    "lower": lambda f: lambda x: str(f.lower(x).compile().input_formats[0][0].layout),
    "lower structs": lambda f: lambda x: str(f.lower(jax.ShapeDtypeStruct.like(x)).out_tree),
    # JAX gives the gradient the layout of the argument.
    "grad": lambda f: lambda x: np.asarray(jax.grad(lambda x: f(x).sum())(x)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[0],
    "nested": lambda f: jax.jit(lambda x: f(x)),
    "eval_shape": lambda f: lambda x: jax.eval_shape(f, x).shape,
}


def check_calls(layout: Any, place: str, stage: str, order: str) -> None:
    """Compare a series of calls with those of JAX: each is refused in both, or gives the same."""
    arguments: dict[str, Callable[[Any], Any]] = {
        "C": lambda library: library.device_put(V, Format(COLUMNS, PLACES[place])),
        "R": lambda library: library.device_put(V, PLACES[place]),
        "h": lambda library: V,
        "u": lambda library: jnp.asarray(V),
    }
    ours = STAGES[stage](jit(xlashard, layout, place))
    of_jax = STAGES[stage](jit(jax, layout, place))
    for number, letter in enumerate(order):
        wanted = outcome_of_call(of_jax, arguments[letter](jax))
        got = outcome_of_call(ours, arguments[letter](xlashard))
        where = f"call {number} of {order}"
        if not isinstance(wanted, ValueError):
            assert got == wanted, where
            continue
        assert isinstance(got, xlashard.errors.ResourceError), (where, got)
        text = str(got)
        assert "x (float32[8,8])" in text and "Layout(" in text, where
        assert "device_put(x, Format(Layout(" in text or "input_formats" in text, where


def outcome_of_call(function: Callable[[Any], Any], x: Any) -> Any:
    try:
        return [describe(leaf) for leaf in jax.tree.leaves(function(x))]
    except ValueError as error:
        return error


@pytest.mark.parametrize("stage", sweep(STAGES, quick=[]))
def test_layouts_that_jax_refuses_are_refused(stage: str) -> None:
    requests = {"columns": COLUMNS, "rows": ROWS, "open": OPEN, "none": None}
    with Together() as together:
        for name, layout in requests.items():
            for place in ("tiles", "one device"):
                for order in ("CCRRCRhuCR", "RCuCRhh", "hhuCR"):
                    if stage != "call" and order != "CCRRCRhuCR":
                        continue
                    with together.case(f"{name}, {place}, {order}"):
                        check_calls(layout, place, stage, order)


def test_layouts_of_another_rank_are_refused() -> None:
    for order in ((0,), (0, 1, 2), ()):
        where = Format(Layout(order), PLACES["tiles"])
        for library in (jax, xlashard):
            for use in (
                lambda library, where: library.jit(double, in_shardings=where).lower(TYPE),
                lambda library, where: library.jit(double, out_shardings=where).lower(TYPE),
                lambda library, where: library.jit(double, in_shardings=where)(V),
                lambda library, where: jax.eval_shape(library.jit(double, in_shardings=where), V),
                lambda library, where: library.device_put(V, where),
                lambda library, where: library.device_put(
                    library.device_put(V), where, donate=True
                ),
                lambda library, where: library.make_array_from_callback(
                    V.shape, where, V.__getitem__
                ),
            ):
                with pytest.raises(ValueError, match="layout") as caught:
                    use(library, where)
                if library is xlashard:
                    assert "write Layout((0, 1))" in str(caught.value)


def test_an_open_layout_is_that_of_argument_and_result_of_a_donation() -> None:
    def lower(library: Any, sharding: Any, *layouts: Any) -> Any:
        ins, outs = [sharding if each is None else Format(each, sharding) for each in layouts]
        jitted = library.jit(double, in_shardings=ins, out_shardings=outs, donate_argnums=0)
        return outcome_of_call(lambda x: jitted.lower(x).out_tree, TYPE)

    for place in ("tiles", "one device"):
        for ins, outs in [(OPEN, None), (None, OPEN), (OPEN, OPEN), (OPEN, COLUMNS), (ROWS, OPEN)]:
            wanted, got = (lower(library, PLACES[place], ins, outs) for library in (jax, xlashard))
            if isinstance(wanted, ValueError):
                assert isinstance(got, xlashard.errors.DonationError), (place, ins, outs)
                assert "Layout.AUTO" in str(got)
            else:
                assert not isinstance(got, ValueError), (place, ins, outs)
