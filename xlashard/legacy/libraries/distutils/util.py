"""Module `distutils.util`."""

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


def strtobool(val: str) -> int:
    """Return 1 or 0 for a word.

    Args:
        val: One of y, yes, t, true, on, 1 and n, no, f, false, off, 0, in any case.

    Raises:
        ValueError: It is another word.
    """
    word = val.lower()
    if word not in _TRUE + _FALSE:
        # no-catalogue: the class that Python raised
        raise ValueError(f"strtobool: invalid truth value {val!r}: write yes or no")
    return int(word in _TRUE)
