import math
import re
import tomllib
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.message_patterns import naming
from xlashard.train.config.schema import (
    LARGEST_NUMBER,
    Bounds,
    Leaf,
    leaves,
    read,
    reference,
    section,
    setting,
    to_toml,
    toml_value,
)
from xlashard.train.config.settings import Settings
from xlashard.train.errors import SettingsError


@dataclass(frozen=True)
class Shape:
    layers: int = setting(4, "how many", Bounds(at_least=1))
    rate: float = setting(0.5, "how fast", Bounds(above=0, below=1))
    kind: Literal["round", "square"] = setting("round", "which")
    wide: bool = setting(False, "whether")


@dataclass(frozen=True)
class Example:
    shape: Shape = section(Shape, "the shape")  # noqa: RUF009
    sizes: dict[str, int] = setting({"a": 1}, "sizes", Bounds(at_least=1))  # noqa: RUF009
    names: tuple[str, ...] = setting((), "names")
    title: str = setting("t", "the title")


def refusal(table: dict[str, Any], *words: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read(Example, table, words)
    return str(caught.value)


def test_missing_keys_have_default_values() -> None:
    assert read(Example, {}) == Example()


def test_nested_table_is_read_into_dataclasses() -> None:
    table = {"shape": {"layers": 2, "rate": 0.25}, "sizes": {"b": 3}, "names": ["x"]}
    got = read(Example, table)
    assert got == Example(Shape(layers=2, rate=0.25), sizes={"b": 3}, names=("x",))


def test_integer_is_accepted_as_a_float_and_a_string_as_a_list() -> None:
    got = read(Settings, {"optimizer": {"clip": 2}, "sharding": {"rules": {"batch": "data"}}})
    assert type(got.optimizer.clip) is float
    assert got.sharding.rules.batch == ("data",)


def test_scalar_is_shorthand_for_a_table() -> None:
    for got in (
        read(Settings, {"sharding": "auto"}),
        read(Settings, {"sharding": {"rules": {"batch": "data"}}}, ["sharding=auto"]),
        read(Settings, {"sharding": "rules"}, ["sharding.layout=auto"]),
    ):
        assert got.sharding.is_auto
    for raw, words in (({"sharding": "atuo"}, []), ({"sharding": 3}, []), ({}, ["sharding=atuo"])):
        with pytest.raises(SettingsError, match=naming("sharding.layout", '"rules", "auto"')):
            read(Settings, raw, words)


def test_assignments_override_the_table() -> None:
    got = read(
        Example,
        {"shape": {"layers": 2}, "title": "old"},
        ["shape.layers=7", "shape.wide=true", "title=two words", "shape.kind=square", "sizes.b=5"],
    )
    assert got.shape == Shape(layers=7, wide=True, kind="square")
    assert got.title == "two words"
    assert got.sizes == {"a": 1, "b": 5}


def test_assignment_accepts_any_toml_value() -> None:
    words = ["names=['x', 'y']", 'title="quoted = sign"', "sizes={c = 2}", "shape.rate=1e-3"]
    got = read(Example, {}, words)
    assert got == Example(
        Shape(rate=0.001), sizes={"c": 2}, names=("x", "y"), title="quoted = sign"
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"shape": {"layer": 3}}, ["shape.layer is not", "shape.layers", "[shape]\n  layers = 3"]),
        ({"layers": 3}, ["layers is not", "Did you mean shape.layers", "[shape]\n  layers = 3"]),
        ({"shapes": {"layers": 3}}, ["[shapes] is not", "Did you mean [shape]"]),
        ({"zzz": 3}, ["zzz is not a setting", "shape, sizes, names, title"]),
        ({"shape": 3}, ["shape must be a table, not the integer 3", "[shape]\n  layers = 4"]),
        ({"shape": {"layers": "3"}}, ['an integer, not the string "3"', "layers = 3"]),
        ({"shape": {"layers": 3.0}}, ["an integer, not the number 3.0", "layers = 3"]),
        ({"shape": {"layers": True}}, ["an integer, not true", "layers = 4"]),
        ({"shape": {"layers": 0}}, ["shape.layers must be at least 1, not 0", "layers = 4"]),
        ({"shape": {"rate": 1}}, ["shape.rate must be less than 1, not 1.0"]),
        ({"shape": {"rate": float("nan")}}, ["shape.rate must be finite"]),
        ({"shape": {"wide": 1}}, ["shape.wide must be true or false", "wide = true"]),
        ({"shape": {"kind": "squar"}}, ['one of "round", "square"', 'kind = "square"']),
        ({"sizes": {"a": 0}}, ["sizes.a must be at least 1, not 0"]),
        ({"sizes": {"a": "x"}}, ["sizes must be a table of integers", "[sizes]\n  a = 1"]),
        ({"names": [1]}, ["names must be a list of strings, not the list [1]"]),
    ],
)
def test_error_of_an_invalid_table_suggests_a_valid_one(
    table: dict[str, Any], expected: list[str]
) -> None:
    text = refusal(table)
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("shape.layers=four", ['not the string "four"', "--set shape.layers=4"]),
        ("shape.layer=3", ["Did you mean shape.layers?", "--set shape.layers=3"]),
        ("shape.layers", ["the value is missing", "--set shape.layers=4"]),
        ("shape=3", ["shape is a table", "layers, rate, kind, wide"]),
        ("shape.wide=True", ["--set shape.wide=true"]),
        ("shape.kind=rund", ["--set shape.kind=round"]),
        ("sizes.b=x", ["sizes must be a table of integers", "--set sizes.a=1"]),
        ("names=[1]", ["--set 'names=[]'"]),
    ],
)
def test_error_of_an_invalid_assignment_suggests_a_valid_one(
    word: str, expected: list[str]
) -> None:
    text = refusal({}, word)
    for part in expected:
        assert part in text


