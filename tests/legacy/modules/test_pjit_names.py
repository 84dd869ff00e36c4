"""Internals of `jax.experimental.pjit` that programs use."""

import inspect
import itertools
import pickle
from collections import OrderedDict
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xlashard
from tests.core.pjit.helpers import f32, make_mesh
from tests.legacy.removed import maps
from tests.legacy.removed import pjit as era
from tests.message_patterns import naming
from xlashard import NamedSharding, legacy
from xlashard._jax.runtime.shardings import HloSharding, OpSharding
from xlashard.errors import (
    ArgumentError,
    DuplicateAxisError,
    MeshError,
    RefusedError,
    ShardingError,
)
from xlashard.legacy import installer as installing
from xlashard.legacy.modes.config_flags import PositionalSemantics
from xlashard.legacy.modules.sharding import op_sharding
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P

pytestmark = pytest.mark.partitioner


def test_markers_are_recognized_by_class():
    again = pickle.loads(pickle.dumps(era.FROM_GDA))
    assert era._is_from_gda(era.FROM_GDA) and era._is_from_gda(again) and again == era.FROM_GDA
    assert era._is_auto(era.AUTO) and era._is_unspecified(era._UNSPECIFIED)
    assert era._is_auto(era.AUTO("any mesh")) and isinstance(era.AUTO, era._AUTOAxisResource)
    assert era._is_auto(xlashard.AUTO) and isinstance(xlashard.UNSPECIFIED, era._UnspecifiedValue)
    assert isinstance(xlashard.FROM_GDA, era._FromGdaSingleton)
    for marker in (era.FROM_GDA, era.AUTO, era._UNSPECIFIED):
        assert era._is_unspecified_or_from_gda_or_auto(marker)
    for other in (None, P(), "x"):
        assert not era._is_unspecified_or_from_gda_or_auto(other)


def test_specs_are_parsed_and_canonicalised():
    parsed = era.ParsedPartitionSpec.from_user_input(P("x", None, ("y", "z"), None), "resources")
    assert parsed.partitions == (("x",), (), ("y", "z"), ()) and len(parsed) == 4
    assert parsed[2] == ("y", "z") and next(iter(parsed)) == ("x",)
    assert parsed.sync == era.SpecSync.IN_SYNC and parsed.user_spec == P(
        "x", None, ("y", "z"), None
    )
    shortest = era.CanonicalizedParsedPartitionSpec(parsed)
    assert shortest.partitions == (("x",), (), ("y", "z")) != parsed.partitions
    assert isinstance(shortest, era.ParsedPartitionSpec) and "Canonicalized" in repr(shortest)
    assert parsed.get_partition_spec() == ("x", None, ("y", "z"), None)
    moved = parsed.insert_axis_partitions(0, ("w",))
    assert moved.get_partition_spec() == ("w", "x", None, ("y", "z"), None)
    assert type(moved.get_partition_spec()) is P and type(moved) is era.ParsedPartitionSpec
    assert moved.sync == era.SpecSync.OUT_OF_SYNC < era.SpecSync.DIM_PERMUTE
    nothing = era.ParsedPartitionSpec.from_user_input(None, "resources")
    assert era.CanonicalizedParsedPartitionSpec(nothing) == era.REPLICATED
    with pytest.raises(ArgumentError, match=naming("resources ", "tuple", "P(('x',))")):
        era.ParsedPartitionSpec.from_user_input(("x",), "resources")
    with pytest.raises(
        ShardingError, match=naming("resources ", "UNCONSTRAINED", "with_sharding_constraint")
    ):
        era.ParsedPartitionSpec.from_user_input(P(P.UNCONSTRAINED), "resources")
    free = era.ParsedPartitionSpec.from_user_input(P(P.UNCONSTRAINED), "r", True)
    assert free.partitions == (None,)


def test_prepare_axis_resources_parses_every_leaf(mesh):
    tree = {"w": P("x", "y"), "b": None, "s": NamedSharding(mesh, P("x")), "a": era.AUTO}
    prepared, entries, treedef, any_auto = era._prepare_axis_resources(tree, "in_axis_resources")
    assert any_auto and treedef.num_leaves == 4 and len(entries) == 4
    assert prepared["w"].partitions == (("x",), ("y",)) and prepared["b"].partitions == ()
    assert prepared["s"] is tree["s"] and prepared["a"] is era.AUTO
    none, entries, _, any_auto = era._prepare_axis_resources(None, "axis_resources")
    assert none == era.REPLICATED and not any_auto and entries == [none]
    twice = naming("in_axis_resources", "'x'", "dimensions 0 and 1")
    with pytest.raises(DuplicateAxisError, match=twice):
        era._prepare_axis_resources((P("x", ("y", "x")),), "in_axis_resources")
    with pytest.raises(
        ArgumentError, match=naming("in_axis_resources", "PartitionSpec", "str", "P('x')")
    ):
        era._prepare_axis_resources(("x",), "in_axis_resources")


