"""Pictures of how arrays lie on devices: a plan as a value, then a terminal, SVG or HTML."""

from xlashard.pictures.picture_plan import Cell, Panel, Picture
from xlashard.pictures.sharding_picture import (
    ShardingPicture,
    TreePicture,
    html_of,
    read_tree,
    visualize,
)

__all__ = [
    "Cell",
    "Panel",
    "Picture",
    "ShardingPicture",
    "TreePicture",
    "html_of",
    "read_tree",
    "visualize",
]
