import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard.errors import (
    DivisibilityError,
    DuplicateAxisError,
    GeometryError,
    RankError,
    SpecEntryError,
    UnknownAxisError,
    XlashardError,
)
from xlashard.geometry import UNCONSTRAINED, MeshGrid, Spec, parse_spec, validate_spec

GRID = MeshGrid(("data", "model"), (2, 4))


def test_unconstrained_marker_stays_a_singleton():
    for copied in (
        copy.copy(UNCONSTRAINED),
        copy.deepcopy(UNCONSTRAINED),
        pickle.loads(pickle.dumps(UNCONSTRAINED)),
    ):
        assert copied is UNCONSTRAINED
    assert repr(UNCONSTRAINED) == "UNCONSTRAINED"


@pytest.mark.parametrize(
    ("entries", "dims"),
    [
        ([], ()),
        ([None], ()),
        (["x"], (("x",),)),
        ([("x",), None], (("x",),)),
        ([["x", "y"], None, "z"], (("x", "y"), (), ("z",))),
        ([(), "x"], ((), ("x",))),
        ([("x", None, "y")], (("x", "y"),)),
        ([(None,), ()], ()),
        ([UNCONSTRAINED], (None,)),
        ([None, UNCONSTRAINED, None], ((), None)),
    ],
)
def test_specs_are_parsed_into_canonical_form(entries, dims):
    spec = parse_spec(entries)
    assert spec.dims == dims
    assert spec == Spec(dims) == Spec((*dims, (), ()))
    assert hash(spec) == hash(Spec((*dims, ())))


def test_unconstrained_marker_may_be_replaced_by_the_caller():
    marker = object()
    assert parse_spec(["x", marker], unconstrained=marker).dims == (("x",), None)
    with pytest.raises(SpecEntryError, match="entry 1 is UNCONSTRAINED"):
        parse_spec(["x", UNCONSTRAINED], unconstrained=marker)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([3], ["entry 0 is 3", "int", "axis name"]),
        (["x", {"y"}], ["entry 1", "set"]),
        ([None, ("x", 2.5)], ["entry 1", "2.5", "float"]),
        ([("x", UNCONSTRAINED)], ["entry 0", "UNCONSTRAINED inside a tuple"]),
        ("data", ["('data',)"]),
    ],
)
def test_wrong_entries_are_named(entries, words):
    with pytest.raises(SpecEntryError) as caught:
        parse_spec(entries)
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, TypeError | ValueError)
    assert caught.value.dim == (0 if entries == "data" else len(entries) - 1)


def test_axes_are_listed_in_the_order_of_the_dims():
    assert parse_spec([("z", "x"), None, UNCONSTRAINED, "y"]).axes == ("z", "x", "y")
    assert parse_spec([None, UNCONSTRAINED]).axes == ()
    assert parse_spec(["x"]).is_constrained
    assert not parse_spec(["x", UNCONSTRAINED]).is_constrained


def test_dims_for_a_rank():
    spec = parse_spec(["x", UNCONSTRAINED])
    assert spec.for_rank(2) == (("x",), None)
    assert spec.for_rank(4) == (("x",), None, (), ())
    with pytest.raises(RankError, match="at least 2 dimensions.* 1") as caught:
        spec.for_rank(1)
    assert (caught.value.ndim, caught.value.needed) == (1, 2)


dim_axes = st.one_of(st.none(), st.just(()), st.sampled_from([("x",), ("y", "z")]))


@given(st.lists(dim_axes, max_size=4), st.integers(0, 6), dim_axes)
def test_inserting_a_dimension(dims, at, axes):
    spec = Spec(tuple(dims))
    padded = list(spec.for_rank(max(len(spec.dims), at)))
    padded.insert(at, axes)
    assert spec.insert(at, axes) == Spec(tuple(padded))


def test_a_dimension_is_not_inserted_from_the_end():
    with pytest.raises(GeometryError, match="got -1"):
        Spec((("x",),)).insert(-1, ())


def test_a_spec_that_fits():
    validate_spec(parse_spec(["data", "model"]), GRID)
    validate_spec(parse_spec(["data", "model"]), GRID, (4, 8, 3))
    validate_spec(parse_spec([("model", "data")]), GRID, (0,))
    validate_spec(parse_spec([UNCONSTRAINED, None]), GRID, (3, 5))


def test_an_unknown_axis():
    with pytest.raises(UnknownAxisError) as caught:
        validate_spec(parse_spec([None, "modle"]), GRID)
    error = caught.value
    assert (error.axis, error.dim, error.mesh_axes) == ("modle", 1, ("data", "model"))
    for word in ("'modle'", "dimension 1", "'data'=2", "'model'=4", "did you mean 'model'?"):
        assert word in str(error)


def test_unknown_axis_without_a_similar_name_gets_no_suggestion():
    with pytest.raises(UnknownAxisError) as caught:
        validate_spec(parse_spec(["q"]), GRID)
    assert "did you mean" not in str(caught.value)
    with pytest.raises(UnknownAxisError, match="dimension 0.* 'q'"):
        validate_spec(parse_spec(["q"]), MeshGrid((), ()))


@pytest.mark.parametrize(
    ("entries", "words", "dims"),
    [
        (["data", None, "data"], "for dimensions 0 and 2", (0, 2)),
        ([None, ("data", "data")], "twice for dimension 1", (1, 1)),
    ],
)
def test_an_axis_used_twice(entries, words, dims):
    with pytest.raises(DuplicateAxisError, match=words) as caught:
        validate_spec(parse_spec(entries), GRID, (2, 2, 2))
    assert (caught.value.axis, caught.value.dims) == ("data", dims)


def test_too_low_a_rank():
    with pytest.raises(RankError):
        validate_spec(parse_spec([None, "data"]), GRID, (4,))


def test_a_dimension_that_does_not_divide():
    with pytest.raises(DivisibilityError) as caught:
        validate_spec(parse_spec([None, ("data", "model")]), GRID, (6, 12, 5))
    error = caught.value
    assert (error.dim, error.size, error.tiles, error.shape) == (1, 12, 8, (6, 12, 5))
    assert error.axes == (("data", 2), ("model", 4))
    for word in ("dimension 1", "(6, 12, 5)", "12", "8 tiles", "'data'=2 * 'model'=4", "8 or 16"):
        assert word in str(error)


def test_error_of_a_too_small_dimension_suggests_a_larger_size():
    with pytest.raises(DivisibilityError, match=r"size 4 would$"):
        validate_spec(parse_spec(["model"]), GRID, (3,))


def test_errors_keep_their_attributes_when_pickled():
    with pytest.raises(DivisibilityError) as caught:
        validate_spec(parse_spec(["model"]), GRID, (3,))
    for copied in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(copied, DivisibilityError)
        assert isinstance(copied, GeometryError | XlashardError | ValueError)
        assert str(copied) == str(caught.value)
        assert (copied.dim, copied.axes) == (0, (("model", 4),))
