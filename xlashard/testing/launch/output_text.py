"""What processes write, made fit for a person."""

import re

from xlashard.errors import counted

# The library behind collectives on a CPU tells of its connections, and no setting stops it.
# Python's fault handler ends the stacks with a list of a dozen modules.
_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.|Extension modules: ")

# What stands below a test or a function in the stacks of a worker.
_MACHINERY = re.compile(
    r'  File "[^"]*/(?:_pytest/|pluggy/|xlashard/testing/(?:'
    r"pytest_plugin/in_worker|workers/(?:pod_worker|bootstrap))\.py)"
    r'.*", line \d+ in .*\n'
)


def without_machinery(text: str) -> str:
    """The stacks in an output without the frames of what calls tests and functions."""
    return _MACHINERY.sub("", text)


def is_noise(line: bytes) -> bool:
    """Whether a line says nothing that somebody wants to know."""
    return _NOISE.match(line) is not None


def without_noise(text: bytes) -> str:
    """A whole output as text, without such lines."""
    lines = text.splitlines(keepends=True)
    kept = b"".join(line for line in lines if not is_noise(line))
    return kept.decode("utf-8", errors="replace")


def last_lines(text: str, most: int) -> str:
    """The end of a text, which says how many lines are left out before."""
    lines = text.rstrip().splitlines()
    left_out = max(0, len(lines) - most)
    head = [f"[{counted(left_out, 'line')} before]"] if left_out else []
    return "\n".join([*head, *lines[left_out:]])
