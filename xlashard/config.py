"""Settings from the environment, read and checked in one place.

| variable | values | meaning |
|---|---|---|
| `XLASHARD_PARTITIONER` | `shardy`, `gspmd` | who partitions programs; JAX's own setting if unset |
| `XLASHARD_EXPLAIN_RECOMPILES` | `1`, `0` | log why a function is compiled again, as it happens |
| `XLASHARD_CHECK_PROGRAMS` | `1`, `0` | compare programs between processes; unset: of pjit only |
| `XLASHARD_PROGRAMS_TIMEOUT` | seconds | how long to wait for others to run it; 3600 if unset |
| `XLASHARD_STRICT` | `1`, `0` | raise where a request is not met, instead of a warning |
| `XLASHARD_WARN_REPLICATED` | MiB | size of unplaced values that are replicated; 64 if unset |
| `XLASHARD_CHECK_DEVICE_PUT` | `always`, `once`, `never` | when `device_put` compares values |
| `XLASHARD_DOCS_URL` | address | site that errors link to; empty: errors without links |
| `XLASHARD_SKIP_FILES` | globs, `:` between | files whose lines no report shows as the user's |

The launcher of emulated pods (`xlashard pod`) is the only program that sets these, in each process:

| variable | meaning |
|---|---|
| `XLASHARD_POD_COORDINATOR` | the address of process 0, `HOST:PORT` |
| `XLASHARD_POD_PROCESSES` | how many processes the pod has |
| `XLASHARD_POD_PROCESS_ID` | which of them this is, from 0 |
| `XLASHARD_POD_DEVICES` | how many devices each has |
"""

import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal, get_args

from xlashard.errors import ConfigError, ConfigWarning, XlashardError
from xlashard.support import hooks
from xlashard.support.formatting import closest
from xlashard.support.lazily import dataclass

type PartitionerName = Literal["shardy", "gspmd"]

type CheckName = Literal["always", "once", "never"]

PREFIX = "XLASHARD_"
PARTITIONER = f"{PREFIX}PARTITIONER"

EXPLAIN_RECOMPILES = f"{PREFIX}EXPLAIN_RECOMPILES"

CHECK_PROGRAMS = f"{PREFIX}CHECK_PROGRAMS"
PROGRAMS_TIMEOUT = f"{PREFIX}PROGRAMS_TIMEOUT"
STRICT = f"{PREFIX}STRICT"
WARN_REPLICATED = f"{PREFIX}WARN_REPLICATED"
CHECK_DEVICE_PUT = f"{PREFIX}CHECK_DEVICE_PUT"
DOCS_URL = f"{PREFIX}DOCS_URL"
SKIP_FILES = f"{PREFIX}SKIP_FILES"

RECOMPILE_LOGGER = "xlashard.recompile"
"""The logger that reports why functions are compiled again."""

POD_COORDINATOR = f"{PREFIX}POD_COORDINATOR"
POD_PROCESSES = f"{PREFIX}POD_PROCESSES"
POD_PROCESS_ID = f"{PREFIX}POD_PROCESS_ID"
POD_DEVICES = f"{PREFIX}POD_DEVICES"

_POD = (POD_COORDINATOR, POD_PROCESSES, POD_PROCESS_ID, POD_DEVICES)
_FOR_USERS = (
    PARTITIONER,
    EXPLAIN_RECOMPILES,
    CHECK_PROGRAMS,
    PROGRAMS_TIMEOUT,
    STRICT,
    WARN_REPLICATED,
    CHECK_DEVICE_PUT,
    DOCS_URL,
    SKIP_FILES,
)
_KNOWN = (*_FOR_USERS, *_POD)
_WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False, "": False}
# Read by the project's tests, which run in the same environment.
_FOR_TESTS = f"{PREFIX}TEST_"
_OWN_FILES = os.path.dirname(__file__)


@dataclass(frozen=True)
class PodPlace:
    """Place of a process in an emulated pod.

    Attributes:
        coordinator: The address of process 0, `HOST:PORT`.
        processes: Number of processes.
        process_id: Index of this process.
        devices: Number of devices of each process.
    """

    coordinator: str
    processes: int
    process_id: int
    devices: int


@dataclass(frozen=True)
class Flags:
    """Settings of the environment.

    Attributes:
        partitioner: The partitioner of programs; None leaves JAX's setting as it is.
        explain_recompiles: True to log why functions are compiled again.
        check_device_put: When `device_put` compares a value between processes.
        pod: The place in an emulated pod; None outside of one.
        check_programs: True if processes compare their programs before they run them.
        check_jit_programs: True if they compare those of `jax.jit`, too.
        programs_timeout: Seconds that a process waits for others to run a program.
        docs_url: Address of the site that errors link to; None if unset; "" for no links.
        skip_files: Globs of files whose lines no report shows as the user's.
        strict: True if a sharding that is not met is an error.
        warn_replicated: Size on one device from which an unplaced value that is replicated is
            reported, in MiB; 0 reports none.
    """

    partitioner: PartitionerName | None = None
    explain_recompiles: bool = False
    check_device_put: CheckName = "once"
    pod: PodPlace | None = None
    check_programs: bool = True
    check_jit_programs: bool = False
    programs_timeout: int = 3600
    docs_url: str | None = None
    skip_files: tuple[str, ...] = ()
    strict: bool = False
    warn_replicated: int = 64

    @property
    def concern_jax(self) -> bool:
        """Return True if a setting acts on JAX, also where no name of xlashard is used."""
        requests = self.explain_recompiles or self.check_jit_programs
        return requests or self.partitioner is not None or self.pod is not None


