"""`reshard_plan`: the transfers of a reshard, which then match the executed ones."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, HALF, named
from tests.message_patterns import naming
from xlashard import NamedSharding, P, device_put, reshard_plan
from xlashard.core.array.reshard import execute, plan
from xlashard.errors import ArgumentError, GeometryError

pytestmark = pytest.mark.devices(8)

V = np.ones((8, 16), np.float32)
ROWS, COLUMNS = named(("x", "y")), named(None, ("x", "y"))


def test_rows_to_columns() -> None:
    report = reshard_plan(device_put(V, ROWS), COLUMNS)
    assert report.type == "float32[8,16]"
    assert (report.nbytes, report.source_shard_bytes, report.target_shard_bytes) == (512, 64, 64)
    # Each device already holds the row of its column that it keeps.
    assert (report.bytes_kept, report.bytes_moved) == (64, 448)
    assert {(p.source, p.destination) for p in report.pairs} == {
        (a.id, b.id) for a in DEVICES for b in DEVICES if a != b
    }
    assert {pair.nbytes for pair in report.pairs} == {8}


def test_report_excludes_bytes_already_in_place() -> None:
    report = reshard_plan(device_put(V, ROWS), named(("x",)))
    assert report.bytes_moved == 8 * 256 - 8 * 64
    same = reshard_plan(device_put(V, ROWS), ROWS)
    assert (same.route, same.bytes_moved, same.pairs) == (("keep",), 0, ())
    assert same.peak_bytes == same.source_shard_bytes
    assert "nothing moves" in str(same)
    assert "from device" not in str(same)


OTHER_HALF = NamedSharding(jax.sharding.Mesh(np.array(DEVICES[:4]), ("z",)), P("z"))
ROUTES: dict[str, tuple[Any, Any, tuple[str, ...], int]] = {
    "columns": (ROWS, COLUMNS, ("compiled",), 3 * 64),
    "carried": (NamedSharding(HALF, P("z")), OTHER_HALF, ("carry",), 128),
    "carried, then cut": (
        NamedSharding(HALF, P("z")),
        NamedSharding(OTHER_HALF.mesh, P(None, "z")),
        ("carry", "compiled"),
        3 * 128,
    ),
    "in pieces": (NamedSharding(HALF, P("z")), COLUMNS, ("p2p",), 128 + 64 + 128),
    "another memory": (ROWS, named(("x", "y"), memory_kind="pinned_host"), ("copy",), 2 * 64),
    "columns of another memory": (
        ROWS,
        named(None, ("x", "y"), memory_kind="pinned_host"),
        ("compiled", "copy"),
        3 * 64,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target", "route", "peak"), ROUTES.values(), ids=ROUTES)
def test_reported_route_equals_the_executed_route(
    source: Any, target: Any, route: Any, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "in_one_memory", lambda *shardings: False)
    taken: list[str] = []
    go = execute._run
    monkeypatch.setattr(
        execute, "_run", lambda strategy, task: (taken.append(strategy), go(strategy, task))[1]
    )
    x = device_put(V, source)
    report = reshard_plan(x, target)
    assert report.route == route
    assert report.peak_bytes == peak
    device_put(x, target)
    assert tuple(taken) == route


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "strategy"), [(jnp.float32, "host memory"), (jnp.int4, "compiled")]
)
def test_the_route_depends_on_the_dtype(
    dtype: Any, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    run = execute._run
    monkeypatch.setattr(
        execute, "_run", lambda strategy, task: (taken.append(strategy), run(strategy, task))[1]
    )
    x = device_put(V.astype(dtype), ROWS)
    assert reshard_plan(x, COLUMNS).route == (strategy,)
    device_put(x, COLUMNS)
    assert taken == [strategy]


def test_six_bits_go_as_bytes_because_xla_compiles_no_program_on_them() -> None:
    v = np.arange(64).reshape(8, 8).astype(ml_dtypes.float6_e2m3fn)
    x = device_put(v, ROWS)
    assert reshard_plan(x, COLUMNS).route == ("to bytes", "host memory", "from bytes")
    moved = device_put(x, COLUMNS)
    assert moved.sharding == COLUMNS and np.asarray(moved).tobytes() == v.tobytes()
    assert not x.is_deleted()


def test_shapes_are_accepted_instead_of_arrays() -> None:
    huge = jax.ShapeDtypeStruct(
        (1 << 20, 1 << 14), jax.numpy.bfloat16, sharding=ROWS.jax_sharding(())
    )
    report = reshard_plan(huge, named())
    assert report.bytes_moved == 8 * huge.size * 2 - huge.size * 2
    assert report.peak_bytes == huge.size * 2 + huge.size * 2 // 8
    assert reshard_plan(V, COLUMNS, source=ROWS).bytes_moved == 448


def test_target_accepts_the_placements_of_device_put() -> None:
    report = reshard_plan(V, DEVICES[0], source=DEVICES[1])
    assert [(p.source, p.destination, p.nbytes) for p in report.pairs] == [(1, 0, 512)]
    assert reshard_plan(device_put(V, ROWS), None).bytes_moved == 0
    with jax.set_mesh(ROWS.mesh):
        assert reshard_plan(device_put(V, ROWS), P(None, ("x", "y"))).bytes_moved == 448


def test_keys_and_numbers_without_dimensions() -> None:
    keys = device_put(jax.random.split(jax.random.key(0), 8), ROWS)
    report = reshard_plan(keys, named())
    assert (report.type, report.nbytes) == ("key<fry>[8]", 64)
    assert report.bytes_moved == 8 * 64 - 64
    assert reshard_plan(device_put(1.0, DEVICES[0]), named()).bytes_moved == 7 * 4


def test_report_prints_a_summary() -> None:
    report = reshard_plan(device_put(V, ROWS), COLUMNS)
    text = str(report)
    for words in ("float32[8,16], 512 B", "P(('x', 'y')) on 8 devices (x=2, y=4)", "448 B"):
        assert words in text
    assert "and 48 more pairs" in text
    assert repr(report) == "<ReshardReport of float32[8,16]: 448 B moved; print it>"


def test_report_prints_every_pair_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    reshard_plan(device_put(V, ROWS), COLUMNS).print(all=True)
    printed = capsys.readouterr().out
    assert printed.count("8 B") >= 56
    assert "more pairs" not in printed


def test_report_serializes_as_json() -> None:
    report = reshard_plan(device_put(V, ROWS), COLUMNS)
    found = json.loads(report.to_json())
    assert found["format"] == 2
    assert found["bytes_moved"] == 448
    assert found["pairs"][0] == {"source": 0, "destination": 1, "nbytes": 8}
    assert len(found["pairs"]) == 56
    assert found == report.to_dict()


def test_errors() -> None:
    with pytest.raises(ArgumentError, match=naming("x ", "list", "jax.ShapeDtypeStruct(")):
        reshard_plan([1.0], ROWS)
    with pytest.raises(ArgumentError, match=naming("x, a ndarray", "source=")):
        reshard_plan(V, ROWS)
    with pytest.raises(ArgumentError, match=naming("target ", "str", "jax.devices()[0]")):
        reshard_plan(device_put(V), "cpu")
    with pytest.raises(GeometryError, match="size 8"):
        reshard_plan(jax.ShapeDtypeStruct((6, 8), np.float32), named("x"), source=ROWS)
