"""XLA's shardings as specs and back: every spec of every small mesh, and those of a program."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import xlashard
from xlashard import GSPMDSharding, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from xlashard._jax.runtime.shardings import HloSharding, OpSharding
from xlashard.errors import (
    ArgumentError,
    ShardingError,
    ShardingTextError,
    SpecEntryError,
    TilingError,
)
from xlashard.geometry import TileAssignment
from xlashard.legacy.modes.pjit_internals import to_op_sharding_sharding
from xlashard.legacy.shardings.op_shardings import (
    get_pspec_from_executable,
    parse_flatten_op_sharding,
)
from xlashard.legacy.shardings.parsed_specs import (
    REPLICATED,
    CanonicalizedParsedPartitionSpec,
    ParsedPartitionSpec,
    SpecSync,
    get_array_mapping,
    get_unconstrained_dims,
)

U = P.UNCONSTRAINED


def mesh(shape, names="xyz"):
    count = math.prod(shape)
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), tuple(names[: len(shape)]))


MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4), (3, 2), (1,)]


def specs(names, ndim):
    """Yield all assignments of axes, in any order, to dimensions."""
    for places in itertools.product(range(ndim + 1), repeat=len(names)):
        dims = [[n for n, p in zip(names, places, strict=True) if p == d] for d in range(ndim)]
        for orders in itertools.product(*(itertools.permutations(d) for d in dims)):
            yield P(*(o[0] if len(o) == 1 else tuple(o) or None for o in orders))


def without_small(spec, on):
    """Return a spec without axes of size 1, which shard nothing."""
    axes = ((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)
    return tuple(tuple(a for a in dim if on.shape[a] > 1) for dim in axes)


def stripped(partitions):
    partitions = list(partitions)
    while partitions and partitions[-1] == ():
        partitions.pop()
    return tuple(partitions)


def protos(assignment):
    """Return a sharding as JAX's protos: with an iota (V2), and with its devices listed (V1)."""
    yield HloSharding.from_string(assignment.to_text()).to_proto()
    if assignment.kind == "tiled":
        listed = TileAssignment.listed(
            assignment.dims, assignment.device_array().reshape(-1), assignment.subgroups
        )
        yield HloSharding.from_string(listed.to_text()).to_proto()


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_spec_round_trips_on_small_meshes(shape):
    on = mesh(shape)
    for ndim in (1, 2, 3):
        for spec in specs(on.axis_names, ndim):
            op = to_op_sharding_sharding(NamedSharding(on, spec), ndim)
            for form in (op._hlo_sharding, *protos(op.tile_assignment)):
                (parsed,) = parse_flatten_op_sharding(form, on)
                assert stripped(parsed) == stripped(without_small(spec, on)), (spec, form)
                assert len(parsed) in (0, ndim)
                again = NamedSharding(on, parsed.get_partition_spec())
                assert again.is_equivalent_to(NamedSharding(on, spec), ndim)


@pytest.mark.slow
@given(st.data())
def test_specs_lowered_by_jax_are_parsed(data):
    on = mesh(data.draw(st.sampled_from(MESHES)))
    ndim = data.draw(st.integers(1, 4))
    spec = data.draw(st.sampled_from(list(specs(on.axis_names, min(ndim, 2)))))
    hlo = jax.sharding.NamedSharding(on, spec)._to_xla_hlo_sharding(ndim)
    for form in (hlo, hlo.to_proto(), hlo.to_string() if "mesh" not in hlo.to_string() else hlo):
        (parsed,) = parse_flatten_op_sharding(form, on)
        assert stripped(parsed) == stripped(without_small(spec, on))


def test_tuple_shardings_parse_to_one_spec_per_element():
    on = mesh((2, 4))
    parts = ["{devices=[2,4]<=[8]}", "{replicated}", "{devices=[4,2]<=[2,4]T(1,0)}"]
    text = f"{{{', '.join(parts)}}}"
    listed = [(("x",), ("y",)), (), (("y",), ("x",))]
    proto = OpSharding()
    proto.type = OpSharding.Type.TUPLE
    proto.tuple_shardings = [HloSharding.from_string(p).to_proto() for p in parts]
    for form in (text, proto, HloSharding.from_string(text)):
        assert [p.partitions for p in parse_flatten_op_sharding(form, on)] == listed


