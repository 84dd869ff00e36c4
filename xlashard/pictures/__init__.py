"""Pictures of how arrays lie on devices: a plan as a value, then a terminal, SVG or HTML."""

from xlashard.pictures.api import ShardingPicture, html_of, visualize
from xlashard.pictures.plan import Cell, Panel, Picture
from xlashard.pictures.tree import TreePicture, read_tree

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
