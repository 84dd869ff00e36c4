"""Whether arrays are one value in other writings."""

import math
from itertools import permutations


def fits(dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array has a shape, turned in any way, with neighbours merged or not.

    Args:
        dims: Of the array.
        shape: That it might have in another writing.

    Example:
        >>> fits((512, 1024), (1024, 4, 128)), fits((2, 1024), (1024, 4))
        (True, False)
    """
    given = sorted(d for d in dims if d > 1)
    wanted = [d for d in shape if d > 1]
    if given == sorted(wanted):
        return bool(given) or math.prod(shape) == math.prod(dims) == 1
    if len(given) >= len(wanted) or len(wanted) > 5 or not given:
        return False
    return any(_merges(turned, tuple(given)) for turned in set(permutations(wanted)))


def _merges(shape: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Whether neighbours of a shape multiply to the given sizes, in some order."""
    if not shape:
        return not given
    product = 1
    for count, size in enumerate(shape, 1):
        product *= size
        if product in given:
            left = list(given)
            left.remove(product)
            if _merges(shape[count:], tuple(left)):
                return True
    return False
