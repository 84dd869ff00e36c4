"""``checkpoint.json``: what a checkpoint is, and by which digests its files are known."""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jax

from xlashard._version import __version__
from xlashard.documents import parse_json, read_text
from xlashard.errors import counted
from xlashard.train.checkpoint.files import Digest, digests, files_in, link_out_of
from xlashard.train.config.toml import differences, setting, setting_changes
from xlashard.train.errors import CheckpointError
from xlashard.wording import typed

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
        versions = differences(self.versions, now.versions)
        return [
            *(f"{name} {was or '(none)'} is {now or 'gone'} now" for name, was, now in versions),
            *_line("the mesh", dict(self.mesh), dict(now.mesh)),
            *_line("the number of processes", self.processes, now.processes),
            *(f"{change} now" for change in setting_changes(self.settings, now.settings).values()),
        ]


def _line(name: str, was: object, now: object) -> list[str]:
    return [] if was == now else [f"{name}, {was}, is {now} now"]


NAME = "checkpoint.json"


FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What stands in the file.

    Attributes:
        about: What the run wrote down.
        arrays: The type of each array by its path in the state.
        files: The digest of each other file by its path.
    """

    about: About
    arrays: Mapping[str, str]
    files: Mapping[str, Digest]

    def write(self, folder: Path) -> None:
        """Writes it into a step's folder."""
        values = {
            "format": FORMAT,
            "about": self.about.to_json(),
            "arrays": dict(self.arrays),
            "files": {name: asdict(digest) for name, digest in self.files.items()},
        }
        values["sha256"] = _digest(values)
        (folder / NAME).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        digests(folder, [NAME], durable=True)


@dataclass(frozen=True)
class Damage:
    """A file that is not as it was written.

    Attributes:
        file: Its path in the step's folder.
        what: What is wrong with it.
    """

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


def read_manifest(folder: Path) -> Manifest | Damage:
    """Reads it from a step's folder; or says why that can't be done."""
    try:
        leads_out = link_out_of(folder, NAME)
        if leads_out:
            return Damage(NAME, leads_out)
        values = parse_json(read_text(folder / NAME))
        form, digest = values["format"], values.pop("sha256")
    except FileNotFoundError:
        return Damage(NAME, "is missing")
    except OSError as error:
        return Damage(NAME, f"can't be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Damage(NAME, "is cut off, altered, or foreign")
    if form != FORMAT:
        return Damage(
            NAME,
            f"has the format {form}, and this release of xlashard reads the format {FORMAT}: "
            f"resume with the release that wrote it",
        )
    if _digest(values) != digest:
        return Damage(NAME, f"was altered: its SHA-256 is not {digest}")
    try:
        return _manifest(values)
    except (KeyError, TypeError, ValueError, AttributeError):
        return Damage(NAME, "is altered or foreign")


def _manifest(values: dict[str, Any]) -> Manifest:
    """Return the manifest that parsed JSON describes; any exception if it describes none."""
    about = About.from_json(values["about"])
    files = {name: Digest(**digest) for name, digest in values["files"].items()}
    expected = [
        *((number, int) for number in (about.step, about.processes)),
        *((table, dict) for table in (about.data, about.mesh, about.versions, values["arrays"])),
        *((text, str) for text in (about.settings, *about.versions.values())),
        *((text, str) for text in values["arrays"].values()),
        *((digest.bytes, int) for digest in files.values()),
    ]
    if not all(isinstance(value, kind) for value, kind in expected):
        raise TypeError("a value of another type")
    return Manifest(about, values["arrays"], files)


def check_sizes(folder: Path, manifest: Manifest) -> Damage | None:
    """Compares what files there are, without reading them.

    Args:
        folder: The step's folder.
        manifest: What it should hold.

    Returns:
        The first that is missing, cut off, too long or foreign; None if all are right.
    """
    found = files_in(folder)
    for name in found:
        leads_out = link_out_of(folder, name)
        if leads_out:
            return Damage(name, leads_out)
    found.pop(NAME, None)
    for name, digest in manifest.files.items():
        size = found.get(name)
        if size is None:
            return Damage(name, "is missing")
        if size < digest.bytes:
            return Damage(name, f"is cut off: {size:,} of its {digest.bytes:,} bytes are there")
        if size > digest.bytes:
            return Damage(name, f"was altered: it has {size:,} bytes, and had {digest.bytes:,}")
    foreign = next((name for name in found if name not in manifest.files), None)
    return Damage(foreign, "is foreign: the step was committed without it") if foreign else None


def check_contents(folder: Path, manifest: Manifest, names: Iterable[str]) -> Damage | None:
    """Reads files and compares them with their digests.

    Args:
        folder: The step's folder.
        manifest: What it should hold.
        names: The files to read.

    Returns:
        The first that is not as it was written; None if all are.
    """
    try:
        found = digests(folder, names)
    except OSError as error:
        file = Path(error.filename).relative_to(folder).as_posix() if error.filename else "a file"
        return Damage(file, f"can't be read: {error.strerror}")
    for name, digest in found.items():
        if digest != manifest.files[name]:
            return Damage(name, f"was altered: its SHA-256 is not {manifest.files[name].sha256}")
    return None


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


_LISTED = 4
"""Arrays and settings that an error shows at most, of each kind."""


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `parameters.layers.mlp.up`."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def described(state: Any) -> dict[str, str]:
    """The type of each array of a state by its path: `float32[8,16]`.

    Raises:
        CheckpointError: A leaf is no array.
    """
    types = {}
    for path, leaf in leaves_of(state).items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{path} of the state is {leaf!r}, a {type(leaf).__name__}, and no array with a "
                f"place. Write, before the first step:\n"
                f"  xlashard.device_put({path.rpartition('.')[2]}, NamedSharding(mesh, P()))"
            )
        types[path] = typed(leaf.dtype, leaf.shape)
    return types


def misfits(saved: Mapping[str, str], wanted: Mapping[str, str], was: str, now: str) -> str:
    """Compares the arrays of a checkpoint with those that a run wants.

    Args:
        saved: Types by paths, of the checkpoint.
        wanted: Types by paths, of the run.
        was: The settings that the checkpoint was made with, as TOML.
        now: The settings of the run; empty where they are not known.

    Returns:
        What does not fit and what to write instead; empty if all fits.
    """
    different = [
        f"{path} is {saved[path]} there and {wanted[path]} here"
        for path in wanted
        if path in saved and saved[path] != wanted[path]
    ]
    lacking = [f"{path}, {wanted[path]}, is not there" for path in wanted if path not in saved]
    left = [f"{path}, {saved[path]}, is there only" for path in saved if path not in wanted]
    if not (different or lacking or left):
        return ""
    found = [line for kind in (different, lacking, left) for line in _first(kind)]
    return "\n".join([*(f"  {line}" for line in found), *_advice(was, now)])


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines if more <= 0 else [*lines[:_LISTED], f"and so {counted(more, 'other array')}"]


def _advice(was: str, now: str) -> list[str]:
    changed = setting_changes(was, now) if now else {}
    # What a parameter's shape depends on stands in the model's table; should it not, all is shown.
    shaping = {k: v for k, v in changed.items() if k.partition(".")[0] == "model"} or changed
    if not shaping:
        return []
    words = [f"{key}={value}" for key in shaping if (value := setting(was, key)) is not None]
    return [
        f"The settings were others: {'; '.join(shaping.values())} now. Write:",
        "  --set " + " ".join(f"'{word}'" if '"' in word else word for word in words),
    ]
