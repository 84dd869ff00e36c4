"""Pictures of how arrays lie on devices: a plan as a value, then a terminal, SVG or HTML."""
