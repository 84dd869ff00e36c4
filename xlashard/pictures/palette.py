"""Tile colours, distinguishable with any colour vision and readable with dark text."""

COLOURS = (
    "#77aadd",
    "#ee8866",
    "#eedd88",
    "#ffaabb",
    "#44bb99",
    "#bbcc33",
    "#99ddff",
    "#cfb8e6",
)
"""Backgrounds; the first seven are of Paul Tol's scheme for labelled cells."""

INK = "#111111"
"""Text on any of them."""

BLANK = "#d4d4d4"
"""The background of a tile without elements or without holders."""
