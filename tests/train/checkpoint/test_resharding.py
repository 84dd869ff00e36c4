"""`xlashard reshard-checkpoint`: the values, shardings, memory and kills of a copy."""

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pods.multihost.safetensors_cases import write_folder
from tests.train.checkpoint.large_copies import (
    COLUMNS,
    ROWS,
    digest_copy,
    finish_copy,
    start_copy,
    write_large_file,
)
from xlashard import Mesh, NamedSharding, P, device_put, eval_shape, load_safetensors
from xlashard.cli.main import main
from xlashard.pods.multihost.safetensors_files import SafetensorsFiles
from xlashard.train.checkpoint.resharding import choose_chunk, open_source, split_blocks

pytestmark = pytest.mark.devices(8)

ROOT = Path(__file__).resolve().parents[3]
RULES = ["params.w$=P('data', 'model')", "mu|nu=P('model')"]


def reshard(*words: object) -> int:
    return main(["reshard-checkpoint", *map(str, words)])


def init() -> Any:
    params = {"w": jnp.arange(128.0).reshape(16, 8), "b": [jnp.ones(3, jnp.bfloat16), None]}
    opt = optax.adamw(1e-3).init({"w": params["w"]})
    return {"params": params, "opt": opt, "key": jax.random.key(3), "empty": {}, "n": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of orbax, of a tree of every kind of node and sharded over eight devices."""
    path = tmp_path_factory.mktemp("orbax") / "state"
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    state = init()
    state["params"]["w"] = device_put(state["params"]["w"], rows)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path


def check_equal(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        if isinstance(theirs, jax.Array) and jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_copy_of_orbax_has_the_tree_the_values_and_new_shardings(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    assert reshard(saved, copy, "--mesh", "data=2,model=4", "--rules", *RULES) == 0
    printed = capsys.readouterr().out
    assert "data=2 × model=4" in printed and "peak memory" in printed
    assert os.listdir(tmp_path) == ["copy"]
    with ocp.PyTreeCheckpointer() as checkpointer:
        check_equal(checkpointer.restore(copy), checkpointer.restore(saved))
        placed = checkpointer.restore(copy)["params"]["w"].sharding
        assert dict(placed.mesh.shape) == {"data": 2, "model": 4}
        assert placed.spec == P("data", "model")
        # With the tree of the state, and shardings of another mesh.
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
        with jax.set_mesh(mesh):
            abstract = eval_shape(init, shardings=[("params.*'w'", P("b")), ("key", P())])
        args = ocp.checkpoint_utils.construct_restore_args(abstract)
        restored = checkpointer.restore(copy, item=abstract, restore_args=args)
    check_equal(restored["opt"], init()["opt"])
    assert restored["params"]["w"].sharding.spec == P("b")
    chunks = {name: array.chunk for name, array in open_source(copy).arrays.items()}  # type: ignore[attr-defined]
    assert chunks["params.w"] == (8, 2) and chunks["opt.0.mu.w"] == (4, 8)


def test_a_checkpoint_without_ocdbt_is_read(saved: Path, tmp_path: Path) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    tree = {"a": np.arange(12.0).reshape(3, 4), "b": {"c": jnp.arange(5)}}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "src", args=ocp.args.PyTreeSave(tree))
    assert (
        reshard(tmp_path / "src", tmp_path / "dst", "--mesh", "x=4", "--rules", "a=P(None, 'x')")
        == 0
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "dst")
    check_equal(restored, tree)


def test_safetensors_become_orbax_and_back(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays: dict[str, Any] = {
        "model.w": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32),
        "model.b": np.arange(6).astype(jnp.bfloat16),
        "scale": np.array(2, np.int32),
    }
    names = sorted(arrays)
    parts = {f"{n}.safetensors": {k: arrays[k] for k in names[n::2]} for n in (0, 1)}
    folder = write_folder(tmp_path / "in", parts)
    words = ("--mesh", "data=2", "--rules", "w$=P('data')", "--json")
    assert reshard(folder, tmp_path / "orbax", *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["arrays"] == 3 and facts["unmatched"] == 2 and facts["mesh"] == {"data": 2}
    assert facts["peak_bytes"] < facts["memory_limit_bytes"] == 2**30
    like = {
        k: jax.ShapeDtypeStruct(
            v.shape, v.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
        for k, v in arrays.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        check_equal(checkpointer.restore(tmp_path / "orbax", like), arrays)
    file = tmp_path / "one.safetensors"
    assert reshard(tmp_path / "orbax", file) == 0
    several = tmp_path / "several"
    assert reshard(file, several, "--format", "safetensors", "--file-size", "200B") == 0
    assert len(list(several.glob("model-0000?-of-00002.safetensors"))) == 2
    mesh = Mesh(np.array(jax.devices()), ("x",))
    for path in (file, several, several / "model.safetensors.index.json"):
        check_equal(load_safetensors(path, NamedSharding(mesh, P())), arrays)
    assert SafetensorsFiles.open(file, "path").metadata == {"format": "flax"}
    # The tree of a state: names with points.
    assert reshard(saved, tmp_path / "state.safetensors") == 0
    assert "opt.0.mu.w" in SafetensorsFiles.open(tmp_path / "state.safetensors", "path").arrays


SIZES = st.lists(st.integers(1, 6), max_size=3)


@given(SIZES, st.integers(1, 40), st.integers(1, 200))
def test_blocks_cover_an_array_in_whole_chunks(shard: list[int], small: int, most: int) -> None:
    shape = [size * (n + 1) for n, size in enumerate(shard)]
    chunk = choose_chunk(shard, small)
    assert math.prod(chunk) <= small
    assert all(size % part == 0 for size, part in zip(shard, chunk, strict=True))
    seen = np.zeros(shape, int)
    for block in split_blocks(shape, chunk, max(most, small)):
        seen[tuple(slice(*ends) for ends in block)] += 1
        assert math.prod(end - start for start, end in block) <= max(most, small)
        for (start, end), part in zip(block, chunk, strict=True):
            assert start % part == end % part == 0
    assert (seen == 1).all()


@pytest.mark.integration
def test_64_mebibytes_are_copied_in_16_and_a_kill_leaves_no_copy(tmp_path: Path) -> None:
    source = tmp_path / "src.safetensors"
    wanted = write_large_file(source, 64)
    limit = ("--memory-limit", "16MiB")
    rows, columns = (*ROWS, *limit), (*COLUMNS, *limit)
    # Chunks of 2 MiB, the largest that can be read under the limit.
    finish_copy(start_copy(source, tmp_path / "rows", *ROWS, "--memory-limit", "32MiB", "--json"))
    steps: list[tuple[Path, Path, tuple[str, ...]]] = [
        (source, tmp_path / "small", rows),
        (tmp_path / "rows", tmp_path / "columns", columns),
        (tmp_path / "columns", tmp_path / "dst.safetensors", limit),
    ]
    for origin, copy, words in steps:
        facts = finish_copy(start_copy(origin, copy, *words, "--json"))
        assert facts["bytes"] == 64 * 2**20
        assert facts["peak_bytes"] <= facts["memory_limit_bytes"] == 16 * 2**20, (copy, facts)
        assert digest_copy(copy, 64) == wanted, copy
    # Killed at random moments while it copies, beginning with the first file that it makes.
    chance = random.Random(1)
    halves = 0
    for number in range(4):
        copy = tmp_path / f"killed{number}"
        process = start_copy(tmp_path / "rows", copy, *columns)
        while process.poll() is None and not list(tmp_path.glob(f".{copy.name}.resharding-*")):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.5)
        process.kill()
        process.communicate()
        halves += not copy.exists()
        assert not copy.exists() or digest_copy(copy, 64) == wanted
    assert halves
    assert (
        finish_copy(start_copy(tmp_path / "rows", tmp_path / "again", *columns, "--json"))["arrays"]
        == 4
    )
    assert digest_copy(tmp_path / "again", 64) == wanted


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert reshard(*words) == 2
    return capsys.readouterr().err


def test_what_cannot_be_copied_is_refused_before_anything_is_written(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst, mesh = tmp_path / "dst", ("--mesh", "data=4")
    (tmp_path / "other.bin").write_bytes(b"12345678")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "_METADATA").write_text('{"tree_metadata": {"a": {}}}')
    cases: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
        ((tmp_path / "no", dst, *mesh), ("SRC", "does not exist")),
        ((saved.parent, dst, *mesh), ("SRC", f"write {saved}")),
        ((tmp_path / "other.bin", dst, *mesh), ("SRC", "no file of safetensors")),
        ((broken, dst, *mesh), ("SRC", "_METADATA", "finished")),
        ((saved, saved.parent, *mesh), ("DST", "exists")),
        ((saved, tmp_path / "a" / "b", *mesh), ("DST", "no folder")),
        ((saved, dst), ("--mesh is missing",)),
        ((saved, dst, "--mesh", "data"), ("--mesh data",)),
        ((saved, dst, "--mesh", "data=0"), ("--mesh data=0", "1 or more")),
        ((saved, dst, *mesh, "--rules", "w$=P('model')"), ("--rules[0]", "'model'", "'data'=4")),
        ((saved, dst, *mesh, "--rules", "kernel=P('data')"), ("--rules[0]", "'kernel'")),
        ((saved, dst, *mesh, "--rules", "b.0=P('data')"), ("params.b.0", "size 3")),
        ((saved, dst, *mesh, "--rules", "w"), ("--rules w", "PATTERN=SPEC")),
        ((saved, dst, *mesh, "--rules", "w=P(1)"), ("--rules w=P(1)", "not a spec")),
        ((saved, dst, *mesh, "--memory-limit", "1KiB"), ("1.0 KiB", "--memory-limit 16MiB")),
        ((saved, tmp_path / "x.safetensors", *mesh), ("--mesh", "--format orbax")),
    ]
    before = sorted(tmp_path.rglob("*"))
    for words, facts in cases:
        printed = refused(capsys, *words)
        for fact in facts:
            assert fact in printed, printed
    wrong = (("--memory-limit", "lots"), ("--memory-limit", "0B"), ("--file-size", "5"))
    for words in (*wrong, ("--format", "zip")):
        with pytest.raises(SystemExit):
            reshard(saved, dst, *mesh, *words)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_of_the_disk_leaves_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xlashard.train.checkpoint.resharding._write_descriptions", fail)
    assert reshard(saved, tmp_path / "dst", "--mesh", "data=4") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not os.listdir(tmp_path)
