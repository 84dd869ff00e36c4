"""The main job against the same job under `jax.jit`: a step, the first step, the import.

Both sides get the very same function, shapes and shardings, those of `configs/tiny.toml`. The
first-step table builds every function anew in each round and keeps JAX's persistent cache off, so
that nothing is cached from the round before.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import xlashard
from benchmarks._devices import cpu_of_children
from benchmarks._measure import ExtraGoal, Report, interleave, read_options
from xlashard.train.command import start_devices
from xlashard.train.config.settings import Settings, load_settings
from xlashard.train.data import plan_batch, read_corpus, training_starts
from xlashard.train.model.layout import Axes, Layout, build_mesh
from xlashard.train.model.programs import batch_sharding, make_recipe, state_shardings

ROOT = Path(__file__).resolve().parent.parent
ONE_DEVICE = ["mesh={data = 1}", "devices.emulate=1"] + [
    f"sharding.rules.{axis}=[]" for axis in ("batch", "vocab", "embed", "heads", "kv_heads", "mlp")
]


def plain(sharding: Any) -> Any:
    """Return the same placement as one of JAX's own shardings."""
    return jax.sharding.NamedSharding(sharding.mesh, sharding.spec)


@dataclass(frozen=True)
class Side:
    """One compiler of the job: its `pjit`, its constraint, its shardings."""

    compile: Callable[..., Any]
    constrain: Callable[[Any, Any], Any]
    sharding: Callable[[Any], Any]


OURS = Side(xlashard.pjit, xlashard.with_sharding_constraint, lambda sharding: sharding)
JAX = Side(jax.jit, jax.lax.with_sharding_constraint, plain)


@dataclass(frozen=True)
class SideLayout(Layout):
    """Layout whose constraints one side makes."""

    side: Side = OURS

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Constrain an activation by the rules, with the spec cut off at its rank."""
        spec = xlashard.PartitionSpec(*tuple(self.spec(axes))[: x.ndim])
        sharding = xlashard.NamedSharding(self.mesh, spec)
        return self.side.constrain(x, self.side.sharding(sharding))


class Job:
    """Training step of the main job, compiled by one side."""

    def __init__(self, side: Side, settings: Settings, devices: list[Any]) -> None:
        self.side, self.settings = side, settings
        mesh = build_mesh(settings.mesh, devices[: settings.devices.emulate])
        self.layout = SideLayout(mesh, settings.sharding.rules, side=side)
        self.recipe = make_recipe(settings)
        shardings = state_shardings(self.recipe, self.layout)
        self.shardings = jax.tree.map(side.sharding, shardings)

    def step(self) -> Any:
        """Return the step as a function that was never called."""
        batch, whole = batch_sharding(self.layout), self.layout.sharding()
        return self.side.compile(
            functools.partial(self.recipe.train_step, place=self.layout),
            in_shardings=(self.shardings, self.side.sharding(batch)),
            out_shardings=(self.shardings, self.side.sharding(whole)),
            donate_argnums=(0,),
        )

    def state(self) -> Any:
        """Return the state before the first step."""
        return self.side.compile(self.recipe.initial_state, out_shardings=self.shardings)(0)

    def batch(self) -> Any:
        """Return the first batch, on the devices."""
        training, length = self.settings.training, self.settings.model.length
        text = read_corpus(self.settings.data, length).train
        starts = training_starts(len(text), 0, training.batch, length, 0)
        sharding = batch_sharding(self.layout)
        if self.side is OURS:
            plan = plan_batch(sharding, training.batch, training.accumulate, length)
            return plan.put(text, starts)
        windows = text.windows(starts, length + 1)
        return jax.device_put(windows.reshape(training.accumulate, -1, length + 1), plain(sharding))

    def lowered(self) -> Any:
        """Return the traced and lowered step."""
        rows = self.settings.training.batch // self.settings.training.accumulate
        shape = (self.settings.training.accumulate, rows, self.settings.model.length + 1)
        shapes = jax.eval_shape(self.recipe.initial_state, 0)
        return self.step().lower(shapes, jax.ShapeDtypeStruct(shape, np.uint8))

    def first_step(self) -> None:
        """Trace, lower and compile the step."""
        self.lowered().compile()


def looping(job: Job) -> Callable[[], None]:
    """Return a call that takes one step and waits for its loss."""
    step, batch, state = job.step(), job.batch(), job.state()

    def call() -> None:
        nonlocal state
        state, measured = step(state, batch)
        jax.block_until_ready((state["step"], measured["loss"]))

    return call


def looping_bound(job: Job) -> Callable[[], None]:
    """Return a call of the bound step that waits for its loss."""
    batch, state = job.batch(), job.state()
    bound = job.step().lower(state, batch).compile().bind(state)

    def call() -> None:
        jax.block_until_ready(bound(batch)["loss"])

    return call


def importing(module: str) -> Callable[[], None]:
    """Return a call that imports a module in a process of its own, which then ends at once.

    The sample excludes Python's teardown of all modules, which takes 250 ms for JAX alone.
    """
    words = [sys.executable, "-c", f"import os, {module}; os._exit(0)"]
    # JAX's wheel contains bytecode; ours must be written as well, by the warm-up calls, or each
    # import would time Python's compiler.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def run() -> None:
        # Ctrl-C reaches this process alone, which ends the other one.
        subprocess.run(words, cwd=ROOT, env=environment, check=True, process_group=0)

    return run


def main() -> int:
    """Measure and print all tables."""
    options = read_options("The main job's training step against jax.jit", rounds=31)
    report = Report("train_step")
    jax.config.update("jax_enable_compilation_cache", False)
    devices = start_devices(8)
    config = ROOT / "configs" / "tiny.toml"

    for title, words in (("8 devices, 2 × 2 × 2", []), ("one device", ONE_DEVICE)):
        settings = load_settings(config, words)
        candidates = {
            "jax.jit": looping(Job(JAX, settings, devices)),
            # The same candidate twice: its ratio's distance from 1 is the noise of this machine.
            "jax.jit, control": looping(Job(JAX, settings, devices)),
            "pjit": looping(Job(OURS, settings, devices)),
            "bound step": looping_bound(Job(OURS, settings, devices)),
        }
        measured = interleave(candidates, rounds=options.rounds, inner=1)
        goals = {"pjit": 1.02, "bound step": 1.02}
        report.add(f"A training step, {title}", measured, baseline="jax.jit", goals=goals)

    settings = load_settings(config)
    few = max(options.rounds // 3, 1)
    candidates = {
        "jax.jit": lambda: Job(JAX, settings, devices).first_step(),
        "pjit": lambda: Job(OURS, settings, devices).first_step(),
    }
    measured = interleave(candidates, rounds=few, inner=1, warmup=1)
    title = "Trace, lower and compile the step, 8 devices"
    report.add(title, measured, baseline="jax.jit", goals={"pjit": 1.05})

    candidates = {f"import {name}": importing(name) for name in ("jax", "xlashard")}
    measured = interleave(candidates, rounds=options.rounds, inner=1, clock=cpu_of_children)
    goals = {"import xlashard": ExtraGoal(0.060)}
    report.add(
        "CPU time of an import, in a new process", measured, baseline="import jax", goals=goals
    )
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
