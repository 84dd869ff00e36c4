"""What `jax.experimental.maps` held."""

from collections.abc import Hashable
from typing import Any

from xlashard.legacy.meshes import Mesh, mesh
from xlashard.legacy.positional import POSITIONAL as _positional_semantics
from xlashard.legacy.positional import PositionalSemantics as _PositionalSemantics
from xlashard.legacy.refusals import Refusal
from xlashard.legacy.thread_resources import EMPTY_ENV, Loop, ResourceEnv, thread_resources

type AxisName = Hashable
type ResourceAxisName = Hashable
type MeshAxisName = Any

SerialLoop = Refusal("jax.experimental.maps.SerialLoop")
make_xmap_callable = Refusal("jax.experimental.maps.make_xmap_callable")
serial_loop = Refusal("jax.experimental.maps.serial_loop")
xmap = Refusal("jax.experimental.maps.xmap")
xmap_p = Refusal("jax.experimental.maps.xmap_p")

__all__ = [
    "EMPTY_ENV",
    "AxisName",
    "Loop",
    "Mesh",
    "MeshAxisName",
    "ResourceAxisName",
    "ResourceEnv",
    "SerialLoop",
    "_PositionalSemantics",
    "_positional_semantics",
    "make_xmap_callable",
    "mesh",
    "serial_loop",
    "thread_resources",
    "xmap",
    "xmap_p",
]
