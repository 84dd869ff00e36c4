"""Whole programs with the advice that their preflights rank first, beside what was printed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xlashard import P, tpu
from xlashard.analysis.programs.program import LoweredModule
from xlashard.predict.preflight.advice import AdviceTrials
from xlashard.predict.preflight.compilation import compile_for_report
from xlashard.predict.preflight.preflight_run import lower_on, read_on_topology
from xlashard.predict.preflight.report.build import build_report
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.support.formatting import in_bytes, in_seconds, signed

PLACE = tpu.topology("v5e:2x4")
MESH = PLACE.mesh({"data": 2, "model": 4})
ROWS, COLUMNS = P("model", None), P(None, "model")

FORMATTERS = (signed(in_seconds), signed(in_bytes))

type Specs = Mapping[str, tuple[tuple[int, ...], P]]
"""Shapes and specs of weights by name."""


def constrain(x: Any, *spec: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(MESH, P(*spec)))


def train_step(loss: Callable[[Any, Any], Any], specs: Specs, batch: tuple[int, ...], dtype: Any):
    """Return a donated step of gradient descent, and its arguments."""

    def step(weights: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g.astype(w.dtype), weights, gradients)

    named = {name: jax.NamedSharding(MESH, spec) for name, (_, spec) in specs.items()}
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=named[name])
        for name, (shape, _) in specs.items()
    }
    x = jax.ShapeDtypeStruct(batch, dtype, sharding=jax.NamedSharding(MESH, P("data")))
    return jax.jit(step, out_shardings=named, donate_argnums=0), (weights, x)


def make_gru() -> Any:
    """Return a recurrent network whose gates and new states are sharded in different ways."""

    def loss(weights: Any, x: Any) -> Any:
        def step(h: Any, at: Any) -> tuple[Any, None]:
            update, reset = (
                jax.nn.sigmoid(constrain(at @ weights["x" + n] + h @ weights["h" + n], *spec))
                for n, spec in {"u": ("data", "model"), "r": ("model", "data")}.items()
            )
            new = jnp.tanh(at @ weights["xn"] + (reset * h) @ weights["hn"])
            return constrain((1 - update) * h + update * new, "data", "model"), None

        start = constrain(jnp.zeros((x.shape[0], 1024), x.dtype), "data", "model")
        h, _ = jax.lax.scan(step, start, jnp.moveaxis(x, 1, 0))
        return (h.astype(jnp.float32) ** 2).mean()

    specs = {side + name: ((1024, 1024), COLUMNS) for side in "xh" for name in "urn"}
    return train_step(loss, specs, (256, 64, 1024), jnp.bfloat16)


def make_mlp() -> Any:
    """Return a perceptron all of whose weights are sharded by columns."""

    def loss(weights: Any, x: Any) -> Any:
        for name in sorted(weights):
            x = constrain(jax.nn.relu(x @ weights[name]), "data", "model")
        return (x.astype(jnp.float32) ** 2).mean()

    return train_step(
        loss, {f"w{n}": ((4096, 4096), COLUMNS) for n in range(4)}, (8192, 4096), jnp.bfloat16
    )


def make_language_model() -> Any:
    """Return a layer of a transformer whose keys are sharded over positions, not heads."""

    def loss(weights: Any, tokens: Any) -> Any:
        x = constrain(weights["table"][tokens], "data")
        inside = {"query": (None, "model"), "key": ("model", None), "value": (None, "model")}
        query, key, value = (
            constrain((x @ weights[name]).reshape(*x.shape[:2], 8, 64), "data", *spec)
            for name, spec in inside.items()
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        x = constrain(x + mixed.reshape(x.shape) @ weights["out"], "data")
        hidden = constrain(jax.nn.gelu(x @ weights["up"]), "data", None, "model")
        x = constrain(x + hidden @ weights["down"], "data")
        logits = constrain(x @ weights["table"].T, "data", None, "model").astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    square = (512, 512)
    specs = {name: (square, COLUMNS) for name in ("query", "key", "value")}
    specs |= {"out": (square, ROWS), "table": ((8192, 512), ROWS)}
    specs |= {"up": ((512, 2048), COLUMNS), "down": ((2048, 512), ROWS)}
    return train_step(loss, specs, (16, 256), jnp.int32)


PROGRAMS: Mapping[str, Callable[[], Any]] = {
    "gru": make_gru,
    "mlp": make_mlp,
    "language model": make_language_model,
}


def make_trials(name: str) -> AdviceTrials:
    """Return the trials of a program, which is compiled whole."""
    function, args = PROGRAMS[name]()
    mesh, lowered, _ = read_on_topology(function, args, {}, PLACE, None)
    assert isinstance(lowered, LoweredModule)
    compilation = compile_for_report(lowered, {}, estimate=False)
    report = build_report(compilation, PLACE, mesh)
    return AdviceTrials(report, compilation, mesh, PLACE, lower_on)


def sum_sent(report: PreflightReport, *, all: bool = True) -> int:
    """Return the bytes that a device sends: all, or those that the program doesn't require."""
    return sum(row.sent_bytes for row in report.traffic if all or not row.requested)


def count_memory(report: PreflightReport) -> int:
    """Return the bytes of a device without the program's code, which trials don't make."""
    return report.memory.total_bytes - report.memory.code_bytes


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_advice_changes_a_whole_program_as_printed(name: str) -> None:
    trials = make_trials(name)
    before = trials.run()
    best = next((each for each in before.advice if each.seconds is not None), None)
    print(f"\n{name}: {in_seconds(before.time.seconds)}, {in_bytes(sum_sent(before))} sent")
    assert best is not None
    mesh = trials._lay_out(best)
    changed = trials.lower(trials._apply(best.changes), mesh)
    compilation = compile_for_report(changed, {}, estimate=False)
    after = build_report(compilation, trials.topology, mesh)
    seconds = after.time.seconds - before.time.seconds
    used = count_memory(after) - count_memory(before)
    print(f"  {best.text}: {best.outcome}")
    for word, *amounts in (
        ("tried", best.seconds or 0.0, best.memory_bytes or 0),
        ("compiled", seconds, used),
    ):
        step, memory = (f(n) for f, n in zip(FORMATTERS, amounts, strict=True))
        print(f"  {word}: {step} a step, {memory}")
    print(f"  {in_bytes(sum_sent(after))} sent")
    assert used == best.memory_bytes
    assert abs(seconds - (best.seconds or 0.0)) <= -before.time.below * before.time.seconds
    assert seconds == pytest.approx(best.seconds, rel=0.05)
    if seconds < 0:
        assert sum_sent(after, all=False) < sum_sent(before, all=False)
    below = before.time.below * before.time.seconds
    assert best.outcome == (
        "helps" if seconds < below else "within the error" if seconds < 0 else "no help"
    )