NO_NUMBERS = ('"4"', "four", "true", "[1]", "{a = 1}", "1979-05-27", "", "1_", "0x")
OUTSIDE = ("inf", "-inf", "nan", "1e300", "-1e300", "9" * 400, "-" + "9" * 5000)
NO_SIZES = ("1.5", "-1", "1e3", str(2**31 * 2), str(2**63 - 1), str(-(2**63)), str(2**64))


@pytest.mark.parametrize(
    "leaf", [x for x in leaves(Settings) if x.kind in (int, float)], ids=lambda leaf: leaf.path
)
def test_no_numeric_setting_takes_an_absurd_value(leaf: Leaf) -> None:
    texts = [*NO_NUMBERS, *OUTSIDE, *(NO_SIZES if leaf.kind is int else ())]
    if leaf.bounds.at_least == 1:
        texts += ["0", "-0"]
    for text in texts:
        with pytest.raises(SettingsError, match=rf"^{re.escape(leaf.path)} must be ") as caught:
            read(Settings, {}, [f"{leaf.path}={text}"])
        problem, _, advice = str(caught.value).partition("\n")
        assert problem.endswith("Write:") and len(problem) < 200
        read(Settings, {}, [advice.split()[1]])


@pytest.mark.parametrize("number", [10**400, -(10**400), float("inf"), 2**64])
def test_numbers_beyond_every_type_are_refused_in_tables(number: float) -> None:
    for table in ({"model": {"layers": number}}, {"mesh": {"data": number}}):
        with pytest.raises(SettingsError, match=r"must be"):
            read(Settings, table)
    if abs(number) > 2**64:
        with pytest.raises(SettingsError, match=r"optimizer\.clip must be"):
            read(Settings, {"optimizer": {"clip": number}})


def test_all_problems_are_reported_at_once() -> None:
    text = refusal({"shape": {"layer": 1, "rate": 7}}, "title", "names=3")
    assert text.count("Write:") == 4


def test_lines_suggested_by_an_error_are_accepted() -> None:
    text = refusal({"shape": {"layers": "12"}})
    corrected = text[text.index("Write:") + len("Write:") :]
    assert read(Example, tomllib.loads(corrected)).shape.layers == 12


def test_reference_lists_every_key() -> None:
    rows = reference(Example)
    assert rows[0] == ("shape.layers", "an integer", "4", "how many")
    assert [row[0] for row in rows] == [leaf.path for leaf in leaves(Example)]
    assert len(rows) == 7


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def values(kind: Any, bounds: Bounds) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(NAMES, max_size=3).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(NAMES, st.integers(1, 99), max_size=3)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return NAMES
    low = bounds.above if bounds.at_least is None else bounds.at_least
    high = bounds.below if bounds.at_most is None else bounds.at_most
    if kind is int:
        return st.integers(-5 if low is None else int(low), int(min(10**6, high or 10**6)))
    high = LARGEST_NUMBER if high is None else high
    return st.floats(
        low, high, exclude_min=bounds.above is not None, exclude_max=bounds.below is not None
    ).filter(math.isfinite)


@st.composite
def filled(draw: st.DrawFn, cls: type) -> Any:
    hints, given_values = get_type_hints(cls), {}
    for spec in fields(cls):
        kind = hints[spec.name]
        if is_dataclass(kind):
            given_values[spec.name] = draw(filled(kind))
        else:
            given_values[spec.name] = draw(values(kind, spec.metadata["bounds"]))
    return cls(**given_values)


@pytest.mark.slow
@given(filled(Settings))
def test_settings_round_trip_through_toml(settings: Settings) -> None:
    assert read(Settings, tomllib.loads(to_toml(settings))) == settings


@pytest.mark.slow
@given(NAMES)
def test_every_string_round_trips_through_toml(text: str) -> None:
    assert tomllib.loads(f"value = {toml_value(text)}") == {"value": text}


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | NAMES, st.lists))
def test_every_value_is_accepted_or_refused_with_its_key(raw: Any) -> None:
    for leaf in leaves(Example):
        table, _, key = leaf.path.rpartition(".")
        document = {table: {key: raw}} if table else {key: raw}
        try:
            got = read(Example, document)
        except SettingsError as error:
            assert str(error).startswith(leaf.path)
        else:
            assert isinstance(got, Example)


@pytest.mark.slow
@given(st.text(max_size=20), st.text(max_size=20))
def test_every_assignment_is_accepted_or_refused(key: str, value: str) -> None:
    try:
        got = read(Example, {}, [f"{key}={value}"])
    except SettingsError as error:
        assert "Write:" in str(error) or "are:" in str(error)
    else:
        assert replace(got) == got
