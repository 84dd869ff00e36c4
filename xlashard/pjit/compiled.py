"""The last stage of a pjit-ed function: compiled."""

from typing import Any

import jax

from xlashard.pjit.arguments import check_values
from xlashard.pjit.executable import Executable
from xlashard.pjit.face import Face, Stage
from xlashard.pjit.prepare import Prepared
from xlashard.pjit.step import BoundStep, bind_step


class Compiled(Executable, Stage, jax.stages.Compiled):
    """A compiled program that takes arguments of one structure, shape and place.

    It is a `jax.stages.Compiled`.
    """

    def __init__(self, face: Face, prepared: Prepared) -> None:
        self._face = face
        self._prepared = prepared

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program, as calling it does."""
        return self(*args, **kwargs)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
        face = self._face
        values, tree = jax.tree_util.tree_flatten((args, kwargs))
        face.check_tree(tree, "compiled")
        check_values(values, face.paths, static=False)
        face.check_concrete(values, f"call the pjit-ed function {face.name} itself there")
        text = "was compiled for {}, but was called with {}"
        face.check_types(values, text, face.otherwise("compiled"))
        self._check_places(values)
        return values, True

    def bind(self, state: Any, *, argnum: int = 0) -> BoundStep:
        """A handle for a loop `state, out = step(state, ...)` that keeps the state's buffers.

        Args:
            state: The first state, an argument of this program.
            argnum: Its position.

        Returns:
            A callable of the other arguments; its `state` gives the state as a pytree of Arrays.

        Raises:
            ArgumentError: If the program's result does not begin with a new state.
        """
        return bind_step(self._prepared, self._face, state, argnum)
