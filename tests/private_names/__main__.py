"""Write the list of private names, compare it with the installed JAX, or try features on it.

`--rings` prints the folders whose tests should pass on it.

python -m tests.private_names --write
python -m tests.private_names --check
python -m tests.private_names --features
python -m tests.private_names --rings
"""

import sys
from importlib import metadata

from tests.private_names.features import PRIVATE, RINGS
from tests.private_names.names import (
    LIST,
    describe,
    find_differences,
    read_list,
    read_uses,
    to_toml,
)
from tests.private_names.sweep import run_features
from xlashard._jax import MINIMUM, parse_version

# Tests of the rings (docs/how/architecture.md).
PUBLIC_FOLDERS = ("tests/_jax", "tests/analysis", "tests/predict/preflight")
PRIVATE_FOLDERS = ("tests/core/array", "tests/core/pjit", "tests/core/sharding")


def main(words: list[str]) -> int:
    """Run a command and return the exit status."""
    if words == ["--write"]:
        names = describe(read_uses(), read_list())
        LIST.write_text(to_toml(names), encoding="utf-8")
        print(f"{LIST.name}: {len(names)} private names of jax {metadata.version('jax')}")
        return 0
    if words == ["--check"]:
        differences = list(find_differences(read_list().values()))
        print(*differences, sep="\n")
        missing = sum(difference.breaks for difference in differences)
        changed = sum(difference.now is not None for difference in differences)
        print(f"jax {metadata.version('jax')}: {missing} private names missing, {changed} changed")
        return 1 if missing and not _is_old() else 0
    if words == ["--rings"]:
        print(*PUBLIC_FOLDERS, *() if _is_old() else PRIVATE_FOLDERS)
        return 0
    if words == ["--features"]:
        return try_features()
    print(__doc__)
    return 2


def _is_old() -> bool:
    """Return True for a release on which the private ring may lack names."""
    return parse_version(metadata.version("jax")) < MINIMUM


def try_features() -> int:
    """Print which features work on the installed JAX; return 1 if one fails that should work."""
    failed = []
    for feature, facts in run_features()["features"].items():
        named = _is_old() and RINGS[feature] == PRIVATE and facts.get("error") == "JaxVersionError"
        if facts and not named:
            failed.append(feature)
        outcome = f"{facts['error']}: {facts['text']}" if facts else "works"
        print(f"{feature} ({RINGS[feature]}): {outcome}")
    print(f"jax {metadata.version('jax')}: {len(failed)} features failed: {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
