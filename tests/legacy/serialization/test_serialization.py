"""Checkpoints of single arrays: values, shardings, dtypes, shapes, forms of calls and errors."""

import asyncio
import base64
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.array_serialization import serialization as of_jax

from tests.core.array.cases import DTYPES, MESH, SHARDINGS, named, same, value
from tests.core.processes import run_many
from tests.message_patterns import naming
from xlashard import Mesh, NamedSharding, P, SingleDeviceSharding, device_put, legacy, pjit
from xlashard._jax.runtime.transfer import HandleType
from xlashard.core.array.placement.target import ResolvedSharding
from xlashard.errors import (
    ArgumentError,
    ProcessesError,
    SerializationError,
)
from xlashard.legacy import jax_array
from xlashard.legacy import serialization as era
from xlashard.legacy import serialization as saving
from xlashard.legacy.arrays.gda import GlobalDeviceArray

V = value(np.float32)
TALL = Mesh(np.array(jax.devices()), ("all",))


def specs_in(folder: Path, count: int) -> list[dict[str, Any]]:
    return [saving.get_tensorstore_spec(f"{folder}/{number}") for number in range(count)]


@pytest.mark.slow
def test_arrays_are_restored_under_every_sharding(tmp_path: Path) -> None:
    places = list(SHARDINGS.values())
    specs = specs_in(tmp_path, len(places))
    saving.run_serialization([device_put(V, place) for place in places], specs)
    for shift in range(3):
        there = places[shift:] + places[:shift]
        for x, place in zip(saving.run_deserialization(there, specs), there, strict=True):
            assert type(x) is HandleType and x.committed
            assert x.sharding.is_equivalent_to(device_put(V, place).sharding, x.ndim)
            assert same(x, V)


def test_every_dtype_round_trips(tmp_path: Path) -> None:
    arrays = [device_put(value(dtype), named("x", "y")) for dtype in DTYPES.values()]
    specs = specs_in(tmp_path, len(arrays))
    saving.run_serialization(arrays, specs)
    for x, back in zip(
        arrays, saving.run_deserialization([named("y")] * len(arrays), specs), strict=True
    ):
        assert same(back, np.asarray(x)), x.dtype


def test_host_values_and_single_device_arrays_round_trip(tmp_path: Path) -> None:
    originals = [np.arange(6.0), 3, True, jnp.ones((4, 2)), np.zeros((0, 3)), np.float32(7)]
    specs = specs_in(tmp_path, len(originals))
    saving.run_serialization(originals, specs)
    for x, back in zip(
        originals, saving.run_deserialization([named()] * len(originals), specs), strict=True
    ):
        assert np.array_equal(back, x) and back.dtype == jnp.asarray(x).dtype


def test_deserialization_pads_crops_and_casts(spec: Any) -> None:
    saving.run_serialization([device_put(V, named("x", "y"))], [spec])
    ask = saving.run_deserialization
    (larger,) = ask([named("x")], [spec], global_shapes=[(12, 20)])
    (smaller,) = ask([named("x", "y")], [spec], [(4, 8)])
    (mixed,) = ask([named(None, "y")], [spec], [(12, 8)], dtypes=[jnp.bfloat16])
    whole = np.zeros((12, 20), np.float32)
    whole[:8, :16] = V
    assert same(larger, whole)
    assert same(smaller, V[:4, :8])
    assert same(mixed, whole[:, :8].astype(jnp.bfloat16))


def cut(size: int) -> str | tuple[str, ...] | None:
    """Return the largest partition of a dimension of a size on the mesh of the tests."""
    fits: list[Any] = [cuts for n, cuts in ((8, ("x", "y")), (4, "y"), (2, "x")) if size % n == 0]
    return fits[0] if fits else None


@pytest.mark.slow
@given(
    st.integers(0, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[st.integers(0, 9)] * n)] * 2)),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_stored_array_can_be_read_in_any_shape(
    shapes: tuple[tuple[int, ...], ...], last: bool
) -> None:
    stored, asked = shapes
    dim = len(stored) - 1 if last else 0
    names = [P(*[None] * dim, cut(shape[dim])) if shape else P() for shape in shapes]
    there, back = (NamedSharding(MESH, spec) for spec in names)
    values = np.arange(1, np.prod(stored, dtype=int) + 1, dtype=np.int32).reshape(stored)
    with tempfile.TemporaryDirectory() as folder:
        spec = saving.get_tensorstore_spec(f"{folder}/w")
        saving.run_serialization([device_put(values, there)], [spec])
        (read,) = saving.run_deserialization([back], [spec], [asked])
    expected = np.zeros(asked, np.int32)
    common = tuple(slice(0, min(a, b)) for a, b in zip(stored, asked, strict=True))
    expected[common] = values[common]
    assert same(read, expected)


