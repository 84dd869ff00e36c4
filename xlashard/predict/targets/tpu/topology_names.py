"""Names of topologies: accelerator types and machine types of Cloud TPU, and libtpu names."""

import difflib
import math
import re
from dataclasses import dataclass
from itertools import combinations_with_replacement

from xlashard.errors import TopologyError
from xlashard.geometry.strides import divisors
from xlashard.predict.targets.tpu.generations import BY_NAME, GENERATIONS, Generation

_ALIASES = {
    **{generation.name: generation.name for generation in GENERATIONS},
    **dict.fromkeys(("v5litepod", "v5lite", "v5-lite", "tpu-v5-lite-podslice"), "v5e"),
    **dict.fromkeys(("v5", "tpu-v5p-slice"), "v5p"),
    **dict.fromkeys(("v6", "trillium", "tpu-v6e-slice"), "v6e"),
    **dict.fromkeys(("ironwood", "v7x", "7x", "v7"), "tpu7x"),
    **dict.fromkeys(("tpu-v4-podslice",), "v4"),
}
_MACHINES = {
    "ct4p-hightpu": "v4",
    "ct5lp-hightpu": "v5e",
    "ct5p-hightpu": "v5p",
    "ct6e-standard": "v6e",
    "tpu7x-standard": "tpu7x",
}
# Cloud TPU slice shapes of two-dimensional generations.
_FLAT_SHAPES = {
    "v2": ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16)),
    "v3": ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)),
    "v5e": ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    "v6e": ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
}
# Shapes of less than a cube, for three-dimensional generations.
_SMALL_SHAPES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBE = 4
_NAME = re.compile(r"(?P<kind>[a-z0-9-]+?)[:-](?P<size>[0-9]+(?:x[0-9]+)*)(?P<twist>_\w+)?")
_MACHINE = re.compile(r"(?P<machine>[a-z0-9]+-[a-z]+)-(?P<chips>[0-9]+)t")


@dataclass(frozen=True)
class SliceName:
    """Parsed name of a slice.

    Attributes:
        generation: Generation of the chips.
        shape: Chips per dimension of the torus.
        twisted: Whether the long dimension is a twisted torus.
    """

    generation: Generation
    shape: tuple[int, ...]
    twisted: bool = False

    @property
    def text(self) -> str:
        """Name in libtpu: `v5p:4x4x8_twisted`."""
        return f"{self.generation.name}:{shape_name(self.shape)}{'_twisted' * self.twisted}"


def shape_name(shape: tuple[int, ...]) -> str:
    """Return a shape as text: `4x4x8`."""
    return "x".join(map(str, shape))


def parse_topology_name(name: str) -> SliceName:
    """Parse the name of a topology.

    Args:
        name: A libtpu name (`v5p:4x4x8`), an accelerator type (`v5p-128`, `v5litepod-16`), either
            one with an alias of the generation (`v5e-16`, `ironwood:4x4x4`), or a machine type
            (`ct5lp-hightpu-4t`).

    Raises:
        TopologyError: If the generation or the slice is unknown.
    """
    if not isinstance(name, str):
        raise TopologyError(
            f"name={name!r} is invalid: expected a string, such as topology('v5p:4x4x4')"
        )
    text = name.strip().lower()
    machine = _MACHINE.fullmatch(text)
    if machine and machine["machine"] in _MACHINES:
        generation = BY_NAME[_MACHINES[machine["machine"]]]
        return SliceName(generation, _machine_shape(name, generation, int(machine["chips"])))
    match = _NAME.fullmatch(text)
    if match is None or match["kind"] not in _ALIASES:
        raise TopologyError(_unknown(name, text))
    generation = BY_NAME[_ALIASES[match["kind"]]]
    twisted = _is_twisted(name, match["twist"])
    sizes = tuple(map(int, match["size"].split("x")))
    if len(sizes) == 1:
        sizes = _shape_of_count(name, generation, sizes[0])
    return validate(SliceName(generation, _dimensions(name, generation, sizes), twisted))


def accelerator_type(slice_name: SliceName) -> str:
    """Return the Cloud TPU name of the slice size: `v5p-128`, `v5litepod-16`."""
    generation = slice_name.generation
    prefix = "v5litepod" if generation.name == "v5e" else generation.name
    return f"{prefix}-{math.prod(slice_name.shape) * _units(generation)}"


