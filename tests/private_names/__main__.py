"""Write the list of private names, or compare it with the installed JAX.

python -m tests.private_names --write
python -m tests.private_names --check
"""

import sys
from importlib import metadata

from tests.private_names.names import (
    LIST,
    describe,
    find_differences,
    read_list,
    read_uses,
    to_toml,
)


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
        return 1 if missing else 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
