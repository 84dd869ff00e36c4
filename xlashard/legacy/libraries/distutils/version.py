"""Module `distutils.version`."""

import re
from functools import total_ordering
from typing import Any


@total_ordering
class LooseVersion:
    """Version of any form, compared part by part.

    Args:
        vstring: The version, as text.

    Example:
        >>> LooseVersion("1.10") > LooseVersion("1.9.2"), LooseVersion("1.5.1").version
        (True, [1, 5, 1])
    """

    def __init__(self, vstring: str | None = None) -> None:
        if vstring:
            self.parse(vstring)

    def parse(self, vstring: str) -> None:
        """Read a version."""
        self.vstring = vstring
        parts = (part for part in re.split(r"(\d+|[a-z]+|\.)", vstring) if part and part != ".")
        self.version: Any = [int(part) if part.isdigit() else part for part in parts]

    def __str__(self) -> str:
        return self.vstring

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return self.version == self._read(other).version

    def __lt__(self, other: object) -> bool:
        return self.version < self._read(other).version

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as then

    def _read(self, other: Any) -> "LooseVersion":
        return type(self)(other) if isinstance(other, str) else other


class StrictVersion(LooseVersion):
    """Version of two or three numbers, and `a` or `b` with a number for one before the release.

    Args:
        vstring: The version, as text.

    Raises:
        ValueError: It has another form.

    Example:
        >>> StrictVersion("1.0b2") < StrictVersion("1.0.0") == StrictVersion("1.0")
        True
    """

    def parse(self, vstring: str) -> None:
        """Read a version."""
        match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:([ab])(\d+))?", vstring)
        if match is None:
            raise ValueError(  # no-catalogue: the class that Python raised
                f"StrictVersion: invalid version number {vstring!r}: write two or three numbers, "
                "such as 1.4.2, or 1.4b2"
            )
        *numbers, letter, number = match.groups()
        self.vstring = vstring
        self.prerelease = (letter, int(number)) if letter else None
        self.numbers = tuple(int(each or 0) for each in numbers)
        # "c" is above "a" and "b": a release is above its own pre-releases.
        self.version = (self.numbers, self.prerelease or ("c", 0))

    def __str__(self) -> str:
        numbers = self.numbers if self.numbers[2] else self.numbers[:2]
        letter = "{}{}".format(*self.prerelease) if self.prerelease else ""
        return ".".join(map(str, numbers)) + letter