def test_array_mappings_are_ordered():
    mapping = era.get_array_mapping(P(("y", "x"), None, "z"))
    assert type(mapping) is OrderedDict and list(mapping.items()) == [("y", 0), ("x", 0), ("z", 2)]
    parsed = era.ParsedPartitionSpec.from_user_input(P(None, "x"), "spec")
    assert era.get_array_mapping(parsed) == {"x": 1} and era.get_array_mapping(era.REPLICATED) == {}
    assert era.get_array_mapping(era.AUTO) is era.AUTO
    assert era.get_array_mapping(era._UNSPECIFIED) is era._UNSPECIFIED


AXES = st.lists(st.sampled_from("xyz"), unique=True, max_size=3)


@settings(max_examples=25)
@given(AXES, st.lists(st.integers(0, 2), min_size=3, max_size=3), st.booleans())
def test_spec_round_trips_through_an_op_sharding(axes, dims, listed):
    """Every spec on a mesh, through both forms of tiles, to an equivalent spec."""
    mesh = make_mesh((2, 2, 2), ("x", "y", "z"))
    entries = [tuple(a for a, d in zip(axes, dims, strict=False) if d == dim) for dim in range(3)]
    sharding = NamedSharding(mesh, P(*entries))
    tiles = era.to_op_sharding_sharding(sharding, 3)
    assert isinstance(tiles, era.OpShardingSharding) and tiles._original_sharding is sharding
    hlo = tiles._hlo_sharding
    op = op_sharding.fget(tiles) if listed else hlo.to_proto()
    assert not (listed and op.iota_reshape_dims)
    (parsed,) = era.parse_flatten_op_sharding(op, mesh)
    back = NamedSharding(mesh, parsed.get_partition_spec())
    assert back.is_equivalent_to(sharding, 3)
    mapping = era.get_array_mapping(parsed)
    assert mapping == era.get_array_mapping(era._get_single_pspec(parsed))
    assert type(era._get_partition_spec([parsed])[0]) is P


