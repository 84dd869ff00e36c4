"""Shardings of arguments and results, from an executable or from the dump."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.predict.preflight.programs import compile_stage, on, training_step
from xlashard import UNSPECIFIED, NamedSharding, P, explain, pjit
from xlashard.analysis.programs.program import Compilation
from xlashard.errors import ProgramTooLargeError
from xlashard.predict.preflight.report.build import build_report
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.tpu import topology

pytestmark = pytest.mark.partitioner

OPEN = P.UNCONSTRAINED


def product(width: int) -> Any:
    """Return a lowered program that leaves much to the partitioner, with one leaf that it doesn't
    use.
    """
    _, mesh = on("v5e:2x2", a=2, b=2)

    def f(state: Any, x: Any, key: Any, unused: Any) -> Any:
        noise = jax.random.uniform(key, (width,))
        return {"w": state["w"] * 2}, x @ state["w"] + noise, x.T, state["n"] + 1

    def struct(shape: tuple[int, ...], dtype: Any = jnp.float32, spec: Any = None) -> Any:
        sharding = None if spec is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    state = {"w": struct((width, width), spec=P("a", "b")), "n": struct((), jnp.int32)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    x = struct((width, width), spec=P(OPEN, OPEN))
    made = pjit(
        f,
        in_shardings=({"w": NamedSharding(mesh, P("a", "b")), "n": None}, UNSPECIFIED, None, None),
        donate_argnums=(0, 1),
    )
    with jax.set_mesh(mesh):
        return made.lower(state, x, key, struct((8,)))


@pytest.fixture(scope="module")
def both() -> tuple[Compilation, Compilation]:
    """Return the same program for a shape that fits and for one that doesn't."""
    fits, too_large = (compile_stage(product(width)) for width in (1024, 1024 * 128))
    assert fits.executable is not None
    assert too_large.executable is None
    return fits, too_large


def report_of(compilation: Compilation, **options: Any) -> PreflightReport:
    """Return the report of a program on the topology of these tests."""
    mesh = compilation.mesh
    assert mesh is not None
    return build_report(compilation, topology("v5e:2x2"), mesh, **options)


def facts(values: PreflightReport) -> list[Any]:
    """Return the facts that don't depend on sizes."""
    described = [
        (v.path, v.dtype, v.spec, v.decided_by, v.copies, v.memory_kind, v.used)
        for v in (*values.inputs, *values.outputs)
    ]
    return [*described, *((d.path, d.donated, d.result) for d in values.donations)]


@pytest.mark.slow
def test_rejected_program_has_the_facts_of_an_executable(both: Any) -> None:
    fits, too_large = map(report_of, both)
    assert facts(fits) == facts(too_large)
    assert [u.path for u in fits.unmet] == [u.path for u in too_large.unmet]


@pytest.mark.slow
def test_report_agrees_with_explain(both: Any) -> None:
    fits = both[0]
    values, report = report_of(fits), explain(product(1024))
    for own, explained in ((values.inputs, report.inputs), (values.outputs, report.outputs)):
        alone = [replace(v, aliased="", donated=False) for v in own]
        assert alone == [
            replace(v, device_bytes=own.device_bytes)
            for v, own in zip(explained, alone, strict=True)
        ]
    assert values.donations == report.donations
    assert values.unmet == report.unmet


def test_unspecified_shardings_are_reported(both: Any) -> None:
    values = report_of(both[1])
    found = {v.path: v for v in (*values.inputs, *values.outputs)}
    assert found["state['w']"].spec == "P('a', 'b')"
    assert found["state['w']"].decided_by == "caller"
    # The rows of w are sharded over `a`, so the columns of x are as well.
    assert found["x"].spec == "P(None, 'a')"
    assert found["x"].device_bytes == (1024 * 128) ** 2 * 4 // 2
    assert found["result[2]"].spec == "P('a')"
    assert found["result[2]"].decided_by == "partitioner"
    assert not found["unused"].used
    donated = {d.path: d.result for d in values.donations if d.donated}
    assert donated["state['w']"] == "result[0]['w']"


@pytest.mark.slow
def test_report_of_a_too_large_step_has_shardings_and_donations() -> None:
    compilation, _ = training_step(32768, 12, 65536)
    values = report_of(compilation)
    assert [(v.path, v.spec) for v in values.inputs] == [
        ("params['down']", "P(None, 'model', 'data')"),
        ("params['up']", "P(None, 'data', 'model')"),
        ("x", "P('data')"),
    ]
    assert all(d.is_reused for d in values.donations)
    assert values.replicated == ()


@pytest.mark.slow
def test_fully_replicated_values_are_listed() -> None:
    _, mesh = on("v5e:2x2", data=2, model=2)
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P("data")))

    def f(table: Any, odd: Any, scale: Any, x: Any) -> Any:
        return x @ table, odd.sum() + scale.sum()

    lowered = pjit(f, out_shardings=(rows, whole)).lower(
        jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((1023, 513), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((512,), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=rows),
    )
    compilation = compile_stage(lowered)
    named = report_of(compilation, replicated_above=1024).replicated
    assert [(v.path, v.device_bytes) for v in named] == [("table", 1024 * 512 * 4), ("scale", 2048)]
    assert report_of(compilation, replicated_above=2**20).replicated == named[:1]


def test_explain_of_a_too_large_program_suggests_a_preflight() -> None:
    lowered = product(1024 * 128)
    with pytest.raises(ProgramTooLargeError) as raised:
        explain(lowered)
    text = str(raised.value)
    assert text.startswith("f ")
    assert "TPU v5 lite" in text and "15.75 GiB" in text
    assert "xlashard.preflight(f, ..., topology=...)" in text
    assert "\n" not in text
    assert "RESOURCE" not in text
    assert raised.value.__cause__ is None
