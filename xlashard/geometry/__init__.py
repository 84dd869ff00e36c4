"""Placement as pure maths: specs, meshes, tiles, tile assignments and reshard plans, no JAX."""

import typing as _typing

from xlashard.geometry.cuts import Index
from xlashard.geometry.mesh import Box, MeshGrid
from xlashard.geometry.sharding_spec import (
    Chunked,
    DimSharding,
    MeshAxis,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardIndex,
    ShardingSpec,
    Unstacked,
)
from xlashard.geometry.spec import UNCONSTRAINED, DimAxes, Spec, parse_spec, validate_spec
from xlashard.geometry.tile_assignment import TileAssignment
from xlashard.geometry.tiling import Tiling
from xlashard.lazily import on_demand as _on_demand

if _typing.TYPE_CHECKING:
    from xlashard.geometry.assignment import (
        explode_superdims,
        spec_from_tile_assignment,
        spec_from_tiling,
        strides_for_sizes,
        unflatten_array,
        unflatten_superdims,
    )
    from xlashard.geometry.groups import (
        AxisPart,
        DeviceGroups,
        DevicePairs,
        read_groups,
        read_pairs,
    )
    from xlashard.geometry.holders import Runs, holder_runs, kept
    from xlashard.geometry.reshard import Piece, ReshardPlan, reshard_plan
    from xlashard.geometry.rounds import Load, Round, deal_out, load, refined
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.geometry.groups": (
                "AxisPart",
                "DeviceGroups",
                "DevicePairs",
                "read_groups",
                "read_pairs",
            ),
            "xlashard.geometry.holders": (
                "Runs",
                "holder_runs",
                "kept",
            ),
            "xlashard.geometry.reshard": (
                "Piece",
                "ReshardPlan",
                "reshard_plan",
            ),
            "xlashard.geometry.rounds": (
                "Load",
                "Round",
                "deal_out",
                "load",
                "refined",
            ),
            "xlashard.geometry.assignment": (
                "explode_superdims",
                "spec_from_tile_assignment",
                "spec_from_tiling",
                "strides_for_sizes",
                "unflatten_array",
                "unflatten_superdims",
            ),
        },
    )

__all__ = [
    "UNCONSTRAINED",
    "AxisPart",
    "Box",
    "Chunked",
    "DeviceGroups",
    "DevicePairs",
    "DimAxes",
    "DimSharding",
    "Index",
    "Load",
    "MeshAxis",
    "MeshGrid",
    "NoSharding",
    "Piece",
    "Replicated",
    "ReshardPlan",
    "Round",
    "Runs",
    "ShardIndex",
    "ShardedAxis",
    "ShardingSpec",
    "Spec",
    "TileAssignment",
    "Tiling",
    "Unstacked",
    "deal_out",
    "explode_superdims",
    "holder_runs",
    "kept",
    "load",
    "parse_spec",
    "read_groups",
    "read_pairs",
    "refined",
    "reshard_plan",
    "spec_from_tile_assignment",
    "spec_from_tiling",
    "strides_for_sizes",
    "unflatten_array",
    "unflatten_superdims",
    "validate_spec",
]
