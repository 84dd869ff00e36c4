"""Check that the checkout is what its version names, before a release.

`python -m tests.release` prints what is missing; `make release-check` calls it first.
"""

import re
import subprocess
import sys
from pathlib import Path

from xlashard._version import __version__

ROOT = Path(__file__).resolve().parent.parent

_SECTION = re.compile(r"^## (\S+).*\n", flags=re.MULTILINE)


def find_problems(changelog: str, version: str, tags: list[str]) -> list[str]:
    """Return what keeps a version from being released.

    Args:
        changelog: The text of `CHANGELOG.md`.
        version: The version of the package.
        tags: The tags of the repository.
    """
    _, *parts = _SECTION.split(changelog)
    sections = {title: text.strip() for title, text in zip(parts[::2], parts[1::2], strict=True)}
    problems = []
    if sections.get("Unreleased"):
        problems.append("CHANGELOG.md has entries under Unreleased: move them under the version")
    if not sections.get(version):
        problems.append(f"CHANGELOG.md has no section `## {version}` with entries")
    if f"v{version}" in tags:
        problems.append(f"the tag v{version} exists: raise the version in xlashard/_version.py")
    return problems


def _run_git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def main() -> int:
    """Print the problems; return 1 if there is one."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    problems = find_problems(changelog, __version__, _run_git("tag").split())
    for problem in problems:
        print(problem)
    if not problems:
        print(f"the version {__version__} has its entries")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