def default_shape(generation: Generation, chips: int) -> tuple[int, ...] | None:
    """Return the shape of a Cloud TPU slice of this many chips, or None if Cloud TPU has none.

    Two-dimensional and small three-dimensional shapes are listed. Larger ones are made of 4x4x4
    cubes, as close to a cube as possible.
    """
    if generation.dimensions == 2:
        return next((s for s in _FLAT_SHAPES[generation.name] if math.prod(s) == chips), None)
    small = next((s for s in _SMALL_SHAPES if math.prod(s) == chips), None)
    if small or chips % _CUBE**3 or not 0 < chips <= generation.pod_chips:
        return small
    cubes = chips // _CUBE**3
    shapes = [
        (_CUBE * a, _CUBE * b, _CUBE * c)
        for a, b, c in combinations_with_replacement(divisors(cubes), 3)
        if a * b * c == cubes
    ]
    return min(shapes, key=lambda s: s[0] * s[1] + s[1] * s[2] + s[0] * s[2])


def chip_counts(generation: Generation) -> tuple[int, ...]:
    """Return the valid chip counts of a slice, smallest first."""
    if generation.dimensions == 2:
        return tuple(map(math.prod, _FLAT_SHAPES[generation.name]))
    small = tuple(map(math.prod, _SMALL_SHAPES))
    return small + tuple(range(_CUBE**3, generation.pod_chips + 1, _CUBE**3))


def validate(slice_name: SliceName) -> SliceName:
    """Return the slice name if the slice is valid.

    Raises:
        TopologyError: If the slice exceeds a pod, is not made of whole hosts and cubes, or can't be
            twisted.
    """
    generation, shape = slice_name.generation, slice_name.shape
    chips = math.prod(shape)
    if not chips:
        raise TopologyError(
            f"{slice_name.text} has no chips: every size must be at least 1; "
            f"{_nearest_text(generation, 0)}"
        )
    if generation.dimensions == 2:
        _check_flat(slice_name)
    else:
        _check_cubes(slice_name)
    if slice_name.twisted:
        _check_twist(slice_name)
    return slice_name


def _check_flat(slice_name: SliceName) -> None:
    generation, shape = slice_name.generation, slice_name.shape
    x, y = sorted(shape)
    if x > generation.pod_shape[0] or y > generation.pod_shape[1]:
        raise _too_large(slice_name)
    # A slice within a single host may have any shape that fits the host.
    host = generation.host_bounds
    if (x > host[0] or y > host[1]) and (x % 2 or y % 2):
        raise _not_whole_hosts(slice_name)


def _check_cubes(slice_name: SliceName) -> None:
    generation, shape = slice_name.generation, slice_name.shape
    if math.prod(shape) > generation.pod_chips:
        raise _too_large(slice_name)
    wrong = [size for size in shape if size not in (1, 2) and size % _CUBE]
    host = generation.host_bounds
    single = all(size <= bound for size, bound in zip(shape, host, strict=True))
    if wrong:
        raise TopologyError(
            f"{slice_name.text} has a dimension of {wrong[0]} chips: expected 1, 2, 4 or a "
            f"multiple of 4; {_nearest_text(generation, math.prod(shape))}"
        )
    if not single and (shape[0] % host[0] or shape[1] % host[1]):
        raise _not_whole_hosts(slice_name)


def _check_twist(slice_name: SliceName) -> None:
    # libtpu aborts the process for an invalid twist.
    generation, shape = slice_name.generation, sorted(slice_name.shape)
    short = shape[0]
    whole = generation.dimensions == 3 and short % _CUBE == 0
    if not whole or shape not in ([short, short, 2 * short], [short, 2 * short, 2 * short]):
        raise TopologyError(
            f"{slice_name.text} can't be twisted: expected three dimensions of whole 4x4x4 "
            "cubes, one or two of them twice as long as the others: 'v5p:4x4x8_twisted', "
            f"'v5p:4x8x8_twisted'"
        )


def _is_twisted(name: str, ending: str | None) -> bool:
    if ending not in (None, "_twisted", "_untwisted"):
        raise TopologyError(
            f"topology {name!r} has the invalid suffix {ending!r}: expected '_twisted', or no "
            f"suffix"
        )
    return ending == "_twisted"


