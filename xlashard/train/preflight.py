"""The training step of a settings file as a preflight takes it: function, shapes, workload."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from xlashard.sharding import Mesh
from xlashard.tpu.preflight.report.preflight_model import Workload
from xlashard.train.checks import check_settings
from xlashard.train.data import token_type
from xlashard.train.formulas import workload
from xlashard.train.layout import Layout
from xlashard.train.programs import batch_sharding, pjit_step
from xlashard.train.settings import Settings
from xlashard.train.step import make_recipe, state_shardings


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
        >>> from xlashard.train.settings import load_settings
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
