"""Checkpoints of single arrays that are missing, damaged, or requested by invalid arguments."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore

from tests.core.array.cases import named, same, value
from xlashard import Mesh, P, device_put
from xlashard.errors import (
    ArgumentError,
    DeletedError,
    PlacementError,
    ProcessesError,
    SerializationError,
)
from xlashard.legacy import serialization as saving
from xlashard.legacy.serialization.array_writing import WriteFuture
from xlashard.legacy.serialization.tensorstore_specs import stored_at

V = value(np.float32)
TALL = Mesh(np.array(jax.devices()), ("all",))


def refused(kind: type[Exception], use: Any, *words: str) -> str:
    with pytest.raises(kind) as caught:
        use()
    for word in words:
        assert word in str(caught.value), caught.value
    return str(caught.value)


def test_error_of_a_missing_array_names_its_path(tmp_path: Path, spec: Any) -> None:
    saving.run_serialization([V], [spec])
    nearby = saving.get_tensorstore_spec(f"{tmp_path}/v")
    text = refused(
        SerializationError,
        lambda: saving.run_deserialization([named()], [nearby]),
        f"no array at '{tmp_path}/v'",
        "contains 'w'",
    )
    assert "source locations" not in text and len(text.splitlines()) == 1
    deep = saving.get_tensorstore_spec(f"{tmp_path}/step_9/params/v")
    refused(
        SerializationError,
        lambda: asyncio.run(saving.async_deserialize(named(), deep)),
        "step_9/params/v",
        f"'{tmp_path}'",
    )


@pytest.mark.parametrize(
    "damage", ["missing", "cut off", "not packed", "no metadata", "bad metadata"]
)
def test_error_of_a_damaged_file_names_its_path(damage: str, tmp_path: Path, spec: Any) -> None:
    saving.run_serialization([device_put(V, named("x"))], [spec])
    piece, metadata = tmp_path / "w" / "1.0", tmp_path / "w" / ".zarray"
    match damage:
        case "missing":
            piece.unlink()
        case "cut off":
            # Without the last bytes, a checksum, the values are read.
            packed = piece.read_bytes()
            piece.write_bytes(packed[: len(packed) // 2])
        case "not packed":
            piece.write_bytes(b"something else")
        case "no metadata":
            metadata.unlink()
        case "bad metadata":
            metadata.write_text("{")
    words = {"missing": "incomplete", "no metadata": "no array at"}
    error = refused(
        SerializationError,
        lambda: saving.run_deserialization([named("x")], [spec]),
        words.get(damage, "cannot be read"),
        f"{tmp_path}/w",
    )
    assert "tensorstore_spec" not in error


def test_write_of_a_different_shape_does_not_overwrite_an_array(tmp_path: Path, spec: Any) -> None:
    saving.run_serialization([V], [spec])
    commits: list[Any] = []
    refused(
        SerializationError,
        lambda: asyncio.run(saving.async_serialize(V.ravel(), spec, commit_future=commits)),
        f"{tmp_path}/w",
        "cannot be written",
        "a new folder",
    )
    (back,) = saving.run_deserialization([named()], [spec])
    assert same(back, V) and not commits


def test_error_of_a_mismatched_shape_names_the_path(spec: Any) -> None:
    saving.run_serialization([V[:3]], [spec])
    ask = saving.run_deserialization
    where = spec["kvstore"]["path"]
    refused(PlacementError, lambda: ask([named("x")], [spec]), where, "size 3", "'x'=2")
    refused(
        SerializationError,
        lambda: ask([named()], [spec], [(3,)]),
        where,
        "(3, 16)",
        "(3,)",
        "rank",
    )


def test_calls_of_neither_signature_raise_with_a_suggestion(spec: Any) -> None:
    ask = saving.run_deserialization
    both = "run_deserialization(shardings, tensorstore_specs, global_shapes"
    refused(ArgumentError, lambda: ask([TALL], [spec]), "missing argument tensorstore_specs", both)
    refused(ArgumentError, lambda: ask([named()], [spec], axes=1), "unexpected argument axes", both)
    refused(ArgumentError, lambda: ask([named()] * 2, [spec]), "shardings has 2 entries for 1")
    refused(ArgumentError, lambda: ask({"w": named()}, [spec]), "type dict", "jax.tree.leaves")
    refused(ArgumentError, lambda: ask([named()], ["/w"]), "tensorstore_specs[0]", "'/w'")
    refused(ArgumentError, lambda: ask(["x"], [spec]), "shardings[0]", "NamedSharding(mesh")
    refused(ArgumentError, lambda: ask([P("x")], [spec]), "shardings[0]", "no mesh", "the array at")
    axes = "the array at", "mesh_axes[0]"
    refused(PlacementError, lambda: ask([TALL], [P("z")], [spec]), *axes, "'z'", "'all'=8")
    refused(ArgumentError, lambda: ask([TALL], ["all"], [spec]), *axes, "P('all')")
    refused(
        ArgumentError, lambda: ask([named()], [spec], dtypes=["floaty"]), "dtypes[0]", "'float32'"
    )
    one = saving.async_deserialize
    refused(
        ArgumentError,
        lambda: asyncio.run(one(spec)),
        "missing argument",
        "async_deserialize(mesh, mesh",
    )


def test_stored_values_of_a_dtype_that_no_device_has_are_refused(tmp_path: Path) -> None:
    metadata = (
        '{"chunks":[2],"compressor":null,"dtype":"%s","fill_value":null,"filters":null,'
        '"order":"C","shape":[2],"zarr_format":2}'
    )
    specs: dict[str, Any] = {"O": {"driver": "json", "kvstore": f"file://{tmp_path}/values.json"}}
    for kind, dtype in (("S", "|S3"), ("V", "|V4")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / ".zarray").write_text(metadata % dtype)
        specs[kind] = saving.get_tensorstore_spec(f"{tmp_path}/{kind}")
    for kind, spec in specs.items():
        for dtypes in (None, [np.float32]):
            refused(
                ArgumentError,
                lambda spec=spec, dtypes=dtypes: saving.run_deserialization(
                    [named()], [spec], dtypes=dtypes
                ),
                f"the array at '{stored_at(spec)}'",
                f"dtype('{kind}')",
            )


@pytest.mark.parametrize(
    "wrong", [{"driver": "n5"}, {"driver": "unknown"}, {"driver": 3}, {"metadata": 3}], ids=repr
)
def test_error_of_an_invalid_spec_names_the_path(wrong: Any, tmp_path: Path, spec: Any) -> None:
    ask, save = saving.run_deserialization, saving.run_serialization
    refused(SerializationError, lambda: ask([named()], [spec | wrong]), f"{tmp_path}/w")
    text = refused(
        SerializationError, lambda: save([V], [spec | wrong]), f"{tmp_path}/w", "cannot be written"
    )
    assert "Another array" not in text


def test_unwritable_values_raise_with_a_suggestion(spec: Any) -> None:
    save = saving.run_serialization
    refused(ArgumentError, lambda: save([jax.random.key(0)], [spec]), "keys", "key_data(keys)")
    refused(ArgumentError, lambda: save(["w"], [spec]), "of str", spec["kvstore"]["path"])
    refused(ArgumentError, lambda: save([V], [spec, spec]), "gdas has 1 entry for 2")
    refused(ArgumentError, lambda: jax.jit(lambda x: save([x], [spec]))(V), "tracer", "outside")
    x = device_put(V, named("x"))
    x.delete()
    with pytest.raises(DeletedError):
        save([x], [spec])


def test_error_of_a_late_storage_failure_names_the_path(spec: Any) -> None:
    promise, future = tensorstore.Promise.new()
    commit = WriteFuture(future, spec)
    assert not commit.done()
    promise.set_exception(ValueError("UNAVAILABLE: no such disk [source locations='a.cc:1']"))
    words = (f"'{spec['kvstore']['path']}'", "UNAVAILABLE: no such disk")

    async def awaited() -> None:
        await commit

    assert refused(SerializationError, commit.result, *words).endswith("disk")
    refused(SerializationError, lambda: asyncio.run(awaited()), *words)
    assert all(word in str(commit.exception()) for word in words)

    manager = saving.AsyncManager()
    manager._add_futures([commit])
    manager._start_async_commit(lambda: pytest.fail("it is not committed"))
    refused(SerializationError, manager.wait_until_finished, *words)
    manager.check_for_errors()  # it is raised once


def test_manager_without_a_coordinator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    refused(ProcessesError, saving.AsyncManager, "2 processes", "jax.distributed.initialize()")


@pytest.mark.slow
def test_error_of_missing_tensorstore_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['tensorstore'] = None\n"
        "import xlashard.legacy\n"
        "try:\n    import xlashard.legacy.serialization\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'xlashard[legacy]'" in done.stdout
