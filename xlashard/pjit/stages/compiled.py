"""The last stage of a pjit-ed function: compiled."""

from collections.abc import Sequence
from typing import Any, Self

import jax

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.tracebacks import short_tracebacks, shortened
from xlashard.pjit.arguments import check_values
from xlashard.pjit.compile import CompiledProgram
from xlashard.pjit.stages.bound_step import BoundStep, bind_step
from xlashard.pjit.stages.executable import Executable
from xlashard.pjit.stages.info import Stage, StageInfo
from xlashard.program.runtime.environment import Target
from xlashard.sharding import Mesh


class Compiled(Executable, Stage, jax.stages.Compiled):
    """A compiled program that takes arguments of one structure, shape and place.

    It is a `jax.stages.Compiled`.
    """

    def __init__(self, info: StageInfo, compiled: CompiledProgram, body: Any = None) -> None:
        self._info = info
        self._compiled = compiled
        self._body = body

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program, as calling it does."""
        return self(*args, **kwargs)

    @classmethod
    def deserialize(
        cls,
        data: bytes,
        *,
        devices: Sequence[Device] | Mesh | None = None,
        in_tree: Any = None,
        out_tree: Any = None,
        allow_other_flags: bool = False,
    ) -> Self:
        """The program of the bytes that `serialize` gave.

        Load only what you trust: it holds machine code. Nothing else in it is run or imported.

        Args:
            data: The bytes.
            devices: The devices to run on, in the program's order or as a mesh; if not given those
                in the same places of the TPU's torus, or of the same numbers.
            in_tree: The tree of `((args, ...), {name: arg, ...})`, needed where a node among them
                has a static part that no file can hold.
            out_tree: The tree of the result, likewise.
            allow_other_flags: Whether this process may have other flags of the compiler
                (`XLA_FLAGS`, `LIBTPU_INIT_ARGS`) than the program was compiled with, and keeps.

        Raises:
            ArgumentError: If an argument is of the wrong kind.
            SavedProgramError: If the bytes are damaged or no saved program, were made by another
                version, with other flags or for other devices, or do not say their trees.

        Example:
            >>> import numpy as np
            >>> from xlashard import pjit
            >>> x = np.arange(3, dtype=np.float32)
            >>> data = pjit(lambda x: {"twice": x * 2}).lower(x).compile().serialize()
            >>> Compiled.deserialize(data)(x)
            {'twice': Array([0., 2., 4.], dtype=float32)}
        """
        from xlashard.pjit.stages.serialization import load  # takes long to import, and few need it

        with short_tracebacks:
            target = Target(devices, allow_other_flags)
            return cls(*load(cls.__name__, data, target, (in_tree, out_tree)))

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
        info = self._info
        values, tree = jax.tree_util.tree_flatten((args, kwargs))
        info.check_tree(tree, "compiled")
        check_values(values, info.paths, static=False)
        info.check_concrete(values, f"call the pjit-ed function {info.name} itself there")
        text = "was compiled for {}, but was called with {}"
        info.check_types(values, text, info.otherwise("compiled"))
        self._check_places(values)
        return values, True

    @shortened
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
        return bind_step(self._compiled, self._info, state, argnum, self._body)
