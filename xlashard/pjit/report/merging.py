"""Merge rows whose paths differ only in an index: layers of a list, members of a tuple."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from xlashard.pjit.report.cell_formatting import operation_text
from xlashard.pjit.report.model import (
    CollectiveReport,
    DonationReport,
    MoveReport,
    ValueReport,
)


def merged_values(values: Sequence[ValueReport]) -> list[ValueReport]:
    """Merge values of one type and sharding with similar paths; sum their bytes."""
    return [
        replace(
            group[0],
            path=_path([v.path for v in group]),
            nbytes=sum(v.nbytes for v in group),
            device_bytes=sum(v.device_bytes for v in group),
        )
        for group in _groups(values, lambda v: replace(v, path=_pattern(v.path)))
    ]


def merged_collectives(found: Sequence[CollectiveReport]) -> list[CollectiveReport]:
    """Merge collectives of one line with similar arguments, most sent bytes first."""
    merged = [
        replace(
            group[0],
            argument=_path([c.argument for c in group]),
            count=sum(c.count for c in group),
            times=sum(c.times for c in group),
            operand_bytes=sum(c.operand_bytes for c in group),
            result_bytes=sum(c.result_bytes for c in group),
            payload_bytes=sum(c.payload_bytes for c in group),
            sent_bytes=sum(c.sent_bytes for c in group),
        )
        for group in _groups(found, _reason)
    ]
    return sorted(merged, key=lambda c: -c.sent_bytes)


def _reason(c: CollectiveReport) -> Hashable:
    what = c.kind, c.along, c.groups, c.operands, c.results
    certain = c.times_known, c.conditional, c.asynchronous
    named = _pattern(c.argument) or operation_text(c.op_name), operation_text(c.needed_by)
    return what, certain, named, c.source, c.needed_by_source


def merged_moves(moves: Sequence[MoveReport]) -> list[MoveReport]:
    """Merge moves between the same shardings with similar arguments, the largest first."""
    merged = [
        replace(
            group[0],
            path=_path([m.path for m in group]),
            device_bytes_moved=sum(m.device_bytes_moved for m in group),
            host_bytes=sum(m.host_bytes for m in group),
        )
        for group in _groups(moves, lambda m: (_pattern(m.path), m.source, m.target))
    ]
    return sorted(merged, key=lambda m: -(m.device_bytes_moved + m.host_bytes))


def merged_donations(found: Sequence[DonationReport]) -> list[DonationReport]:
    """Merge donations with similar arguments and results."""
    return [
        replace(
            group[0],
            path=_path([d.path for d in group]),
            result=_path([d.result for d in group], count=False),
            device_bytes=sum(d.device_bytes for d in group),
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
