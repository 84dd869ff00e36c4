"""``checkpoint.json``: what a checkpoint is, and by which digests its files are known."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xlashard.documents import parse_json, read_text
from xlashard.train.checkpoint.about import About
from xlashard.train.checkpoint.files import Digest, digests, files_in, link_out_of

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
