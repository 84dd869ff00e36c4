"""Pictures of trees of arrays."""

import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import xlashard
from tests.analysis.pictures.cases import MESH
from tests.analysis.pictures.test_files import parsed
from tests.train.examples import devices, settings
from xlashard import NamedSharding, P, TreePicture
from xlashard.analysis.pictures.picture_plan import COLOURS
from xlashard.analysis.pictures.sharding_picture import read_tree
from xlashard.errors import ArgumentError
from xlashard.train.model.layout import Layout, build_mesh
from xlashard.train.model.programs import make_recipe, state_shardings


def named(*spec):
    return NamedSharding(MESH, P(*spec))


def struct(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named(*spec))


TREE = {
    "embedding": struct((64, 32), "data", "model"),
    "layers": [{"w": struct((32, 32), "model"), "b": struct((32,))} for _ in range(2)],
    "rate": 0.1,
}


def test_arrays_stand_with_their_paths_the_biggest_first():
    tree = xlashard.visualize(TREE)
    assert isinstance(tree, TreePicture)
    assert [leaf.path for leaf in tree.leaves] == [
        "['embedding']",
        *(f"['layers'][{i}]['w']" for i in range(2)),
        *(f"['layers'][{i}]['b']" for i in range(2)),
    ]
    text = str(tree)
    assert text.startswith("5 arrays: 16.2 KiB, 5.2 KiB on each device\n")
    assert text.endswith("without a sharding: ['rate']")
    for words in (r"P\('data', 'model'\) +\[16,16\], 1.0 KiB +2  3", r"\[32,32\] +0, 2, 4, 6"):
        assert re.search(words, text), text


def test_bytes_are_counted_in_total_and_per_device():
    tree = read_tree({"a": struct((8, 4), "data"), "b": struct((), dtype=jnp.int8)})
    assert (tree.nbytes, tree.device_bytes) == (129, 33)


def test_shardings_may_be_one_a_tree_or_a_prefix():
    values = {"a": np.ones((8, 8)), "b": [np.ones(8), np.ones((8, 2))]}
    given = {
        "one": named("data"),
        "tree": {"a": named("data"), "b": [named("data"), named("data")]},
        "prefix": {"a": named("data"), "b": named("data")},
        "of jax": {"a": jax.sharding.NamedSharding(MESH, P("data")), "b": named("data")},
    }
    texts = {name: str(xlashard.visualize(values, shardings)) for name, shardings in given.items()}
    assert len(set(texts.values())) == 1
    own = xlashard.device_put(values, named("data"))
    assert [leaf.subject.sharding for leaf in xlashard.visualize(own).leaves] == ["P('data')"] * 3


@pytest.mark.parametrize(
    ("tree", "sharding", "words"),
    [
        ({"a": np.ones((8, 8))}, {"b": named()}, ["{'b': *}", "no prefix", "{'a': *}"]),
        ({"a": {"b": np.ones(8)}}, named("data", "model"), ["['a']['b']", "2 dimensions", "1"]),
        ([np.ones((8, 2))], [3], ["[0]", "not int", "NamedSharding(mesh"]),
    ],
)
def test_errors_name_the_path(tree, sharding, words):
    with pytest.raises(ArgumentError) as caught:
        xlashard.visualize(tree, sharding)
    assert all(word in str(caught.value) for word in words), caught.value


def test_many_arrays_are_counted():
    text = str(read_tree([struct((8, n + 1), "data") for n in range(40)]))
    assert "40 arrays" in text and "and 24 smaller" in text
    assert text.count("P('data')") == 16


def test_every_tile_has_its_colour():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    xlashard.visualize([TREE["embedding"]]).print(console=console)
    found = re.findall(r"48;2;(\d+);(\d+);(\d+)", console.file.getvalue())
    assert {"#" + "".join(f"{int(n):02x}" for n in rgb) for rgb in found} == set(COLOURS)


def test_numbers_replace_a_too_wide_picture():
    mesh = xlashard.AbstractMesh((8, 2), ("a", "b"))
    sharding = NamedSharding(mesh, P(None, "a"))
    console = Console(file=io.StringIO(), width=60)
    read_tree({"w": np.ones((8, 800))}, sharding).print(console=console)
    assert "8 tiles, each on 2" in console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    console = Console(file=io.StringIO(), width=width)
    xlashard.visualize(TREE).print(console=console)
    assert max(map(len, console.file.getvalue().splitlines())) <= width


def test_pictures_unfold_in_a_page(tmp_path):
    tree = xlashard.visualize(TREE)
    fragment = parsed(tree._repr_html_())
    assert fragment.tags.count("details") == fragment.tags.count("svg") == 5
    tree.save(tmp_path / "tree.html")
    parsed((tmp_path / "tree.html").read_text(encoding="utf-8"))
    tree.save(tmp_path / "tree.txt")
    with pytest.raises(
        ArgumentError, match=r"'a\.svg'.*\.html or \.txt.*picture\.save\('a\.html'\)"
    ):
        tree.save("a.svg")


@pytest.mark.parametrize("width", [80, 100])
def test_training_job_shows_its_largest_parameters(width):
    run = settings()
    layout = Layout(build_mesh(run.mesh, devices(8)), run.sharding.rules)
    recipe = make_recipe(run)
    shapes = jax.eval_shape(recipe.initial_state, 0)
    tree = read_tree(shapes, state_shardings(recipe, layout))
    assert not tree.unplaced
    parameters = read_tree(shapes["parameters"], state_shardings(recipe, layout)["parameters"])
    console = Console(file=io.StringIO(), width=width)
    console.print(parameters.biggest(4, "The biggest parameters"))
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("The biggest parameters")
    number = next(i for i, line in enumerate(lines) if "['embedding']" in line)
    # 256 × 32 values in 2 × 2 tiles.
    assert "float32[256,32]" in lines[number] and "0, 4  2, 6" in lines[number]
    assert "P('tensor', 'fsdp')" in lines[number + 1] and "1, 5  3, 7" in lines[number + 1]
    assert sum("float32[" in line for line in lines) == 4
    assert not any("…" in line for line in lines)
