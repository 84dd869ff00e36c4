"""Programs compiled for a topology and saved: they run on devices of the topology only."""

import ast
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import _jax as jaxlib_module

import xlashard
from tests.fork_server import python_command
from tests.message_patterns import naming
from xlashard import Compiled, Mesh, NamedSharding, P, pjit
from xlashard._jax.runtime import topologies
from xlashard.core.program import saved_format
from xlashard.core.program.environment import (
    Environment,
    TorusFacts,
    differences,
    flag_differences,
    torus_differences,
)
from xlashard.errors import CompileOnlyError, SavedProgramError
from xlashard.tpu import topology

ROOT = Path(__file__).resolve().parents[4]
TABLE = np.arange(64 * 8, dtype=np.float32).reshape(64, 8) / 512


def step(total, x):
    return total + 1, {"y": jnp.tanh(x) @ TABLE}


def compiled_for(devices):
    mesh = Mesh(np.array(devices).reshape(-1, 2), ("x", "y"))
    total, x = (
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P("x", "y")))
        for shape in ((8, 4), (8, 64))
    )
    return pjit(step, donate_argnums=0).lower(total, x).compile()


def devices_of(name, **options):
    return topologies.compile_only_devices(name, options)


@pytest.fixture(scope="module")
def compiled():
    return compiled_for(topology("v5e:4x4").devices)


@pytest.fixture(scope="module")
def data(compiled):
    return compiled.serialize()


@pytest.fixture(scope="module")
def elsewhere(compiled, data, tmp_path_factory):
    """Facts of both programs in another process."""
    folder = tmp_path_factory.mktemp("for topologies")
    (folder / "tpu.program").write_bytes(data)
    # Likewise, for a topology of local devices: those of this host.
    of_host = jaxlib_module.get_topology_for_devices(jax.devices())
    saved = compiled_for(of_host._make_compile_only_devices()).serialize()
    (folder / "cpu.program").write_bytes(saved)
    command = [*python_command(), "-m", "tests.core.pjit.saved.for_topologies", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ, timeout=240)
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.slow
def test_program_loaded_in_another_process_is_equal(compiled, elsewhere):
    assert elsewhere["text"] == compiled.as_text()
    assert elsewhere["cost"] == compiled.cost_analysis()
    memory = compiled.memory_analysis()
    assert elsewhere["memory"]["peak_memory_in_bytes"] == memory.peak_memory_in_bytes
    assert {name: getattr(memory, name) for name in elsewhere["memory"]} == elsewhere["memory"]
    assert elsewhere["same again"]


@pytest.mark.slow
def test_program_compiled_for_a_topology_runs_on_its_devices(elsewhere):
    total, rows = elsewhere["result"]
    assert total == 2.0 * 8 * 4 and elsewhere["devices"] == len(jax.devices())
    np.testing.assert_allclose(rows, np.tanh(np.ones((8, 64))) @ TABLE, rtol=1e-5)


def test_loaded_program_is_on_the_requested_topology(compiled, data):
    devices = topology("v5e:4x4").devices
    loaded = Compiled.deserialize(data, devices=devices)
    assert loaded.devices == devices and loaded.as_text() == compiled.as_text()
    assert [str(f.layout) for f in jax.tree.leaves(loaded.input_formats)] == [
        str(f.layout) for f in jax.tree.leaves(compiled.input_formats)
    ]
    assert loaded.input_shardings[0][0].spec == P("x", "y")
    assert loaded.out_info[1]["y"].shape == (8, 8)


def test_compile_only_devices_refuse_to_run(compiled, data):
    loaded = Compiled.deserialize(data, devices=topology("v5e:4x4").devices)
    args = np.ones((8, 4), np.float32), np.ones((8, 64), np.float32)
    text = naming("step ", "v5e:4x4", "compiled.serialize()")
    for call in (
        lambda: compiled(*args),
        lambda: loaded(*args),
        lambda: loaded.bind(args[0]),
        lambda: pjit(step, in_shardings=compiled.input_shardings[0])(*args),
    ):
        with pytest.raises(CompileOnlyError, match=text):
            call()


def swapped(devices):
    return [devices[1], devices[0], *devices[2:]]


