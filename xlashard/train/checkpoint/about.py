"""What is written down beside the arrays of a checkpoint."""

import json
import platform
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any, Self

import jax

from xlashard._version import __version__
from xlashard.train.errors import CheckpointError
from xlashard.train.toml import toml_value

_PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "numpy")


def _installed() -> dict[str, str]:
    """The versions of Python and of what a checkpoint depends on."""
    own = {"python": platform.python_version(), "xlashard": __version__}
    return own | {name: version(name) for name in _PACKAGES}


@dataclass(frozen=True)
class About:
    """What a run needs besides its arrays to go on, and what they were made with.

    Attributes:
        step: Steps that are done.
        data: Where in the data the run is: what it needs to read the next batch, as JSON has it.
        settings: The settings of the run, a TOML document.
        mesh: The axes of the mesh and their sizes.
        processes: How many processes there were.
        versions: By package its version, and Python's own.

    Raises:
        CheckpointError: The data are not what JSON can say.

    Example:
        >>> about = About(step=200, data={"seed": 0}, settings="", mesh={"data": 8})
        >>> About.from_json(about.to_json()) == about
        True
    """

    step: int
    data: Mapping[str, Any]
    settings: str
    mesh: Mapping[str, int]
    processes: int = field(default_factory=jax.process_count)
    versions: Mapping[str, str] = field(default_factory=_installed)

    def __post_init__(self) -> None:
        if self.step < 0:
            raise CheckpointError(f"step = {self.step}: steps are counted from 0")
        try:
            json.dumps(self.to_json())
        except TypeError as error:
            raise CheckpointError(
                f"data = {self.data!r} is written down as JSON, and an {error}. Write numbers as "
                f"int(x) or float(x), arrays as x.tolist()"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def changes(self, now: Self) -> list[str]:
        """What is not as it was, each as a line for a person.

        Args:
            now: Of the run that goes on.

        Returns:
            Lines such as `jax 0.11.2 is 0.12.0 now` and `model.width = 64 is 128 now`, first of
            versions, then of the mesh and the processes, then of settings.
        """
        versions = _differing(self.versions, now.versions)
        return [
            *(f"{name} {was or '(none)'} is {now or 'gone'} now" for name, was, now in versions),
            *_line("the mesh", dict(self.mesh), dict(now.mesh)),
            *_line("the number of processes", self.processes, now.processes),
            *(f"{change} now" for change in setting_changes(self.settings, now.settings).values()),
        ]


def _line(name: str, was: object, now: object) -> list[str]:
    return [] if was == now else [f"{name}, {was}, is {now} now"]


def setting_changes(was: str, now: str) -> dict[str, str]:
    r"""Settings that two TOML documents have differently.

    Args:
        was: The one.
        now: The other.

    Returns:
        By key what stood and what stands there: `model.width = 64 is 128`.

    Example:
        >>> setting_changes("[model]\nwidth = 64", "[model]\nwidth = 128")
        {'model.width': 'model.width = 64 is 128'}
    """
    before, after = ({key: toml_value(x) for key, x in _flat(text)} for text in (was, now))
    return {
        key: f"{key} = {old or '(not set)'} is {new or 'not set'}"
        for key, old, new in _differing(before, after)
    }


def setting(text: str, key: str) -> str | None:
    """The value of one setting as a TOML document has it."""
    return {k: toml_value(x) for k, x in _flat(text)}.get(key)


def _flat(text: str) -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [("", tomllib.loads(text))]
    while waiting:
        path, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}" if path else key, x) for key, x in value.items()]
        else:
            yield path, value


def _differing(
    was: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[tuple[str, str | None, str | None]]:
    for key in dict.fromkeys([*was, *now]):
        if was.get(key) != now.get(key):
            yield key, was.get(key), now.get(key)
