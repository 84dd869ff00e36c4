"""Behaviours of the era that programs use without a name of its table, found by the code that runs.

The report of uses watches the entry of a few functions: that of `with mesh:`, of `pjit` with None
in its resources, of flags that are read, of members of `GlobalDeviceArray` and of
`thread_resources.env`. Nothing is patched, and without a report nothing is watched.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import jax

from xlashard._jax.legacy_flags import code_of_reads
from xlashard.legacy import flags
from xlashard.legacy.gda import GlobalDeviceArray
from xlashard.legacy.pjit import pjit
from xlashard.legacy.table import Entry, entries
from xlashard.legacy.thread_resources import ThreadResources
from xlashard.sharding import Mesh

type Watcher = Callable[[FrameType], Sequence[Entry]]
"""Returns the entries that a call stands for, from the frame of the called function."""

WITH_MESH = Entry(
    "with mesh:",
    "",
    "differs",
    "",
    "with jax.set_mesh(mesh):",
    "JAX deprecates `with mesh:`, and jax.jit does not read its mesh for a PartitionSpec in "
    "in_shardings or out_shardings.",
)
NONE_IN = Entry(
    "in_axis_resources=None",
    "",
    "differs",
    "",
    "in_shardings=jax.P()",
    "None replicated the argument; in jax.jit's in_shardings it keeps the argument's own sharding.",
)
NONE_OUT = Entry(
    "out_axis_resources=None",
    "",
    "differs",
    "",
    "out_shardings=jax.P()",
    "None replicated the result; in jax.jit's out_shardings it lets the compiler choose.",
)
BEHAVIOURS = (WITH_MESH, NONE_IN, NONE_OUT)

_GDA = "jax.experimental.global_device_array.GlobalDeviceArray"
_MEMBERS = {
    "mesh": "x.sharding.mesh",
    "mesh_axes": "x.sharding.spec",
    "local_shards": "x.addressable_shards",
    "local_data": "x.addressable_data(0)",
}


def watched_code() -> dict[CodeType, Watcher]:
    """Return the functions to watch, by their code objects."""
    env = ThreadResources.env
    reads_mesh = (entries()["jax.experimental.maps.thread_resources"],)
    return {
        Mesh.__enter__.__code__: lambda _: (WITH_MESH,),
        pjit.__code__: _none_in_resources,
        code_of_reads(): _read_flag,
        _code(env.fget): lambda _: reads_mesh,
        _code(env.fset): lambda _: reads_mesh,
        **dict(_members()),
    }


def _members() -> Iterator[tuple[CodeType, Watcher]]:
    """Members of a GlobalDeviceArray that today's arrays lack."""
    for name, today in _MEMBERS.items():
        member = vars(GlobalDeviceArray)[name]
        entry = replace(entries()[_GDA], name=f"{_GDA}.{name}", today=today, note="")
        yield _code(getattr(member, "fget", member)), lambda _, entry=entry: (entry,)


def _code(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def _read_flag(frame: FrameType) -> Sequence[Entry]:
    flag = frame.f_locals.get("flag")
    return tuple(entries()[f"jax.config.{own.name}"] for own in flags.OWN if own is flag)


def _none_in_resources(frame: FrameType) -> Sequence[Entry]:
    given = frame.f_locals
    return [
        behaviour
        for behaviour, names in (
            (NONE_IN, ("in_axis_resources", "in_shardings")),
            (NONE_OUT, ("out_axis_resources", "out_shardings")),
        )
        if any(_has_none(given[name]) for name in names)
    ]


def _has_none(resources: Any) -> bool:
    return any(leaf is None for leaf in jax.tree.leaves(resources, is_leaf=lambda x: x is None))
