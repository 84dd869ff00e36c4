"""Changes that the advice of a preflight predicts, beside those of the program that follows it.

    python -m benchmarks.advice [--programs gru experts] [--json PATH]

Each program has shardings as a user might write them first. The best set of suggestions of its
preflight is written into the shardings of its arguments and into its mesh, as a reader of the
report would. A line has the change of the step's time and of the peak memory, in the report and in
the changed program, and the bytes that a device sends before and after.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._auto_program import HandLayout
from benchmarks._auto_programs import PROGRAMS as LARGE
from xlashard import NamedSharding, P, PreflightReport, preflight, tpu
from xlashard.predict.preflight.mesh_mapping import leaves_by_path
from xlashard.predict.preflight.report.preflight_model import AdviceReport

LEARNING_RATE = 0.01
SMALL = "v5e-16", {"data": 4, "model": 4}


@dataclass(frozen=True)
class AdvisedProgram:
    """A training step, with the shardings that a user wrote first.

    Attributes:
        title: What it is.
        step: Returns the next value of its first argument, and a loss.
        arguments: Their shapes.
        specs: The spec of each argument, by its path.
        topology: Where it is to run.
        axes: Sizes of the mesh axes.
        order: Order in which the axes take the links; None for the usual one.
    """

    title: str
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    specs: Mapping[str, P]
    topology: str
    axes: Mapping[str, int]
    order: tuple[str, ...] | None = None

    def report(self, *, is_estimate: bool = False) -> PreflightReport:
        """Return the preflight of the step; an estimate has no advice."""
        mesh = tpu.topology(self.topology).mesh(dict(self.axes), order=self.order)
        paths = leaves_by_path(self.step, self.arguments, {})
        shardings = jax.tree.unflatten(
            jax.tree.structure(self.arguments),
            [NamedSharding(mesh, self.specs[path]) for path in paths],
        )
        step = jax.jit(
            self.step,
            in_shardings=shardings,
            out_shardings=(shardings[0], NamedSharding(mesh, P())),
            donate_argnums=0,
        )
        return preflight(step, *self.arguments, topology=self.topology, estimate=is_estimate)

    def follow(self, advice: AdviceReport) -> "AdvisedProgram":
        """Return the program with the shardings and the mesh that the advice names."""
        order, specs = self.order, dict(self.specs)
        for change in advice.changes:
            if change.order:
                order = change.order
            else:
                assert change.path in specs, change.path
                specs[change.path] = P(*[a[0] if len(a) == 1 else a or None for a in change.after])
        return replace(self, order=order, specs=specs)


def lay_out(
    program: tuple[str, Callable[..., Any], tuple[Any, ...]],
    layout: HandLayout,
    topology: str,
    axes: Mapping[str, int],
) -> AdvisedProgram:
    """Return a program, of title, step and arguments, under a layout of its arguments."""
    title, step, arguments = program
    mesh = tpu.topology(topology).mesh(dict(axes))
    shardings = jax.tree.leaves(layout.shardings(arguments, mesh))
    paths = leaves_by_path(step, arguments, {})
    specs = {path: sharding.spec for path, sharding in zip(paths, shardings, strict=True)}
    return AdvisedProgram(title, step, arguments, specs, topology, axes)


def descend(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step that goes along the gradient of a loss of parameters and of a batch."""

    def step(parameters: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, batch)
        new = jax.tree.map(
            lambda p, g: p - (LEARNING_RATE * g).astype(p.dtype), parameters, gradient
        )
        return new, value

    return step


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean loss of `[..., classes]` for targets `[...]`."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, targets[..., None], -1))


