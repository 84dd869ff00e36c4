"""Read the replacements in the table of old names."""

import ast
import builtins
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

ROOTS = {"jax", "xlashard", "numpy", "functools", "graphlib", "optax", "orbax", "asyncio"}


def lost_names(code: str) -> list[str]:
    """Return the names of packages in a piece of code that don't resolve today."""
    tree = ast.parse(f"{code} ..." if code.endswith(":") else code)
    return [name for name in _names(tree) if not leads_somewhere(name)]


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node)
            if name.partition(".")[0] in ROOTS:
                yield name


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    before = _dotted(node.value)
    return f"{before}.{node.attr}" if before else ""


def leads_somewhere(name: str) -> bool:
    """Return whether a name of a package can be imported, or reached by attributes."""
    try:
        resolve(name)
    except (ImportError, AttributeError):
        return False
    return True


def resolve(name: str) -> Any:
    """Resolve a full name: its longest prefix that is a module, then attributes."""
    parts = name.split(".")
    if hasattr(builtins, parts[0]):
        return getattr(builtins, parts[0])
    module = importlib.import_module(parts[0])
    value: Any = module
    for n, part in enumerate(parts[1:], start=2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:n]))
    return value


def by_attributes(name: str) -> Any:
    """Resolve a full name from its package, by attributes alone."""
    first, *rest = name.split(".")
    value: Any = importlib.import_module(first)
    for part in rest:
        value = getattr(value, part)
    return value
