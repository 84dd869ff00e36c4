"""Filtering of the output of processes."""

import re

from xlashard.errors import counted

# Gloo logs its connections unconditionally; Python's fault handler ends its stacks with a list of
# modules.
_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.|Extension modules: ")

# Frames below a test or a function in the stacks of a worker.
_MACHINERY = re.compile(
    r'  File "[^"]*/(?:_pytest/|pluggy/|xlashard/testing/(?:'
    r"pytest_plugin/in_worker|workers/(?:pod_worker|bootstrap))\.py)"
    r'.*", line \d+ in .*\n'
)


def without_machinery(text: str) -> str:
    """Remove the frames that call tests and functions from the stacks in an output."""
    return _MACHINERY.sub("", text)


def is_noise(line: bytes) -> bool:
    """Return whether a line carries no information for the user."""
    return _NOISE.match(line) is not None


def without_noise(text: bytes) -> str:
    """Decode an output without its noise lines."""
    lines = text.splitlines(keepends=True)
    kept = b"".join(line for line in lines if not is_noise(line))
    return kept.decode("utf-8", errors="replace")


def last_lines(text: str, most: int) -> str:
    """Return the last lines of a text, preceded by the number of omitted lines."""
    lines = text.rstrip().splitlines()
    left_out = max(0, len(lines) - most)
    head = [f"[{counted(left_out, 'line')} before]"] if left_out else []
    return "\n".join([*head, *lines[left_out:]])