def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of bfloat16."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def recurrent_loss(parameters: Any, batch: Any) -> jax.Array:
    """Return the loss of a gated recurrent unit over `[length, batch, features]`."""

    def cell(state: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset, update, new = jnp.split(gates + state @ parameters["recurrent"], 3, -1)
        update = jax.nn.sigmoid(update)
        state = (1 - update) * jnp.tanh(new * jax.nn.sigmoid(reset)) + update * state
        return state, state

    features = batch["features"]
    start = jnp.zeros((features.shape[1], parameters["recurrent"].shape[0]), features.dtype)
    _, states = jax.lax.scan(cell, start, features @ parameters["input"])
    return cross_entropy(states @ parameters["output"], batch["targets"])


def layered_loss(parameters: Any, batch: Any) -> jax.Array:
    """Return the loss of layers over `[batch, features]`."""
    x = batch["features"]
    for weights in parameters["layers"]:
        x = jax.nn.relu(x @ weights)
    return cross_entropy(x @ parameters["output"], batch["targets"])


def make_recurrent() -> AdvisedProgram:
    """Return a recurrent network whose weights are sharded by columns."""
    parameters = {
        "input": bfloat16(2048, 3 * 4096),
        "recurrent": bfloat16(4096, 3 * 4096),
        "output": bfloat16(4096, 32_000),
    }
    batch = {
        "features": bfloat16(512, 256, 2048),
        "targets": jax.ShapeDtypeStruct((512, 256), jnp.int32),
    }
    columns, rows = P(None, "model"), P(None, "data")
    layout = HandLayout(
        {"input": columns, "recurrent": columns, "output": P("model", None)}
        | {"features": rows, "targets": rows}
    )
    return lay_out(("GRU", descend(recurrent_loss), (parameters, batch)), layout, *SMALL)


def make_layered() -> AdvisedProgram:
    """Return layers whose weights are all sharded by columns, as no two of them should be."""
    parameters = {
        "layers": [bfloat16(8192, 8192) for _ in range(4)],
        "output": bfloat16(8192, 1024),
    }
    batch = {
        "features": bfloat16(8192, 8192),
        "targets": jax.ShapeDtypeStruct((8192,), jnp.int32),
    }
    columns, rows = P(None, "model"), P("data")
    layout = HandLayout(dict(layers=columns, output=columns, features=rows, targets=rows))
    return lay_out(("layers", descend(layered_loss), (parameters, batch)), layout, *SMALL)


def make_large(name: str, layout: str, topology: str) -> AdvisedProgram:
    """Return a program of `benchmarks.auto` under a layout for its arguments alone."""
    program = LARGE[name]
    axes = program.meshes[topology]
    by_hand = program.layouts(tpu.topology(topology).mesh(dict(axes)))[layout]
    parts = program.title, program.step, program.arguments()
    return lay_out(parts, by_hand, topology, axes)


PROGRAMS: Mapping[str, Callable[[], AdvisedProgram]] = {
    "gru": make_recurrent,
    "columns": make_layered,
    "dense": lambda: make_large("dense_1b", "fsdp", "v5e-16"),
    "grouped_8b": lambda: make_large("grouped_8b", "fsdp", "v5e-64"),
    "experts": lambda: make_large("moe", "expert + fsdp", "v5e-64"),
}
"""By name."""


@dataclass(frozen=True)
class Followed:
    """Advice that was followed.

    Attributes:
        program: The name of the program.
        advice: The code changes; empty where the report has none to follow.
        outcome: Their outcome in the report.
        predicted_seconds: Change of the step's time in the report.
        seconds: Change of the step's time in the changed program.
        step_seconds: Time of the step in the report.
        predicted_bytes: Change of the peak memory of a device in the report.
        peak_bytes: The same in the changed program.
        sent_before: Bytes that a device sends in the program.
        sent_after: The same in the changed program.
    """

    program: str
    advice: str = ""
    outcome: str = ""
    predicted_seconds: float = 0.0
    seconds: float = 0.0
    step_seconds: float = 0.0
    predicted_bytes: int = 0
    peak_bytes: int = 0
    sent_before: int = 0
    sent_after: int = 0

    @property
    def is_right(self) -> bool:
        """Return True if the program changes as predicted, within a thousandth of its time."""
        return (
            abs(self.seconds - self.predicted_seconds) <= 1e-3 * self.step_seconds
            and self.peak_bytes == self.predicted_bytes
        )


def follow_best(name: str) -> Followed:
    """Follow the best set of suggestions for a program."""
    program = PROGRAMS[name]()
    before = program.report()
    tried = [each for each in before.advice if each.seconds is not None]
    usable = [each for each in tried if all(c.line is None for c in each.changes)]
    if not usable:
        return Followed(name)
    best = usable[0]
    after = program.follow(best).report(is_estimate=True)
    peaks = [r.memory.total_bytes - r.memory.code_bytes for r in (before, after)]
    sent = [sum(row.sent_bytes for row in r.traffic) for r in (before, after)]
    seconds = after.time.seconds - before.time.seconds
    times = best.seconds or 0.0, seconds, before.time.seconds
    memory = best.memory_bytes or 0, peaks[1] - peaks[0]
    return Followed(name, best.text, best.outcome, *times, *memory, *sent)


def main(arguments: Sequence[str] | None = None) -> None:
    """Follow the advice for each program, and print a line for it."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--programs", nargs="+", choices=[*PROGRAMS], default=[*PROGRAMS])
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    rows = []
    heads = ("time predicted", "compiled", "memory predicted", "compiled", "sent", "after")
    print(f"{'program':11}" + "".join([f"{head:>18}" for head in heads]) + "  advice")
    for name in options.programs:
        row = follow_best(name)
        rows.append(asdict(row) | {"is_right": row.is_right})
        if not row.advice:
            print(f"{name:11}no advice that was tried", flush=True)
            continue
        seconds = [row.predicted_seconds, row.seconds]
        sizes = [row.predicted_bytes, row.peak_bytes, row.sent_before, row.sent_after]
        cells = [f"{x * 1e3:.2f} ms" for x in seconds] + [f"{x / 2**20:,.0f} MiB" for x in sizes]
        line = f"{name:11}" + "".join([f"{cell:>18}" for cell in cells])
        print(
            f"{line}  {row.outcome}{'' if row.is_right else ' (WRONG)'}: {row.advice}", flush=True
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
