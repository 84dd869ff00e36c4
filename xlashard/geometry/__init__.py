"""Placement as pure maths: specs, meshes, tiles, tile assignments and reshard plans, no JAX."""

import typing as _typing

from xlashard.geometry.assignment import Runs as Runs
from xlashard.geometry.assignment import head_and_tail as head_and_tail
from xlashard.geometry.assignment import replica_runs as replica_runs
from xlashard.geometry.assignment import spec_from_tile_assignment as spec_from_tile_assignment
from xlashard.geometry.assignment import spec_from_tiling as spec_from_tiling
from xlashard.geometry.mesh import Box as Box
from xlashard.geometry.mesh import MeshGrid as MeshGrid
from xlashard.geometry.spec import UNCONSTRAINED as UNCONSTRAINED
from xlashard.geometry.spec import DimAxes as DimAxes
from xlashard.geometry.spec import Spec as Spec
from xlashard.geometry.spec import parse_spec as parse_spec
from xlashard.geometry.spec import validate_spec as validate_spec
from xlashard.geometry.strides import Index as Index
from xlashard.geometry.tile_assignment import TileAssignment as TileAssignment
from xlashard.geometry.tiling import Tiling as Tiling
from xlashard.support.lazily import on_demand as _on_demand

if _typing.TYPE_CHECKING:
    from xlashard.geometry.groups import AxisPart as AxisPart
    from xlashard.geometry.groups import ReplicaGroups as ReplicaGroups
    from xlashard.geometry.groups import SourceTargetPairs as SourceTargetPairs
    from xlashard.geometry.groups import read_groups as read_groups
    from xlashard.geometry.groups import read_pairs as read_pairs
    from xlashard.geometry.reshard import Piece as Piece
    from xlashard.geometry.reshard import ReshardPlan as ReshardPlan
    from xlashard.geometry.reshard import Round as Round
    from xlashard.geometry.reshard import TransferLoad as TransferLoad
    from xlashard.geometry.reshard import refine as refine
    from xlashard.geometry.reshard import reshard_plan as reshard_plan
    from xlashard.geometry.reshard import schedule_rounds as schedule_rounds
    from xlashard.geometry.reshard import transfer_load as transfer_load
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
        },
    )
