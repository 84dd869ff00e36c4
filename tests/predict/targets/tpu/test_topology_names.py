"""Parsing of topology names."""

import math

import pytest

from xlashard.errors import TopologyError
from xlashard.predict.targets.tpu.generations import BY_NAME, GENERATIONS
from xlashard.predict.targets.tpu.topology_names import (
    accelerator_type,
    chip_counts,
    default_shape,
    parse_topology_name,
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v4-32", "v4:2x2x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5e-16", "v5e:4x4"),
        ("v5e-8", "v5e:2x4"),
        ("v6e-64", "v6e:8x8"),
        ("tpu7x-128", "tpu7x:4x4x4"),
        ("v2-8", "v2:2x2"),
        ("v3-2048", "v3:32x32"),
        ("v4:2x2x4", "v4:2x2x4"),
        ("V5P:8X8X8", "v5p:8x8x8"),
        (" ironwood:4x4x4 ", "tpu7x:4x4x4"),
        ("trillium-256", "v6e:16x16"),
        ("tpu-v5-lite-podslice:4x4", "v5e:4x4"),
        ("v5e:4x4x1", "v5e:4x4"),
        ("v5e:1x1", "v5e:1x1"),
        ("v5p:4x4x8_twisted", "v5p:4x4x8_twisted"),
        ("v5p:4x4x8_untwisted", "v5p:4x4x8"),
        ("ct5lp-hightpu-1t", "v5e:1x1"),
        ("ct5lp-hightpu-4t", "v5e:2x2"),
        ("ct6e-standard-8t", "v6e:2x4"),
        ("ct5p-hightpu-4t", "v5p:2x2x1"),
        ("tpu7x-standard-4t", "tpu7x:2x2x1"),
    ],
)
def test_topology_names_are_parsed(name: str, text: str) -> None:
    assert parse_topology_name(name).text == text


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # The table of https://cloud.google.com/tpu/docs/v5p: TensorCores and shapes.
        *((f"v5p-{2 ** (3 + i)}", s) for i, s in enumerate(["2x2x1", "2x2x2", "2x2x4", "2x4x4"])),
        *(("v5p-128", "4x4x4"), ("v5p-256", "4x4x8"), ("v5p-384", "4x4x12"), ("v5p-512", "4x8x8")),
        *(("v5p-768", "4x8x12"), ("v5p-1024", "8x8x8"), ("v5p-1152", "4x12x12")),
        *(("v5p-1280", "4x8x20"), ("v5p-1536", "8x8x12"), ("v5p-2048", "8x8x16")),
        *(("v5p-3072", "8x12x16"), ("v5p-4096", "8x16x16"), ("v5p-6144", "12x16x16")),
        *(("v5p-8192", "16x16x16"), ("v5p-12288", "16x16x24")),
        # That of https://cloud.google.com/tpu/docs/v4.
        *(("v4-64", "2x4x4"), ("v4-128", "4x4x4"), ("v4-1024", "8x8x8"), ("v4-1536", "8x8x12")),
    ],
)
def test_core_count_maps_to_the_documented_cloud_shape(name: str, shape: str) -> None:
    assert parse_topology_name(name).text.endswith(f":{shape}")


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
def test_every_chip_count_round_trips_through_a_name(generation) -> None:
    counts = chip_counts(generation)
    assert list(counts) == sorted(set(counts))
    assert counts[-1] == generation.pod_chips
    assert default_shape(generation, generation.pod_chips) == generation.pod_shape
    for count in counts:
        shape = default_shape(generation, count)
        assert shape is not None
        assert math.prod(shape) == count
        known = parse_topology_name(f"{generation.name}:{'x'.join(map(str, shape))}")
        assert parse_topology_name(accelerator_type(known)) == known


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5x:4x4", ["'v5x:4x4'", "'v5e:4x4'", "v2, v3, v4, v5e, v5p, v6e, tpu7x"]),
        ("v5litpod-16", ["'v5litpod-16'", "the nearest are 'v5e-16'"]),
        ("v5litepod16", ["'v5e-16'"]),
        ("h100-8", ["unknown TPU topology 'h100-8'", "'v5p-128' or 'v5p:4x4x4'"]),
        ("", ["unknown TPU topology ''"]),
        ("v5p", ["lacks a slice size", "'v5p-32', 'v5p:2x2x4'"]),
        ("ironwood", ["lacks a slice size", "'tpu7x-32', 'tpu7x:2x2x4'"]),
        ("v5p-100", ["100 TensorCores (2 of a chip)", "'v5p-64'", "'v5p-128' (v5p:4x4x4)"]),
        ("v5p-129", ["129 TensorCores", "'v5p-128'", "'v5p-256'"]),
        ("v5e-24", ["24 chips", "'v5litepod-16' (v5e:4x4)", "'v5litepod-32' (v5e:4x8)"]),
        ("v5p-17920", ["17,920 TensorCores", "take 'v5p-12288' (v5p:16x16x24)"]),
        ("v5p:3x5x7", ["a dimension of 3 chips", "1, 2, 4 or a multiple of 4"]),
        ("v5p:4x4x6", ["a dimension of 6 chips", "'v5p-128'", "'v5p-256'"]),
        ("v5p:1x4x4", ["whole hosts, of 2x2x1 chips each"]),
        ("v5e:3x3", ["whole hosts, of 2x2 chips each", "'v5litepod-8' (v5e:2x4)"]),
        ("v5e:32x32", ["1,024 chips", "has 256, as v5e:16x16", "slices=2"]),
        ("v5p:32x32x32", ["32,768 chips", "has 6,144, as v5p:16x16x24"]),
        ("v5e:0x4", ["v5e:0x4 has no chips"]),
        ("v5p:4x4", ["2 dimensions", "has 3", "'v5p:4x4x1'"]),
        ("v5e:2x2x2", ["3 dimensions", "has 2", "'v5e:2x2'"]),
        ("v5p:4x4x12_twisted", ["can't be twisted", "'v5p:4x4x8_twisted'"]),
        ("v5e:16x16_twisted", ["can't be twisted"]),
        ("v5e:4x4_bent", ["'_bent'", "'_twisted', or no suffix"]),
        ("ct5lp-hightpu-3t", ["ct5lp-hightpu-1t or ct5lp-hightpu-4t or ct5lp-hightpu-8t"]),
        (128, ["name=128 is invalid"]),
    ],
)
def test_invalid_topology_names_are_refused(name, message: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology_name(name)
    for part in message:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_suggested_names_are_valid() -> None:
    for name in ("v5x:4x4", "v5litpod-16", "v4p-4096", "v6p:8x8", "v5pp:4x4x4"):
        with pytest.raises(TopologyError) as caught:
            parse_topology_name(name)
        offered = str(caught.value).partition("nearest are ")[2].partition(".")[0].split(", ")
        assert offered != [""]
        for each in offered:
            parse_topology_name(each.strip("'"))
    assert BY_NAME["v5e"].title == "TPU v5e"
