"""Module `pkg_resources` of setuptools, removed in 82: files and versions of packages."""

import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from packaging.requirements import Requirement
from packaging.version import Version

parse_version = Version


class ResolutionError(Exception):
    """Requirement that the installed distributions do not fulfil."""


class DistributionNotFound(ResolutionError):
    """Distribution that is not installed."""


class VersionConflict(ResolutionError):
    """Distribution that is installed in another version than required."""


class Distribution:
    """Installed distribution.

    Args:
        metadata: Python's record of it.
    """

    def __init__(self, metadata: importlib.metadata.Distribution) -> None:
        self._metadata = metadata

    @property
    def project_name(self) -> str:
        """The name of the distribution."""
        return self._metadata.metadata["Name"]

    @property
    def key(self) -> str:
        """The name in lower case."""
        return self.project_name.lower()

    @property
    def version(self) -> str:
        """The version, as text."""
        return self._metadata.version

    @property
    def parsed_version(self) -> Version:
        """The version, which compares."""
        return Version(self.version)

    @property
    def location(self) -> str:
        """The folder that holds the distribution."""
        return str(self._metadata.locate_file(""))


def get_distribution(dist: str) -> Distribution:
    """Return an installed distribution that fulfils a requirement.

    Args:
        dist: Its name, or a requirement such as `numpy>=1.20`.

    Raises:
        DistributionNotFound: It is not installed.
        VersionConflict: It is installed in another version.
    """
    required = Requirement(dist)
    try:
        installed = Distribution(importlib.metadata.distribution(required.name))
    except importlib.metadata.PackageNotFoundError:
        raise DistributionNotFound(  # no-catalogue: the class that setuptools raised
            f"{required.name} is not installed: write pip install {required.name}"
        ) from None
    if installed.version not in required.specifier:
        raise VersionConflict(  # no-catalogue: the class that setuptools raised
            f"{required.name} {installed.version} is installed, which is not {required.specifier}: "
            f"write pip install '{dist}'"
        )
    return installed


def require(*requirements: str) -> list[Distribution]:
    """Return the installed distributions that fulfil some requirements.

    Args:
        *requirements: The requirements.
    """
    return [get_distribution(each) for each in requirements]


def iter_entry_points(group: str, name: str | None = None) -> Iterator[Any]:
    """Yield the entry points of a group.

    Args:
        group: The group.
        name: The name of the entry points; None for all.
    """
    points = importlib.metadata.entry_points(group=group)
    yield from points if name is None else points.select(name=name)


def resource_filename(package_or_requirement: str, resource_name: str) -> str:
    """Return the path of a file of a package.

    Args:
        package_or_requirement: The package, or a module of it.
        resource_name: The path in its folder, with slashes.
    """
    file = importlib.import_module(package_or_requirement).__file__
    return os.path.join(os.path.dirname(file or ""), *resource_name.split("/"))


def resource_exists(package_or_requirement: str, resource_name: str) -> bool:
    """Return whether a package has a file or folder."""
    return os.path.exists(resource_filename(package_or_requirement, resource_name))


def resource_isdir(package_or_requirement: str, resource_name: str) -> bool:
    """Return whether a package has a folder."""
    return os.path.isdir(resource_filename(package_or_requirement, resource_name))


def resource_listdir(package_or_requirement: str, resource_name: str) -> list[str]:
    """Return the names in a folder of a package."""
    return os.listdir(resource_filename(package_or_requirement, resource_name))


def resource_stream(package_or_requirement: str, resource_name: str) -> BinaryIO:
    """Open a file of a package."""
    return open(resource_filename(package_or_requirement, resource_name), "rb")


def resource_string(package_or_requirement: str, resource_name: str) -> bytes:
    """Return the bytes of a file of a package."""
    with resource_stream(package_or_requirement, resource_name) as file:
        return file.read()