def _dimensions(name: str, generation: Generation, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return one size per torus dimension, dropping trailing sizes of 1."""
    rank = generation.dimensions
    while len(sizes) > rank and sizes[-1] == 1:
        sizes = sizes[:-1]
    if len(sizes) == rank:
        return sizes
    example = SliceName(generation, (*sizes, *(1,) * rank)[:rank])
    raise TopologyError(
        f"topology {name!r} has {len(sizes)} dimensions, but the torus of a {generation.title} "
        f"has {rank}: '{example.text}'"
    )


def _units(generation: Generation) -> int:
    """Return the number of units per chip that an accelerator type counts."""
    return generation.cores_per_chip if generation.counts_cores else 1


def _shape_of_count(name: str, generation: Generation, count: int) -> tuple[int, ...]:
    chips, left = divmod(count, _units(generation))
    shape = None if left else default_shape(generation, chips)
    if shape is not None:
        return shape
    counted = (
        f"{count:,} TensorCores ({generation.cores_per_chip} of a chip)"
        if generation.counts_cores
        else f"{count:,} chips"
    )
    raise TopologyError(
        f"no slice of {generation.title} has the {counted} of {name!r}: "
        f"{_nearest_text(generation, count / _units(generation))}"
    )


def _machine_shape(name: str, generation: Generation, chips: int) -> tuple[int, ...]:
    bounds = generation.host_bounds[: generation.dimensions]
    one = (1,) * generation.dimensions
    shapes = {math.prod(s): s for s in (one, bounds, *generation.single_host_shapes)}
    if chips not in shapes:
        machine = name.strip().rpartition("-")[0]
        known = " or ".join(f"{machine}-{count}t" for count in sorted(shapes))
        raise TopologyError(f"unknown machine type {name!r}: write {known}")
    return shapes[chips]


def _nearest_text(generation: Generation, chips: float) -> str:
    """Return the nearest valid slices, by both names."""
    counts = chip_counts(generation)
    below = [count for count in counts if count <= chips][-1:]
    above = [count for count in counts if count > chips][:1]
    names = []
    for count in (*below, *above):
        shape = default_shape(generation, count)
        if shape is not None:
            known = SliceName(generation, shape)
            names.append(f"'{accelerator_type(known)}' ({known.text})")
    return f"the nearest are {' and '.join(names)}" if len(names) > 1 else f"take {names[0]}"


def _not_whole_hosts(slice_name: SliceName) -> TopologyError:
    generation = slice_name.generation
    host = shape_name(generation.host_bounds[: generation.dimensions])
    return TopologyError(
        f"{slice_name.text} is not made of whole hosts, of {host} chips each: "
        f"{_nearest_text(generation, math.prod(slice_name.shape))}"
    )


def _too_large(slice_name: SliceName) -> TopologyError:
    generation = slice_name.generation
    pod = SliceName(generation, generation.pod_shape)
    return TopologyError(
        f"{slice_name.text} has {math.prod(slice_name.shape):,} chips; the largest slice of "
        f"{generation.title} has {generation.pod_chips:,}, as {pod.text}. Larger topologies have "
        f"several slices",
        topology=pod.text,
        slices=2,
    )


def _unknown(name: str, text: str) -> str:
    parted = re.fullmatch(r"(.*?)[:-]?([0-9]+(?:x[0-9]+)*)?(_\w+)?", text)
    kind, size = (parted[1] or "", parted[2] or "") if parted else (text, "")
    if text in _ALIASES:
        usual = ", ".join(f"'{offer}'" for offer in _usual(BY_NAME[_ALIASES[text]]))
        return f"topology {name!r} lacks a slice size: write {usual}"
    # Suggest each generation once, by the name shared by Cloud TPU and libtpu.
    near = dict.fromkeys(
        _ALIASES[alias] for alias in difflib.get_close_matches(kind, _ALIASES, n=5, cutoff=0.5)
    )
    offers = ", ".join(f"'{_offer(BY_NAME[kind], size)}'" for kind in near)
    meant = f"the nearest are {offers}. " if offers else ""
    return (
        f"unknown TPU topology {name!r}: {meant}Write a generation ({', '.join(BY_NAME)}) and a "
        f"size: 'v5p-128' or 'v5p:4x4x4'"
    )


def _usual(generation: Generation) -> tuple[str, str]:
    """Return both names of a small slice."""
    shape = default_shape(generation, 16) or generation.pod_shape
    known = SliceName(generation, shape)
    return accelerator_type(known), known.text


def _offer(generation: Generation, size: str) -> str:
    """Return a generation with the requested size if valid, else with a typical size."""
    if not size:
        return _usual(generation)[0]
    separator = ":" if "x" in size else "-"
    offer = f"{generation.name}{separator}{size}"
    try:
        parse_topology_name(offer)
    except TopologyError:
        return _usual(generation)[0]
    return offer
