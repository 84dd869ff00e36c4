"""Shardings of values by rules over their paths: pairs of a regular expression and a spec."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from xlashard.core.pjit.shardings.resolve import fit_sharding, to_sharding
from xlashard.core.pjit.shardings.resources import Resource, read_resources
from xlashard.core.sharding import AbstractMesh, Mesh, Sharding, XLACompatibleSharding
from xlashard.core.sharding.replicated import REPLICATED
from xlashard.errors import ArgumentError, MeshError, ResourceError, counted
from xlashard.support.formatting import closest
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class PathRules:
    """Rules that name shardings by paths; the first whose expression a path contains holds.

    Attributes:
        what: The argument: `shardings`.
        rules: Pairs of a regular expression, for `re.search`, and what is requested.
    """

    what: str
    rules: tuple[tuple[str, Resource], ...]

    def find_shardings(
        self, values: Mapping[str, Any], mesh: Mesh | AbstractMesh | None, noun: str
    ) -> dict[str, XLACompatibleSharding]:
        """Return the sharding of each value that a rule matches, by path.

        Args:
            values: Abstract values, or shapes with dtypes, by path.
            mesh: The mesh of the specs.
            noun: What the values are, for errors: `result`.

        Raises:
            ArgumentError: A rule matches no path.
            MeshError: A rule has a spec, and there is no mesh.
            ResourceError: A rule's sharding does not fit a value that it matches.
        """
        shardings: dict[str, XLACompatibleSharding | None] = {}
        for number, (pattern, resource) in enumerate(self.rules):
            matching = [path for path in values if re.search(pattern, path)]
            if not matching:
                raise self._match_error(number, pattern, values, noun)
            for path in matching:
                if path in shardings:
                    continue
                value = f"{self.what}[{number}]", path, values[path]
                sharding = read_sharding(resource, mesh, value)
                shardings[path] = None if sharding is None else _fit_by_rule(sharding, value)
        return {path: sharding for path, sharding in shardings.items() if sharding is not None}

    def _match_error(
        self, number: int, pattern: str, values: Mapping[str, Any], noun: str
    ) -> ArgumentError:
        paths_by_word = {word: path for path in values for word in re.findall(r"\w+", path)}
        words = re.findall(r"\w+", pattern)
        close = next(filter(None, (closest(word, paths_by_word) for word in reversed(words))), None)
        near = paths_by_word[close] if close else next(iter(values), "")
        return ArgumentError(
            f"{self.what}[{number}] has the pattern {pattern!r}, which matches none of "
            f"{counted(len(values), noun)}: write a regular expression that matches a path such "
            f"as {near!r}, or leave the rule out"
        )


def read_sharding(
    resource: Resource, mesh: Mesh | AbstractMesh | None, value: tuple[str, str, Any]
) -> Sharding | None:
    """Return the sharding that a resource stands for; None if it is unspecified.

    Args:
        resource: The resource.
        mesh: The mesh of specs, and of None.
        value: Argument that holds the resource, path of the value, and its abstract value.

    Raises:
        MeshError: A spec or None, without a mesh.
        ResourceError: A spec does not fit the mesh.
    """
    what, path, _ = value
    sharding = to_sharding(resource, mesh, what, path)
    if sharding is REPLICATED:
        raise MeshError(
            f"{what} of {path} is None (replicated), but no mesh is in force over whose devices: "
            "call inside `with jax.set_mesh(mesh):`, or give NamedSharding(mesh, P())"
        )
    return sharding


def _fit_by_rule(sharding: Sharding, value: tuple[str, str, Any]) -> XLACompatibleSharding:
    try:
        return fit_sharding(sharding, value, (), None)
    except ResourceError as error:
        path = value[1]
        first = f"({f'^{re.escape(path)}$'!r}, P())"
        raise ResourceError(
            f"{error}; or write a rule for {path} before it: {first}", path=path, also=type(error)
        ) from None


def is_path_rules(value: Any) -> bool:
    """Return True for a list or tuple of pairs that begin with text, also for an empty one."""
    return type(value) in (list, tuple) and all(
        isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)
        for rule in value
    )


def read_path_rules(rules: Sequence[tuple[str, Any]], what: str) -> PathRules:
    """Read rules, and check them as far as possible without a mesh.

    Args:
        rules: Pairs of a regular expression and None, a PartitionSpec or a Sharding.
        what: The argument, for errors.

    Raises:
        ArgumentError: A pattern is not a regular expression.
        ResourceError: What is requested by a rule is no sharding.
    """
    read = []
    for number, (pattern, requested) in enumerate(rules):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ArgumentError(
                f"{what}[{number}] has the pattern {pattern!r}, which is not a regular expression "
                f"({error}): write {re.escape(pattern)!r} for a path that contains this text"
            ) from None
        tree = read_resources(requested, f"{what}[{number}][1]")
        if not tree.is_leaf:
            raise ResourceError(
                f"{what}[{number}][1] is a {type(requested).__name__}: write one sharding for all "
                "paths that the pattern matches",
                path=f"{what}[{number}][1]",
            )
        read.append((pattern, tree.leaves[0]))
    return PathRules(what, tuple(read))