@settings(max_examples=25)
@given(st.permutations(range(3)), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_unflatten_array_recovers_the_axis_order(order, sizes):
    names = OrderedDict(zip("abc", sizes, strict=True))
    assignment = np.arange(np.prod(sizes)).reshape(sizes).transpose(order).ravel()
    ordered = era.unflatten_array(names, assignment)
    again = np.arange(np.prod(sizes)).reshape(sizes)
    kept = [list(names).index(name) for name in ordered]
    again = again.transpose(kept + [n for n in range(3) if n not in kept]).ravel()
    assert again.tolist() == assignment.tolist()
    strides = era.strides_for_sizes(sizes)
    assert isinstance(strides, np.ndarray) and strides[-1] == 1
    digits = era.explode_superdims(sizes, era.unflatten_superdims(assignment))
    assert sorted(size for size, _ in digits) == sorted(size for size in sizes if size > 1)


def test_tuples_are_flattened(mesh):
    ops = [
        HloSharding.from_string(text).to_proto() for text in ("{replicated}", "{devices=[8]<=[8]}")
    ]
    both = OpSharding()
    both.type = OpSharding.Type.TUPLE
    both.tuple_shardings = ops
    parsed = era.parse_flatten_op_sharding(both, mesh)
    assert parsed[0] == era.REPLICATED and parsed[1].partitions == (("x", "y"),)
    assert len(era._get_op_sharding(both)) == 2 and len(era._get_op_sharding(ops[0])) == 1


def test_unconstrained_dimensions(mesh):
    free = P("x", P.UNCONSTRAINED, P.UNCONSTRAINED)
    assert era.get_unconstrained_dims(NamedSharding(mesh, free)) == {1, 2}
    assert era.get_unconstrained_dims(jax.sharding.NamedSharding(mesh, free)) == {1, 2}
    assert era.get_unconstrained_dims(NamedSharding(mesh, P("x"))) == set()


@pytest.mark.slow
def test_partition_specs_are_read_from_an_executable(mesh, partitioner):
    with mesh:
        compiled = (
            era.pjit(
                lambda x, y: (x + 1, y.T),
                in_axis_resources=(P("x", "y"), P(None, "x")),
                out_axis_resources=(P("y"), None),
            )
            .lower(f32(8, 4), f32(4, 8))
            .compile()
        )
    ins, outs = era._get_pspec_from_executable(compiled, mesh)
    assert ins == (P(("x",), ("y",)), P(None, ("x",))) and outs == (P(("y",)), P())
    assert all(type(spec) is P for spec in ins + outs)
    parsed_ins, parsed_outs = era._get_ppspec_from_executable(compiled, mesh)
    assert [p.partitions for p in parsed_ins] == [(("x",), ("y",)), ((), ("x",))]
    ops, _ = era._get_op_sharding_from_executable(compiled.runtime_executable())
    assert ops[0].tile_assignment_devices == list(range(8)) and len(parsed_outs) == 2


class StandInDevice:
    """Stand-in for a device, as in tests of the era."""

    def __init__(self, number: int) -> None:
        self.id, self.process_index = number, 0


@pytest.mark.parametrize(
    "make",
    [
        StandInDevice,
        lambda number: mock.Mock(id=number, process_index=0),
        lambda number: mock.Mock(spec=jax.Device, id=number, process_index=0),
    ],
    ids=["object", "Mock", "Mock of a device"],
)
def test_op_shardings_accept_mock_devices(make):
    devices = np.array([make(number) for number in range(8)])
    mesh = maps.Mesh(devices.reshape(4, 2), ("x", "y"))
    for kind in (jax.sharding.NamedSharding, NamedSharding):
        tiles = era.to_op_sharding_sharding(kind(mesh, P("y")), 2)
        assert isinstance(tiles, era.OpShardingSharding)
        assert op_sharding.fget(tiles).tile_assignment_dimensions == [2, 1, 4]
        assert tiles.devices_indices_map((8, 4))[devices[1]] == (slice(4, 8), slice(None))


def test_single_device_programs_have_replicated_op_shardings():
    compiled = jax.jit(lambda x: x * 2).lower(f32(4)).compile()
    ins, outs = era._get_op_sharding_from_executable(compiled)
    assert [op.type for op in ins + outs] == [OpSharding.Type.REPLICATED] * 2


def test_prefixes_are_flattened():
    tree = jax.tree.structure(({"w": 1, "b": (2, 3)}, 4))
    flat = era.flatten_axis_resources(
        "pjit in_axis_resources", tree, ({"w": P("x"), "b": None}, None), True
    )
    assert flat == (None, None, P("x"), None)
    assert era.flatten_axis_resources("r", tree, P("x"), False) == (P("x"),) * 4
    assert era.flatten_axis_resources("r", tree, [None, P()], True) == (None, None, None, P())
    with pytest.raises(ArgumentError, match=naming("in_axis_resources[0]", "['w']", "['b', 'w']")):
        era.flatten_axis_resources("in_axis_resources", tree, ({"w": P()}, None), True)


def test_hashable_pytree_has_equality_and_hash():
    one, other = era.hashable_pytree({"w": P("x")}), era.hashable_pytree({"w": P("x")})
    assert one == other and hash(one) == hash(other) and one() == {"w": P("x")}
    assert one != era.hashable_pytree({"w": P("y")}) != era.hashable_pytree([P("y")])
    assert one != {"w": P("x")}


def test_avals_are_checked_against_shardings(mesh):
    check = era.pjit_check_aval_sharding
    sharding = NamedSharding(mesh, P("x"))
    good, uneven = (
        jax.core.ShapedArray((8, 4), np.float32),
        jax.core.ShapedArray((6, 4), np.float32),
    )
    check([sharding, era.AUTO, era.FROM_GDA], [good, uneven, uneven], "pjit arguments", False)
    check([sharding], [uneven], "with_sharding_constraint arguments", allow_uneven_sharding=True)
    check([jax.sharding.NamedSharding(mesh, P("x"))], [good], "pjit outputs", False)
    with pytest.raises(
        ShardingError, match=naming("1 of pjit arguments", "shape (6, 4)", "4 tiles")
    ):
        check([sharding, sharding], [good, uneven], "pjit arguments", False)
    with pytest.raises(ShardingError, match=naming("0 of pjit outputs", "shape ()", "1 dimension")):
        check([sharding], [jax.core.ShapedArray((), np.float32)], "pjit outputs", True)


def test_resources_become_shardings_on_a_mesh(mesh):
    parsed = era.ParsedPartitionSpec.from_user_input(P("x"), "resources")
    assert era._create_sharding_for_array(mesh, parsed) == NamedSharding(mesh, P("x"))
    make = era._create_mesh_pspec_sharding_from_parsed_pspec
    assert make(mesh, parsed) == NamedSharding(mesh, P("x")) and make(mesh, era.AUTO) is era.AUTO
    sharding = NamedSharding(mesh, P("y"))
    empty = era.Mesh(np.empty((), object), ())
    assert era._create_sharding_for_array(empty, sharding) is sharding
    with pytest.raises(MeshError, match=naming("PartitionSpec('x',)", "`with mesh:`")):
        era._create_sharding_for_array(empty, parsed)


def test_local_to_global_leaves_avals_unchanged_with_jax_array(mesh):
    avals = [jax.core.ShapedArray((8, 4), np.float32)]
    shardings = [NamedSharding(mesh, P("x"))]
    for scale in (era.global_to_local, era.local_to_global):
        assert scale([PositionalSemantics.LOCAL], avals, shardings, mesh) is avals
        with legacy.jax_array(False):
            # All of the mesh belongs to the only process.
            assert scale([PositionalSemantics.LOCAL], avals, shardings, mesh) == avals
            assert scale(PositionalSemantics.GLOBAL, avals, shardings, mesh) == avals
            bare = [era.to_op_sharding_sharding(shardings[0], 2)]
            assert scale(PositionalSemantics.LOCAL, avals, bare, mesh) == avals


def test_jaxprs_use_pjit_p_and_sharding_constraint_p(mesh):
    with mesh:
        double = era.pjit(lambda x: era.with_sharding_constraint(x * 2, P("x")))
        jaxpr = jax.make_jaxpr(lambda x: double(x) + 1)(f32(8, 4))
    (called,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is era.pjit_p]
    inner = called.params["jaxpr"]
    assert era.sharding_constraint_p in [eqn.primitive for eqn in inner.eqns]


@pytest.mark.parametrize("name", ["_pjit_lower", "_pjit_jaxpr", "_pjit_call_impl"])
def test_removed_functions_are_refused(name):
    with pytest.raises(RefusedError, match=rf"{name} .*pjit\(f\)"):
        getattr(era, name)()


def test_shardings_have_their_legacy_attributes_while_installed(mesh):
    sharding = NamedSharding(mesh, P("x", "y"))
    with installing.installed():
        op = sharding._to_xla_op_sharding(2)
        assert op.tile_assignment_devices == list(range(8)) and op.tile_assignment_dimensions == [
            4,
            2,
        ]
        assert sharding._parsed_pspec.partitions == (("x",), ("y",))
        tiles = era.to_op_sharding_sharding(sharding, 2)
        assert tiles._op_sharding.tile_assignment_dimensions == [4, 2]
        assert era.parse_flatten_op_sharding(tiles._op_sharding, mesh)[0].partitions == (
            ("x",),
            ("y",),
        )
    assert not hasattr(sharding, "_parsed_pspec") and not hasattr(sharding, "_to_xla_op_sharding")


def test_shardings_are_instances_of_xla_compatible_sharding():
    kinds = [
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        xlashard.SingleDeviceSharding(jax.devices()[0]),
        jax.numpy.zeros(3).sharding,
    ]
    assert all(isinstance(kind, era.XLACompatibleSharding) for kind in kinds)
    assert issubclass(NamedSharding, era.XLACompatibleSharding)
    assert issubclass(jax.sharding.NamedSharding, era.XLACompatibleSharding)
    assert not isinstance("x", era.XLACompatibleSharding)

    class Own(xlashard.Sharding):
        devices = jax.devices()

    assert not isinstance(Own(), era.XLACompatibleSharding)
    assert not issubclass(Own, era.XLACompatibleSharding)


def test_sharding_unions_support_isinstance(mesh):
    on_mesh = NamedSharding(mesh, P("x"))
    tiles = era.to_op_sharding_sharding(on_mesh, 2)
    assert isinstance(on_mesh, era.MeshSharding) and isinstance(tiles, era.PjitSharding)
    assert isinstance(era._UNSPECIFIED, era.PjitSharding | era.MeshSharding)
    assert not isinstance(era._UNSPECIFIED, era.PjitShardingMinusUnspecified)
    assert isinstance(era.AUTO, era.MeshShardingMinusUnspecified)
    assert not isinstance(P("x"), era.PjitSharding | era.MeshSharding)


def test_signatures_equal_those_of_legacy_jax():
    expected = {
        "_prepare_axis_resources": "axis_resources, arg_name, allow_unconstrained_dims",
        "flatten_axis_resources": "what, tree, shardings, tupled_args",
        "get_array_mapping": "axis_resources",
        "get_unconstrained_dims": "sharding",
        "global_to_local": "positional_semantics, avals, shardings, mesh",
        "hashable_pytree": "pytree",
        "local_to_global": "positional_semantics, avals, shardings, mesh",
        "parse_flatten_op_sharding": "op_sharding, mesh",
        "pjit_check_aval_sharding": "shardings, flat_avals, what_aval, allow_uneven_sharding",
        "to_op_sharding_sharding": "s, ndim",
        "_get_op_sharding_from_executable": "executable",
        "_get_pspec_from_executable": "executable, mesh",
        "_get_partition_spec": "ppspec",
        "unflatten_array": "named_sizes, assignment",
        "unflatten_superdims": "assignment",
        "explode_superdims": "sizes, dims",
        "strides_for_sizes": "sizes",
    }
    for name, names in expected.items():
        assert ", ".join(inspect.signature(getattr(era, name)).parameters) == names
    first = itertools.islice(inspect.signature(era.pjit).parameters, 3)
    assert next(first) == "fun"
