"""One call of a pjit-ed function, before anything of it is placed."""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

from xlashard._jax.runtime import global_state
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace import tracing
from xlashard.array.core.handles import KindOf
from xlashard.lazily import dataclass
from xlashard.pjit.arguments import Argument
from xlashard.pjit.lower import LoweringRequest
from xlashard.pjit.recompile.history import CacheMiss, CallKey, StaticValue
from xlashard.sharding import Mesh, Sharding


@dataclass(frozen=True, eq=False)
class Call:
    """One call, as far as it is known before anything is placed.

    Attributes:
        traced: The function, traced for its arguments.
        values: The dynamic arguments, flat.
        mesh: The mesh in force, or None.
        in_shardings: For each argument what was said of it; None for nothing.
        out_shardings: For each result what was said of it; None for nothing.
        layouts: The layouts that were asked for, of arguments and of results.
        donated: For each argument whether its buffers may be reused.
        statics: The static arguments: names, values, and whether they were passed by name.
        kind_of: Which class of arrays a result is; None for `Array`.
        miss: The stages that the call had to run.
        assign: See `ShardingRequest`.
    """

    traced: tracing.TracedFunction
    values: tuple[Any, ...]
    mesh: Mesh | None
    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]
    layouts: tuple[tuple[Any, ...], tuple[Any, ...]]
    donated: tuple[bool, ...]
    statics: tuple[tuple[str, Any, bool], ...] = ()
    kind_of: KindOf | None = None
    miss: CacheMiss = field(default_factory=CacheMiss)
    assign: Callable[[int], tuple[Device, ...]] | None = None

    def on(self, values: Sequence[Any]) -> "Call":
        """The same call with other arguments of the same types."""
        return replace(self, values=tuple(values), miss=CacheMiss())

    def key(
        self, order: LoweringRequest | None, options: tuple[tuple[str, Any], ...] = ()
    ) -> CallKey:
        """Return the key by which recompilations compare calls.

        Args:
            order: The program it needs; None as long as it is only traced.
            options: Options of the compiler, where there is no order yet.
        """
        traced, arguments = self.traced, self.miss.arguments
        if arguments is None:
            types = zip(traced.arg_names, traced.in_avals, strict=True)
            arguments = tuple(
                Argument(path, tracing.shaped(aval), None, False) for path, aval in types
            )
        return CallKey(
            source=tracing.source_of(traced.jaxpr),
            in_tree=traced.in_tree,
            arguments=arguments,
            statics=tuple(StaticValue.of(*static) for static in self.statics),
            mesh=self.mesh,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            result_paths=traced.result_paths,
            donated=self.donated,
            devices=None if order is None else order.placement.devices,
            options=options if order is None else order.options,
            context=global_state.trace_context() if order is None else order.context,
        )
