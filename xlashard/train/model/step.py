"""Training step: one program from state and batch to state and metrics.

The functions are plain JAX functions of plain trees. `xlashard.pjit` compiles them over a mesh,
`jax.jit` the same functions on one device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xlashard.train.config.settings import ModelSettings, OptimizerSettings, Settings
from xlashard.train.model.layout import Layout, Place, initial_parameters, unplaced
from xlashard.train.model.transformer import declare, loss, measure

type State = dict[str, Any]
"""``parameters``, ``optimizer`` (AdamW's moments) and ``step`` (steps done, int32)."""


@dataclass(frozen=True)
class Recipe:
    """Plain functions of a training step: model, optimiser, learning rate."""

    model: ModelSettings
    declarations: dict[str, Any]
    optimizer: optax.GradientTransformation
    schedule: Callable[[Any], Any]

    def initial_state(self, seed: Any) -> State:
        """Return the initial state; equal seeds give equal values on every mesh."""
        parameters = initial_parameters(self.declarations, jax.random.key(seed))
        dtype = jnp.dtype(self.model.parameters)
        parameters = jax.tree.map(lambda x: x.astype(dtype), parameters)
        return {
            "parameters": parameters,
            "optimizer": self.optimizer.init(parameters),
            "step": jnp.zeros((), jnp.int32),
        }

    def train_step(
        self, state: State, batch: jax.Array, place: Place = unplaced
    ) -> tuple[State, dict[str, jax.Array]]:
        """Run one optimiser step.

        Args:
            state: From `initial_state` or the previous step.
            batch: Tokens [parts, sequences, L + 1]; gradients are accumulated over the parts.
            place: Constrains activations on a mesh.

        Returns:
            The new state, and float32 scalars: ``loss`` in nats per token, ``gradient_norm`` before
            clipping, ``learning_rate``, and for a model of experts ``balance`` and ``dropped``.
        """
        values, gradients = self._gradients(state["parameters"], batch, place)
        updates, optimizer = self.optimizer.update(
            gradients, state["optimizer"], state["parameters"]
        )
        measured = {
            **values,
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
        """Return the mean loss of a batch [parts, sequences, L + 1], in nats per token."""
        return jnp.mean(jax.lax.map(lambda part: loss(parameters, part, self.model, place), batch))

    def _gradients(
        self, parameters: Any, batch: jax.Array, place: Place
    ) -> tuple[dict[str, jax.Array], Any]:
        """Return metrics and gradients, averaged over the parts of the batch."""
        differentiate = jax.value_and_grad(
            lambda p, part: measure(p, part, self.model, place), has_aux=True
        )

        def one(part: jax.Array) -> tuple[dict[str, jax.Array], Any]:
            (_, values), gradients = differentiate(parameters, part)
            return values, gradients

        if batch.shape[0] == 1:
            return one(batch[0])

        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, one(part)), None

        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, batch[0]))
        total, _ = jax.lax.scan(add, zero, batch)
        return jax.tree.map(lambda x: x / batch.shape[0], total)


def global_norm(tree: Any) -> jax.Array:
    """Return the Euclidean norm of all arrays of a tree."""
    # Squares and sums: dot products would flatten the arrays, which gathers them.
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def make_recipe(settings: Settings) -> Recipe:
    """Return the training step of the settings."""
    declarations = declare(settings.model)
    schedule = learning_rate(settings.optimizer, settings.training.steps)
    return Recipe(
        model=settings.model,
        declarations=declarations,
        optimizer=make_optimizer(settings.optimizer, schedule, declarations),
        schedule=schedule,
    )


def learning_rate(optimizer: OptimizerSettings, steps: int) -> Callable[[Any], Any]:
    """Return the schedule: linear warm-up, then cosine decay to the last step.

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
    """Return clipped AdamW; arrays initialised to ones (the norms) are not decayed."""
    decayed = jax.tree.map(lambda declared: declared.spread is not None, declarations)
    means = optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip),
        optax.chain(
            stored(means, jnp.dtype(optimizer.moments)),
            optax.add_decayed_weights(optimizer.weight_decay, decayed),
            optax.scale_by_learning_rate(schedule),
        ),
    )


def stored(means: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """Compute Adam's moments in float32 and store them in another type.

    Args:
        means: `optax.scale_by_adam`, or another transformation with arrays like the parameters.
        dtype: Storage type.
    """

    def cast(tree: Any, dtype: Any) -> Any:
        floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(dtype) if floating(x) else x, tree)

    def init(params: Any) -> Any:
        return cast(means.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = cast(state, jnp.float32)
        updates, new = means.update(cast(updates, jnp.float32), wide, params)
        return updates, cast(new, dtype)

    return optax.GradientTransformation(init, update)


def state_shardings(recipe: Recipe, layout: Layout) -> State:
    """Return the shardings of the state; moments have the shardings of their parameters."""
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
