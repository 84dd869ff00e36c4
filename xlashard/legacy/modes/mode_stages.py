"""Traced, lowered and compiled stages of `legacy.pjit`, with the dialects and methods of 2022.

With `jax_array` off their arguments and results are host-local, as those of a call are, unless
they were lowered with `_global_avals=True`. The shapes that they report are global.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xlashard._jax.modules import to_text
from xlashard._jax.runtime.tracebacks import shortened
from xlashard._jax.stablehlo_parse import to_mhlo
from xlashard._jax.trace.tracing import abstractify
from xlashard.legacy.modes.host_local import HostLocal
from xlashard.legacy.modes.mode_function import ModeFunction, is_global
from xlashard.pjit.stages import compiled
from xlashard.pjit.stages import traced as stages
from xlashard.pjit.trace import Call


def _called(
    call: Callable[..., Any],
    host_local: HostLocal | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a stage, also with host-local arguments."""
    if host_local is None or kwargs:
        return call(*args, **kwargs)
    return host_local.lower(call(*host_local.lift_dynamic(args)))


class ModeTraced(stages.Traced):
    """Traced function.

    Args:
        function: The function.
        call: The call that it was traced for.
        host_local: Converts host-local arguments and results; None if they are global.
    """

    def __init__(self, function: ModeFunction, call: Call, host_local: HostLocal | None) -> None:
        super().__init__(function, call)
        self._host_local = host_local

    @shortened
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the traced function."""
        return _called(super().__call__, self._host_local, args, kwargs)

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the result, as a tree of `jax.ShapeDtypeStruct`."""
        whole = super().out_info
        return whole if self._host_local is None else self._host_local.lower_types(whole)

    @shortened
    def lower(self, **options: Any) -> Any:
        """Resolve the shardings and lower the function, as `xlashard.pjit` does."""
        lowered = super().lower(**options)
        if not isinstance(lowered, stages.Lowered):
            return lowered  # JAX's own, for jax.export
        return ModeLowered(lowered, self._host_local)


class ModeLowered(stages.Lowered):
    """Lowered function whose compiled program takes host-local or global arguments.

    Args:
        lowered: The module.
        host_local: Converts host-local arguments and results; None if they are global.
    """

    def __init__(self, lowered: stages.Lowered, host_local: HostLocal | None) -> None:
        parts = lowered._request, lowered._signature, lowered._program, lowered._platform
        super().__init__(lowered._traced, *parts)
        self._host_local = host_local

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the module as text.

        Args:
            dialect: `"stablehlo"`, which None means, `"mhlo"` or `"hlo"`.
            debug_info: Include the source locations.
        """
        if dialect == "mhlo":
            return to_text(self.compiler_ir("mhlo"), debug_info=debug_info)
        return super().as_text(dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Return the module as an object.

        Args:
            dialect: `"stablehlo"`, which None means, `"mhlo"` or `"hlo"`.
        """
        if dialect == "mhlo":
            return to_mhlo(super().compiler_ir("stablehlo"))
        return super().compiler_ir(dialect)

    @shortened
    def compile(
        self,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        share_binary: bool | None = None,
        device_assignment: Sequence[Any] | None = None,
    ) -> "ModeCompiled":
        """Compile the module, as `xlashard.pjit` does."""
        made = super().compile(
            compiler_options, share_binary=share_binary, device_assignment=device_assignment
        )
        function: Any = self._traced._function
        kind = ModeCompiled if function.mode.jax_array else HostLocalCompiled
        out = kind(made._info, made._compiled, made._body)
        out._host_local = self._host_local
        return out


class ModeCompiled(compiled.Compiled):
    """Compiled program."""

    # Converts host-local arguments and results; None if they are global.
    _host_local: HostLocal | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return _called(super().__call__, self._host_local, args, kwargs)

    def compiler_ir(self) -> list[Any]:
        """Return the optimised module of each partition, as an `HloModule` of jaxlib."""
        return compiled_ir(self)


class HostLocalCompiled(ModeCompiled):
    """Compiled program that moves host-local arguments to its devices, but no global ones."""

    def _check_places(self, values: Sequence[Any]) -> None:
        super()._check_places([v if is_global(v) else _type_of(v) for v in values])


def _type_of(value: Any) -> jax.ShapeDtypeStruct:
    aval = abstractify(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def compiled_ir(self: Any) -> list[Any]:
    """Return the optimised modules of a compiled stage: `Compiled.compiler_ir` until JAX 0.3.25."""
    return self.runtime_executable().hlo_modules()


_AS_TEXT, _COMPILER_IR = jax.stages.Lowered.as_text, jax.stages.Lowered.compiler_ir


def lowered_ir(self: Any, dialect: str | None = None) -> Any:
    """Return the module of a lowered stage of JAX, also in the dialect `"mhlo"`."""
    if dialect == "mhlo":
        return to_mhlo(_COMPILER_IR(self, "stablehlo"))
    return _COMPILER_IR(self, dialect)


def lowered_text(self: Any, dialect: str | None = None, *, debug_info: bool = False) -> str:
    """Return the text of a lowered stage of JAX, also in the dialect `"mhlo"`."""
    if dialect == "mhlo":
        return to_text(lowered_ir(self, dialect), debug_info=debug_info)
    return _AS_TEXT(self, dialect, debug_info=debug_info)
