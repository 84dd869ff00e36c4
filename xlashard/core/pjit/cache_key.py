"""The cache key of a program: everything that it depends on besides its jaxpr."""

from dataclasses import field
from typing import Any

from xlashard._jax.runtime.global_state import trace_context
from xlashard.core.pjit.shardings.resolve import ProgramPlacement
from xlashard.support.lazily import copy_with, dataclass


@dataclass(frozen=True)
class LoweringRequest:
    """Everything that a program depends on besides its jaxpr: the cache key.

    Attributes:
        name: The function's name.
        placement: Devices and shardings.
        layouts: Layouts of arguments and of results; None for the default one.
        donated: For each argument, True if its buffers may be reused.
        keep_unused: True to keep unused arguments.
        options: Compiler options.
        context: The settings in force that JAX's lowering rules read.
        share_binary: True to let one process compile for all. The cache keeps these programs apart
            within one entry.
        moved_from: The devices for which the function was traced, if the placement has others.
    """

    name: str
    placement: ProgramPlacement
    layouts: tuple[tuple[Any, ...], tuple[Any, ...]]
    donated: tuple[bool, ...]
    keep_unused: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    context: Any = field(default_factory=trace_context)
    share_binary: bool = False
    moved_from: tuple[Any, ...] = ()

    def canonicalize(self) -> "LoweringRequest":
        """Return the key of the cache entry that serves this request."""
        return copy_with(self, placement=self.placement.canonicalize(), share_binary=False)