ELSEWHERE = {
    "shape": (
        lambda: devices_of("v5e:2x8"),
        r"\b4x4x1 chips.*\b16 devices.*\b2x8x1 chips.*; its device 4 .*"
        r"\(2, 0, 0\)",
    ),
    "generation": (lambda: devices_of("v6e:4x4"), "TPU v5 lite.*TPU v6 lite"),
    "slices": (
        lambda: devices_of("v5e:2x4", num_slices=2),
        r"\b4x4x1 chips.*\b16 devices.*\b2 slices of 2x4x1 chips.*\b16",
    ),
    "a part of more chips": (
        lambda: devices_of("v5e:4x8")[:16],
        r"4x8x1 chips.*\b32 devices.*\b4 processes.*\b8",
    ),
    "fewer chips": (lambda: devices_of("v5e:4x4")[:8], "16 devices.*8"),
    "order": (
        lambda: swapped(devices_of("v5e:4x4")),
        r"order.*device 0.*\(0, 0, 0\).*"
        r"\(1, 0, 0\).*device 1.*devices=mesh",
    ),
    "hosts": (
        lambda: sorted(
            devices_of("v5e:4x4", chips_per_host_bounds=[2, 4, 1]),
            key=lambda d: (d.coords[1] // 2, d.coords[0] // 2, d.coords[1], d.coords[0]),
        ),
        r"\b4 processes.*\b2; .*device 8.*process 2.*"
        r"process 0",
    ),
    "platform": (lambda: jax.devices() * 2, r"platform tpu.*\bcpu\b"),
}


@pytest.mark.parametrize(("make", "text"), ELSEWHERE.values(), ids=ELSEWHERE)
@pytest.mark.devices(8)
def test_another_topology_or_device_order_is_refused(data, make, text):
    with pytest.raises(SavedProgramError, match=text):
        Compiled.deserialize(data, devices=make())


def test_missing_devices_are_named(data):
    with pytest.raises(
        SavedProgramError, match=r"made for tpu.*16 TPU v5 lite.*topology\(\.\.\.\)"
    ):
        Compiled.deserialize(data)


def test_requested_torus_wrap_is_compared():
    ring, mixed, unspecified = (
        TorusFacts.of(devices_of("v5p:4x4x4", **options)[0])
        for options in ({"wrap": [True] * 3}, {"wrap": [True, False, True]}, {})
    )
    assert (ring.wraps, mixed.wraps, unspecified.wraps) == ((True,) * 3, (True, False, True), ())
    (difference,) = torus_differences(ring, mixed)
    assert difference.endswith("wraps along x and y and z, this one wraps along x and z")
    assert torus_differences(ring, unspecified) == torus_differences(None, unspecified) == []


def test_one_error_lists_differing_versions_flags_and_devices(data):
    def other(header):
        header["program"]["environment"].update(
            jaxlib="0.4.1", libtpu="0.0.7", runtime="TFRT TPU v5 lite\nBuilt on May 1 2024 cl/7"
        )
        header["program"]["environment"]["flags"] = [["LIBTPU_INIT_ARGS", "--xla_tpu_best=7"]]

    contents = saved_format.unpack(data)
    other(contents.header)
    changed = saved_format.pack(contents.header, contents.sections)
    with pytest.raises(SavedProgramError) as caught:
        Compiled.deserialize(changed, devices=swapped(devices_of("v5e:4x4")))
    for part in (
        "jaxlib 0.4.1, this is jaxlib 0.1",
        "libtpu 0.0.7, this is libtpu 0.0.",
        "the runtime Built on May 1 2024 cl/7, this is Built on",
        "compiled with --xla_tpu_best=7 in LIBTPU_INIT_ARGS, which is not set here",
        "allow_other_flags=True",
        "devices are here in another order",
    ):
        assert part in str(caught.value)
    with pytest.raises(SavedProgramError, match=r"jaxlib 0\.4\.1.*libtpu 0\.0\.7"):
        Compiled.deserialize(changed)


def test_runtime_prefix_of_real_devices_is_ignored():
    here = Environment.of(jax.devices()[:1])
    made, real = (
        replace(here, runtime=text)
        for text in ("TFRT TPU v4\nBuilt on X", "PJRT C API\nTFRT TPU v4\nBuilt on X")
    )
    assert differences(made, real) == []


FLAGS = {
    "equal": ("--xla_a=1", "--xla_a=1 --xla_dump_to=x", []),
    "order and repeats": ("--xla_a=1 --xla_b", "--xla_b=true --xla_a=3 --xla_a=1", []),
    "what JAX sets on TPU hosts": ("", "--xla_tpu_use_enhanced_launch_barrier=true", []),
    "how many devices": ("--xla_force_host_platform_device_count=8", "", []),
    "of another platform": ("--xla_cpu_x=1 --xla_gpu_y=2", "", []),
    "no flag of XLA's": ("--v=1", "--vmodule=x=2", []),
    "lost": ("--xla_a=1", "", ["with --xla_a=1 in XLA_FLAGS, which is not set here"]),
    "added": ("", "--xla_a", ["without --xla_a, and XLA_FLAGS has --xla_a=true here"]),
    "changed": ("--xla_a=1", "--xla_a=2", ["with --xla_a=1 in XLA_FLAGS, which is 2 here"]),
}


@pytest.mark.parametrize(("theirs", "ours", "expected"), FLAGS.values(), ids=FLAGS)
def test_flags_are_compared_by_effect(theirs, ours, expected):
    found = flag_differences((("XLA_FLAGS", theirs),), (("XLA_FLAGS", ours),), "tpu")
    assert [text.removeprefix("it was compiled ") for text in found] == expected


def test_flags_in_a_file_are_compared(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_a=1\n--xla_b=2")
    assert flag_differences((("XLA_FLAGS", str(file)),), (("XLA_FLAGS", "--xla_b=2"),), "cpu") == [
        "it was compiled with --xla_a=1 in XLA_FLAGS, which is not set here"
    ]


def test_tpu_flags_are_ignored_on_other_platforms():
    flags = (("LIBTPU_INIT_ARGS", "--xla_tpu_a=1 --xla_b=1"), ("XLA_FLAGS", "--xla_tpu_c=1"))
    assert flag_differences(flags, (), "cpu") == flag_differences(flags, (), "cuda") == []
    assert len(flag_differences(flags, (), "tpu")) == 3


def test_settings_of_jax_are_compared(data):
    devices = topology("v5e:4x4").devices
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        text = r"jax_disable_most_optimizations=False.*True.*allow_other_flags=True"
        with pytest.raises(SavedProgramError, match=text):
            Compiled.deserialize(data, devices=devices)
        Compiled.deserialize(data, devices=devices, allow_other_flags=True)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


DAMAGED = {
    "an invalid description": {"description": b"x"},
    "one of something else": {"description": b"x\x9c\xab\xae\x05\x00\x01u\x00\xf9"},
}


@pytest.mark.parametrize("sections", DAMAGED.values(), ids=DAMAGED)
def test_wrong_description_is_refused(data, sections):
    contents = saved_format.unpack(data)
    wrong = saved_format.pack(contents.header, contents.sections | sections)
    with pytest.raises(SavedProgramError, match="header"):
        Compiled.deserialize(wrong, devices=topology("v5e:4x4").devices)


def test_program_of_real_devices_does_not_load_on_a_topology(data):
    contents = saved_format.unpack(data)
    del contents.sections["description"]
    loaded_there = saved_format.pack(contents.header, contents.sections)
    with pytest.raises(SavedProgramError, match=naming("step", "topology")):
        Compiled.deserialize(loaded_there, devices=topology("v5e:4x4").devices)


def test_serialization_modules_do_not_import_pickle():
    package = Path(xlashard.__file__).parent
    ways = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
    seen, found = [], []
    for name in ("core/pjit/stages/serialization", "core/program/saved_*"):
        seen += package.glob(f"{name}.py")
    for name in ("environment", "executables"):
        seen.append(package / f"core/program/{name}.py")
    seen += [package / f"_jax/runtime/{name}.py" for name in ("executables", "topologies")]
    for path in seen:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                names = ["pickle"]
            found += [(path.name, name) for name in names if name.partition(".")[0] in ways]
    assert len(seen) == 7 and found == []
