"""What type checkers know of the operators and methods of an `Array`: see `typed.pyi`.

The members themselves are made in loops from JAX's, where a type checker can't see parameters.
"""


class Typed:
    """Nothing at run time."""

    __slots__ = ()
