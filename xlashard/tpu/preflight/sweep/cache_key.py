"""Cache keys of sweep results."""

import ast
import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import jax

from xlashard._jax.runtime import executables
from xlashard._jax.runtime.topologies import libtpu_version
from xlashard.program.runtime.flags import flags_here

_PACKAGE = Path(__file__).parents[3]
_LENGTH = 24


def cache_key(request: Mapping[str, Any], sources: Sequence[Path] = ()) -> str:
    """Return the digest of a request, the user's sources, and all versions and flags.

    Args:
        request: Request as a JSON value.
        sources: Other files that the result depends on.
    """
    inputs = {
        "request": request,
        "sources": _digest_of_files(sources),
        "xlashard": _package_digest(),
        "jax": jax.__version__,
        "jaxlib": executables.jaxlib_version(),
        "libtpu": libtpu_version(),
        "flags": flags_here(),
        "config": _config(),
    }
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def _config() -> list[tuple[str, str]]:
    """Return JAX's environment variables, which worker processes inherit."""
    return sorted((k, v) for k, v in os.environ.items() if k.startswith("JAX_"))


@lru_cache(maxsize=16)
def _package_digest() -> str:
    return _digest_of_files(sorted(_PACKAGE.rglob("*.py")))


def source_files(module: str) -> list[Path]:
    """Return the files of a module and its imports, without installed packages.

    Args:
        module: Name of an imported module.
    """
    brought = [Path(p).resolve() for p in _installed()]
    found: dict[str, Path | None] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in found or not file or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        found[name] = None
        if not any(path.is_relative_to(folder) for folder in brought):
            found[name] = path
            waiting += _imports(path, name)
    return sorted(path for path in found.values() if path is not None)


def _imports(file: Path, module: str) -> Iterator[str]:
    """Yield the names of the modules that a file imports, including packages."""
    package = sys.modules[module].__package__ or ""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            name = f"{'.' * node.level}{node.module or ''}"
            base = resolve_name(name, package) if node.level else name
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _installed() -> Iterator[str]:
    paths = sysconfig.get_paths()
    yield from (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    yield from site.getsitepackages()
    yield str(_PACKAGE)
    yield sys.prefix
    yield sys.base_prefix


def _digest_of_files(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        # Digest name and content, so that the folder doesn't matter.
        digest.update(f"{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
