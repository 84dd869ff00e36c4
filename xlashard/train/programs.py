"""The compiled programs of a run, with the layout of everything that goes in and out."""

import functools
import math
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import xlashard
from xlashard.train.data import token_type
from xlashard.train.generate import generate
from xlashard.train.layout import Layout
from xlashard.train.settings import Settings
from xlashard.train.step import Recipe, State, state_shardings


@dataclass(frozen=True)
class Programs:
    """What a run calls.

    Attributes:
        train_step: Compiled; from state and batch to state and measurements; gives up the state.
        evaluate: From parameters and batch to a loss.
        state: The shardings of the state.
        batch: The sharding of a batch [parts, sequences, length + 1].
        seconds: Time to trace, lower and compile the step.
    """

    train_step: Any
    evaluate: Any
    state: State
    batch: Any
    seconds: float


def batch_sharding(layout: Layout) -> Any:
    """The sharding of a batch [parts, sequences, length + 1]."""
    return layout.sharding((None, "batch", None))


def pjit_step(recipe: Recipe, layout: Layout) -> Any:
    """The training step as one program over the mesh, its state laid out and given up."""
    state, whole = state_shardings(recipe, layout), layout.sharding()
    return xlashard.pjit(
        functools.partial(recipe.train_step, place=layout),
        in_shardings=(state, batch_sharding(layout)),
        out_shardings=(state, whole),
        donate_argnums=(0,),
    )


def initial_state(recipe: Recipe, layout: Layout) -> Any:
    """The program from a seed to the state before the first step."""
    return xlashard.pjit(recipe.initial_state, out_shardings=state_shardings(recipe, layout))


def build_programs(recipe: Recipe, layout: Layout, settings: Settings) -> Programs:
    """Compiles the step and prepares the rest, which compiles when it is first called."""
    state, batch = state_shardings(recipe, layout), batch_sharding(layout)
    training = settings.training
    rows = training.batch // training.accumulate
    shape = (training.accumulate, rows, settings.model.length + 1)
    began = time.perf_counter()
    lowered = pjit_step(recipe, layout).lower(
        jax.eval_shape(recipe.initial_state, 0), jax.ShapeDtypeStruct(shape, token_type(settings))
    )
    step = lowered.compile()
    return Programs(
        train_step=step,
        evaluate=xlashard.pjit(
            functools.partial(recipe.evaluate, place=layout),
            in_shardings=(state["parameters"], batch),
            out_shardings=layout.sharding(),
        ),
        state=state,
        batch=batch,
        seconds=time.perf_counter() - began,
    )


def write_text(parameters: Any, layout: Layout, settings: Settings) -> bytes:
    """The text that the settings ask for, without its prompt."""
    asked = settings.generation
    prompt = np.frombuffer(asked.prompt.encode() or b"\n", np.uint8)
    program = xlashard.pjit(
        functools.partial(generate, count=asked.bytes, model=settings.model),
        out_shardings=layout.sharding(),
    )
    seed, temperature = np.uint32(settings.run.seed), np.float32(asked.temperature)
    return np.asarray(program(parameters, prompt, seed, temperature)).tobytes()


def parameter_count(recipe: Recipe) -> int:
    """Number of parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(recipe.declarations))
