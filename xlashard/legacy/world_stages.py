"""Traced, lowered and compiled functions of a world without `jax_array`.

They take and give what a call in that world would: this process's parts of arrays, unless they were
made for global shapes. What they know of the program itself (`in_avals`, its text) is global.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xlashard._jax.tracebacks import shortened
from xlashard._jax.tracing import abstractify
from xlashard.legacy.host_local import HostLocal
from xlashard.legacy.kinds import is_global
from xlashard.legacy.world_function import WorldFunction
from xlashard.pjit import compiled, stages
from xlashard.pjit.call import Call
from xlashard.pjit.face import Face
from xlashard.pjit.prepare import Prepared


class Traced(stages.Traced):
    """A function after tracing.

    Args:
        function: The function.
        call: The call that it was traced for.
        host_local: Where this process's parts become global; None if they are so already.
    """

    def __init__(self, function: WorldFunction, call: Call, host_local: HostLocal | None) -> None:
        super().__init__(function, call)
        self._host_local = host_local

    @shortened
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs what was traced."""
        edge = self._host_local
        if edge is None or kwargs:
            return super().__call__(*args, **kwargs)
        return edge.lower(super().__call__(*edge.lift_dynamic(args)))

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of what a call gives, as its tree of `jax.ShapeDtypeStruct`."""
        whole = super().out_info
        return whole if self._host_local is None else self._host_local.lower_types(whole)

    @shortened
    def lower(self, **options: Any) -> Any:
        """Chooses the place and writes the module, as `xlashard.pjit` does."""
        lowered = super().lower(**options)
        if not isinstance(lowered, stages.Lowered):
            return lowered  # by JAX itself, for its jax.export
        return Lowered(lowered, self._host_local)


class Lowered(stages.Lowered):
    """A module whose program will be called as the era called it.

    Args:
        lowered: The module.
        host_local: Where this process's parts become global; None if they are so already.
    """

    def __init__(self, lowered: stages.Lowered, host_local: HostLocal | None) -> None:
        parts = lowered._order, lowered._interface, lowered._program, lowered._platform
        super().__init__(lowered._traced, *parts)
        self._host_local = host_local

    @shortened
    def compile(
        self,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        share_binary: bool | None = None,
        device_assignment: Sequence[Any] | None = None,
    ) -> "Compiled":
        """Compiles the module, as `xlashard.pjit` does."""
        made = super().compile(
            compiler_options, share_binary=share_binary, device_assignment=device_assignment
        )
        return Compiled(made._face, made._prepared, made._body, self._host_local)


class Compiled(compiled.Compiled):
    """A program whose arguments go where it takes them, but for global arrays, which must be there.

    Args:
        face: Its outside.
        prepared: The program.
        body: Its jaxpr.
        host_local: Where this process's parts become global; None if they are so already.
    """

    def __init__(
        self,
        face: Face,
        prepared: Prepared,
        body: Any = None,
        host_local: HostLocal | None = None,
    ) -> None:
        super().__init__(face, prepared, body)
        self._host_local = host_local

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program."""
        edge = self._host_local
        if edge is None or kwargs:
            return super().__call__(*args, **kwargs)
        return edge.lower(super().__call__(*edge.lift_dynamic(args)))

    def _check_places(self, values: Sequence[Any]) -> None:
        super()._check_places([v if is_global(v) else _type_of(v) for v in values])


def _type_of(value: Any) -> jax.ShapeDtypeStruct:
    aval = abstractify(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
