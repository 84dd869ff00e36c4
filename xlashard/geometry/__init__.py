"""Placement as pure maths: specs, meshes, tiles, tile assignments and reshard plans, no JAX."""

import typing as _typing

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
from xlashard.geometry.strides import Index
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
        ReplicaGroups,
        SourceTargetPairs,
        read_groups,
        read_pairs,
    )
    from xlashard.geometry.replicas import Runs, head_and_tail, replica_runs
    from xlashard.geometry.reshard import (
        Piece,
        ReshardPlan,
        Round,
        TransferLoad,
        refine,
        reshard_plan,
        schedule_rounds,
        transfer_load,
    )
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.geometry.groups": (
                "AxisPart",
                "ReplicaGroups",
                "SourceTargetPairs",
                "read_groups",
                "read_pairs",
            ),
            "xlashard.geometry.replicas": (
                "Runs",
                "replica_runs",
                "head_and_tail",
            ),
            "xlashard.geometry.reshard": (
                "Piece",
                "ReshardPlan",
                "Round",
                "TransferLoad",
                "refine",
                "reshard_plan",
                "schedule_rounds",
                "transfer_load",
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
    "DimAxes",
    "DimSharding",
    "Index",
    "MeshAxis",
    "MeshGrid",
    "NoSharding",
    "Piece",
    "ReplicaGroups",
    "Replicated",
    "ReshardPlan",
    "Round",
    "Runs",
    "ShardIndex",
    "ShardedAxis",
    "ShardingSpec",
    "SourceTargetPairs",
    "Spec",
    "TileAssignment",
    "Tiling",
    "TransferLoad",
    "Unstacked",
    "explode_superdims",
    "head_and_tail",
    "parse_spec",
    "read_groups",
    "read_pairs",
    "refine",
    "replica_runs",
    "reshard_plan",
    "schedule_rounds",
    "spec_from_tile_assignment",
    "spec_from_tiling",
    "strides_for_sizes",
    "transfer_load",
    "unflatten_array",
    "unflatten_superdims",
    "validate_spec",
]