def test_partial_replication_is_parsed():
    on = mesh((2, 2, 2))
    text = "{devices=[2,1,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}"
    (parsed,) = parse_flatten_op_sharding(text, on)
    assert parsed.partitions == (("y",), ())
    (whole,) = parse_flatten_op_sharding("{replicated}", on)
    assert whole == REPLICATED
    assert type(whole) is CanonicalizedParsedPartitionSpec


def test_abstract_mesh_is_accepted():
    (parsed,) = parse_flatten_op_sharding("{devices=[1,8]<=[8]}", AbstractMesh((2, 4), ("x", "y")))
    assert parsed.get_partition_spec() == P(None, ("x", "y"))


@pytest.mark.parametrize(
    ("text_of_sharding", "kind", "text"),
    [
        ("{devices=[2,4]<=[8", ShardingTextError, r"'\]'.*character 18"),
        ("{devices=[4,2]<=[8]}", TilingError, "'y' of size 4"),
        ("{devices=[4]<=[4]}", TilingError, "4 devices.* 8"),
        ("{devices=[8]0,2,1,3,4,5,6,7}", TilingError, "0,2,1,3,4,5,6,7.*'x'=2, 'y'=4"),
        ("{manual}", TilingError, "manual"),
        ("{maximal device=3}", TilingError, "maximal device=3"),
        (7, ArgumentError, "OpSharding.* int"),
    ],
)
def test_shardings_without_a_partition_spec_are_refused(text_of_sharding, kind, text):
    with pytest.raises(kind, match=text):
        parse_flatten_op_sharding(text_of_sharding, mesh((2, 4)))


@pytest.mark.parametrize(
    ("entry", "partitions"),
    [
        (None, ()),
        (P(), ()),
        (P(None), ((),)),
        (P("x", None), (("x",), ())),
        (P(("x", "y"), "z", None), (("x", "y"), ("z",), ())),
    ],
)
def test_user_specs_are_parsed(entry, partitions):
    parsed = ParsedPartitionSpec.from_user_input(entry, "in_axis_resources")
    assert parsed.partitions == tuple(parsed) == partitions
    assert len(parsed) == len(partitions)
    assert parsed.user_spec is entry
    assert parsed.get_partition_spec() == (entry if entry is not None else P())
    assert CanonicalizedParsedPartitionSpec(parsed).partitions == stripped(partitions)


@pytest.mark.parametrize(
    ("entry", "kind", "text"),
    [
        ("x", ArgumentError, r"in_axis_resources .* str.*P\('x'\)"),
        (P(3), SpecEntryError, "entry 0 is 3"),
        (P("x", U), ShardingError, "in_axis_resources .*dimension 1.*UNCONSTRAINED"),
    ],
)
def test_invalid_user_specs_are_refused(entry, kind, text):
    with pytest.raises(kind, match=text):
        ParsedPartitionSpec.from_user_input(entry, "in_axis_resources")


def test_unconstrained_dimensions_are_parsed_where_allowed():
    parsed = ParsedPartitionSpec.from_user_input(P("x", U), "x", allow_unconstrained_dims=True)
    assert parsed.partitions == (("x",), None)
    assert ParsedPartitionSpec(None, parsed).get_partition_spec() == P("x", U)
    assert get_array_mapping(parsed) == {"x": 0}
    assert get_unconstrained_dims(NamedSharding(mesh((2, 4)), P("x", U))) == {1}


