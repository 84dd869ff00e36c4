"""Which JAX releases this project runs on, checked before anything internal is touched."""

import re
from collections.abc import Iterable

import jax

from xlashard.errors import TopologyError

MINIMUM = (0, 11, 2)
BELOW = (0, 13)


def parse_version(text: str) -> tuple[int, ...]:
    """Reads the leading numbers of a version: `"0.12.0.1"` is `(0, 12, 0, 1)`."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = ""
        for char in part:
            if not char.isdigit():
                break
            digits += char
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def check_supported(version: str = jax.__version__) -> None:
    """Refuses a JAX outside the supported window, in one sentence.

    Raises:
        ImportError: If `version` is older or newer than what was tested.
    """
    found = parse_version(version)
    if MINIMUM <= found < BELOW:
        return
    low, high = ".".join(map(str, MINIMUM)), ".".join(map(str, BELOW))
    raise ImportError(  # no-catalogue: raised at import
        f"xlashard works with jax>={low},<{high}, but jax {version} is installed: "
        f"pip install 'jax>={low},<{high}'"
    )


def check_libtpu(installed: str | None, required: Iterable[str]) -> None:
    """Refuses a libtpu that is not the one which JAX was made for.

    Another one compiles most programs, and crashes or says nonsense of others.

    Args:
        installed: Its version; None for one that is no package, of which nobody knows.
        required: What JAX's package requires, such as `libtpu==0.0.50.*; extra == "tpu"`.

    Raises:
        TopologyError: If it is another.
    """
    found = (re.match(r"libtpu\s*==\s*([\w.]+?)(\.\*)?\s*(?:;|$)", each) for each in required)
    pinned = next((match for match in found if match is not None), None)
    if installed is None or pinned is None:
        return
    wanted, is_open = pinned[1], pinned[2] is not None
    if installed == wanted or (is_open and f"{installed}.".startswith(f"{wanted}.")):
        return
    version = wanted + (pinned[2] or "")
    raise TopologyError(  # no-catalogue: needs another libtpu
        f"jax {jax.__version__} works with libtpu {version}, but libtpu {installed} is installed: "
        f"pip install 'libtpu=={version}'"
    )
