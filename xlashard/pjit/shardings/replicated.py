"""Report large values without a sharding that the partitioner leaves whole on every device."""

import math
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

from xlashard._jax.lowering import dtype_name
from xlashard.errors import ReplicationError, ReplicationWarning
from xlashard.pjit.compile import CompiledProgram
from xlashard.pjit.options import PjitOptions
from xlashard.pjit.shardings import uneven as settings
from xlashard.pjit.shardings.resources import AUTO
from xlashard.pjit.shardings.uneven import is_strict, tile_bytes, warn
from xlashard.pjit.trace import Call, expand_out
from xlashard.sharding import Mesh, PartitionSpec, XLACompatibleSharding
from xlashard.wording import in_bytes

type _Value = tuple[str, Any, XLACompatibleSharding]
"""Path, abstract value and final sharding."""


def report_replicated(call: Call, compiled: CompiledProgram, options: PjitOptions) -> None:
    """Report large values of a call that have no sharding and are replicated.

    These are arguments without a requested sharding that are not committed, and results under
    `AUTO`.

    Args:
        call: The call, which has missed the caches.
        compiled: Its program.
        options: The options of its function.

    Raises:
        ReplicationError: If any, under `strict`.
    """
    least, plan = settings.FLAGS.warn_replicated * 2**20, compiled.program.parts.plan
    if len(plan.devices) == 1 or not least:
        return
    arguments = ((*each, "by device_put or in_shardings") for each in _arguments(call, compiled))
    results = ((*each, "in out_shardings") for each in _results(call, compiled, options))
    for path, aval, sharding, by in (*arguments, *results):
        nbytes = tile_bytes(aval, (1,) * aval.ndim)
        if nbytes < least or not sharding.rank_tiling(aval.ndim).is_replicated:
            continue
        text = (
            f"{path} of {call.traced.name} ({dtype_name(aval)}) has no sharding, and the "
            f"partitioner leaves it whole: {in_bytes(nbytes)} on each of {len(plan.devices)} "
            f"devices. Give it {_advice(plan.mesh, aval.shape)}, {by}; P() keeps it whole"
        )
        if is_strict(options.strict):
            raise ReplicationError(text, path=path, device_bytes=nbytes)
        warn(text, ReplicationWarning)


def _arguments(call: Call, compiled: CompiledProgram) -> Iterator[_Value]:
    """Yield the arguments that have no placement."""
    kept = compiled.kept
    arguments = compress(call.miss.arguments or (), kept)
    shardings = compiled.program.parts.in_shardings[len(compiled.consts) :]
    for argument, requested, sharding in zip(
        arguments, compress(call.in_shardings, kept), shardings, strict=True
    ):
        if requested is None and not argument.committed:
            yield argument.path, argument.aval, sharding


def _results(call: Call, compiled: CompiledProgram, options: PjitOptions) -> Iterator[_Value]:
    """Yield the results under `AUTO`."""
    if not any(resource.given is AUTO for resource in options.out_resources.leaves):
        return
    traced, shardings = call.traced, compiled.program.parts.out_shardings
    resources = expand_out(options.out_resources, traced.out_tree)
    # The new values of references follow the results.
    for resource, path, aval, sharding in zip(
        resources, traced.result_paths, traced.jaxpr.out_avals, shardings, strict=False
    ):
        if resource.given is AUTO:
            yield path, aval, sharding


def _advice(mesh: Mesh | None, shape: Sequence[int]) -> str:
    """Return a sharding over the largest axes that divide a dimension, as code."""
    if mesh is None:
        return "one, such as NamedSharding(mesh, P('data'))"
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    for names in (tuple(sizes), *sorted(((name,) for name in sizes), key=lambda n: -sizes[n[0]])):
        for dim, length in enumerate(shape):
            if length and length % math.prod(sizes[name] for name in names) == 0:
                entry = names[0] if len(names) == 1 else names
                return f"one, such as NamedSharding(mesh, {PartitionSpec(*[None] * dim, entry)})"
    return "one after xlashard.pad_to_mesh"
