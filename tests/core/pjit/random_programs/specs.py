"""Specs drawn for a shape on a mesh."""

from collections.abc import Callable, Sequence

from tests.core.pjit.random_programs.dice import Dice

UNCONSTRAINED = "P.UNCONSTRAINED"


def draw_spec(
    dice: Dice,
    shape: Sequence[int],
    axes: Sequence[tuple[str, int]],
    *,
    without: Sequence[str] = (),
    even: bool = True,
    opening: float = 0.0,
    opens: Callable[[int], bool] = lambda length: True,
) -> str:
    """Draw the text of a spec that fits a shape.

    Args:
        dice: Source of choices.
        shape: The shape.
        axes: Names and sizes of the mesh's axes.
        without: Axes to leave out.
        even: True if each dimension must divide.
        opening: Probability of an unconstrained dimension.
        opens: Returns True if a dimension of a length may be unconstrained.
    """
    free = [axis for axis in axes if axis[0] not in without]
    entries = []
    for length in shape:
        if dice.chance(opening) and opens(length):
            entries.append(UNCONSTRAINED)
            continue
        chosen, tiles = [], 1
        for name, size in dice.sample(free, dice.pick([0, 1, 1, 1, 2])):
            if even and length % (tiles * size):
                continue
            chosen.append(name)
            tiles *= size
            free = [axis for axis in free if axis[0] != name]
        entries.append(_entry(dice, chosen))
    while entries and entries[-1] == "None" and dice.chance(0.7):
        entries.pop()
    return f"P({', '.join(entries)})"


def _entry(dice: Dice, names: Sequence[str]) -> str:
    if not names:
        return "None"
    if len(names) == 1 and dice.chance(0.8):
        return repr(names[0])
    return f"({', '.join(map(repr, names))}{',' if len(names) == 1 else ''})"
