"""The compiled programs of a run, with the layout of everything that goes in and out."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import xlashard
from xlashard.sharding import Mesh
from xlashard.tpu.preflight.report.pricing import Workload
from xlashard.train.config.settings import ModelSettings, Settings
from xlashard.train.data import token_type
from xlashard.train.formulas import workload
from xlashard.train.model.checks import check_settings
from xlashard.train.model.layout import Layout
from xlashard.train.model.step import Recipe, State, make_recipe, state_shardings
from xlashard.train.model.transformer import decode, empty_cache


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


def generate(
    parameters: Any,
    prompt: ArrayLike,
    seed: ArrayLike,
    temperature: ArrayLike,
    count: int,
    model: ModelSettings,
) -> jax.Array:
    """Continues a prompt byte by byte, keeping the keys and values of the last bytes.

    The prompt is read the same way, so that reading and writing are one loop and one program.

    Args:
        parameters: The model's arrays.
        prompt: Bytes [P], at least one.
        seed: Scalar integer; equal seeds write equal texts.
        temperature: Scalar; at 0 the likeliest byte is taken, higher values are bolder.
        count: Bytes to write.
        model: The shape of the model.

    Returns:
        The written bytes [count], uint8.
    """
    prompt = jnp.asarray(prompt)
    size = prompt.shape[0]
    window = min(model.length, size + count)

    def advance(carry: tuple[Any, jax.Array], position: jax.Array):
        cache, written = carry
        token = jnp.where(position < size, prompt[jnp.minimum(position, size - 1)], written)
        scores, cache = decode(parameters, cache, token[None], position, model)
        key = jax.random.fold_in(jax.random.key(seed), position)
        written = choose(scores[0], key, jnp.asarray(temperature))
        return (cache, written), written

    start = (empty_cache(1, window, model), jnp.zeros((), jnp.uint8))
    _, written = jax.lax.scan(advance, start, jnp.arange(size + count - 1))
    return written[size - 1 :]


def choose(scores: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    """One byte, drawn from the softmax of scores [256] / temperature, or the likeliest at 0."""
    greedy = jnp.argmax(scores)
    drawn = jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.uint8)


def readable(written: bytes) -> str:
    """Generated bytes for a terminal: what is no text, or would steer the terminal, as ``·``."""
    text = written.decode("utf-8", errors="replace").replace("\ufffd", "·")
    return "".join(x if x.isprintable() or x == "\n" else "·" for x in text)


@dataclass(frozen=True)
class Target:
    """A program for a preflight.

    Attributes:
        function: A `pjit` function.
        args: Its arguments, as shapes with shardings.
        workload: What one call of it does.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    workload: Workload


def training_step(settings: Settings, mesh: Mesh) -> Target:
    """The training step that settings describe, on the devices of a mesh.

    Args:
        settings: A whole run.
        mesh: With the axes that the rules of the settings name, over any devices, those of a
            topology included. Its sizes may be others than in the settings.

    Returns:
        The step, which donates its state; the shapes of state and batch; the workload.

    Raises:
        SettingsError: The model or the batch does not fit the mesh.

    Example:
        >>> import jax
        >>> from xlashard import Mesh
        >>> from xlashard.train.config.settings import load_settings
        >>> settings = load_settings("configs/tiny_dp.toml")
        >>> target = training_step(settings, Mesh(jax.devices(), ("data",)))
        >>> target.workload.tokens, target.args[1].shape
        (2048, (1, 16, 129))
        >>> lowered = target.function.lower(*target.args)
    """
    settings = on_mesh(settings, mesh)
    check_settings(settings)
    recipe = make_recipe(settings)
    layout = Layout(mesh, settings.sharding.rules)
    shardings = state_shardings(recipe, layout)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(recipe.initial_state, 0),
        shardings,
    )
    training = settings.training
    rows = training.batch // training.accumulate
    shape = (training.accumulate, rows, settings.model.length + 1)
    batch = jax.ShapeDtypeStruct(shape, token_type(settings), sharding=batch_sharding(layout))
    return Target(pjit_step(recipe, layout), (state, batch), workload(settings))


def on_mesh(settings: Settings, mesh: Mesh) -> Settings:
    """The settings with the axes of a mesh, whatever devices it has."""
    devices = replace(settings.devices, emulate=0)
    return replace(settings, mesh=dict(mesh.shape), devices=devices)
