"""Words of a picture, the same in a terminal, in SVG and in HTML."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from xlashard.analysis.pictures.picture_plan import Cell, Picture, cut_text
from xlashard.analysis.pictures.subject import PictureSubject
from xlashard.errors import counted
from xlashard.geometry import Runs
from xlashard.support.formatting import in_bytes, shape_text, sizes_text, typed

_WRITTEN_OUT = 4
"""Maximum number of runs in even steps that are written out."""


def runs_text(runs: Runs, most: int) -> str:
    """Return numbers as text: `0–3, 8, 9`; with even steps `0, 8 … 504`.

    Args:
        runs: The numbers.
        most: Maximum length; of more numbers, the first and the last are shown.
    """
    first, last = ([_run_text(run) for run in part] for part in (runs.first, runs.last))
    text = ", ".join([*first, *(["…"] if last else []), *last])
    if len(first) > _WRITTEN_OUT and runs.is_whole and _is_even(runs.first):
        text = f"{', '.join(first[:2])} … {first[-1]}"
    if len(text) <= most or not first:
        return text
    end = _run_text((runs.last or runs.first)[-1])
    for count in range(min(len(first), most // 2), 0, -1):
        text = f"{', '.join(first[:count])} … {end}"
        if len(text) <= most:
            return text
    return f"{runs.first[0].start} +{runs.count - 1}"


def _is_even(runs: Sequence[range]) -> bool:
    """Return whether runs have one length and one step."""
    steps = {b.start - a.start for a, b in pairwise(runs)}
    return len(steps) == 1 and len(set(map(len, runs))) == 1


def _run_text(run: range) -> str:
    if len(run) == 1:
        return str(run.start)
    return f"{run.start}{'–' if len(run) > 2 else ', '}{run[-1]}"


def devices_text(picture: Picture, cell: Cell, most: int, *, platform: bool = True) -> str:
    """Return the devices of a tile: `CPU 0–3`, or `#0–3` by position on an abstract mesh.

    Args:
        picture: The picture.
        cell: The tile.
        most: Maximum length.
        platform: Whether to name the platform.
    """
    if not cell.ids.count:
        return "no device"
    kind = platform_of(picture.subject)
    before = "#" if picture.subject.devices is None else f"{kind} " if platform and kind else ""
    return before + runs_text(cell.ids, most - len(before))


def hosts_text(cell: Cell, most: int) -> str:
    """Return the hosts whose devices hold a tile: `host 0`, `hosts 0–3`."""
    if cell.hosts is None or not cell.hosts.count:
        return ""
    before = "host " if cell.hosts.count == 1 else "hosts "
    return before + runs_text(cell.hosts, most - len(before))


def placed_text(picture: Picture, cell: Cell, most: int = 200) -> str:
    """Return devices and hosts of a tile in one line."""
    if len(cell.by_host) < 2 or not cell.ids.is_whole:
        hosts = hosts_text(cell, most) if picture.has_hosts else ""
        return devices_text(picture, cell, most) + (f" on {hosts}" if hosts else "")
    kind = platform_of(picture.subject)
    each = most // len(cell.by_host)
    groups = (f"{runs_text(ids, each)} on host {host}" for host, ids in cell.by_host)
    return f"{kind} {'; '.join(groups)}"


def index_text(picture: Picture, cell: Cell) -> str:
    """Return the index of a tile, `[0:2, :]`; whole dimensions as a colon."""
    whole = set(picture.whole_dims)
    parts = (":" if dim in whole else cut_text(cut) for dim, cut in enumerate(cell.index))
    return f"[{', '.join(parts)}]"


def panel_text(picture: Picture, number: int) -> str:
    """Return the index of a panel: `[0:2, :, :]`."""
    panel = picture.panels[number]
    cuts = {}
    if panel is not None:
        placement = picture.subject.placement
        pairs = zip(picture.panel_dims, panel.places, strict=True)
        cuts = {dim: cut_text(placement.cut(dim, place)) for dim, place in pairs}
    parts = (cuts.get(dim, ":") for dim in range(len(picture.subject.shape)))
    return f"[{', '.join(parts)}]"


def platform_of(subject: PictureSubject) -> str:
    """Return the kind of the devices, as it stands before their numbers: `CPU`, `TPU`."""
    return str(subject.devices[0].platform).upper() if subject.devices else ""


def type_text(subject: PictureSubject) -> str:
    """Return dtype and shape: `float32[8,16]`."""
    return typed(subject.dtype or "", subject.shape)


def title_text(subject: PictureSubject) -> str:
    """Return the title of a picture: `float32[8,16]  P('x', 'y') on x=2 × y=4`."""
    where = f" on {sizes_text(subject.mesh)}" if subject.mesh else ""
    return f"{type_text(subject)}  {subject.sharding}{where}"


def facts(picture: Picture) -> Iterator[tuple[str, str]]:
    """Yield further facts about the sharding, as pairs of a label and a sentence."""
    subject = picture.subject
    yield "devices", _devices_fact(subject)
    if subject.devices is None:
        yield "#", "a position on the mesh, row-major; it has no devices"
    for dim in picture.panel_dims:
        yield "panels", _cut_fact(subject, dim)
    for role, dim in (("rows", picture.row_dim), ("columns", picture.column_dim)):
        if dim is not None:
            yield role, _cut_fact(subject, dim)
    if picture.whole_dims and picture.num_tiles > 1:
        yield "whole", ", ".join(_whole_fact(subject, dim) for dim in picture.whole_dims)
    if subject.placement.addends > 1:
        words = f"each device holds one of {subject.placement.addends:,} partial results of a "
        yield "unreduced", f"{words}{subject.reduction}{_along(subject.unreduced_along)}"
    if (copies := _copies_fact(picture)) is not None:
        yield "copies", copies
    if not subject.placement.is_even:
        yield "uneven", "tiles differ in size; one that ends where it begins has no elements"


def _devices_fact(subject: PictureSubject) -> str:
    count = subject.placement.num_devices
    kind = platform_of(subject)
    words = counted(count, f"{kind} device".strip())
    if (subject.num_hosts or 1) > 1:
        words += f" of {subject.num_hosts} hosts"
    most = "" if subject.placement.is_even else "at most "
    words += (
        f"{', each holds' if count > 1 else ', holds'} {most}{shape_text(subject.placement.tile)}"
    )
    if subject.nbytes is not None and subject.tile_bytes is not None:
        words += f", {in_bytes(subject.tile_bytes)}"
        words += f" of {in_bytes(subject.nbytes)}" if subject.tile_bytes < subject.nbytes else ""
    if subject.memory_kind is not None:
        words += f", in {subject.memory_kind} memory"
    return words


def _cut_fact(subject: PictureSubject, dim: int) -> str:
    count, extent = subject.placement.counts[dim], subject.placement.tile[dim]
    most = "" if subject.placement.is_even else "at most "
    sizes = dict(subject.mesh)
    axes = () if subject.dim_axes is None else subject.dim_axes[dim] or ()
    along = _along([(name, sizes[name]) for name in axes])
    return f"dimension {dim} ({subject.shape[dim]:,}) in {count:,} tiles of {most}{extent:,}{along}"


def _whole_fact(subject: PictureSubject, dim: int) -> str:
    is_open = subject.dim_axes is not None and subject.dim_axes[dim] is None
    return f"dimension {dim} ({subject.shape[dim]:,}){', left to the partitioner' * is_open}"


def _copies_fact(picture: Picture) -> str | None:
    subject = picture.subject
    counts = {cell.ids.count // subject.placement.addends for cell in picture.cells}
    most = max(counts)
    if most < 2:
        return None
    words = (
        f"each tile on {most:,} devices" if picture.num_tiles > 1 else f"all on {most:,} devices"
    )
    if subject.placement.addends > 1:
        words = f"each partial result on {most:,} devices"
    if len(counts) > 1:
        words = f"tiles on {min(counts)} to {most:,} devices"
    return words + _along(subject.copied_along)


def _along(axes: Sequence[tuple[str, int]]) -> str:
    return f", along {sizes_text(axes)}" if axes else ""