def test_insert_axis_partitions_adds_a_dimension():
    parsed = ParsedPartitionSpec.from_user_input(P("x"), "x")
    moved = parsed.insert_axis_partitions(0, ())
    assert (moved.partitions, moved.sync) == (((), ("x",)), SpecSync.DIM_PERMUTE)
    assert moved.get_partition_spec() == P(None, "x")
    assert moved.unsynced_user_spec(SpecSync.DIM_PERMUTE) == P("x")
    cut = parsed.insert_axis_partitions(3, ("y", "z"))
    assert (cut.partitions, cut.sync) == ((("x",), (), (), ("y", "z")), SpecSync.OUT_OF_SYNC)
    assert cut.insert_axis_partitions(0, None).sync is SpecSync.OUT_OF_SYNC
    for kind in (ShardingError, AssertionError):
        with pytest.raises(kind, match=r"P\('x',\).*get_partition"):
            _ = cut.user_spec


def test_equality_compares_partitions():
    one = ParsedPartitionSpec.from_user_input(P("x", None), "x")
    assert one == ParsedPartitionSpec(None, (("x",), ()))
    assert hash(one) == hash(ParsedPartitionSpec(None, (("x",), ())))
    assert one != ParsedPartitionSpec(None, (("x",),))
    assert CanonicalizedParsedPartitionSpec(one) == ParsedPartitionSpec(None, (("x",),))
    assert one != one.insert_axis_partitions(2, ())
    assert one != "x"


def test_array_mapping_of_parsed_specs():
    assert get_array_mapping(P(("x", "y"), None, "z")) == {"x": 0, "y": 0, "z": 2}
    assert list(get_array_mapping(P("z", ("y", "x")))) == ["z", "y", "x"]
    assert get_array_mapping(REPLICATED) == {}
    for given_back in (xlashard.AUTO, xlashard.UNSPECIFIED):
        assert get_array_mapping(given_back) is given_back


def test_to_op_sharding_sharding_accepts_every_sharding_class():
    on = mesh((2, 4))
    named = NamedSharding(on, P("y"), memory_kind="pinned_host")
    op = to_op_sharding_sharding(named, 2)
    assert isinstance(op, GSPMDSharding)
    assert op.is_equivalent_to(named, 2)
    assert op.memory_kind == "pinned_host"
    assert to_op_sharding_sharding(op, 2) is op
    assert to_op_sharding_sharding(jax.sharding.NamedSharding(on, P("y")), 2).is_equivalent_to(
        NamedSharding(on, P("y")), 2
    )
    alone = SingleDeviceSharding(jax.devices()[3])
    assert to_op_sharding_sharding(alone, 1).devices == alone.devices

    class Own(Sharding):
        @property
        def devices(self):
            return tuple(jax.devices())

    with pytest.raises(ShardingError, match=r"Own .*tiling\(shape\)"):
        to_op_sharding_sharding(Own(), 1)


@pytest.mark.parametrize("compiler", [jax.jit, xlashard.pjit])
def test_get_pspec_from_executable_returns_input_and_output_specs(compiler):
    on = mesh((4, 2))
    ins = tuple(jax.sharding.NamedSharding(on, s) for s in (P("x", "y"), P("y")))
    fun = compiler(lambda a, b: (a @ b, a.sum()), in_shardings=ins)
    compiled = fun.lower(np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)).compile()
    expected = ((P("x", "y"), P("y")), (P("x"), P()))
    assert get_pspec_from_executable(compiled, on) == expected
    assert get_pspec_from_executable(compiled.runtime_executable(), on) == expected


def test_specs_of_executables_with_one_sharding_or_one_device():
    on = mesh((4, 2))
    sharding = NamedSharding(on, P("x"))
    fun = xlashard.pjit(lambda a: (a, a + 1, a + 2), in_shardings=sharding, out_shardings=sharding)
    compiled = fun.lower(np.ones((8, 8), np.float32)).compile()
    assert get_pspec_from_executable(compiled, on) == ((P("x"),), (P("x"),) * 3)
    alone = mesh((1, 1))
    compiled = xlashard.pjit(lambda a: (a, a + 1)).lower(np.ones(8, np.float32)).compile()
    assert get_pspec_from_executable(compiled, alone) == ((P(),), (P(),) * 2)
