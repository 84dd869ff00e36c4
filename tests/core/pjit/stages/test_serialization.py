"""Compiled programs as bytes: they load in other processes, or raise an error with the reason."""

import functools
import json
import os
import pickle
import random
import subprocess
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from tests.core.pjit.helpers import f32, make_mesh
from tests.core.pjit.saved import cases
from tests.core.processes import run_many
from tests.fork_server import python_command
from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard import (
    Compiled,
    NamedSharding,
    P,
    SingleDeviceSharding,
    StableHLOProgram,
    compile_stablehlo,
    device_put,
    pjit,
)
from xlashard.core.program import saved_format
from xlashard.core.program.environment import Environment, differences
from xlashard.errors import ArgumentError, DeletedError, SavedProgramError

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Facts of all programs, here and in a fresh process that loads them from files."""
    folder = tmp_path_factory.mktemp("saved")
    here = {}
    for name, make in cases.CASES.items():
        compiled, args, kwargs = make()
        (folder / f"{name}.program").write_bytes(compiled.serialize())
        leaves = [np.asarray(cases.data(jnp.asarray(x))) for x in jax.tree.leaves((args, kwargs))]
        np.savez(folder / f"{name}.npz", *leaves)
        args, kwargs = jax.tree.map(on_host, (args, kwargs))
        here[name] = cases.facts(compiled, args, kwargs)
    command = [*python_command(), "-m", "tests.core.pjit.saved.load", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ, timeout=240)
    return {name: (here[name], json.loads((folder / f"{name}.json").read_text())) for name in here}


def on_host(leaf):
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.extended):
        return leaf
    return np.asarray(leaf)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_saved_program_runs_in_a_fresh_process(elsewhere, name):
    here, there = elsewhere[name]
    for loaded in there:
        assert here == loaded


@functools.cache
def saved_sum():
    """Return a small program, compiled on first use; not a fixture, which failures would print."""
    f = pjit(lambda x, y: x + y, donate_argnums=0)
    return f.lower(f32(4), f32(4)).compile().serialize()


def test_loaded_program_behaves_like_a_compiled_program():
    program = Compiled.deserialize(saved_sum())
    assert isinstance(program, Compiled) and isinstance(program, jax.stages.Compiled)
    x = device_put(f32(4))
    np.testing.assert_array_equal(program(x, f32(4)), f32(4) * 2)
    with pytest.raises(DeletedError, match=naming("donated", "<lambda>, as x")):
        program(x, f32(4))
    with pytest.raises(ArgumentError, match=naming("<lambda>", "x as float32[4]", "float32[3]")):
        program(f32(3), f32(4))
    with pytest.raises(ArgumentError, match="structure"):
        program(f32(4))
    with pytest.raises(ArgumentError, match=naming("<lambda>", "StableHLO", "as_text('hlo')")):
        program.as_text("stablehlo")


def test_loaded_step_can_be_bound():
    def step(state, x):
        return {"n": state["n"] + 1, "w": state["w"] * x}, state["n"]

    state = {"n": np.int32(0), "w": np.ones(3, np.float32)}
    compiled = pjit(step, donate_argnums=0).lower(state, np.float32(2)).compile()
    bound = Compiled.deserialize(compiled.serialize()).bind(state)
    counts = [int(bound(np.float32(2))) for _ in range(3)]
    assert counts == [0, 1, 2]
    np.testing.assert_array_equal(bound.state["w"], [8, 8, 8])


def test_program_loads_on_other_devices_of_an_equal_topology():
    def place(devices):
        return make_mesh((2, 2), ("x", "y"), devices)

    first, last = jax.devices()[:4], jax.devices()[4:]
    f = pjit(lambda x: (x.T, x.sum()), in_shardings=NamedSharding(place(first), P("x", "y")))
    data = f.lower(f32(4, 8)).compile().serialize()
    for devices in (last, place(last), last[::-1]):
        program = Compiled.deserialize(data, devices=devices)
        mesh = place(getattr(devices, "devices", np.array(devices)).reshape(-1))
        transposed, total = program(f32(4, 8))
        np.testing.assert_array_equal(transposed, f32(4, 8).T)
        assert float(total) == f32(4, 8).sum()
        assert program.input_shardings[0][0] == NamedSharding(mesh, P("x", "y"))
        assert transposed.devices() == set(last)
    with pytest.raises(SavedProgramError, match=naming("4 devices", "8")):
        Compiled.deserialize(data, devices=jax.devices())
    with pytest.raises(ArgumentError, match=naming("devices ", "Mesh", "jax.devices()")):
        Compiled.deserialize(data, devices=[0, 1, 2, 3])


def test_stablehlo_program_round_trips():
    text = """func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
      %y = stablehlo.add %x, %x : tensor<4xf32>
      return %y, %x : tensor<4xf32>, tensor<4xf32>
    }"""
    program = compile_stablehlo(text, donate_argnums=0, name="twice")
    loaded = StableHLOProgram.deserialize(program.serialize())
    assert repr(loaded) == repr(program) and loaded.donate_argnums == (0,)
    np.testing.assert_array_equal(loaded(f32(4))[0], f32(4) * 2)
    with pytest.raises(
        SavedProgramError, match=naming("Compiled", "StableHLOProgram.deserialize(data)")
    ):
        Compiled.deserialize(program.serialize())


def shout(x):
    return np.asarray(x) + 1


CALLS = {
    "pure": lambda x: jax.pure_callback(shout, jax.ShapeDtypeStruct((3,), np.float32), x),
    "io": lambda x: jax.experimental.io_callback(
        shout, jax.ShapeDtypeStruct((3,), np.float32), x, ordered=True
    ),
    "debug": lambda x: (jax.debug.callback(shout, x), x + 1)[1],
    "inside": lambda x: jax.lax.scan(lambda c, y: (c, CALLS["pure"](x)), 0.0, x)[1],
}


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_programs_with_python_callbacks_can_not_be_saved(function):
    compiled = pjit(function).lower(f32(3)).compile()
    with pytest.raises(SavedProgramError, match=naming("<lambda>", "shout")):
        compiled.serialize()


def test_programs_with_debug_print_can_not_be_saved():
    def f(x):
        jax.debug.print("x is {}", x)
        return x

    with pytest.raises(SavedProgramError, match=r"jax.debug.print\('x is \{\}'\)"):
        pjit(f).lower(f32(3)).compile().serialize()


def edited(data, edit):
    """Return the file with another header, and a valid checksum."""
    contents = saved_format.unpack(data)
    edit(contents.header["program"]["environment"])
    return saved_format.pack(contents.header, contents.sections)


def on_device(**facts):
    return lambda e: e["devices"][0].update(facts)


OTHERS = {
    "jaxlib": (
        lambda e: e.update(jaxlib="0.4.1"),
        r"jaxlib 0\.4\.1.*jaxlib 0\.1",
    ),
    "jax": (lambda e: e.update(jax="0.4.2"), r"jax 0\.4\.2.*jax 0\.1"),
    "platform": (lambda e: e.update(platform="tpu"), r"\btpu\b.*\bcpu\b"),
    "runtime": (lambda e: e.update(runtime="cpu 7"), r"runtime cpu 7.*\bcpu\b"),
    "processor": (lambda e: e.update(machine="vax"), r"processor vax"),
    "features": (
        lambda e: e["features"].append("avx9000"),
        r"processor.*avx9000",
    ),
    "processes": (lambda e: e.update(processes=4), r"\b4 processes.*\b1\b"),
    "kind": (on_device(kind="TPU v9"), r"device 0.*TPU v9.*\bcpu\b"),
    "process": (on_device(process=3), r"device 0.*process 3.*process 0"),
    "core": (on_device(core=1), r"device 0.*\(\), core 1"),
    "number": (
        on_device(id=77),
        r"\b1 cpu device.*\b8\b.*\b77\b.*devices=jax.devices",
    ),
    "count": (
        lambda e: e.update(devices=[{**e["devices"][0], "id": i} for i in range(9)]),
        r"\b9 cpu devices.*\b8\b.*\b8\b",
    ),
}


@pytest.mark.parametrize(("edit", "text"), OTHERS.values(), ids=OTHERS)
@pytest.mark.devices(8)
def test_program_of_another_environment_is_refused(edit, text):
    with pytest.raises(SavedProgramError, match=text):
        Compiled.deserialize(edited(saved_sum(), edit))


def test_devices_may_be_translated_but_not_rearranged_on_the_torus():
    def environment(*coords):
        here = Environment.of(jax.devices()[: len(coords)])
        placed = [replace(d, coords=c) for d, c in zip(here.devices, coords, strict=True)]
        return replace(here, devices=tuple(placed))

    row, moved, bent = (
        environment((0, 0), (1, 0)),
        environment((4, 2), (5, 2)),
        environment((0, 0), (0, 1)),
    )
    assert differences(row, moved) == []
    (difference,) = differences(row, bent)
    assert "device 1" in difference and "(1, 0)" in difference and "(0, 1)" in difference


def test_program_with_other_flags_requires_allow_other_flags():
    environment = saved_format.unpack(saved_sum()).header["program"]["environment"]
    assert dict(environment["flags"]).get("XLA_FLAGS") == os.environ.get("XLA_FLAGS")
    other = [["XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_other=1"]]
    data = edited(saved_sum(), lambda e: e.update(flags=other))
    with pytest.raises(
        SavedProgramError, match=naming("--xla_other=1", "XLA_FLAGS", "allow_other_flags=True")
    ):
        Compiled.deserialize(data)
    Compiled.deserialize(data, allow_other_flags=True)


def test_program_compiled_with_x64_requires_x64():
    with jax.enable_x64(True):
        data = pjit(lambda x: x + 1).lower(np.ones(2)).compile().serialize()
        np.testing.assert_array_equal(Compiled.deserialize(data)(np.ones(2)), [2.0, 2.0])
    with pytest.raises(
        SavedProgramError, match=naming("float64", "jax.config.update('jax_enable_x64', True)")
    ):
        Compiled.deserialize(data)


DAMAGE = {
    "empty": (lambda d: b"", "b''"),
    "text": (lambda d: b"HloModule", "b'HloModul'"),
    "pickle": (lambda d: b"\x80\x04\x95" + d, r"b'\\x80\\x04\\x95"),
    "cut in its start": (lambda d: d[:20], "20 bytes"),
    "cut": (lambda d: d[:-7], r"\d,\d{3} of .*\d,\d{3} bytes"),
    "longer": (lambda d: d + b"\0", "checksum"),
    "a bit": (lambda d: d[:500] + bytes([d[500] ^ 1]) + d[501:], "checksum"),
    "of the future": (lambda d: d[:8] + b"\x03" + d[9:], "format 3.* format 2"),
    "of the past": (lambda d: d[:8] + b"\x01" + d[9:], "format 1.* format 2"),
}


@pytest.mark.parametrize(("harm", "text"), DAMAGE.values(), ids=DAMAGE)
def test_corrupt_data_is_reported(harm, text):
    with pytest.raises(SavedProgramError, match=text):
        Compiled.deserialize(harm(saved_sum()))


def test_deserialize_requires_bytes():
    with pytest.raises(ArgumentError, match=r"bytes.* str.*read_bytes\(\)"):
        Compiled.deserialize("model.bin")
    np.testing.assert_array_equal(
        Compiled.deserialize(bytearray(saved_sum()))(f32(4), f32(4)), f32(4) * 2
    )


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200)
def test_corrupt_data_never_reaches_the_runtime(data):
    whole = saved_sum()
    at = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "insert", "swap"]))
    harmed = {
        "flip": lambda: whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :],
        "cut": lambda: whole[:at],
        "insert": lambda: whole[:at] + b"\xff" + whole[at:],
        "swap": lambda: whole[at:] + whole[:at] + b"\0",
    }[how]()
    with pytest.raises(SavedProgramError):
        Compiled.deserialize(harmed)


RAN = []


def run_by_a_file(*args, **kwargs):
    RAN.append((args, kwargs))


class MadeByFile:
    def __init__(self, *args, **kwargs):
        RAN.append((args, kwargs))


HERE = f"{__name__}:run_by_a_file"
HOSTILE = [
    *(None, True, -1, 0, 2, 2.5, 10**30, 2**40, float("nan"), "", "no", "*", "x" * 10_000),
    *(
        [],
        {},
        [[]],
        [2**40],
        [2**20, 2**20],
        [None, None],
        functools.reduce(lambda x, _: [x], range(500), []),
    ),
    *(
        HERE,
        f"{__name__}:MadeByFile",
        "os:system",
        "builtins:exec",
        "no.module:name",
        "\0",
        "\ud800",
    ),
    *({"place": HERE}, {"custom": HERE}, {"tuple": [{"place": HERE}]}, {"dict": [[[], 1]]}),
    *({"enum": f"{__name__}:MadeByFile", "name": "x"}, {"enum": "re:RegexFlag", "name": "no"}),
    *({"dtype": "O"}, {"bytes": "%"}, {"float": "no"}, {"frozenset": [{"list": []}]}),
    *("O", "V8", "S1000000000", "float128", "key<no>", "{manual}", "{replicated}"),
    *("{devices=[99999999,1]<=[99999999]}", "{devices=[2,2]0,1,2,3}", "{maximal device=5}"),
]


def places(value, path=()):
    """Yield the path of every value in a header."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def find_value(header, path):
    return functools.reduce(lambda holder, key: holder[key], path, header)


