"""Rules of layouts, regular expressions over paths, and the text of specs."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard import P
from xlashard.auto.plan.plan_model import is_parameter_path, path_rules, spec_of_text, text_of_spec

KEYS = st.sampled_from(["['up']", "['down']", "[0]", "[1]", ".mu", "['a.b']"])
PATHS = st.builds(lambda root, keys: root + "".join(keys), st.sampled_from(["w", "ww"]),
                  st.lists(KEYS, max_size=4))  # fmt: skip
SPECS = st.dictionaries(PATHS, st.sampled_from(["P()", "P('x')", "P(None, 'x')"]), min_size=1)


@pytest.mark.slow
@given(SPECS)
def test_path_rules_map_each_path_to_its_spec(specs):
    rules = path_rules(specs)
    for path, spec in specs.items():
        assert next(s for pattern, s in rules if re.search(pattern, path)) == spec


def test_path_rules_merge_equal_layers():
    specs = {"state.count": "P()", "batch['tokens']": "P('data')"}
    for part in ("state['params']", "state['opt'].mu", "state['opt'].nu"):
        for layer in range(12):
            specs[f"{part}['layers'][{layer}]['up']"] = "P('data', 'model')"
            specs[f"{part}['layers'][{layer}]['down']"] = "P('model', 'data')"
            specs[f"{part}['layers'][{layer}]['norm']"] = "P()"
    rules = dict(path_rules(specs))
    assert rules == {
        r"\['up'\]$": "P('data', 'model')",
        r"\['down'\]$": "P('model', 'data')",
        "^batch": "P('data')",
        "": "P()",
    }


SPELLED = P(), P("x"), P(None, ("x", "y")), P("x", None), P(P.UNCONSTRAINED, "x"), P("a'b", 'c"')


@pytest.mark.parametrize("spec", SPELLED)
def test_specs_round_trip_through_text(spec):
    again = spec_of_text(text_of_spec(spec))
    assert text_of_spec(again) == text_of_spec(spec)
    assert list(again) == [dim for dim in spec if dim is not None or spec[-1] is not None]


@pytest.mark.parametrize(
    "text",
    ["", "P(", "P(1)", "P('x') ", "P('x',\n'y')", "P(('x', ('y',)))", "P(*[])", "P('\\N{x}')",
     "P(f())", "P('x' if f() else 'y')", "P(" + "'x'" * 50_000, "P('x') #"],
)  # fmt: skip
def test_no_other_expression_is_a_spec(text):
    with pytest.raises(ValueError, match="not a spec"):
        spec_of_text(text)


@pytest.mark.parametrize(
    ("path", "is_one"),
    [("state", True), ("others[0]", True), ("a b", False), ("f()", False), ("x\n", False),
     ("lambda", False), ("x[0][f()]", False), ("", False)],
)  # fmt: skip
def test_code_has_names_of_arguments_only(path, is_one):
    assert is_parameter_path(path) is is_one
