"""Pictures of how arrays lie on devices: a plan as a value, then a terminal, SVG or HTML."""

from xlashard.pictures.api import ShardingPicture, html_of, visualize
from xlashard.pictures.plan import Cell, Panel, Picture

__all__ = ["Cell", "Panel", "Picture", "ShardingPicture", "html_of", "visualize"]
