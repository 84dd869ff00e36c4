"""The era's flags: environment, `config.update`, absl, `jax.config`, contexts, and cache keys."""

import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.message_patterns import naming
from xlashard import legacy, pjit
from xlashard.errors import ConfigError
from xlashard.legacy import config
from xlashard.legacy.arrays.device_arrays import device_buffers
from xlashard.legacy.modules import entries

MODULE_AND_OBJECT = ("jax.config", "jax.config.config")
IGNORED = {
    True: (
        *("experimental_cpp_jit", "experimental_cpp_pjit", "experimental_cpp_pmap"),
        *("jax_coordination_service", "jax_eager_pmap"),
    ),
    False: (
        *("experimental_xmap_ensure_fixed_sharding", "experimental_xmap_spmd_lowering"),
        *("experimental_xmap_spmd_lowering_manual", "jax_experimental_subjaxpr_lowering_cache"),
        *("jax_host_callback_ad_transforms", "jax_host_callback_inline"),
        "jax_host_callback_outfeed",
    ),
}
NAMES = ("jax_array", "jax_parallel_functions_output_gda", "jax_pmap_no_rank_reduction")
FLAGS = (*NAMES, "jax_enable_checks", "jax_distributed_debug")


def in_a_process(code: str, *arguments: str, **environment: str) -> dict:
    """Return the last line that a program in its own process prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_spmd_mode_is_stored_and_validated() -> None:
    with legacy.installed():
        assert jax.config.jax_spmd_mode == "allow_jit"
        with jax.spmd_mode("allow_all"):
            assert jax.config.jax_spmd_mode == legacy.config.jax_spmd_mode == "allow_all"
            assert jax.jit(lambda x: x + 1)(1) == 2
        assert jax.config.jax_spmd_mode == "allow_jit"
        jax.config.update("jax_spmd_mode", "allow_all")
        try:
            assert legacy.config.read("jax_spmd_mode") == "allow_all"
        finally:
            jax.config.update("jax_spmd_mode", "allow_jit")
        with pytest.raises(
            ConfigError, match=naming("jax_spmd_mode", "'sometimes'", "'allow_jit'")
        ):
            jax.config.update("jax_spmd_mode", "sometimes")


def test_flags_without_an_effect_are_accepted() -> None:
    with legacy.installed():
        from jax._src.api import FLAGS

        for name, default in ((name, value) for value, names in IGNORED.items() for name in names):
            assert getattr(FLAGS, name) is getattr(jax.config, name) is default
            jax.config.update(name, not default)
            assert getattr(FLAGS, name) is config.read(name) is not default
            setattr(FLAGS, name, default)
            assert getattr(jax.config, name) is default
        assert FLAGS.jax_enable_checks == jax.config.jax_enable_checks
        assert legacy.pjit(lambda x: x + 1)(np.ones(2)).tolist() == [2, 2]
    with pytest.raises(ConfigError, match=naming("jax_arrays", "jax_array")):
        config.jax_arrays = False


def test_jax_array_mode_is_the_default() -> None:
    assert legacy.current_array_mode() == legacy.ArrayMode(jax_array=True, output_gda=False)
    assert config.jax_pmap_no_rank_reduction is False


@pytest.mark.slow
def test_flags_come_from_environment_command_line_and_jax_config() -> None:
    """One program: JAX's config before and after, and the precedence of sources."""
    code = """
import json, sys
import jax
before = sorted(dir(jax.config)), sorted(jax.config.values)
from xlashard import legacy
after = sorted(dir(jax.config)), sorted(jax.config.values)
names = json.loads(sys.argv.pop(1))
shown = lambda: [(getattr(jax.config, n), jax.config.values[n]) for n in names]
results = {"untouched": before == after}
results["environment"] = [getattr(legacy.config, n) for n in names]
legacy.show_flags()
results["shown"] = shown()
jax.config.parse_flags_with_absl()
results["command line"] = [getattr(legacy.config, n) for n in names], shown()
for name in names:
    jax.config.update(name, not getattr(jax.config, name))
results["update"] = [getattr(legacy.config, n) for n in names], shown()
results["mode"] = legacy.current_array_mode().jax_array
legacy.hide_flags()
results["hidden"] = [n for n in dir(jax.config) if n in names]
print(json.dumps(results))
"""
    # The environment sets each flag to another value than its default, the command line back.
    defaults = {name: name == "jax_array" for name in FLAGS}
    environment = {name.upper(): str(int(not value)) for name, value in defaults.items()}
    arguments = [f"--{name}={int(value)}" for name, value in defaults.items()]
    settings = in_a_process(code, json.dumps(FLAGS), *arguments, "--other=1", **environment)
    default = list(defaults.values())
    other = [not value for value in default]
    assert settings == {
        "untouched": True,
        "environment": other,
        "shown": [[value] * 2 for value in other],
        "command line": [default, [[value] * 2 for value in default]],
        "update": [other, [[value] * 2 for value in other]],
        "mode": False,
        "hidden": sorted(set(FLAGS) - set(NAMES)),
    }


