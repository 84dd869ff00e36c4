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
from xlashard.pjit.shardings.uneven import is_strict, tile_bytes, warn
from xlashard.pjit.trace import Call
from xlashard.sharding import Mesh, PartitionSpec, XLACompatibleSharding
from xlashard.wording import in_bytes

type _Value = tuple[str, Any, XLACompatibleSharding]
"""Path, abstract value and final sharding."""


def report_replicated(call: Call, compiled: CompiledProgram, options: PjitOptions) -> None:
    """Report large values of a call that have no sharding and are replicated.

    These are arguments without a requested sharding that are not committed. A layout chosen under
    `AUTO` replicates on purpose.

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
    for path, aval, sharding in _arguments(call, compiled):
        nbytes = tile_bytes(aval, (1,) * aval.ndim)
        if nbytes < least or not sharding.rank_tiling(aval.ndim).is_replicated:
            continue
        text = (
            f"{path} of {call.traced.name} ({dtype_name(aval)}) has no sharding, and the "
            f"partitioner leaves it whole: {in_bytes(nbytes)} on each of {len(plan.devices)} "
            f"devices. Give it {_advice(plan.mesh, aval.shape)}, by device_put or "
            "in_shardings; P() keeps it whole, and AUTO chooses"
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