def test_mesh_and_axes_replace_a_sharding(spec: Any) -> None:
    saving.run_serialization([device_put(V, named("x"))], [spec])
    manager = saving.GlobalAsyncCheckpointManager()
    limiter = saving.LimitInFlightBytes(10**6)
    one = saving.async_deserialize
    back = [
        *saving.run_deserialization([TALL], [P(None, None)], [spec], [V.shape]),
        *saving.run_deserialization(
            global_meshes=[TALL], mesh_axes=[None], tensorstore_specs=[spec], concurrent_gb=1
        ),
        *manager.deserialize((TALL,), (("all",),), (spec,), dtypes=(np.float32,)),
        *manager.deserialize([NamedSharding(TALL, P("all"))], [spec], concurrent_gb=1),
        asyncio.run(one(TALL, P("all"), spec, V.shape, np.float32, limiter)),
        asyncio.run(one(mesh=TALL, mesh_axes=P("all"), tensorstore_spec=spec)),
        asyncio.run(one(NamedSharding(TALL, P("all")), spec, byte_limiter=limiter)),
        asyncio.run(one(in_sharding=NamedSharding(TALL, P("all")), tensorstore_spec=spec)),
    ]
    assert all(same(x, V) for x in back)
    cut = [x.sharding.shard_shape(x.shape)[0] for x in back]
    assert cut == [8, 8, 1, 1, 1, 1, 1, 1]


def test_gdas_round_trip_without_jax_array(spec: Any) -> None:
    x = GlobalDeviceArray.from_array(device_put(V, named("x", "y")))
    saving.run_serialization([x], [spec])
    with jax_array(False):
        (back,) = saving.run_deserialization([x.sharding], [spec])
        alone = asyncio.run(saving.async_deserialize(TALL, P("all"), spec))
        with pytest.raises(
            ArgumentError, match=r"SingleDevice.*GlobalDeviceArray.*NamedSharding\("
        ):
            saving.run_deserialization([SingleDeviceSharding(jax.devices()[0])], [spec])
    assert type(back) is type(alone) is GlobalDeviceArray
    assert back.mesh == x.mesh and back.mesh_axes == P("x", "y")
    assert alone.mesh == TALL and alone.mesh_axes == ("all",)
    assert same(back, V) and same(alone, V)


def test_metadata_have_dtype_shape_and_chunks(tmp_path: Path) -> None:
    x = device_put(V.astype(jnp.bfloat16), named("x", None))
    metadata = saving.get_metadata(x)
    assert metadata["dtype"] == "bfloat16" and metadata["shape"] == V.shape
    assert list(metadata["chunks"]) == list(x.sharding.shard_shape(V.shape))
    saving.get_metadata(x)["chunks"].clear()
    assert saving.get_metadata(x) == metadata, "the caller may modify metadata"
    assert saving.get_metadata(np.zeros((0, 3)))["chunks"] == [1, 3]
    assert saving.get_metadata(V)["dtype"] == "<f4"
    # As in T5X: the stored dtype is in the spec, and another one in the driver around it.
    base = saving.get_tensorstore_spec(f"{tmp_path}/cast")
    del metadata["dtype"]
    spec = {"driver": "cast", "dtype": "float32", "base": {**base, "dtype": "bfloat16"}}
    saving.run_serialization([device_put(V, named("x"))], [spec])
    stored = json.loads((tmp_path / "cast" / ".zarray").read_text())
    assert stored["dtype"] == "bfloat16"
    (back,) = saving.run_deserialization([named()], [spec])
    assert same(back, V.astype(jnp.bfloat16).astype(np.float32))
    (bare,) = saving.run_deserialization([named()], [{**base, "metadata": metadata}])
    assert bare.dtype == jnp.bfloat16


