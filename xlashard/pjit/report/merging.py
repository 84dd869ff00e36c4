"""Merge rows whose paths differ only in an index: layers of a list, members of a tuple."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from xlashard.pjit.report.cell_formatting import operation_text
from xlashard.pjit.report.model import (
    CollectiveReport,
    DonationReport,
    MoveReport,
    ValueReport,
)

_COLLECTIVE_SUMS = (
    "count",
    "times",
    "operand_bytes",
    "result_bytes",
    "payload_bytes",
    "sent_bytes",
)


def merged_values(values: Sequence[ValueReport]) -> list[ValueReport]:
    """Merge values of one type and sharding with similar paths; sum their bytes."""
    groups = _groups(values, lambda v: replace(v, path=_pattern(v.path)))
    return [_merged(group, "path", ("nbytes", "device_bytes")) for group in groups]


def merged_collectives(found: Sequence[CollectiveReport]) -> list[CollectiveReport]:
    """Merge collectives of one line with similar arguments, most sent bytes first."""
    merged = [_merged(group, "argument", _COLLECTIVE_SUMS) for group in _groups(found, _reason)]
    return sorted(merged, key=lambda c: -c.sent_bytes)


def collective_sums(found: Sequence[CollectiveReport]) -> dict[str, int]:
    """Sum the counts, executions and bytes of collectives."""
    return _sums(found, _COLLECTIVE_SUMS)


def _reason(c: CollectiveReport) -> Hashable:
    what = c.kind, c.along, c.groups, c.operands, c.results
    certain = c.times_known, c.conditional, c.asynchronous
    named = _pattern(c.argument) or operation_text(c.op_name), operation_text(c.needed_by)
    return what, certain, named, c.source, c.needed_by_source


def merged_moves(moves: Sequence[MoveReport]) -> list[MoveReport]:
    """Merge moves between the same shardings with similar arguments, the largest first."""
    groups = _groups(moves, lambda m: (_pattern(m.path), m.source, m.target))
    merged = [_merged(group, "path", ("device_bytes_moved", "host_bytes")) for group in groups]
    return sorted(merged, key=lambda m: -(m.device_bytes_moved + m.host_bytes))


def merged_donations(found: Sequence[DonationReport]) -> list[DonationReport]:
    """Merge donations with similar arguments and results."""
    return [
        replace(
            _merged(group, "path", ("device_bytes",)),
            result=_path([d.result for d in group], count=False),
        )
        for group in _groups(found, _outcome)
    ]


def _outcome(d: DonationReport) -> Hashable:
    return d.donated, _pattern(d.path), _pattern(d.result), _pattern(d.reason)


def _groups[T](values: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def _merged(group: Sequence[Any], path: str, sums: Sequence[str]) -> Any:
    """Merge similar values: name them by one path, and sum some of their fields."""
    paths = [getattr(value, path) for value in group]
    return replace(group[0], **{path: _path(paths)}, **_sums(group, sums))


def _sums(group: Sequence[Any], names: Sequence[str]) -> dict[str, int]:
    return {name: sum(getattr(value, name) for value in group) for name in names}


def _pattern(path: str) -> str:
    """Replace the indices of a path."""
    return re.sub(r"\[\d+\]", "[*]", path)


def _path(paths: Sequence[str], *, count: bool = True) -> str:
    """Format one path for similar ones: `layers[*].w (12)`. Common indices stay."""
    first, *others = [re.split(r"(\[\d+\])", path) for path in paths]
    if not others:
        return paths[0]
    steps = [
        step if all(other[i] == step for other in others) else "[*]" for i, step in enumerate(first)
    ]
    text = "".join(steps)
    return f"{text} ({len(paths)})" if count and text else text
