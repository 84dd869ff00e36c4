"""What `jax.experimental.maps` held."""

from collections.abc import Hashable
from typing import Any

from xlashard.legacy.meshes import Mesh, mesh
from xlashard.legacy.positional import POSITIONAL as _positional_semantics
from xlashard.legacy.positional import PositionalSemantics as _PositionalSemantics
from xlashard.legacy.resources import EMPTY_ENV, Loop, ResourceEnv, thread_resources

type AxisName = Hashable
type ResourceAxisName = Hashable
type MeshAxisName = Any

__all__ = [
    "EMPTY_ENV",
    "AxisName",
    "Loop",
    "Mesh",
    "MeshAxisName",
    "ResourceAxisName",
    "ResourceEnv",
    "_PositionalSemantics",
    "_positional_semantics",
    "mesh",
    "thread_resources",
]
