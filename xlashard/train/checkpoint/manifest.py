"""``checkpoint.json``: metadata of a checkpoint, types of its arrays, digests of its files."""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from xlashard._version import __version__
from xlashard.errors import counted
from xlashard.support.documents import decode, parse_json, read_text
from xlashard.support.formatting import typed
from xlashard.train.config.settings import change_text, differences, setting_changes
from xlashard.train.errors import CheckpointError
from xlashard.train.stores import is_object, list_objects, write_file

NAME = "checkpoint.json"
FORMAT = 1

_PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "numpy")
_PROCESS = re.compile(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)")
# Reading and hashing release the GIL; more threads than this exceed the speed of disks.
_THREADS = 4


def _installed() -> dict[str, str]:
    """Return the versions of Python and of the packages that a checkpoint depends on."""
    own = {"python": platform.python_version(), "xlashard": __version__}
    return own | {name: version(name) for name in _PACKAGES}


@dataclass(frozen=True)
class RunMetadata:
    """Metadata of a run, saved beside its arrays.

    Attributes:
        step: Number of complete steps.
        data: Position in the data, from which the next batch follows; JSON values.
        settings: Settings of the run, a TOML document.
        mesh: Sizes of the mesh axes.
        processes: Number of processes.
        versions: Versions of Python and of packages.

    Raises:
        CheckpointError: `data` is not JSON, or `step` is negative.

    Example:
        >>> metadata = RunMetadata(step=200, data={"seed": 0}, settings="", mesh={"data": 8})
        >>> metadata.processes
        1
    """

    step: int
    data: Mapping[str, Any]
    settings: str
    mesh: Mapping[str, int]
    processes: int = field(default_factory=jax.process_count)
    versions: Mapping[str, str] = field(default_factory=_installed)

    def __post_init__(self) -> None:
        if self.step < 0:
            raise CheckpointError(f"step = {self.step} is negative. Write 0 or more")
        try:
            json.dumps(asdict(self))
        except TypeError as error:
            raise CheckpointError(
                f"data = {self.data!r} is not JSON: an {error}. Write numbers as "
                f"int(x) or float(x), arrays as x.tolist()"
            ) from None


@dataclass(frozen=True)
class Digest:
    """Size and hash of a file, or of an object.

    Attributes:
        bytes: Size of the file.
        sha256: Hexadecimal SHA-256, the fastest cryptographic hash of Python's library on current
            processors: 1.7 GB/s in one thread.
        crc32c: Checksum that an object store has computed from what it has received; reading every
            object again for a SHA-256 would double the traffic of a save.
    """

    bytes: int
    sha256: str = ""
    crc32c: str = ""

    def describe_alteration(self, now: "Digest") -> str:
        """Return how a file differs from the one with this digest; empty if it does not.

        A step that was copied into an object store, or out of one, has no hash in common.
        """
        if now.bytes < self.bytes:
            return f"is truncated: it has {now.bytes:,} of {self.bytes:,} bytes"
        if now.bytes > self.bytes:
            return f"was altered: it has {now.bytes:,} bytes, and had {self.bytes:,}"
        if self.sha256 and now.sha256 not in ("", self.sha256):
            return f"was altered: its SHA-256 is not {self.sha256}"
        if self.crc32c and now.crc32c not in ("", self.crc32c):
            return f"was altered: its CRC-32C is not {self.crc32c}"
        return ""


@dataclass(frozen=True)
class Manifest:
    """Contents of ``checkpoint.json``.

    Attributes:
        metadata: Metadata of the run.
        arrays: Types of the arrays by path in the state.
        files: Digests of the other files by path.
    """

    metadata: RunMetadata
    arrays: Mapping[str, str]
    files: Mapping[str, Digest]

    def write(self, folder: Path) -> None:
        """Write the manifest into a step's folder."""
        own = asdict(self, dict_factory=_drop_missing_hashes)
        values = {"format": FORMAT, "about": own.pop("metadata"), **own}
        values["sha256"] = _digest(values)
        write_file(folder / NAME, json.dumps(values, indent=1) + "\n")


def _drop_missing_hashes(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: x for name, x in fields if x or name not in ("sha256", "crc32c")}


@dataclass(frozen=True)
class Damage:
    """Damaged file of a checkpoint.

    Attributes:
        file: Path in the step's folder.
        what: Description of the damage.
    """

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


def read_manifest(folder: Path) -> Manifest | Damage:
    """Read the manifest of a step's folder, or return its damage."""
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
        return Damage(NAME, "is truncated, altered, or foreign")
    if form != FORMAT:
        return Damage(
            NAME,
            f"has format {form}, but this release of xlashard reads format {FORMAT}: "
            f"resume with the release that wrote it",
        )
    if _digest(values) != digest:
        return Damage(NAME, f"was altered: its SHA-256 is not {digest}")
    try:
        return decode(Manifest, {**values, "metadata": values["about"]})
    except (KeyError, ValueError):
        return Damage(NAME, "is altered or foreign")


def check_sizes(folder: Path, manifest: Manifest) -> Damage | None:
    """Compare names and sizes of files with a manifest.

    Args:
        folder: The step's folder.
        manifest: Manifest of the step.

    Returns:
        The first file that is missing, truncated, too long or foreign; None if all match.
    """
    sizes = files_in(folder)
    for name in sizes:
        leads_out = link_out_of(folder, name)
        if leads_out:
            return Damage(name, leads_out)
    sizes.pop(NAME, None)
    for name, digest in manifest.files.items():
        if name not in sizes:
            return Damage(name, "is missing")
        if alteration := digest.describe_alteration(Digest(sizes[name])):
            return Damage(name, alteration)
    foreign = next((name for name in sizes if name not in manifest.files), None)
    return Damage(foreign, "is foreign: the step was committed without it") if foreign else None


