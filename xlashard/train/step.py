"""The training step: state in, state and measurements out, in one program.

The functions here are plain JAX functions of plain trees. `xlashard.pjit` compiles them over a
mesh; `jax.jit` compiles the very same functions on one device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xlashard.train.layout import Layout, Place, initial_parameters, unplaced
from xlashard.train.model import declare, loss
from xlashard.train.settings import ModelSettings, OptimizerSettings, Settings

type State = dict[str, Any]
"""``parameters``, ``optimizer`` (AdamW's moments) and ``step`` (steps done, int32)."""


@dataclass(frozen=True)
class Recipe:
    """What a step does, as plain functions: the model, the optimiser, the learning rate."""

    model: ModelSettings
    declarations: dict[str, Any]
    optimizer: optax.GradientTransformation
    schedule: Callable[[Any], Any]

    def initial_state(self, seed: Any) -> State:
        """The state before the first step; equal seeds give equal values on every mesh."""
        parameters = initial_parameters(self.declarations, jax.random.key(seed))
        return {
            "parameters": parameters,
            "optimizer": self.optimizer.init(parameters),
            "step": jnp.zeros((), jnp.int32),
        }

    def train_step(
        self, state: State, batch: jax.Array, place: Place = unplaced
    ) -> tuple[State, dict[str, jax.Array]]:
        """One optimiser step.

        Args:
            state: From `initial_state` or the step before.
            batch: Bytes [parts, sequences, L + 1]; gradients are averaged over the parts, which
                are computed one after the other.
            place: Lays activations out on a mesh.

        Returns:
            The new state, and float32 scalars: ``loss`` in nats per byte, ``gradient_norm`` before
            clipping, ``learning_rate``.
        """
        value, gradients = self._gradients(state["parameters"], batch, place)
        updates, optimizer = self.optimizer.update(
            gradients, state["optimizer"], state["parameters"]
        )
        measured = {
            "loss": value,
            "gradient_norm": global_norm(gradients),
            "learning_rate": jnp.asarray(self.schedule(state["step"]), jnp.float32),
        }
        new = {
            "parameters": optax.apply_updates(state["parameters"], updates),
            "optimizer": optimizer,
            "step": state["step"] + 1,
        }
        return new, measured

    def evaluate(self, parameters: Any, batch: jax.Array, place: Place = unplaced) -> jax.Array:
        """Mean loss over a batch [parts, sequences, L + 1], in nats per byte."""
        return jnp.mean(jax.lax.map(lambda part: loss(parameters, part, self.model, place), batch))

    def _gradients(self, parameters: Any, batch: jax.Array, place: Place) -> tuple[jax.Array, Any]:
        measure = jax.value_and_grad(lambda p, part: loss(p, part, self.model, place))
        if batch.shape[0] == 1:
            return measure(parameters, batch[0])

        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, measure(parameters, part)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, parameters))
        total, _ = jax.lax.scan(add, zero, batch)
        return jax.tree.map(lambda x: x / batch.shape[0], total)


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all arrays of a tree, taken as one vector."""
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))


def make_recipe(settings: Settings) -> Recipe:
    """The step that the settings describe."""
    declarations = declare(settings.model)
    schedule = learning_rate(settings.optimizer, settings.training.steps)
    return Recipe(
        model=settings.model,
        declarations=declarations,
        optimizer=make_optimizer(settings.optimizer, schedule, declarations),
        schedule=schedule,
    )


def learning_rate(optimizer: OptimizerSettings, steps: int) -> Callable[[Any], Any]:
    """Linear rise over the warm-up, then half a cosine down to the last step.

    Args:
        optimizer: Peak, warm-up steps and final fraction.
        steps: Steps of the whole run.

    Returns:
        A function from the number of steps done to the learning rate.
    """
    warmup = min(optimizer.warmup, steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=optimizer.learning_rate / (warmup + 1),
        peak_value=optimizer.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=optimizer.learning_rate * optimizer.final,
    )


def make_optimizer(
    optimizer: OptimizerSettings, schedule: Callable[[Any], Any], declarations: Any
) -> optax.GradientTransformation:
    """Clipped AdamW; arrays that begin as ones (the norms) are not decayed."""
    decayed = jax.tree.map(lambda declared: declared.spread is not None, declarations)
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip),
        optax.adamw(
            schedule,
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            mask=decayed,
        ),
    )


def state_shardings(recipe: Recipe, layout: Layout) -> State:
    """A sharding for every array of the state: the moments lie as their parameters do."""
    parameters = layout.shardings(recipe.declarations)
    whole = layout.sharding()
    shapes = jax.eval_shape(recipe.initial_state, 0)
    return {
        "parameters": parameters,
        "optimizer": optax.tree_map_params(
            recipe.optimizer,
            lambda _, sharding: sharding,
            shapes["optimizer"],
            parameters,
            transform_non_params=lambda _: whole,
        ),
        "step": whole,
    }
