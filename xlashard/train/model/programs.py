"""Training step as plain functions of plain trees, and the compiled programs of a run.

`xlashard.pjit` compiles the functions over a mesh, `jax.jit` the same functions on one device.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import xlashard
from xlashard.core.sharding import Mesh
from xlashard.predict.preflight.target_loading import TargetProgram
from xlashard.train.config.settings import ModelSettings, OptimizerSettings, Settings
from xlashard.train.data import token_type
from xlashard.train.formulas import workload
from xlashard.train.model.checks import check_settings
from xlashard.train.model.layout import Layout, declare, initial_parameters, unplaced
from xlashard.train.model.transformer import loss, measure

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
        self, state: State, batch: jax.Array, place: Layout = unplaced
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

    def evaluate(self, parameters: Any, batch: jax.Array, place: Layout = unplaced) -> jax.Array:
        """Return the mean loss of a batch [parts, sequences, L + 1], in nats per token."""
        return jnp.mean(jax.lax.map(lambda part: loss(parameters, part, self.model, place), batch))

    def _gradients(
        self, parameters: Any, batch: jax.Array, place: Layout
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
            stored(means, jnp.dtype(optimizer.moments), jnp.dtype(optimizer.first_moment)),
            optax.add_decayed_weights(optimizer.weight_decay, decayed),
            optax.scale_by_learning_rate(schedule),
        ),
    )


def stored(means: Any, dtype: Any, first: Any) -> optax.GradientTransformation:
    """Compute Adam's moments in float32 and store them in other types.

    Args:
        means: `optax.scale_by_adam`.
        dtype: Storage type of the second moment.
        first: Storage type of the first moment.
    """

    def cast(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    def narrow(state: Any) -> Any:
        return state._replace(mu=cast(state.mu, first), nu=cast(state.nu, dtype))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = state._replace(mu=cast(state.mu, jnp.float32), nu=cast(state.nu, jnp.float32))
        updates, new = means.update(cast(updates, jnp.float32), wide, params)
        return updates, narrow(new)

    return optax.GradientTransformation(lambda params: narrow(means.init(params)), update)


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


@dataclass(frozen=True)
class Programs:
    """Programs of a run.

    Attributes:
        train_step: Compiled step from state and batch to state and metrics; donates the state.
        evaluate: Function of parameters and batch that returns a loss.
        state: Shardings of the state.
        batch: Sharding of a batch [parts, sequences, length + 1].
        seconds: Time to choose the layout, if it is automatic, to trace, lower and compile the
            step.
    """

    train_step: Any
    evaluate: Any
    state: State
    batch: Any
    seconds: float


def batch_sharding(layout: Layout) -> Any:
    """Return the sharding of a batch [parts, sequences, length + 1]."""
    return layout.sharding((None, "batch", None))


def _batch_shape(settings: Settings, sharding: Any = None) -> jax.ShapeDtypeStruct:
    training = settings.training
    rows = training.batch // training.accumulate
    shape = (training.accumulate, rows, settings.model.length + 1)
    return jax.ShapeDtypeStruct(shape, token_type(settings), sharding=sharding)


def state_shapes(recipe: Recipe, shardings: State) -> State:
    """Return the shapes of the state, with shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(recipe.initial_state, 0),
        shardings,
    )


def pjit_step(recipe: Recipe, layout: Layout) -> Any:
    """Return the training step over the mesh, which donates the state."""
    state, batch = xlashard.AUTO, xlashard.AUTO
    if not layout.automatic:
        state, batch = state_shardings(recipe, layout), batch_sharding(layout)
    return xlashard.pjit(
        functools.partial(recipe.train_step, place=layout),
        in_shardings=(state, batch),
        out_shardings=(state, layout.sharding()),
        donate_argnums=(0,),
    )


def initial_state(recipe: Recipe, shardings: State) -> Any:
    """Return the program from a seed to the initial state."""
    return xlashard.pjit(recipe.initial_state, out_shardings=shardings)


def build_programs(recipe: Recipe, layout: Layout, settings: Settings) -> Programs:
    """Compile the step; the other programs compile at their first call."""
    began = time.perf_counter()
    lowered = pjit_step(recipe, layout).lower(
        jax.eval_shape(recipe.initial_state, 0), _batch_shape(settings)
    )
    step = lowered.compile()
    if layout.automatic:
        (state, batch), _ = step.input_shardings
    else:
        state, batch = state_shardings(recipe, layout), batch_sharding(layout)
    return Programs(
        train_step=step,
        evaluate=xlashard.pjit(
            functools.partial(recipe.evaluate, place=layout),
            in_shardings=(state["parameters"], batch),
            out_shardings=xlashard.AUTO if layout.automatic else layout.sharding(),
        ),
        state=state,
        batch=batch,
        seconds=time.perf_counter() - began,
    )


def training_step(settings: Settings, mesh: Mesh) -> TargetProgram:
    """Return the training step of settings on the devices of a mesh.

    Args:
        settings: A whole run.
        mesh: Mesh with the axes of the settings' rules, over any devices, including those of a
            topology. Its sizes may differ from the settings.

    Returns:
        The step, which donates the state; the shapes of state and batch; the workload.

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
    layout = Layout.of(settings, mesh)
    if layout.automatic:
        args = jax.eval_shape(recipe.initial_state, 0), _batch_shape(settings)
    else:
        state = state_shapes(recipe, state_shardings(recipe, layout))
        args = state, _batch_shape(settings, batch_sharding(layout))
    return TargetProgram(pjit_step(recipe, layout), mesh, args, workload=workload(settings))


def on_mesh(settings: Settings, mesh: Mesh) -> Settings:
    """Return the settings with the axes of a mesh."""
    devices = replace(settings.devices, emulate=0)
    return replace(settings, mesh=dict(mesh.shape), devices=devices)
