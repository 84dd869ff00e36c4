"""On a JAX that lacks private names, the functions that need them fail and name what is missing."""

import pickle
import random
import sys
import types

import cloudpickle
import pytest

from tests.private_names.features import FEATURES, PURE, RINGS
from tests.private_names.names import read_uses
from tests.private_names.sweep import run_features
from xlashard._jax import private
from xlashard.errors import JaxVersionError, JaxVersionWarning

pytestmark = pytest.mark.jax_version

HIDDEN = 10


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(4))
def test_jax_without_ten_private_names_breaks_the_features_that_need_them(seed: int) -> None:
    names = [use.full for use in read_uses()]
    hidden = random.Random(seed).sample(names, HIDDEN)
    done = run_features(hidden=hidden, version="0.13.0")
    outcomes = done["features"]
    assert set(outcomes) == set(FEATURES)
    warnings = {line for line in done["warnings"] if "is installed" in line}
    assert all("jax 0.11.2 to 0.12" in line and "0.13.0" in line for line in warnings)
    works = {feature for feature, facts in outcomes.items() if not facts}
    assert works >= {feature for feature, ring in RINGS.items() if ring == PURE}
    broken = {feature: facts for feature, facts in outcomes.items() if facts}
    for feature, facts in broken.items():
        assert facts["error"] == "JaxVersionError", (feature, hidden, facts)
        assert facts["private_name"] in hidden
        assert (facts["installed"], facts["tested"]) == ("0.13.0", "0.11.2 to 0.12")
        for part in (facts["private_name"], facts["feature"], "0.13.0", "'jax>=0.11.2,<0.13'"):
            assert part in facts["text"]


@pytest.mark.integration
def test_error_names_the_function_that_the_user_called() -> None:
    hidden = ["jax._src.interpreters.pxla.shard_args", "jax._src.lib.xla_client.batched_device_put"]
    outcomes = run_features(hidden=hidden, features=["device_put"])["features"]
    assert outcomes["device_put"]["feature"] == "xlashard.device_put"
    # Needed while the modules of pjit are imported.
    hidden = ["jax._src.core.Primitive"]
    outcomes = run_features(hidden=hidden, features=["pjit", "explain_jit"])["features"]
    assert outcomes["pjit"]["feature"] == "xlashard.pjit"
    assert not outcomes["explain_jit"]
    hidden = ["jax._src.core.jaxpr_const_args"]
    outcomes = run_features(hidden=hidden, features=["explain_jit"])["features"]
    assert outcomes["explain_jit"]["feature"] == "xlashard.explain"


def stand_in(module: str = "jax._src.core") -> types.ModuleType:
    return private._stand_in(module)


def test_missing_name_is_an_import_error_and_no_attribute_error() -> None:
    with pytest.raises(ImportError, match=r"jax\._src\.core\.no_such_name") as caught:
        _ = stand_in().no_such_name
    assert isinstance(caught.value, JaxVersionError)
    assert not isinstance(caught.value, AttributeError)
    assert caught.value.private_name == "jax._src.core.no_such_name"


@pytest.mark.parametrize("module", ["jax._src.no_such_module", "no_such_package.inner"])
def test_missing_module_is_named(module: str) -> None:
    with pytest.raises(JaxVersionError, match=module) as caught:
        _ = stand_in(module).anything
    assert caught.value.private_name == module


def test_stand_in_keeps_functions_and_rereads_values(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_private_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.number, module.function = 1, len
    ours = stand_in(module.__name__)
    assert (ours.number, ours.function) == (1, len)
    assert type(ours) is types.ModuleType
    module.number = 2
    assert ours.number == 2
    assert "function" in vars(ours) and "number" not in vars(ours)


def test_replaced_name_is_seen_by_jax_and_by_every_stand_in() -> None:
    before = private.jax_pjit._trace_for_jit
    private.replace_name(private.jax_pjit, "_trace_for_jit", len)
    try:
        assert private.jax_pjit._trace_for_jit is len
        assert private.real_module(private.jax_pjit)._trace_for_jit is len
        assert private.original_value(private.jax_pjit, "_trace_for_jit") is not len
    finally:
        private.replace_name(private.jax_pjit, "_trace_for_jit", before)
    assert private.jax_pjit._trace_for_jit is before


def test_missing_optional_name_gives_none() -> None:
    assert private.find_name(private.core, "no_such_name") is None
    assert private.find_name(private.core, "Jaxpr") is private.core.Jaxpr


def test_step_without_its_private_name_is_left_out_with_a_warning() -> None:
    taken: list[int] = []
    with pytest.warns(JaxVersionWarning, match="no_such_name"):
        private.try_steps(lambda: stand_in().no_such_name, lambda: taken.append(1))
    assert taken == [1]


def test_functions_over_stand_ins_are_pickled() -> None:
    core = private.core
    assert pickle.loads(pickle.dumps(core.Jaxpr)) is core.Jaxpr
    restored = cloudpickle.loads(cloudpickle.dumps(lambda: core.Jaxpr))
    assert restored() is core.Jaxpr
