"""Arrays of safetensors on shardings: their values, and the bytes that each process reads."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.processes import run_many
from tests.message_patterns import naming
from tests.pods.multihost.safetensors_cases import write_file, write_folder
from xlashard import Mesh, NamedSharding, P, load_safetensors
from xlashard.errors import ArgumentError, ResourceError
from xlashard.pods.multihost.safetensors_files import SafetensorsFiles, create_file

pytestmark = pytest.mark.devices(8)

RNG = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "wide": RNG.normal(size=(16, 4096)).astype(np.float32),
    "deep": RNG.normal(size=(4, 3, 8)).astype(jnp.bfloat16),
    "ids": np.arange(24, dtype=np.int32),
    "scale": np.array(3, np.float32),
    "none": np.zeros((0, 8), np.float32),
}
RULES = [("wide", P("data", "model")), ("deep", P("data", None, "model")), ("", P())]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    return write_file(path, ARRAYS, __metadata__={"format": "pt"})


def check_equal(arrays: dict[str, Any], names: Any = ARRAYS) -> None:
    assert arrays.keys() == set(names)
    for name, array in arrays.items():
        assert array.dtype == ARRAYS[name].dtype
        assert np.array_equal(np.asarray(array), ARRAYS[name])


def test_arrays_have_the_shardings_of_rules_a_dict_or_one_for_all(mesh: Mesh, file: Path) -> None:
    with jax.set_mesh(mesh):
        by_rules = load_safetensors(file, RULES)
        by_name = load_safetensors(str(file), {**dict.fromkeys(ARRAYS), "wide": P("model")})
        whole = load_safetensors(file, P())
    columns = load_safetensors(
        file, [("wide", NamedSharding(mesh, P(None, "model"))), ("", NamedSharding(mesh, P()))]
    )
    for arrays in (by_rules, by_name, whole, columns):
        check_equal(arrays)
    assert by_rules["deep"].sharding.spec == P("data", None, "model")
    assert by_name["wide"].sharding.spec == P("model")
    assert by_name["ids"].is_fully_replicated


def test_files_of_a_folder_are_one(mesh: Mesh, file: Path, tmp_path: Path) -> None:
    names = sorted(ARRAYS)
    parts = {f"model-{n}-of-2.safetensors": {k: ARRAYS[k] for k in names[n::2]} for n in (0, 1)}
    folder = write_folder(tmp_path / "model", parts)
    (folder / "other.safetensors").write_bytes(b"not in the index")
    with jax.set_mesh(mesh):
        for path in (folder, folder / "model.safetensors.index.json"):
            check_equal(load_safetensors(path, RULES))
        check_equal(load_safetensors(file.parent, RULES))


def test_floating_point_arrays_are_converted(mesh: Mesh, file: Path) -> None:
    with jax.set_mesh(mesh):
        arrays = load_safetensors(file, RULES, dtype=jnp.bfloat16)
    assert arrays["wide"].dtype == arrays["scale"].dtype == jnp.bfloat16
    assert arrays["ids"].dtype == np.int32
    assert np.array_equal(np.asarray(arrays["wide"]), ARRAYS["wide"].astype(jnp.bfloat16))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_part_is_that_of_the_whole_array(tmp_path_factory: Any, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        box.append((start, data.draw(st.integers(start, size))))
    index = tuple(slice(*ends) for ends in box)
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    file = tmp_path_factory.mktemp("part") / "x.safetensors"
    stored = create_file(file, {"x": (shape, whole.dtype)}, {"a": "b"})["x"]
    stored.write(tuple((0, size) for size in shape), np.zeros_like(whole))
    stored.write(tuple(box), whole[index])
    expected = np.zeros_like(whole)
    expected[index] = whole[index]
    opened = SafetensorsFiles.open(file, "path")
    assert opened.metadata == {"a": "b"}
    assert np.array_equal(opened.arrays["x"].read(tuple((0, size) for size in shape)), expected)
    assert np.array_equal(stored.read(tuple(box)), whole[index])


@pytest.mark.integration
def test_each_process_reads_its_own_bytes(tmp_path: Path) -> None:
    wide = {"wide": np.arange(64 * 8192, dtype=np.float32).reshape(64, 8192)}
    file = write_file(tmp_path / "model.safetensors", wide)
    run_many(Path(__file__).with_name("pod_safetensors.py"), 4, 2, str(file))


def header_of(entry: Any, size: int = 0) -> bytes:
    text = json.dumps({"x": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"", ("is no file of safetensors",)),
        (b"\xff" * 40, ("is no file of safetensors",)),
        ((10).to_bytes(8, "little") + b"{" * 10, ("no file of safetensors",)),
        (header_of({"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}, 4), ("F9",)),
        (header_of({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, 4), ("4 bytes", "(2,)")),
        (header_of({"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}, 4), ("(-1,)",)),
        (header_of({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, 4), ("needs",)),
        (header_of({"dtype": "F32"}, 4), ("data_offsets",)),
        (header_of([]), ("is no file of safetensors",)),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, content: bytes, facts: Any) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ArgumentError, match=naming("path", str(file), *facts)):
        load_safetensors(file, P())


def test_missing_files_and_rules_are_named(mesh: Mesh, file: Path, tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, Any, tuple[str, ...]]] = [
        (tmp_path / "no", P(), ArgumentError, ("path", "does not exist")),
        (tmp_path, P(), ArgumentError, ("path", "*.safetensors")),
        (file, [("wide", P())], ArgumentError, ("shardings", "4 arrays", "('', P())")),
        (file, [("wid$", P())], ArgumentError, ("shardings[0]", "'wide'")),
        (file, {"wide": P()}, ResourceError, ("shardings", "lacks")),
        (file, [("", P("data"))], ResourceError, ("scale", "float32[]")),
        (file, [("", P("x"))], ResourceError, ("'x'", "'data'=4")),
    ]
    with jax.set_mesh(mesh):
        for path, shardings, error, facts in cases:
            with pytest.raises(error, match=naming(*facts)):
                load_safetensors(path, shardings)
        for dtype in ("int8", "bfloat17"):
            with pytest.raises(ArgumentError, match=naming("dtype", dtype, "jnp.bfloat16")):
                load_safetensors(file, P(), dtype=dtype)
        index = tmp_path / "model.safetensors.index.json"
        for text, fact in (("{", "weight_map"), ('{"weight_map": {"x": "gone"}}', "1 file")):
            index.write_text(text)
            with pytest.raises(ArgumentError, match=naming(str(index), fact)):
                load_safetensors(index, P())
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.safetensors", {"x": ARRAYS["ids"]})
    index.unlink()
    with pytest.raises(ArgumentError, match=naming("'x'", "a.safetensors", "b.safetensors")):
        load_safetensors(tmp_path, P())
