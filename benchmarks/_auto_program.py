"""Programs for automatic shardings, and the layouts that an expert writes for them by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, GetAttrKey, tree_map_with_path

import xlashard
from xlashard import Mesh, NamedSharding, P

type Spec = P | Turn
type Constrain = Callable[[str, Any], Any]
"""Returns an array, constrained to the sharding that a layout has for the name."""


@dataclass(frozen=True)
class Turn:
    """Spec of a value, and another one of its gradient.

    Attributes:
        forth: Spec of the value.
        back: Spec of its gradient. A gathered weight's gradient is reduce-scattered this way.
    """

    forth: P
    back: P


@dataclass(frozen=True)
class HandLayout:
    """Shardings of a program, as an expert writes them.

    Attributes:
        arguments: Spec of each argument by the last name of its path; others are replicated.
        inside: Specs of values inside, by the names that the program gives to `constrain`.
        moments: Specs of the optimiser's moments; by default those of their parameters.
    """

    arguments: Mapping[str, P]
    inside: Mapping[str, Spec] = field(default_factory=dict)
    moments: Mapping[str, P] | None = None

    def shardings(self, arguments: Any, mesh: Mesh) -> Any:
        """Return the sharding of each array of the arguments."""

        def of(path: tuple[Any, ...], x: Any) -> NamedSharding:
            names = path_names(path)
            moment = self.moments is not None and bool({"mu", "nu"} & set(names))
            table = self.moments if moment and self.moments is not None else self.arguments
            spec = next((table[name] for name in reversed(names) if name in table), P())
            return NamedSharding(mesh, spec if len(spec) <= x.ndim else P())

        return tree_map_with_path(of, arguments)

    def constrain(self, mesh: Mesh) -> Constrain:
        """Return the function that constrains values inside the program."""

        def to(spec: P, x: Any) -> Any:
            return xlashard.with_sharding_constraint(x, NamedSharding(mesh, spec))

        def constrain(name: str, x: Any) -> Any:
            spec = self.inside.get(name)
            if spec is None:
                return x
            if not isinstance(spec, Turn):
                return to(spec, x)
            forth, back = spec.forth, spec.back
            turned = jax.custom_vjp(lambda x: to(forth, x))
            turned.defvjp(lambda x: (to(forth, x), None), lambda _, ct: (to(back, ct),))
            return turned(x)

        return constrain


def path_names(path: tuple[Any, ...]) -> list[str]:
    """Return the keys and attributes of a path to an array."""
    return [
        str(key.key) if isinstance(key, DictKey) else key.name
        for key in path
        if isinstance(key, DictKey | GetAttrKey)
    ]


def _unconstrained(name: str, x: Any) -> Any:
    del name
    return x


@dataclass(frozen=True)
class BenchmarkProgram:
    """Step of a training or of a decoding loop.

    The first argument is fed back: the step donates it and returns its next value first.

    Attributes:
        title: Description with its size.
        build: Returns the step, a new function, for a function that constrains values inside.
        arguments: Returns the shapes of the arguments.
        layouts: Returns the layouts by name, for a mesh.
        meshes: Sizes of the mesh axes by topology.
    """

    title: str
    build: Callable[[Constrain], Callable[..., Any]]
    arguments: Callable[[], tuple[Any, ...]]
    layouts: Callable[[Mesh], Mapping[str, HandLayout]]
    meshes: Mapping[str, Mapping[str, int]]
    donate: tuple[int, ...] = (0,)

    @property
    def step(self) -> Callable[..., Any]:
        """A new function of the step without constraints."""
        return self.build(_unconstrained)

    def hand_layouts(self, mesh: Mesh) -> dict[str, Any]:
        """Return the step under each layout, a function of `xlashard.pjit`."""
        return {name: self.hand_step(x, mesh) for name, x in self.layouts(mesh).items()}

    def hand_step(self, layout: HandLayout, mesh: Mesh) -> Any:
        """Return the step under a layout.

        Args:
            layout: The layout.
            mesh: A mesh with its axes.
        """
        shardings = layout.shardings(self.arguments(), mesh)
        return xlashard.pjit(
            self.build(layout.constrain(mesh)),
            in_shardings=shardings,
            out_shardings=(shardings[0], NamedSharding(mesh, P())),
            donate_argnums=self.donate,
        )


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape of an array; float32 unless `dtype` is another."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def training_state(parameters: Any) -> dict[str, Any]:
    """Return the shapes of parameters with the state of `OPTIMIZER`."""
    return {
        "parameters": parameters,
        "optimizer": jax.eval_shape(OPTIMIZER.init, parameters),
    }


def training_step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of `OPTIMIZER`.

    Args:
        loss: Function of the parameters and of the step's other arguments.

    Returns:
        A function of the state and the other arguments, which returns the state and the loss.
    """

    def step(state: Any, *others: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["parameters"], *others)
        parameters = state["parameters"]
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], parameters)
        new = {"parameters": optax.apply_updates(parameters, updates), "optimizer": optimizer}
        return new, value

    return step
