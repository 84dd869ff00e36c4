"""Lower a jaxpr to an annotated StableHLO module, and find its closed-over values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax.lowering import (
    LoweringTarget,
    aval_text,
    lower_body,
    memory_kind_of,
)
from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.dispatch import handles_of_keys
from xlashard._jax.runtime.shardings import Device, layout_text
from xlashard._jax.runtime.transfer import base_handle, lacks_buffer
from xlashard._jax.trace.jaxprs import (
    array_literals,
    drop_unused,
    has_unreduced,
    hoist,
    is_host_array,
    is_ref,
    reference_positions,
    short_index,
    without_high_level,
    without_references,
)
from xlashard._jax.trace.rewriting import (
    TrimmingBeforeDilation,
    WholeValuesFirst,
    has_trimmed_dilation,
    must_be_whole,
)
from xlashard._jax.trace.tracing import (
    abstractify,
    has_tokens,
    is_extended,
    is_token,
    physical_aval,
    shaped,
    sharding_of_type,
    source_of,
    typed_axes,
)
from xlashard.core.array.array_class.closed_over import closure_variable_name
from xlashard.core.array.placement.read import handle_value
from xlashard.core.pjit.arguments import bare, check_alive
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.shardings.unreduced import check_reductions, unreduced_axes
from xlashard.core.program.donation import check_open_layouts
from xlashard.core.program.lowered import LoweredProgram, lower_program
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan, open_dims
from xlashard.core.sharding import (
    NamedSharding,
    Sharding,
    XLACompatibleSharding,
    from_jax,
    move_to,
    partition_spec,
)
from xlashard.core.sharding.replicated import custom_memory_kind
from xlashard.errors import ArgumentError, CompileError, MeshError
from xlashard.support.formatting import format_axes
from xlashard.support.lazily import copy_with, dataclass, deferred

if TYPE_CHECKING:
    from xlashard.core import processes
    from xlashard.core.program.consistency.fingerprint import ValueNamer
else:
    processes = deferred("xlashard.core.processes")


# A closed-over array above this size, in bytes, becomes an argument of the program, not a constant
# in it.
_LARGEST_CONSTANT = 1 << 16


def is_hoisted(value: Any) -> bool:
    """Return True if a closed-over value becomes an argument of the program.

    References and arrays that are large or on several devices do.
    """
    if is_ref(value):
        return True
    if is_host_array(value):
        return value.nbytes > _LARGEST_CONSTANT
    if not isinstance(value, jax.Array) or value.ndim == 0:
        return False
    handle = bare(value)
    spread = handle.sharding.num_devices > 1
    return spread or value.size * value.dtype.itemsize > _LARGEST_CONSTANT


def closed_over_sharding(value: Any) -> XLACompatibleSharding | None:
    """Return the sharding of a closed-over array over several devices; None for other values."""
    handle = bare(value)
    if not isinstance(handle, jax.Array):
        return None
    sharding = from_jax(handle.sharding)
    if not isinstance(sharding, XLACompatibleSharding) or sharding.num_devices == 1:
        return None
    return sharding


def closed_over_values(jaxpr: Any, consts: Iterable[Any]) -> list[Any]:
    """Return some of the consts of a closed jaxpr, and all arrays that stand in it."""
    return [*consts, *[value for value, _ in array_literals(jaxpr)]]


type ClosedOver = tuple[tuple[Callable[[], str], Sharding], ...]
"""Description and sharding of closed-over arrays."""


def closed_over_places(values: Iterable[Any], function: Any) -> ClosedOver:
    """Find the closed-over arrays that are committed to several devices.

    The buffer of a reference keeps its placement, also on one device.

    Args:
        values: The closed-over values that a function uses.
        function: The function.

    Returns:
        For each its description for errors, and its sharding.
    """
    arrays, references = [], []
    for value in values:
        if is_ref(value):
            sharding = from_jax(bare(value).sharding)
            references.append((lambda: "a reference that the function closes over", sharding))
        elif isinstance(value, jax.Array) and bare(value).committed:
            sharding = closed_over_sharding(value)
            if sharding is not None:
                # The search for its variable runs for errors only.
                arrays.append((partial(named_value, value, function, "the function"), sharding))
    return tuple(arrays + references)


def named_value(value: Any, function: Any, called: str) -> str:
    """Describe a closed-over array, by its variable if there is one."""
    variable = None if function is None else closure_variable_name(function, value)
    if variable is None:
        return f"an array that {called} closes over"
    return f"{variable}, an array that {called} closes over"


def check_closed_over(jaxpr: Any, name: str, function: Any = None) -> None:
    """Refuse a function that closes over an array that lacks buffers.

    Args:
        jaxpr: The closed jaxpr.
        name: The name of the function.
        function: The Python function, or None.

    Raises:
        DeletedError: With the function, the variable and the array's type.
    """
    naming = partial(named_value, function=function, called=name)
    check_closed_alive(closed_over_values(jaxpr, jaxpr.consts), name, naming)


def check_closed_alive(
    values: Iterable[Any], called: str, naming: "ValueNamer | None" = None
) -> None:
    """Refuse closed-over values that lack buffers.

    Args:
        values: The values, or their handles.
        called: The function.
        naming: Returns the name of a value; None where its variable is unknown.

    Raises:
        DeletedError: With the name and the type of the first.
    """
    for value in values:
        handle = base_handle(bare(value))
        if handle is not None and lacks_buffer(handle):
            name = named_value(value, None, called) if naming is None else naming(value)
            check_alive(value, name, abstractify(bare(value)))


@dataclass(frozen=True, eq=False)
class ClosedValues:
    """The closed-over values of a function, as processes compare them.

    Attributes:
        hoisted: Arguments of its program. The other values are constants of its module.
        all: All of them.
    """

    hoisted: tuple[Any, ...]
    all: tuple[Any, ...]

    def digests(self) -> tuple[str, ...]:
        """Return a digest of each hoisted value; empty for one that spans processes."""
        return tuple(map(_digest, self.hoisted))

    def describe(self, naming: "ValueNamer | None") -> tuple[tuple[str, str, str], ...]:
        """Return name, type and digest of every closed-over value."""
        name = partial(named_value, function=None, called="it") if naming is None else naming
        return tuple((name(value), str(abstractify(value)), _digest(value)) for value in self.all)


def _digest(value: Any) -> str:
    """Return a digest of a value of this process alone; empty for one that spans processes."""
    if is_ref(value):
        return ""
    if not isinstance(value, jax.Array):
        return processes.digest(np.asarray(value)).hex()
    handle = bare(value)
    if handle.is_deleted() or not handle.is_fully_addressable:
        return ""
    return processes.digest(handle_value(*handles_of_keys([handle]))).hex()


def lower_jaxpr(
    jaxpr: Any, request: LoweringRequest, platform: str | None = None
) -> LoweredProgram:
    """Return the module of a jaxpr.

    It must not hold the jaxpr: the programs of a function are dropped with the function's jaxpr.

    Args:
        jaxpr: The closed jaxpr.
        request: The canonical request.
        platform: Another platform than that of the devices, for a module to be read only.

    Raises:
        ArgumentError: If an index is too short for its dimension.
        CompileError: If a primitive has no rule for the platform.
        DeletedError: If a closed-over array is deleted.
        UnreducedError: If XLA can't do what the function does with unreduced values.
    """
    if jaxpr.consts:
        check_closed_over(jaxpr, request.name)
    if has_unreduced(jaxpr):
        check_reductions(jaxpr, request.name)
        jaxpr = WholeValuesFirst().jaxpr(jaxpr)
    if len(request.placement.devices) > 1 and has_trimmed_dilation(jaxpr):
        jaxpr = TrimmingBeforeDilation().jaxpr(jaxpr)
    devices: tuple[Device, ...] = request.placement.devices
    low = without_high_level(jaxpr)
    hoisted, consts = hoist(low, [is_hoisted(c) for c in low.consts])
    ready, written = without_references(hoisted)
    kept = (True,) * len(hoisted.in_avals)
    if not request.keep_unused:
        ready, kept = drop_unused(ready)
    _check_indices(ready, request.name)
    _check_explicit_meshes(jaxpr, request.name, len(devices))
    literals = array_literals(ready)
    # JAX passes arrays that stand in a jaxpr before all arguments.
    first = len(literals)
    consts: list[Any] = [*[value for value, _ in literals], *consts]
    kept = (*(True,) * first, *kept)
    written: Sequence[int] = [first + i for i in written]
    in_avals = (*[aval for _, aval in literals], *ready.in_avals)
    names = ready.debug_info.safe_arg_names(len(ready.in_avals))
    arg_names = (*("",) * first, *names)
    plan = _plan(request, ready, (in_avals, arg_names), (consts, kept, written))
    known = [v.sharding for v in (*plan.args, *plan.results) if v.sharding is not None]
    target = LoweringTarget(
        platform=platform or compiler.platform_of(devices[0]),
        client=compiler.client_of(devices[0]) if platform is None else None,
        devices=devices,
        shardings=tuple(known),
    )
    try:
        body = lower_body(ready, request.name, arg_names, target)
    except CompileError as error:
        text = f"{request.name} can't be lowered: {error}"
        raise CompileError(text, also=ValueError) from None
    lowered = lower_program(plan, body, (in_avals, ready.out_avals), source_of(ready))
    check_open_layouts(plan, lowered.donation, request.name)
    count, used = len(consts), tuple(compress(consts, kept))
    of_call = kept[count:]
    types = (*hoisted.in_avals, *hoisted.out_avals)
    return copy_with(
        lowered,
        kept=of_call,
        unused=_unused_donations(jaxpr, request, of_call) if any(request.donated) else (),
        consts=used,
        written=tuple([consts[i] if i < count else i - count for i in written]),
        stateful=has_tokens(types) or bool(reference_positions(hoisted)),
        closed=ClosedValues(used, (*consts[:first], *low.consts)),
    )


type _Names = tuple[tuple[Any, ...], Sequence[Any]]
"""Abstract values and paths of the arguments of a program."""

type _Inputs = tuple[list[Any], tuple[bool, ...], Sequence[int]]
"""Hoisted values, whether the program takes each of them and each argument, and those written."""


def _plan(request: LoweringRequest, ready: Any, arguments: _Names, inputs: _Inputs) -> ProgramPlan:
    """Return the plan of a jaxpr from which state and unused arguments are removed."""
    placement, (consts, kept, written) = request.placement, inputs
    multi = len(placement.devices) > 1
    const_shardings = [closed_over_sharding(c) if multi else None for c in consts]
    if request.moved_from:
        devices = dict(zip(request.moved_from, placement.devices, strict=True))
        const_shardings = [move_to(sharding, devices) for sharding in const_shardings]
    ins = [*const_shardings, *placement.in_shardings]
    layouts = [*(None,) * len(consts), *request.layouts[0]]
    donated = [*(False,) * len(consts), *request.donated]
    for i in written:
        # A reference is written in place, unless the partitioner may choose its sharding.
        donated[i] = not multi or ins[i] is not None
    requested = zip(placement.out_shardings, ready.out_avals, strict=False)
    results = [None if s is None else _open_typed_result(s, aval) for s, aval in requested]
    outs = [*results, *[ins[i] for i in written]]
    out_layouts = [*request.layouts[1], *[layouts[i] for i in written]]
    result_names = ready.debug_info.safe_result_paths(len(ready.out_avals))
    avals, names = arguments
    args = tuple(map(_value, avals, compress(ins, kept), compress(layouts, kept), names))
    return ProgramPlan(
        name=f"pjit_{request.name}",
        devices=placement.devices,
        args=args,
        results=tuple(map(_value, ready.out_avals, outs, out_layouts, result_names)),
        donated=tuple(
            [d and not v.is_token for d, v in zip(compress(donated, kept), args, strict=True)]
        ),
        partitioner=Partitioner.in_force(),
        options=request.options,
        mesh=placement.mesh,
        context=request.context,
    )


def _check_indices(jaxpr: Any, name: str) -> None:
    """Refuse a program that indexes a dimension with integers of too few bits.

    Raises:
        ArgumentError: With the type of the array.
    """
    indexed = short_index(jaxpr)
    if indexed is not None:
        aval, integers = indexed
        raise ArgumentError(
            f"{name} indexes an array {aval_text(aval)} with {integers}, which ends at "
            f"{2**31 - 1:,}: call jax.config.update('jax_enable_x64', True) and index with int64, "
            "or reshape the array to shorter dimensions"
        )


def _check_explicit_meshes(jaxpr: Any, name: str, devices: int) -> None:
    """Refuse a program on fewer or more devices than the types of its results prescribe.

    Raises:
        MeshError: With the result and its type.
    """
    paths = jaxpr.debug_info.safe_result_paths(len(jaxpr.out_avals))
    for aval, path in zip(jaxpr.out_avals, paths, strict=True):
        typed = sharding_of_type(aval)
        if typed is not None and typed[0].size != devices:
            mesh = format_axes(typed[0].shape)
            raise MeshError(
                f"{path or 'a result'} of {name} ({aval_text(aval)}) is on a mesh of explicit axes "
                f"({mesh}), which has {typed[0].size} devices, but the program runs on {devices}: "
                "call it inside `with jax.set_mesh(mesh):` of that mesh"
            )


def _unused_donations(
    jaxpr: Any, request: LoweringRequest, kept: Sequence[bool]
) -> tuple[ValuePlan, ...]:
    """Return the donated arguments that no result needs."""
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.in_avals))
    marks = zip(request.donated, kept, jaxpr.in_avals, strict=True)
    chosen = [donated and not stays and not is_token(aval) for donated, stays, aval in marks]
    values = jaxpr.in_avals, request.placement.in_shardings, repeat(None), names
    return tuple(map(_value, *(compress(side, chosen) for side in values)))


def _open_typed_result(sharding: XLACompatibleSharding, aval: Any) -> XLACompatibleSharding:
    """Return the sharding of a result with all dimensions open, if its type prescribes it.

    Where it has open dimensions, automatic axes may also cut those of explicit axes, which the
    operations of the body pin.
    """
    if not open_dims(sharding) or not isinstance(sharding, NamedSharding):
        return sharding
    typed, dims = typed_axes(aval), sharding.normal_spec.for_rank(aval.ndim)
    if not typed or any(
        axes is not None and axes != cut for axes, cut in zip(dims, typed, strict=True)
    ):
        return sharding
    spec = replace(sharding.normal_spec, dims=(None,) * aval.ndim)
    return sharding.with_spec(partition_spec(spec))


def _must_be_whole(aval: Any, sharding: Any) -> bool:
    """Return True if a result becomes an unreduced one by way of the whole value."""
    return not unreduced_axes(aval) and must_be_whole(aval.sharding, sharding)


def _value(aval: Any, sharding: XLACompatibleSharding | None, layout: Any, name: str) -> ValuePlan:
    plan = _plan_unnamed(aval, sharding, layout)
    return plan.with_name(name) if name else plan


# Most values of a large program are alike in all but their names.
@lru_cache(maxsize=4096)
def _plan_unnamed(aval: Any, sharding: XLACompatibleSharding | None, layout: Any) -> ValuePlan:
    trailing, token = 0, is_token(aval)
    if token:
        sharding, aval = None, shaped(aval)
    elif is_extended(aval):
        trailing = physical_aval(aval).ndim - aval.ndim
    return ValuePlan(
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        sharding=sharding,
        layout=layout_text(layout, aval.dtype),
        memory_kind=memory_kind_of(aval) if sharding is None else custom_memory_kind(sharding),
        trailing=trailing,
        is_token=token,
        is_whole=sharding is not None and sharding.is_unreduced and _must_be_whole(aval, sharding),
    )
