"""Lower jaxprs to the body of a StableHLO module, by JAX's lowering rules."""

import functools
import inspect
import itertools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import jax

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.private import (
    core,
    effects_lib,
    find_name,
    ir,
    mlir,
    passmanager,
    pxla,
    sharding_impls,
)
from xlashard._jax.runtime.compiler import NamedClient
from xlashard._jax.runtime.global_state import cached_by_jaxpr
from xlashard._jax.runtime.shardings import (
    AbstractMesh,
    Device,
    JaxNamedSharding,
    JaxSharding,
    hlo_text,
)
from xlashard._jax.trace.jaxprs import array_literals, callback_names
from xlashard._jax.trace.primitive_names import MEMORY_MOVES
from xlashard._jax.trace.tracing import Jaxpr, inner_primitives, inner_shardings, needs_devices
from xlashard.errors import CompileError
from xlashard.support.lazily import dataclass


@dataclass(frozen=True, eq=False)
class LoweredBody:
    """A module with an unannotated `@main`, and the objects that must live as long as its program.

    Attributes:
        module: The module, whose `@main` takes the tokens of `ordered_effects`, then the arguments;
            None for a loaded program.
        main: The `func.func @main` operation.
        ordered_effects: Effects whose tokens come first among arguments and results.
        has_effects: True if the program must be run with tokens.
        keepalives: Python objects that the module points to.
        host_callbacks: Callbacks to pass to the compiler.
        callbacks: The names of the Python functions that the program calls.
    """

    module: Any = None
    main: Any = None
    ordered_effects: tuple[Any, ...] = ()
    has_effects: bool = False
    keepalives: tuple[Any, ...] = ()
    host_callbacks: tuple[Any, ...] = ()
    callbacks: tuple[str, ...] = ()

    @property
    def is_self_contained(self) -> bool:
        """Return True for a program that its module defines, without effects and Python objects."""
        return not (self.has_effects or self.keepalives or self.host_callbacks)


@dataclass(frozen=True)
class LoweringTarget:
    """Platform and devices to lower for.

    Attributes:
        platform: `"cpu"`, `"tpu"`, `"cuda"`, ...
        client: The PJRT client, or None to lower without one.
        devices: The device assignment.
        shardings: The shardings of the program, for primitives that depend on mesh or memory.
    """

    platform: str
    client: Any
    devices: tuple[Device, ...]
    shardings: tuple[Any, ...] = ()


def lower_body(
    jaxpr: Jaxpr, name: str, arg_names: Sequence[str], to: LoweringTarget
) -> LoweredBody:
    """Lower a closed jaxpr into the `@main` of a new module, without annotations.

    The array literals of the jaxpr are the first arguments of `@main`.
    """
    unlowerable = effects_lib.lowerable_effects.filter_not_in(jaxpr.effects)
    if unlowerable:
        # no-catalogue: effects of references differ by number
        raise CompileError(f"the program has effects that JAX can't lower: {unlowerable}")
    ordered = tuple(effects_lib.ordered_effects.filter_in(jaxpr.effects))
    unordered = tuple(effects_lib.ordered_effects.filter_not_in(jaxpr.effects))
    if len(to.devices) > 1:
        single = effects_lib.shardable_ordered_effects.filter_not_in(ordered)
        if single:
            kinds = ", ".join(sorted(type(effect).__name__ for effect in single))
            raise CompileError(
                f"ordered effects such as {kinds} run on one device only, the program is for "
                f"{len(to.devices)}: leave ordered=True out"
            )
    bound = to.devices if needs_devices(jaxpr) else None
    literals = [aval for _, aval in array_literals(jaxpr)]
    result_types: dict[str, Any] = {}
    if _takes_result_types():
        result_types["out_avals"] = list(jaxpr.out_avals)
    context = mlir.ModuleContext(
        platforms=(to.platform,),
        backend=to.client and NamedClient(to.client, to.platform),
        axis_context=sharding_impls.ShardingContext(
            len(to.devices), bound, _abstract_mesh(to.shardings) if bound else None
        ),
        keepalives=[],
        # The first channel is reserved for collectives.
        channel_iterator=itertools.count(mlir.COLLECTIVE_CHANNEL_ID + 1),
        host_callbacks=[],
        lowering_parameters=mlir.LoweringParameters(hoist_constants_as_args=False),
        all_default_mem_kind=_keeps_to_default_memory(jaxpr, to.shardings),
        **_collective_ids(jaxpr, to.platform),
    )
    with context.context, ir.Location.unknown(context.context):
        main = mlir.lower_jaxpr_to_fun(
            context,
            name,
            jaxpr,
            ordered,
            num_const_args=len(literals),
            main_function=True,
            in_avals=[*literals, *jaxpr.in_avals],
            **result_types,
            arg_names=list(arg_names),
        )
    module = context.module
    if context.shape_poly_state.uses_dim_vars:
        # A call of an export with symbolic dimensions; the arguments make them static.
        module = mlir.refine_polymorphic_shapes(module)
        main = modules.main_function(module)
    return LoweredBody(
        module=module,
        main=main,
        ordered_effects=ordered,
        has_effects=bool(ordered or unordered or context.host_callbacks),
        keepalives=tuple(context.keepalives),
        host_callbacks=tuple(context.host_callbacks),
        callbacks=callback_names(jaxpr) if context.keepalives or context.host_callbacks else (),
    )