def test_files_are_interchangeable_with_jax(tmp_path: Path) -> None:
    ours, spec_of_jax = specs_in(tmp_path, 2)
    x = device_put(V, named("x", "y"))
    saving.run_serialization([x], [ours])
    of_jax.run_serialization([x.to_jax()], [spec_of_jax])
    there = [jax.sharding.NamedSharding(TALL, P("all"))]
    (read_by_jax,) = of_jax.run_deserialization(
        there, [saving.get_tensorstore_spec(f"{tmp_path}/0")]
    )
    (read_by_us,) = saving.run_deserialization(there, [spec_of_jax])
    assert same(read_by_us, V) and np.array_equal(read_by_jax, V)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [{}, {"driver": "zarr3"}, {"ocdbt": True}], ids=["zarr", "zarr3", "ocdbt"]
)
def test_jax_reads_our_files_and_we_read_those_of_jax(form: Any, tmp_path: Path) -> None:
    kinds = [(dtype, spec) for dtype in DTYPES.values() for spec in (P(), P("x"), P("x", "y"))]
    arrays = [device_put(value(dtype), NamedSharding(MESH, spec)) for dtype, spec in kinds]
    there = [jax.sharding.NamedSharding(TALL, P("all"))] * len(arrays)

    def specs(writer: str) -> list[dict[str, Any]]:
        paths = [f"{tmp_path}/{writer}/{number}" for number in range(len(arrays))]
        return [saving.get_tensorstore_spec(path, **form) for path in paths]

    saving.run_serialization(arrays, specs("ours"))
    of_jax.run_serialization([x.to_jax() for x in arrays], specs("of_jax"))
    read_by_jax = of_jax.run_deserialization(there, specs("ours"))
    read_by_us = saving.run_deserialization(there, specs("of_jax"))
    for x, theirs, ours in zip(arrays, read_by_jax, read_by_us, strict=True):
        assert same(theirs, np.asarray(x)) and same(ours, np.asarray(x)), x.dtype


def test_inline_and_stacked_specs_are_readable(tmp_path: Path) -> None:
    """Values in the spec itself, and a stack of stored arrays and of inline values."""
    upper, lower = specs_in(tmp_path, 2)
    saving.run_serialization(
        [device_put(V[:4], named("x")), device_put(V[4:], named("x"))], [upper, lower]
    )
    below = {
        "input_inclusive_min": [4, 0],
        "input_exclusive_max": [len(V), V.shape[1]],
        "output": [{"input_dimension": 0, "offset": -4}, {"input_dimension": 1}],
    }
    # TensorStore needs the domain of each layer.
    top = {**upper, "schema": {"domain": {"shape": [4, V.shape[1]]}}}
    values = {"driver": "array", "dtype": V.dtype.name, "array": V.tolist()}
    bottom = {**values, "array": V[4:].tolist(), "transform": below}
    specs = [
        values,
        tensorstore.Spec(values),
        {"driver": "cast", "dtype": V.dtype.name, "base": values},
        {"driver": "stack", "dtype": V.dtype.name, "layers": [top, {**lower, "transform": below}]},
        {"driver": "stack", "dtype": V.dtype.name, "layers": [top, bottom]},
    ]
    out = saving.run_deserialization([named("x", "y")] * len(specs), specs)
    for x in out:
        np.testing.assert_array_equal(x, V)
    (single,) = asyncio.run(one(values))
    np.testing.assert_array_equal(single, V)
    with pytest.raises(SerializationError, match="no such type"):
        saving.run_deserialization([named()], [{**values, "dtype": "no such type"}])
    for wrong in ({"driver": "array", "dtype": "float32"}, {"driver": "zarr"}):
        with pytest.raises(
            ArgumentError, match=naming("tensorstore_specs[0]", "get_tensorstore_spec(")
        ):
            saving.run_deserialization([named()], [wrong])


async def one(spec: Any) -> list[Any]:
    return [await saving.async_deserialize(named("x"), spec)]


def test_files_of_tensorstore_0_1_19_are_readable(tmp_path: Path, spec: Any) -> None:
    # By TensorStore 0.1.19, of the numbers from 0 to 7 in two pieces.
    metadata = (
        '{"chunks":[2,2],"compressor":{"id":"gzip","level":1},"dimension_separator":".",'
        '"dtype":"<f4","fill_value":null,"filters":null,"order":"C","shape":[4,2],"zarr_format":2}'
    )
    pieces = {
        "0.0": "H4sIAAAAAAAEA2NgAIEGeyDhAEQOAIsbYCUQAAAA",
        "1.0": "H4sIAAAAAAAEA2NgaHBgYFgAxAeA+IEDAEvINsQQAAAA",
    }
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".zarray").write_text(metadata)
    for name, text in pieces.items():
        (tmp_path / "w" / name).write_bytes(base64.b64decode(text))
    (back,) = saving.run_deserialization([named("y")], [spec])
    assert same(back, np.arange(8, dtype=np.float32).reshape(4, 2))


