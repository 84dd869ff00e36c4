"""Fingerprints of programs in several processes, and reports of two that differ."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.program.consistency import traced_before
from xlashard import Mesh, NamedSharding, P, pjit
from xlashard.core.pjit.lower import ClosedValues
from xlashard.core.program.consistency.difference import (
    Listing,
    environment_difference,
    find_difference,
    first_difference,
    small_diff,
)
from xlashard.core.program.consistency.fingerprint import (
    ProgramDescription,
    ProgramFingerprint,
    source_lines,
)

ROOT = Path(__file__).resolve().parents[4]


def digests(when: str, seed: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, traced_before.__file__, when],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_digest_is_independent_of_earlier_traces():
    fresh, later = digests("before", "1"), digests("after", "77")
    assert fresh == later
    assert len(set(fresh.values())) == len(traced_before.PROGRAMS)


def fingerprint(function, *args, closed=None, **options):
    lowered = pjit(function, **options).lower(*args)._program
    return ProgramFingerprint(
        lowered.plan, lowered.body.module, callbacks=lowered.body.callbacks, closed=closed
    )


def story(function, *args, **options) -> ProgramDescription:
    return fingerprint(function, *args, **options).describe(None, ())


def add_one(x):
    return x + 1


def test_equal_programs_have_equal_digests():
    one, other = (fingerprint(add_one, jnp.ones(4)) for _ in range(2))
    assert one.digest == other.digest
    assert one.digest != fingerprint(add_one, jnp.ones(5)).digest
    assert one.digest != fingerprint(add_one, jnp.ones(4), donate_argnums=0).digest


@pytest.mark.devices(8)
def test_digest_depends_on_the_device_order():
    meshes = (Mesh(np.array(jax.devices())[::step], ("data",)) for step in (1, -1))
    one, other = (
        fingerprint(add_one, np.ones(8), in_shardings=NamedSharding(m, P())) for m in meshes
    )
    assert one.module_digest == other.module_digest
    assert one.digest != other.digest


def test_equivalent_specs_have_equal_digests():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    shardings = (NamedSharding(mesh, P("data")), NamedSharding(mesh, P("data", None)))
    one, other = (fingerprint(add_one, np.ones((8, 2)), in_shardings=s) for s in shardings)
    assert one.digest == other.digest
    assert one.describe(None, ()).arguments == other.describe(None, ()).arguments


def test_values_that_become_arguments_are_part_of_the_digest():
    def digest(value: object) -> str:
        return fingerprint(add_one, jnp.ones(4), closed=ClosedValues((value,), (value,))).digest

    values = np.arange(5.0, dtype=np.float32)
    assert digest(values) == digest(jnp.asarray(values))
    assert digest(values) != digest(values + 1)
    assert digest(jax.random.key(1)) != digest(jax.random.key(2))


def test_description_round_trips_through_json():
    description = fingerprint(add_one, jnp.ones(4), donate_argnums=0).describe(
        None, ("init", "warm_up")
    )
    assert ProgramDescription.from_json(description.to_json()) == description
    assert description.before == ("init", "warm_up")
    assert description.arguments[0].rest == "donated"


def test_first_differing_operation_has_its_source_line():
    def one(x):
        x = jnp.sin(x)
        return jnp.cos(x)

    def other(x):
        x = jnp.sin(x)
        return jnp.tan(x)

    stories = [story(one, jnp.ones(4)), story(other, jnp.ones(4))]
    assert find_difference(*stories).kind == "order"
    renamed = dataclasses.replace(stories[1], name="one")
    texts = [s.text.replace("pjit_other", "pjit_one") for s in (stories[0], renamed)]
    found = find_difference(
        dataclasses.replace(stories[0], text=texts[0]), dataclasses.replace(renamed, text=texts[1])
    )
    assert found.kind == "operation"
    assert found.one.endswith(".one: return jnp.cos(x)")
    assert found.other.endswith(".other: return jnp.tan(x)")
    marks = [line[0] for line in found.lines]
    assert marks.count("-") == marks.count("+") == 1
    assert any("stablehlo.cosine" in line for line in found.lines if line[0] == "-")


def test_difference_of_equal_programs_has_kind_module():
    details = story(add_one, jnp.ones(4))
    assert find_difference(details, details).kind == "module"


def test_versions_and_flags():
    here = {"jax": "0.12.0", "jaxlib": "0.12.0", "XLA_FLAGS": "--a=1 --b=2"}
    assert environment_difference(here, dict(here)) is None
    found = environment_difference(here, {**here, "jaxlib": "0.11.2"})
    assert found is not None
    assert (found.kind, found.one, found.other) == ("version", "jaxlib 0.12.0", "jaxlib 0.11.2")
    found = environment_difference(here, {**here, "XLA_FLAGS": "--a=1"})
    assert found is not None
    assert (found.kind, found.one, found.other) == ("flags", "--b=2", "nothing more")


MODULE = """module @f {
  func.func public @main(%arg0: tensor<4xf32> loc("x")) -> tensor<4xf32> {
    %cst = stablehlo.constant dense<1.0> : tensor<4xf32> loc(#loc1)
    %0 = stablehlo.sine %arg0 : tensor<4xf32> loc(#loc4)
    %1 = stablehlo.add %0, %cst : tensor<4xf32> loc(#loc6)
    return %1 : tensor<4xf32> loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc = loc(unknown)
#loc1 = loc("f"(#loc5))
#loc2 = loc("train.py":7:4 to :9)
#loc3 = loc("main.py":20:0)
#loc4 = loc("f/sin"(callsite(#loc2 at #loc3)))
#loc5 = loc("<module>"(#loc3))
#loc6 = loc("f/add"(#loc7))
#loc7 = loc("step"(#loc8))
#loc8 = loc("train.py":8:4)
"""


def test_module_lines_have_source_locations():
    listing = Listing(MODULE)
    assert not any("loc(" in line for line in listing.lines)
    assert len(listing.lines) == 8
    sine, add = listing.place(3), listing.place(4)
    assert sine is not None
    assert (sine.file, sine.line) == ("train.py", 7)
    assert add is not None
    assert (add.file, add.line, add.function) == ("train.py", 8, "step")
    assert listing.place(2) == add, "a constant is where it is used"
    assert listing.place(7) is None


def test_source_lines_are_read_from_local_files(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("\n" * 7 + "    y = x + 1\n")
    text = MODULE.replace("train.py", str(file))
    lines = source_lines(text)
    assert lines[f"{file}:8"] == "y = x + 1"
    assert not any("main.py" in key for key in lines)


def test_small_diff_shows_context_of_the_first_difference():
    one = [f"line {number}" for number in range(100)]
    other = [*one[:50], "new", *one[50:]]
    number = first_difference(one, other)
    assert number == 50
    assert small_diff(one, other, number) == ["  line 48", "  line 49", "+ new", "  line 50"]
    assert first_difference(one, one) is None
    assert first_difference(one, one[:-1]) == 99
    assert small_diff(one, one[:-1], 99) == ["  line 97", "  line 98", "- line 99"]


def test_long_lines_are_cut_around_the_difference():
    one, other = (["x" * 1000 + value + "y" * 1000] for value in "ab")
    shown = small_diff(one, other, 0)
    assert all(len(line) < 160 for line in shown)
    assert [("a" in shown[0]), ("b" in shown[1])] == [True, True]