def read_flags(environment: Mapping[str, str]) -> Flags:
    """Read the variables of this project; an empty one counts as unset, but for the address.

    Args:
        environment: For example `os.environ`.

    Raises:
        ConfigError: A variable has a value that it can't have.

    Example:
        >>> read_flags({"XLASHARD_PARTITIONER": "gspmd"}).partitioner
        'gspmd'
    """
    return Flags(
        partitioner=_one_of(PARTITIONER, environment, PartitionerName),
        explain_recompiles=_switch(EXPLAIN_RECOMPILES, environment.get(EXPLAIN_RECOMPILES, "")),
        check_device_put=_one_of(CHECK_DEVICE_PUT, environment, CheckName) or "once",
        pod=_pod(environment),
        check_programs=_switch(CHECK_PROGRAMS, environment.get(CHECK_PROGRAMS) or "1"),
        check_jit_programs=_switch(CHECK_PROGRAMS, environment.get(CHECK_PROGRAMS, "")),
        programs_timeout=_number(PROGRAMS_TIMEOUT, environment.get(PROGRAMS_TIMEOUT) or "3600", 1),
        strict=_switch(STRICT, environment.get(STRICT, "")),
        warn_replicated=_number(WARN_REPLICATED, environment.get(WARN_REPLICATED) or "64", 0),
        docs_url=None if (url := environment.get(DOCS_URL)) is None else url.strip(),
        skip_files=split_globs(environment.get(SKIP_FILES, "")),
    )


def apply_environment(environment: Mapping[str, str]) -> None:
    """Apply the variables that act on a process as a whole; without them nothing is imported.

    Args:
        environment: For example `os.environ`.

    Raises:
        ConfigError: As `read_flags`.
    """
    warn_of_unknown_variables(environment)
    flags = read_flags(environment)
    XlashardError.docs_url = flags.docs_url
    if flags.concern_jax:
        hooks.startup.apply(flags)


def warn_of_unknown_variables(environment: Mapping[str, str]) -> None:
    """Warn of variables that no setting has: another release may read them.

    Args:
        environment: For example `os.environ`.
    """
    for text in describe_unknown_variables(environment):
        warnings.warn(text, ConfigWarning, skip_file_prefixes=(_OWN_FILES,))


def describe_unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable with the project's prefix that is no setting.

    Args:
        environment: For example `os.environ`.

    Example:
        >>> describe_unknown_variables({"XLASHARD_STRIKT": "1"})
        ['the environment sets XLASHARD_STRIKT, which is not a setting of xlashard; did you mean \
XLASHARD_STRICT?']
    """
    names = [n for n in environment if n.startswith(PREFIX) and not n.startswith(_FOR_TESTS)]
    return [_unknown_text(name) for name in sorted(names) if name not in _KNOWN]


def split_globs(text: str) -> tuple[str, ...]:
    """Return the globs that a variable lists."""
    return tuple(filter(None, map(str.strip, text.split(os.pathsep))))


def place_variables(place: PodPlace) -> dict[str, str]:
    """Return the variables that `read_flags` reads a place from."""
    values = (place.coordinator, place.processes, place.process_id, place.devices)
    return {name: str(value) for name, value in zip(_POD, values, strict=True)}


def _pod(environment: Mapping[str, str]) -> PodPlace | None:
    values = {name: environment[name] for name in _POD if environment.get(name)}
    if not values:
        return None
    missing = [name for name in _POD if name not in values]
    if missing:
        raise ConfigError(
            f"the environment sets {' and '.join(values)} without {' and '.join(missing)}; leave "
            "all of them to the launcher: xlashard pod -n 2 -d 4 -- python script.py"
        )
    return PodPlace(
        values[POD_COORDINATOR],
        _number(POD_PROCESSES, values[POD_PROCESSES], 1),
        _number(POD_PROCESS_ID, values[POD_PROCESS_ID], 0),
        _number(POD_DEVICES, values[POD_DEVICES], 1),
    )


def _number(name: str, text: str, least: int) -> int:
    if text.isascii() and text.isdecimal() and int(text) >= least:
        return int(text)
    raise ConfigError(
        f"{name} is {text!r}; it must be a number of {least} or more: export {name}={least}"
    )


def _switch(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in _WORDS:
        raise ConfigError(f"{name} is {text!r}; it must be '1' or '0': export {name}=1")
    return _WORDS[word]


def _one_of(name: str, environment: Mapping[str, str], names: Any) -> Any:
    """Return the name in a variable; None if it is unset."""
    text = environment.get(name, "")
    known = get_args(names.__value__)
    for word in known:
        if text.strip().lower() == word:
            return word
    if not text.strip():
        return None
    raise ConfigError(
        f"{name} is {text!r}; it must be {' or '.join(map(repr, known))}: "
        f"export {name}={closest(text.lower(), known) or known[0]}"
    )


def _unknown_text(name: str) -> str:
    close = closest(name.removeprefix(PREFIX), (n.removeprefix(PREFIX) for n in _FOR_USERS))
    advice = f"did you mean {PREFIX}{close}?" if close else f"known: {', '.join(_FOR_USERS)}"
    return f"the environment sets {name}, which is not a setting of xlashard; {advice}"
