"""Pictures of how arrays lie on devices: a plan as a value, then a terminal, SVG or HTML."""

from xlashard.analysis.pictures.picture_plan import Cell as Cell
from xlashard.analysis.pictures.picture_plan import Panel as Panel
from xlashard.analysis.pictures.picture_plan import Picture as Picture
from xlashard.analysis.pictures.sharding_picture import ShardingPicture as ShardingPicture
from xlashard.analysis.pictures.sharding_picture import TreePicture as TreePicture
from xlashard.analysis.pictures.sharding_picture import html_of as html_of
from xlashard.analysis.pictures.sharding_picture import read_tree as read_tree
from xlashard.analysis.pictures.sharding_picture import visualize as visualize
