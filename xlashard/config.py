"""Settings from the environment, read and checked in one place.

| variable | values | meaning |
|---|---|---|
| `XLASHARD_PARTITIONER` | `shardy`, `gspmd` | who partitions programs; JAX's own setting if unset |
| `XLASHARD_EXPLAIN_RECOMPILES` | `1`, `0` | log why a function is compiled again, as it happens |
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from xlashard.errors import ConfigError

type PartitionerName = Literal["shardy", "gspmd"]

PREFIX = "XLASHARD_"
PARTITIONER = f"{PREFIX}PARTITIONER"

EXPLAIN_RECOMPILES = f"{PREFIX}EXPLAIN_RECOMPILES"

RECOMPILE_LOGGER = "xlashard.recompile"
"""The logger that says why functions are compiled again."""

_KNOWN = (PARTITIONER, EXPLAIN_RECOMPILES)
_WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False, "": False}
# Read by the project's tests, which run in the same environment.
_FOR_TESTS = f"{PREFIX}TEST_"


@dataclass(frozen=True)
class Flags:
    """What the environment says.

    Attributes:
        partitioner: Who partitions programs; None leaves JAX's setting as it is.
        explain_recompiles: Whether to log why functions are compiled again.
    """

    partitioner: PartitionerName | None = None
    explain_recompiles: bool = False


def read_flags(environment: Mapping[str, str]) -> Flags:
    """Reads the variables of this project; an empty one counts as unset.

    Args:
        environment: For example `os.environ`.

    Raises:
        ConfigError: A variable has a value that it can't have, or a name that none has.

    Example:
        >>> read_flags({"XLASHARD_PARTITIONER": "gspmd"})
        Flags(partitioner='gspmd', explain_recompiles=False)
    """
    for name in environment:
        if name.startswith(PREFIX) and name not in _KNOWN and not name.startswith(_FOR_TESTS):
            raise ConfigError(_unknown_text(name))
    return Flags(
        partitioner=_partitioner(environment.get(PARTITIONER, "")),
        explain_recompiles=_switch(EXPLAIN_RECOMPILES, environment.get(EXPLAIN_RECOMPILES, "")),
    )


def _switch(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in _WORDS:
        raise ConfigError(f"{name} is {text!r}; it must be '1' or '0': export {name}=1")
    return _WORDS[word]


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
