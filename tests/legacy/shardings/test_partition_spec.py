"""The era's partition spec: a tuple, and accepted wherever today's is."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from hypothesis import given, settings
from hypothesis import strategies as st

import xlashard
from tests.core.pjit.helpers import f32
from xlashard import NamedSharding, legacy, multihost, pjit, with_sharding_constraint
from xlashard.errors import ShardingError, UnknownAxisError
from xlashard.legacy.shardings.parsed_specs import ParsedPartitionSpec, get_array_mapping
from xlashard.legacy.shardings.partition_spec import PartitionSpec

pytestmark = pytest.mark.partitioner

Today = jax.sharding.PartitionSpec

ENTRIES = st.lists(
    st.sampled_from([None, "x", "y", ("x", "y"), ("x",), Today.UNCONSTRAINED]), max_size=4
)


@settings(max_examples=40)
@given(ENTRIES, ENTRIES)
def test_spec_equals_the_tuple_of_its_entries(entries, others):
    spec, plain = PartitionSpec(*entries), tuple(entries)
    assert isinstance(spec, tuple) and type(spec) is PartitionSpec
    assert spec == plain and plain == spec and (spec != plain) is False
    assert hash(spec) == hash(plain) and {plain: 1}[spec] == 1
    assert len(spec) == len(plain) and list(spec) == entries
    assert type(spec + tuple(others)) is tuple and spec + tuple(others) == plain + tuple(others)
    assert tuple(others) + spec == tuple(others) + plain
    assert spec + PartitionSpec(*others) == plain + tuple(others)
    assert spec[:2] == plain[:2] and spec[1:] == plain[1:] and spec * 2 == plain * 2
    assert (spec == tuple(others)) == (plain == tuple(others))
    assert (spec == PartitionSpec(*others)) == (plain == tuple(others))


def test_spec_supports_indexing_count_and_repr():
    spec = PartitionSpec("x", None, ("y", "z"))
    assert spec[0] == "x" and spec[-1] == ("y", "z") and spec.index("x") == 0
    assert spec.count(None) == 1 and "x" in spec and bool(spec) and not PartitionSpec()
    assert repr(spec) == "PartitionSpec('x', None, ('y', 'z'))" == str(spec)
    assert repr(PartitionSpec("x")) == "PartitionSpec('x',)" and repr(PartitionSpec()).endswith(
        "()"
    )
    with pytest.raises(TypeError):
        PartitionSpec("x", unreduced={"y"})


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_copies_and_pickles_keep_the_class(again):
    spec = PartitionSpec("x", None, PartitionSpec.UNCONSTRAINED)
    back = again(spec)
    assert type(back) is PartitionSpec and back == spec
    assert back[2] is PartitionSpec.UNCONSTRAINED is Today.UNCONSTRAINED


@settings(max_examples=40)
@given(ENTRIES, ENTRIES)
def test_spec_equals_the_current_spec_of_equal_entries(entries, others):
    spec, today = PartitionSpec(*entries), Today(*entries)
    assert spec == today and today == spec
    assert (spec != today) is False and (today != spec) is False
    assert spec.today is today
    assert (spec == Today(*others)) == (today == Today(*others)) == (Today(*others) == spec)
    assert isinstance(spec, Today) and isinstance(today, PartitionSpec)
    assert spec.partitions == today.partitions and spec.unreduced == frozenset() == spec.reduced
    assert Today("z") + spec == Today("z", *entries)
    assert spec + today == (*entries, *today)


def test_other_types_are_not_instances_of_partition_spec():
    assert not isinstance(("x",), PartitionSpec) and not isinstance("x", PartitionSpec)
    assert issubclass(Today, PartitionSpec) and issubclass(PartitionSpec, tuple)
    assert not issubclass(tuple, PartitionSpec)
    assert not hasattr(PartitionSpec("x"), "_fields")
    with pytest.raises(AttributeError):
        PartitionSpec("x").no_such_name  # noqa: B018


def test_spec_is_a_pytree_leaf():
    tree = {"w": PartitionSpec("x", "y"), "b": None, "opt": (PartitionSpec(), ())}
    leaves = jax.tree.leaves(tree)
    assert leaves == [PartitionSpec(), PartitionSpec("x", "y")]
    assert all(type(leaf) is PartitionSpec for leaf in leaves)
    on_more = jax.tree.map(lambda spec: PartitionSpec("z", *spec), tree)
    assert on_more["w"] == ("z", "x", "y")
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert len(paths) == 2


def test_shardings_of_legacy_and_current_specs_are_equal(mesh):
    spec = PartitionSpec("x", None)
    own = NamedSharding(mesh, spec)
    assert own == NamedSharding(mesh, Today("x", None)) and hash(own) == hash(
        NamedSharding(mesh, Today("x", None))
    )
    assert own.spec == spec and own.with_spec(PartitionSpec("y")).shard_shape((8, 4)) == (4, 4)
    todays = jax.sharding.NamedSharding(mesh, spec)
    assert todays == jax.sharding.NamedSharding(mesh, Today("x", None))
    assert own.is_equivalent_to(todays, 2) and todays.is_equivalent_to(own, 2)
    with pytest.raises(UnknownAxisError, match="'z'"):
        NamedSharding(mesh, PartitionSpec("z"))


def test_a_plain_tuple_is_not_a_spec(mesh):
    with pytest.raises(ShardingError, match=r"P\('x', None\)"):
        NamedSharding(mesh, ("x", None))


def test_xlashard_functions_accept_the_legacy_spec(mesh, partitioner):
    x, spec, out = f32(8, 4), PartitionSpec("x", None), PartitionSpec(None, "y")
    free = PartitionSpec("x", PartitionSpec.UNCONSTRAINED)
    with mesh:
        doubled = pjit(
            lambda tree: with_sharding_constraint(tree["a"] * 2, free),
            in_axis_resources=({"a": spec},),
            out_axis_resources=out,
        )({"a": x})
        placed = xlashard.device_put(x, spec)
        drawn = xlashard.visualize((8, 4), spec)
        assert str(drawn) == str(xlashard.visualize((8, 4), Today("x", None)))
    np.testing.assert_array_equal(doubled, x * 2)
    assert doubled.sharding == NamedSharding(mesh, Today(None, "y"))
    assert placed.sharding.is_equivalent_to(NamedSharding(mesh, Today("x")), 2)
    made = xlashard.make_array_from_callback((8, 4), NamedSharding(mesh, spec), lambda i: x[i])
    np.testing.assert_array_equal(made, x)
    lifted = multihost.host_local_array_to_global_array({"b": x}, mesh, {"b": spec})
    assert lifted["b"].sharding == NamedSharding(mesh, Today("x"))
    lowered = multihost.global_array_to_host_local_array(lifted, mesh, spec)
    np.testing.assert_array_equal(lowered["b"], x)
    assert get_array_mapping(spec) == {"x": 0}
    parsed = ParsedPartitionSpec.from_user_input(spec, "in_axis_resources")
    assert parsed.partitions == (("x",), ()) and type(parsed.get_partition_spec()) is PartitionSpec


def test_legacy_and_current_specs_share_a_cache_entry(mesh):
    double = pjit(lambda x: x * 2)
    for spec in (PartitionSpec("x"), Today("x"), PartitionSpec(("x",))):
        double(xlashard.device_put(f32(8, 4), NamedSharding(mesh, spec)))
    assert double._cache_size() == 1


@pytest.mark.slow
def test_jax_functions_accept_the_legacy_spec(mesh):
    x, spec = f32(8, 4), PartitionSpec("x", None)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    placed = jax.device_put(x, sharding)
    assert placed.addressable_shards[0].data.shape == (2, 4)
    with jax.set_mesh(mesh):
        constrained = jax.jit(
            lambda v: jax.lax.with_sharding_constraint(v + 1, spec), in_shardings=spec
        )(x)
    assert constrained.sharding.is_equivalent_to(sharding, 2)
    summed = jax.shard_map(
        lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
    )(placed)
    np.testing.assert_allclose(summed, x.reshape(4, 2, 4).sum(0))
    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    assert pjit(lambda v: v * 2).lower(shape).compile()(placed).sharding == NamedSharding(
        mesh, Today("x", None)
    )


@pytest.mark.slow
def test_flax_modules_receive_the_legacy_spec_while_installed(mesh):
    rules = (("batch", "x"), ("embed", None), ("mlp", "y"))
    init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
    module, x = linen.Dense(16, kernel_init=init), f32(4, 8)
    with legacy.installed(), mesh, linen.logical_axis_rules(rules):
        from jax.experimental.pjit import PartitionSpec as P
        from jax.experimental.pjit import pjit

        shapes = jax.eval_shape(module.init, jax.random.key(0), x)
        logical = linen.get_partition_spec(shapes)
        assert type(logical["params"]["kernel"]) is P
        specs = linen.logical_to_mesh(logical, rules)
        assert specs == {"params": {"kernel": P(None, "y"), "bias": P()}}
        variables = pjit(module.init, in_axis_resources=None, out_axis_resources=specs)(
            jax.random.key(0), x
        )
        apply = pjit(module.apply, in_axis_resources=(specs, P("x")), out_axis_resources=P("x"))
        out = apply(variables, x)
    assert variables["params"]["kernel"].value.sharding.spec == P(None, "y")
    np.testing.assert_allclose(out, module.apply(linen.meta.unbox(variables), x), rtol=1e-5)
