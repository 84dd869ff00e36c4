"""Types of the operators and methods of an `Array` for type checkers: see `typed.pyi`.

The members themselves are generated from JAX's, so that type checkers cannot see their parameters.
"""


class Typed:
    """Empty at run time."""

    __slots__ = ()