def make_hostile(data, choice):
    """Return the file with one value of its header replaced, and a valid checksum."""
    contents = saved_format.unpack(data)
    paths = [path for path in places(contents.header) if path]
    *parents, last = choice.choice(paths)
    holder = find_value(contents.header, parents)
    match choice.choice(["remove", "insert", "copy", "replace", "replace", "replace"]):
        case "remove":
            del holder[last]
        case "insert" if isinstance(holder, list):
            holder.insert(last, choice.choice(HOSTILE))
        case "copy":
            holder[last] = find_value(saved_format.unpack(data).header, choice.choice(paths))
        case _:
            holder[last] = choice.choice(HOSTILE)
    return saved_format.pack(contents.header, contents.sections)


@functools.cache
def saved_tree():
    """Return a program with a tree, a constant, and types on an explicit mesh."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    sharding = NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((4, 2), np.float32, sharding=sharding)
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    with jax.set_mesh(mesh):
        step = pjit(lambda s, k: {"w": s["w"] * table + s["b"][0], "n": k})
        return step.lower({"w": x, "b": (x, None)}, np.int32(1)).compile().serialize()


@pytest.mark.slow
@pytest.mark.parametrize("load", [saved_sum, saved_tree])
def test_hostile_headers_raise_one_error_run_nothing_and_need_little_memory(load):
    data, choice = load(), random.Random(39)
    Compiled.deserialize(data)  # imports what it needs
    raised = 0
    with Together() as cases:
        for number in range(150):
            hostile = make_hostile(data, choice)
            with cases.case(f"{number}"):
                tracemalloc.start()
                try:
                    Compiled.deserialize(hostile)
                except SavedProgramError as error:
                    raised += 1
                    assert str(error)
                finally:
                    _, peak = tracemalloc.get_traced_memory()
                    tracemalloc.stop()
                assert not RAN
                assert peak < 20 * len(hostile) + (1 << 22)
    assert raised > 75


def test_sharded_constants_round_trip(mesh):
    table = device_put(np.arange(20_000, dtype=np.float32), NamedSharding(mesh, P("x")))
    compiled = pjit(lambda i: table[i]).lower(np.int32(7)).compile()
    loaded = Compiled.deserialize(compiled.serialize())
    assert float(loaded(np.int32(19_999))) == 19_999.0


def test_two_loads_give_independent_programs():
    programs = [Compiled.deserialize(saved_sum()) for _ in range(2)]
    results = [program(f32(4), f32(4) * i) for i, program in enumerate(programs)]
    np.testing.assert_array_equal(results[1], f32(4) * 2)
    np.testing.assert_array_equal(results[0], f32(4))
    assert programs[0].input_shardings[0][0] == SingleDeviceSharding(jax.devices()[0])


@pytest.mark.slow
def test_program_from_the_persistent_cache_is_saved_completely(tmp_path):
    program = """
import jax, numpy as np, sys
from pathlib import Path
from xlashard import Compiled, pjit
jax.config.update("jax_compilation_cache_dir", sys.argv[1] + "/cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = np.arange(4, dtype=np.float32)
compiled = pjit(lambda x: (x * 2 + 1).sum()).lower(x).compile()
data = compiled.serialize()
assert float(Compiled.deserialize(data)(x)) == 16.0
print(len(list(Path(sys.argv[1], "cache").glob("*-cache"))))
"""
    for _ in range(2):
        command = [*python_command(), "-c", program, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.slow
def test_one_process_saves_and_all_processes_load(tmp_path):
    script = Path(cases.__file__).with_name("two_processes.py")
    for output in run_many(script, 2, 2, str(tmp_path / "program")):
        assert "both ran it" in output, output


def test_pickle_errors_name_serialize():
    with pytest.raises(ArgumentError, match=naming("Compiled", "pickle", "compiled.serialize()")):
        pickle.dumps(Compiled.deserialize(saved_sum()))