@pytest.mark.slow
def test_command_line_flags_work_without_installation() -> None:
    code = """
import json, sys
from absl import app
from xlashard import legacy
if "--run" in sys.argv:
    sys.argv.remove("--run")
    legacy.config.config_with_absl()
    app.run(lambda argv: print(json.dumps(dict(array=legacy.config.jax_array, rest=argv[1:]))))
legacy.config.parse_flags_with_absl()
legacy.config.parse_flags_with_absl()
print(json.dumps(dict(array=legacy.config.jax_array)))
"""
    assert in_a_process(code, "--nojax_array", "--", "--jax_array") == {"array": False}
    settings = in_a_process(code, "--run", "--jax_array=false", "data.txt")
    assert settings == {"array": False, "rest": ["data.txt"]}


@pytest.mark.slow
def test_error_of_an_invalid_boolean_variable_names_the_variable() -> None:
    with pytest.raises(AssertionError, match="JAX_ARRAY=1"):
        in_a_process("from xlashard.legacy import config", JAX_ARRAY="perhaps")


def test_jax_config_has_the_flags_from_show_flags_to_hide_flags() -> None:
    legacy.show_flags()
    try:
        legacy.show_flags()
        assert [getattr(jax.config, name) for name in NAMES] == [True, False, False]
        assert set(NAMES) <= set(jax.config.values)
        with legacy.jax_array(False):
            assert jax.config.jax_array is False
        jax.config.update("jax_array", False)
        assert legacy.current_array_mode().jax_array is False
    finally:
        config.update("jax_array", True)
        legacy.hide_flags()
    legacy.hide_flags()
    assert not any(name in dir(jax.config) or name in jax.config.values for name in NAMES)
    with pytest.raises(AttributeError):
        jax.config.update("jax_array", False)


def test_config_update_accepts_strings_and_jax_flags() -> None:
    try:
        config.update("jax_array", "off")
        assert config.jax_array is False
        config.update("jax_array", 1)
        assert config.read("jax_array") is True
        config.update("jax_enable_checks", True)
        assert jax.config.jax_enable_checks and config.jax_enable_checks
    finally:
        config.update("jax_enable_checks", False)
        config.update("jax_array", True)
    assert {*NAMES, "jax_enable_x64"} <= set(dir(config))


@pytest.mark.parametrize("name", ["jax_aray", "array"])
def test_error_of_an_unknown_flag_suggests_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match="jax_array"):
        config.update(name, True)


def test_non_boolean_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"jax_array=None.*True or False"):
        config.update("jax_array", None)
    with pytest.raises(ConfigError, match="2"):
        legacy.jax_array(2)


def test_context_managers_are_thread_local_and_nest() -> None:
    seen: dict[str, legacy.ArrayMode] = {}

    def look() -> None:
        seen["other"] = legacy.current_array_mode()

    @legacy.parallel_functions_output_gda(True)
    def inner() -> legacy.ArrayMode:
        return legacy.current_array_mode()

    with legacy.jax_array(False):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert inner().returns_gda
        with legacy.jax_array(True):
            assert legacy.current_array_mode().jax_array
        assert legacy.current_array_mode().returns_host_local
    assert seen["other"].jax_array
    assert legacy.current_array_mode().jax_array


@pytest.mark.slow
@pytest.mark.parametrize("compiled_by", [jax.jit, pjit], ids=["jax.jit", "pjit"])
def test_caches_separate_programs_of_different_modes(compiled_by: object) -> None:
    traces: list[bool] = []

    @compiled_by  # type: ignore[operator]
    def step(x: jax.Array) -> jax.Array:
        traces.append(legacy.config.jax_array)
        return x + (1 if legacy.config.jax_array else 2)

    x = np.zeros(3, np.float32)
    for _ in range(2):
        assert step(x)[0] == 1
        with legacy.jax_array(False):
            assert step(x)[0] == 2
    try:
        config.update("jax_array", False)
        assert step(x)[0] == 2
    finally:
        config.update("jax_array", True)
    assert traces == [True, False]


def test_nested_jit_is_traced_per_mode() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return x * (1 if legacy.config.jax_array else 3)

    nested = jax.jit(lambda x: jax.jit(inner)(x))
    with legacy.jax_array(False):
        assert nested(jnp.float32(2)) == 6
    assert nested(jnp.float32(2)) == 2


@pytest.mark.devices(8)
def test_buffers_of_pmap_with_and_without_rank_reduction() -> None:
    rows = [jax.device_put(np.full(3, i), device) for i, device in enumerate(jax.devices())]
    spec = xlashard.PmapSharding.default((8, 3), unstacked=True).sharding_spec
    x = xlashard.make_sharded_device_array(jax.ShapeDtypeStruct((8, 3), np.int32), spec, rows)
    assert [b.shape for b in device_buffers(x)] == [(3,)] * 8
    with legacy.pmap_no_rank_reduction(True):
        assert [b.shape for b in device_buffers(x)] == [(1, 3)] * 8


def test_entries_list_every_removed_flag() -> None:
    names = {
        f"jax.config.{name}" for name in (*NAMES, *IGNORED[True], *IGNORED[False], "jax_spmd_mode")
    }
    listed = {
        name
        for name in entries()
        if name.startswith("jax.config") and not name.startswith("jax.config.define_")
    }
    assert listed == names | set(MODULE_AND_OBJECT)
    assert "jax.spmd_mode" in entries()
