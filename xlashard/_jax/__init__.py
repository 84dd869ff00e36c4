"""The only door to JAX's internals and to jaxlib.

`private.py` names the private modules, and nothing else imports `jax._src`, `jaxlib`,
`jax.interpreters` or `jax.extend` (a lint rule and `tests/test_layers.py` check it); no other
package tests JAX's version. Each internal function or class that another package needs has a short
function here, so that a new JAX release requires changes in one place. Importing this package
registers nothing with JAX and checks nothing: all registrations are in `registration.install`.
"""

import re
import warnings

from xlashard.errors import JaxVersionError, JaxVersionWarning

OLDEST = (0, 10, 2)
"""The oldest release of JAX that works for functions of `jax.jit`: reports and predictions."""

MINIMUM = (0, 11, 2)
"""The oldest release that works for all of xlashard: all tests run on it."""

NEWEST = (0, 12)
"""The newest minor release of JAX that the tests run on. Later ones may lack private names."""


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: `"0.12.0.1"` is `(0, 12, 0, 1)`."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match is not None else ()


def is_too_old(version: str) -> bool:
    """Return True for a release of JAX that is older than the oldest that works."""
    return parse_version(version) < OLDEST


def installed_version() -> str:
    """Return the version of JAX."""
    import jax  # not needed before a version is asked for

    return jax.__version__


def describe_tested_versions() -> str:
    """Return the versions of JAX that all tests run on, such as `0.11.2 to 0.12`."""
    return f"{_write_version(MINIMUM)} to {_write_version(NEWEST)}"


def describe_requirement() -> str:
    """Return the requirement of pip for the versions of JAX that all tests run on."""
    after = (*NEWEST[:-1], NEWEST[-1] + 1)
    return f"jax>={_write_version(MINIMUM)},<{_write_version(after)}"


def _write_version(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def warn_of_untested_version(version: str = "") -> None:
    """Refuse a JAX that is too old, and warn of one that only some or no tests run on.

    Args:
        version: The version; that of the installed JAX if empty.

    Raises:
        JaxVersionError: If it is too old.
    """
    version = version or installed_version()
    numbers = parse_version(version)
    if is_too_old(version):
        raise JaxVersionError(  # no-catalogue: raised at import
            f"xlashard works with jax {_write_version(OLDEST)} and newer, but jax {version} "
            f"is installed: pip install {describe_requirement()!r}",
            feature="xlashard",
            installed=version,
            tested=describe_tested_versions(),
        )
    if numbers < MINIMUM:
        warnings.warn(
            f"jax {version} is installed: explain, preflight and other reports work for functions "
            f"of jax.jit, but Array and pjit are tested with jax {describe_tested_versions()} and "
            "may raise a JaxVersionError, as under jax.grad: "
            f"pip install {describe_requirement()!r}",
            JaxVersionWarning,
            stacklevel=2,
        )
    if numbers[: len(NEWEST)] > NEWEST:
        warnings.warn(
            f"xlashard is tested with jax {describe_tested_versions()}, and jax {version} is "
            "installed: functions that need a private name of JAX which it lacks raise a "
            "JaxVersionError",
            JaxVersionWarning,
            stacklevel=2,
        )