def test_programs_open_files_by_specs_that_name_gzip(spec: Any) -> None:
    # As orbax 0.1 and T5X do, in place of async_deserialize.
    saving.run_serialization([device_put(V, named("x", "y"))], [spec])
    theirs = {**spec, "metadata": {"compressor": {"id": "gzip"}}}
    opened = tensorstore.open(theirs, open=True).result()
    assert np.array_equal(opened.read().result(), V)


def test_array_of_another_compressor_is_readable_by_any_spec(tmp_path: Path, spec: Any) -> None:
    x = device_put(V, named("x", "y"))
    packed = {**spec, "metadata": {**saving.get_metadata(x), "compressor": {"id": "zstd"}}}
    saving.run_serialization([x], [packed])
    assert '"zstd"' in (tmp_path / "w" / ".zarray").read_text()
    mine = {**spec, "metadata": saving.get_metadata(device_put(V, named()))}
    (back,) = saving.run_deserialization([named("y")], [mine])
    assert same(back, V)


def test_omitted_chunks_are_read_as_fill_values(spec: Any) -> None:
    x = device_put(np.zeros((8, 4), np.float32), named("x"))
    filled = {**spec, "metadata": {**saving.get_metadata(x), "fill_value": 0.0}}
    saving.run_serialization([x], [filled])
    (back,) = saving.run_deserialization([named()], [spec])
    assert same(back, np.zeros((8, 4), np.float32))


def test_specs_of_the_caller_are_not_modified(spec: Any) -> None:
    before = json.dumps(spec)
    saving.run_serialization([device_put(V, named("x"))], [spec])
    saving.run_deserialization([named("x")], [spec])
    assert json.dumps(spec) == before


def test_functions_work_in_a_running_event_loop(spec: Any) -> None:
    async def in_a_notebook() -> Any:
        saving.run_serialization([device_put(V, named("x"))], [spec])
        return saving.run_deserialization([named("y")], [spec])

    (back,) = asyncio.run(in_a_notebook())
    assert same(back, V)


def test_bytes_of_the_limiter_are_acquired_and_released(spec: Any) -> None:
    class Limiter:
        taken, released = 0, 0

        async def wait_for_bytes(self, size: int) -> None:
            self.taken += size

        async def release_bytes(self, size: int) -> None:
            self.released += size

    saving.run_serialization([device_put(V, named("x"))], [spec])
    limiter = Limiter()
    asyncio.run(saving.async_deserialize(named("x"), spec, byte_limiter=limiter))
    assert limiter.taken == limiter.released == V.nbytes, "each distinct piece once"
    tight = saving.LimitInFlightBytes(8)
    assert same(asyncio.run(saving.async_deserialize(named("y"), spec, byte_limiter=tight)), V)


def test_internal_names_used_by_programs_work(spec: Any) -> None:
    x = device_put(V, named("x"))
    asyncio.run(era.async_serialize(x, spec, None, era.TS_CONTEXT))
    store = tensorstore.open(spec, context=era.TS_CONTEXT).result()
    assert era.estimate_read_memory_footprint(store, store.domain) == V.nbytes
    assert not era._spec_has_metadata(spec)
    assert era._spec_has_metadata({"base": {**spec, "metadata": era._get_metadata(x)}})
    # The exception that programs catch if other processes do not arrive.
    with pytest.raises(era.BarrierTimeoutError):
        raise ProcessesError("process 1 did not come", processes=(1,))


def test_array_may_be_deleted_or_donated_during_its_write(tmp_path: Path) -> None:
    big = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    step = pjit(lambda x: x * 0 - 1, donate_argnums=0)
    arrays = [device_put(big, named("x")), device_put(big, named("y"))]
    host = big.copy()
    specs = specs_in(tmp_path, 3)
    commits: list[Any] = []

    async def begin() -> None:
        for x, spec in zip([*arrays, host], specs, strict=True):
            await saving.async_serialize(x, spec, commit_future=commits)

    asyncio.run(begin())
    arrays[0].delete()
    step(arrays[1]).block_until_ready()
    host[:] = -1
    for commit in commits:
        commit.result(timeout=60)
        assert commit.done() and commit.exception() is None
    for back in saving.run_deserialization([named("x", "y")] * 3, specs):
        assert same(back, big)


def test_manager_writes_checkpoints_in_sequence(tmp_path: Path) -> None:
    manager = saving.GlobalAsyncCheckpointManager(timeout_secs=60)
    assert isinstance(manager, of_jax.GlobalAsyncCheckpointManagerBase)
    done: list[int] = []
    for step in range(3):
        x = device_put(V + step, named("x"))
        paths = [f"{tmp_path}/{step}/w", f"{tmp_path}/{step}/b"]
        manager.serialize_with_paths(
            [x, V], paths, on_commit_callback=lambda step=step: done.append(step)
        )
        assert done[:step] == list(range(step)), "the one before is committed"
    manager.wait_until_finished()
    manager.wait_until_finished()
    assert done == [0, 1, 2]
    there = [named("y"), named()]
    (back, _) = manager.deserialize_with_paths(there, [f"{tmp_path}/2/w", f"{tmp_path}/2/b"])
    assert same(back, V + 2)