def check_contents(folder: Path, manifest: Manifest, names: Iterable[str]) -> Damage | None:
    """Compare the contents of files with their digests.

    Args:
        folder: The step's folder.
        manifest: Manifest of the step.
        names: Files to read.

    Returns:
        The first file that differs; None if all match.
    """
    try:
        contents = digests(folder, names)
    except OSError as error:
        file = Path(error.filename).relative_to(folder).as_posix() if error.filename else "a file"
        return Damage(file, f"can't be read: {error.strerror}")
    for name, digest in contents.items():
        if alteration := manifest.files[name].describe_alteration(digest):
            return Damage(name, alteration)
    return None


def files_in(folder: Path) -> dict[str, int]:
    """Return the sizes of all files below a folder, by POSIX paths relative to it."""
    if is_object(folder):
        return {name: each["size"] for name, each in list_objects(folder).items()}
    return {
        path.relative_to(folder).as_posix(): path.stat(follow_symlinks=path.exists()).st_size
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }


def link_out_of(folder: Path, name: str) -> str:
    """Return the reason why a file is not inside of a folder; empty if it is.

    Args:
        folder: The folder.
        name: Path relative to the folder.
    """
    path = folder / name
    if is_object(path):
        return ""
    # `Path.resolve` of Python 3.12 raises an error for cyclic links.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        return f"is a symbolic link out of its folder, to {os.path.realpath(path)}"
    if path.exists() and not path.is_file():
        return "is not a regular file"
    return ""


def writer_of(name: str) -> int:
    """Return the process that wrote a file, from orbax's naming; 0 for other names."""
    match = _PROCESS.search(name)
    return int(match[1]) if match else 0


def digests(folder: Path, names: Iterable[str], *, durable: bool = False) -> dict[str, Digest]:
    """Compute the digests of files.

    Args:
        folder: The folder.
        names: Paths relative to the folder.
        durable: Flush each file to the disk.

    Returns:
        Digests by name.
    """
    names = list(names)
    if is_object(folder):
        stored = list_objects(folder)
        return {name: Digest(stored[name]["size"], "", stored[name]["crc32c"]) for name in names}

    def read(name: str) -> Digest:
        with (folder / name).open("rb") as file:
            if durable:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Digest(file.tell(), digest)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as threads:
        return dict(zip(names, threads.map(read, names), strict=True))


def write_digests(folder: Path, name: str, by_name: dict[str, Digest]) -> None:
    """Write digests for another process, into an existing folder."""
    text = json.dumps({name: asdict(digest) for name, digest in by_name.items()})
    (folder / name).write_text(text, encoding="utf-8")


def take_digests(folder: Path, count: int) -> dict[str, Digest]:
    """Read and delete the digests of all processes; a single process writes none."""
    values: dict[str, Any] = {}
    for process in range(count) if count > 1 else ():
        values |= parse_json(read_text(folder / str(process)))
    shutil.rmtree(folder)
    return {name: Digest(**digest) for name, digest in values.items()}


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


_LISTED = 4
"""Maximum number of arrays that an error lists, of each kind."""


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, such as `parameters.layers.mlp.up`."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def array_types(state: Any) -> dict[str, str]:
    """Return the type of each array of a state by path: `float32[8,16]`.

    Raises:
        CheckpointError: A leaf is not an array.
    """
    types = {}
    for path, leaf in leaves_of(state).items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{path} of the state is {leaf!r}, a {type(leaf).__name__}, not an array with a "
                f"sharding. Write, before the first step:\n"
                f"  xlashard.device_put({path.rpartition('.')[2]}, NamedSharding(mesh, P()))"
            )
        types[path] = typed(leaf.dtype, leaf.shape)
    return types


def describe_mismatches(
    saved: Mapping[str, str], types: Mapping[str, str], was: str, now: str
) -> str:
    """Compare the arrays of a checkpoint with those of a run.

    Args:
        saved: Types by path in the checkpoint.
        types: Types by path in the run.
        was: Settings of the checkpoint, as TOML.
        now: Settings of the run; empty if unknown.

    Returns:
        Mismatches and remedies; empty if all arrays match.
    """
    different, lacking, left = [], [], []
    for path, (old, new) in differences(saved, types).items():
        if old is None:
            lacking.append(f"{path}, {new}, is missing in the checkpoint")
        elif new is None:
            left.append(f"{path}, {old}, is in the checkpoint only")
        else:
            different.append(f"{path} is {old} in the checkpoint, but {new} in the run")
    lines = [line for kind in (different, lacking, left) for line in _first(kind)]
    return "\n".join([*(f"  {line}" for line in lines), *_advice(was, now)]) if lines else ""


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines if more <= 0 else [*lines[:_LISTED], f"and {counted(more, 'more array')}"]


def _advice(was: str, now: str) -> list[str]:
    changed = setting_changes(was, now) if now else {}
    # Shapes depend on settings of the model; without such a change, all changes are listed.
    shaping = {k: v for k, v in changed.items() if k.partition(".")[0] == "model"} or changed
    if not shaping:
        return []
    texts = [change_text(key, *values) for key, values in shaping.items()]
    words = [f"{key}={old}" for key, (old, _) in shaping.items() if old is not None]
    return [
        f"The settings changed: {'; '.join(texts)} now. Write:",
        "  --set " + " ".join(f"'{word}'" if '"' in word else word for word in words),
    ]