@functools.lru_cache(maxsize=1)
def _takes_result_types() -> bool:
    """Return whether JAX's lowering takes the types of results, which JAX 0.10 reads itself.

    Reading a signature takes a twentieth of the time that a small function takes to lower.
    """
    return "out_avals" in inspect.signature(mlir.lower_jaxpr_to_fun).parameters


def _collective_ids(jaxpr: Jaxpr, platform: str) -> dict[str, Any]:
    """Return the argument of a lowering that numbers the collectives of Pallas kernels on TPUs."""
    if platform != "tpu":
        return {}
    mapping = find_name(mlir, "CollectiveIdMapping")
    # JAX 0.11.0 and older number them while they lower them.
    if not hasattr(mapping, "from_jaxpr"):
        return {}
    return {"pallas_collective_id_mapping": mapping.from_jaxpr(jaxpr)}


@cached_by_jaxpr
def memory_transfers(jaxpr: Jaxpr) -> tuple[Any, ...]:
    """Return the memory spaces that equations inside name for their results."""
    is_moving = any([primitive.name in MEMORY_MOVES for primitive in inner_primitives(jaxpr)])
    return tuple(pxla.jaxpr_transfer_mem_kinds(jaxpr)) if is_moving else ()


def _keeps_to_default_memory(jaxpr: Jaxpr, shardings: Sequence[Any]) -> bool:
    """Return True if every value is in the default memory; only then rules may omit transfers."""
    return pxla.are_all_shardings_default_mem_kind(
        [*shardings, *inner_shardings(jaxpr), *memory_transfers(jaxpr)]
    )


def memory_kind_of(aval: Any) -> str | None:
    """Return the memory kind in the type of a value; None for the default one."""
    space = getattr(aval, "memory_space", None)
    if space in (None, jax.memory.Space.Device, jax.memory.Space.Any):
        return None
    return core.mem_space_to_kind(space)


def _abstract_mesh(shardings: Sequence[Any]) -> AbstractMesh | None:
    meshes = {s.mesh.abstract_mesh for s in shardings if isinstance(s, JaxNamedSharding)}
    if len(meshes) > 1:
        raise CompileError(  # no-catalogue: no primitive of JAX needs it under two meshes
            f"a primitive of the program requires one mesh, but its shardings have {len(meshes)}: "
            + ", ".join(map(str, meshes))
        )
    return next(iter(meshes), None)


def uses_shardy() -> bool:
    """Return True if the Shardy partitioner is in force, False for GSPMD."""
    return jax.config.jax_use_shardy_partitioner


def lift_meshes(module: Any) -> None:
    """Replace each mesh inside an annotation by a `sdy.mesh` symbol."""
    with module.context:
        passmanager.PassManager.parse("builtin.module(sdy-lift-inlined-meshes)").run(
            module.operation
        )


def constrain(ctx: Any, x: Any, text: str, open_dims: Sequence[int]) -> Any:
    """Insert the sharding constraint of a value inside a body, and return its result.

    Args:
        ctx: The context of a lowering rule.
        x: The value.
        text: Shardy's attribute, or the HLO sharding.
        open_dims: Dimensions left to the partitioner; Shardy's text contains them.
    """
    if uses_shardy():
        return modules.shardy_constraint(x, text)
    return modules.sharding_call(x, modules.Constraint(text, tuple(open_dims))).result


def device_count(ctx: Any) -> int:
    """Return the number of devices of the program that a lowering rule emits."""
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, sharding_impls.SPMDAxisContext):
        return axis_context.mesh.size
    return getattr(axis_context, "num_devices", 0)


def manual_axes(ctx: Any) -> frozenset[str]:
    """Return the mesh axes that are manual here, inside a `shard_map`."""
    axis_context = ctx.module_context.axis_context
    if not isinstance(axis_context, sharding_impls.SPMDAxisContext):
        return frozenset()
    return frozenset(axis_context.manual_axes)


def manual_text(ctx: Any, sharding: JaxSharding, ndim: int) -> str:
    """Return the HLO sharding of a value where some mesh axes are manual."""
    axis_context = ctx.module_context.axis_context
    return hlo_text(mlir.add_manual_axes(axis_context, sharding, ndim)._to_xla_hlo_sharding(ndim))


def register_lowering(primitive: Any, rule: Callable[..., Any]) -> None:
    """Register the lowering rule of a primitive, for every platform."""
    mlir.register_lowering(primitive, rule)


def lowering_entries() -> MutableMapping[Any, Any]:
    """Return JAX's lowering rules, by primitive, for the platforms without one of their own.

    JAX has no function that reads its rules. Lowering a call finds a missing one too, for which
    the primitive's operands would have to be known.
    """
    return mlir._lowerings


def aval_text(aval: Any) -> str:
    """Return the type of a value as jaxprs print it, such as `float32[8,16]` or `token`."""
    if aval is core.abstract_token:
        return "token"
    if isinstance(aval, jax.ShapeDtypeStruct):
        aval = jax.core.ShapedArray(aval.shape, aval.dtype)
    return aval.str_short() if isinstance(aval, jax.core.ShapedArray) else str(aval)