def test_manager_renames_its_temporary_folder(tmp_path: Path) -> None:
    manager = saving.GlobalAsyncCheckpointManager()
    spec = saving.get_tensorstore_spec(f"{tmp_path}/temporary/w")
    folders = (f"{tmp_path}/temporary", f"{tmp_path}/step_1")
    names: dict[str, Any] = dict(
        zip(("temp_checkpoint_dir", "final_checkpoint_dir"), folders, strict=True)
    )
    manager.serialize([V], [spec], **names)
    manager.wait_until_finished()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    manager.serialize([V], [spec], **names)  # which exists already
    with pytest.raises(OSError, match="step_1"):
        manager.wait_until_finished()


@pytest.mark.slow
def test_several_processes_save_and_read(tmp_path: Path) -> None:
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    saving.run_serialization([whole], [saving.get_tensorstore_spec(f"{tmp_path}/alone")])
    script = Path(__file__).with_name("pod_serialization.py")
    for output in run_many(script, 2, 2, str(tmp_path)):
        assert "saved and read" in output, output
    specs = [
        saving.get_tensorstore_spec(f"{tmp_path}/together/{name}")
        for name in ("rows", "columns", "copies")
    ]
    for x in saving.run_deserialization([named("x", "y")] * 3, specs):
        assert same(x, whole)


def test_serialization_is_importable_by_its_legacy_names() -> None:
    of_today = of_jax.run_deserialization
    with legacy.installed():
        from jax.experimental.array_serialization import serialization as of_2023
        from jax.experimental.gda_serialization import serialization as of_2022
        from jax.experimental.gda_serialization.serialization import (
            GlobalAsyncCheckpointManager,
            _get_metadata,
            _LimitInFlightBytes,
        )

        assert all(getattr(of_2022, name) is getattr(era, name) for name in era.__all__)
        assert GlobalAsyncCheckpointManager is saving.GlobalAsyncCheckpointManager
        assert _get_metadata is saving.get_metadata
        assert isinstance(saving.LimitInFlightBytes(1), _LimitInFlightBytes)
        assert of_2023.async_serialize is saving.async_serialize
        assert of_2023._get_metadata(V)["dtype"] == "<f4"
        # Functions that the era did not have are today's.
        assert of_2023.is_remote_storage("gs://bucket/w")
        assert jax.experimental.array_serialization.serialization is of_2023
    assert of_jax.run_deserialization is of_today
    with pytest.raises(ImportError):
        importlib.import_module("jax.experimental.gda_serialization")
    assert sys.modules["jax.experimental.array_serialization.serialization"] is of_jax


def test_arrays_are_restored_to_device_memory(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # On GPU and TPU each piece goes to its devices as soon as it is read.
    saving.run_serialization([device_put(V, named("x"))], [spec])
    monkeypatch.setattr(ResolvedSharding, "on_host", False)
    for place in (named("x", "y"), named("y"), named(), SingleDeviceSharding(jax.devices()[3])):
        (back,) = saving.run_deserialization([place], [spec], dtypes=[jnp.bfloat16])
        assert same(back, V.astype(jnp.bfloat16))
        assert back.sharding.is_equivalent_to(place, 2)


def test_ocdbt_zarr3_and_spec_objects_are_accepted(tmp_path: Path) -> None:
    specs = [
        saving.get_tensorstore_spec(f"{tmp_path}/database/w", ocdbt=True),
        saving.get_tensorstore_spec(f"{tmp_path}/database/b", ocdbt=True),
        saving.get_tensorstore_spec(f"{tmp_path}/third", driver="zarr3"),
        tensorstore.Spec({"driver": "zarr", "kvstore": f"file://{tmp_path}/url/", "path": "w"}),
    ]
    saving.run_serialization([device_put(V, named("x", "y"))] * 4, specs)
    for back in saving.run_deserialization([named("y")] * 4, specs):
        assert same(back, V)
    absent = saving.get_tensorstore_spec(f"{tmp_path}/database/v", ocdbt=True)
    with pytest.raises(SerializationError, match=naming("/database/v'", "'d', 'manifest.ocdbt'")):
        saving.run_deserialization([named()], [absent])
