"""Settings from the environment, read and checked in one place.

| variable | values | meaning |
|---|---|---|
| `XLASHARD_PARTITIONER` | `shardy`, `gspmd` | who partitions programs; JAX's own setting if unset |
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from xlashard.errors import ConfigError

type PartitionerName = Literal["shardy", "gspmd"]

PREFIX = "XLASHARD_"
PARTITIONER = f"{PREFIX}PARTITIONER"

_KNOWN = (PARTITIONER,)
# Read by the project's tests, which run in the same environment.
_FOR_TESTS = f"{PREFIX}TEST_"


@dataclass(frozen=True)
class Flags:
    """What the environment says.

    Attributes:
        partitioner: Who partitions programs; None leaves JAX's setting as it is.
    """

    partitioner: PartitionerName | None = None


def read_flags(environment: Mapping[str, str]) -> Flags:
    """Reads the variables of this project; an empty one counts as unset.

    Args:
        environment: For example `os.environ`.

    Raises:
        ConfigError: A variable has a value that it can't have, or a name that none has.

    Example:
        >>> read_flags({"XLASHARD_PARTITIONER": "gspmd"})
        Flags(partitioner='gspmd')
    """
    for name in environment:
        if name.startswith(PREFIX) and name not in _KNOWN and not name.startswith(_FOR_TESTS):
            raise ConfigError(_unknown_text(name))
    return Flags(partitioner=_partitioner(environment.get(PARTITIONER, "")))


def _partitioner(text: str) -> PartitionerName | None:
    known = get_args(PartitionerName.__value__)
    for name in known:
        if text.strip().lower() == name:
            return name
    if not text.strip():
        return None
    raise ConfigError(
        f"{PARTITIONER} is {text!r}; it must be {' or '.join(map(repr, known))}: "
        f"export {PARTITIONER}={_closest(text.lower(), known) or known[0]}"
    )


def _unknown_text(name: str) -> str:
    close = _closest(name.removeprefix(PREFIX), tuple(n.removeprefix(PREFIX) for n in _KNOWN))
    advice = f"did you mean {PREFIX}{close}?" if close else f"known: {', '.join(_KNOWN)}"
    return f"the environment sets {name}, which xlashard does not know; {advice}"


def _closest(name: str, known: tuple[str, ...]) -> str | None:
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None
