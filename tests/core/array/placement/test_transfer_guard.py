"""Transfer guards: they refuse the same transfers as for JAX's arrays, and suggest the fix."""

import logging
import threading
from typing import Any

import jax
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, MESH, named, same
from tests.core.array.placement.guarded_actions import (
    ACTIONS,
    JAX,
    OURS,
    Side,
    V,
    copies,
    one,
    rows,
)
from tests.grouped_cases import sweep
from tests.message_patterns import naming
from xlashard import (
    Array,
    NamedSharding,
    P,
    device_get,
    device_put,
    make_array_from_callback,
    make_array_from_process_local_data,
    pjit,
    with_sharding_constraint,
)
from xlashard.errors import TransferGuardError

WAYS = ("host_to_device", "device_to_device", "device_to_host")
LEVELS = ("disallow", "disallow_explicit")

# Here JAX goes through the host, and ours from device to device.
_BY_THE_HOST = {"put rows everywhere", "put rows on a device", "put copies on rows"}
# JAX 0.11 checks no guard if all these shards are in host memory; later versions do.
_READS_SHARDS = {"asarray of rows", "get rows", "tolist", "tobytes", "copy_to_host_async", "pickle"}
# Allowed here, and refused by JAX: it transfers the numbers of an index, goes through the host to
# iterate, and has no text for an unreadable value.
_MOVES_NOTHING = {"a shard by index", "iterate over rows", "repr"}
# One device has the value as it is.
_SHARDED = _BY_THE_HOST | _READS_SHARDS | {"a shard by index"}


def outcome(side: Side, name: str, way: str, level: str) -> str:
    make, act = ACTIONS[name]
    x = make(side)
    try:
        with getattr(jax, f"transfer_guard_{way}")(level):
            act(side, x)
    except RuntimeError as error:
        assert way.replace("_", "-") in str(error)
        return "refused"
    return "allowed"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sweep(ACTIONS, quick=ACTIONS, several=_SHARDED))
def test_guards_refuse_the_transfers_that_jax_refuses(name: str, way: str, level: str) -> None:
    ours = outcome(OURS, name, way, level)
    if name in _BY_THE_HOST:
        explicit_is_forbidden = (way, level) == ("device_to_device", "disallow_explicit")
        assert ours == ("refused" if explicit_is_forbidden else "allowed")
    elif name in _MOVES_NOTHING:
        assert ours == "allowed"
    elif name in _READS_SHARDS:
        is_forbidden = name != "get rows" or level == "disallow_explicit"
        assert ours == ("refused" if way == "device_to_host" and is_forbidden else "allowed")
    else:
        assert ours == outcome(JAX, name, way, level)


def test_level_allow_permits_every_transfer() -> None:
    for name, (make, act) in ACTIONS.items():
        x = make(OURS)
        with jax.transfer_guard("allow"):
            act(OURS, x)
        assert name


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("use", "way", "facts"),
    [
        (
            lambda: device_put({"w": [V]}, named("x")),
            "host_to_device",
            (
                "x['w'][0]",
                "host-to-device",
                "ndarray",
                "jax.transfer_guard_host_to_device('disallow_explicit')",
                "`with jax.transfer_guard_host_to_device('allow'):`",
            ),
        ),
        (
            lambda: device_put({"w": rows(OURS)}, named()),
            "device_to_device",
            ("x['w']", "device-to-device", "float32[8,2]"),
        ),
        (lambda: device_get(rows(OURS)), "device_to_host", ("Array float32[8,2]",)),
        (
            lambda: make_array_from_process_local_data(named("x"), {"b": V}),
            "host_to_device",
            ("local_data['b']", "host-to-device", "ndarray"),
        ),
    ],
)
def test_errors_of_explicit_transfers_name_the_call(
    use: Any, way: str, facts: tuple[str, ...]
) -> None:
    x = rows(OURS)
    del x
    named = pytest.raises(TransferGuardError, match=naming(*facts))
    with named, _only(way, "disallow_explicit"):
        use()

    with _only(way, "disallow"):
        use()


def _only(way: str, level: str) -> Any:
    return getattr(jax, f"transfer_guard_{way}")(level)


@pytest.mark.devices(8)
def test_errors_of_implicit_transfers_suggest_the_explicit_call() -> None:
    x = rows(OURS)
    with jax.transfer_guard("disallow"):
        with pytest.raises(
            TransferGuardError,
            match=naming("jax.transfer_guard_device_to_host('disallow')", "device_get(x)"),
        ):
            np.asarray(x)
        with pytest.raises(
            TransferGuardError, match=r"of data_callback's piece for index \[0:1, :\]"
        ):
            make_array_from_callback(V.shape, named(("x", "y")), lambda index: V[index])
        read = device_get(x)
    assert same(x, V) and same(read, V)


@pytest.mark.devices(8)
def test_jax_device_get_is_an_explicit_transfer() -> None:
    x = rows(OURS)
    with jax.transfer_guard("disallow"):
        assert same(jax.device_get({"x": x})["x"], V)
    x, y = rows(OURS), rows(OURS)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(TransferGuardError):
        jax.device_get(x)
    with jax.transfer_guard("disallow"), pytest.raises(TransferGuardError, match="device_get"):
        np.asarray(y)  # The call before has left no state behind.


@pytest.mark.devices(8)
def test_error_names_the_path_of_the_argument() -> None:
    f = pjit(lambda state, scale: jax.tree.map(lambda leaf: leaf * scale, state))
    x = rows(OURS)
    with jax.transfer_guard("disallow"):
        with pytest.raises(TransferGuardError) as caught:
            f({"w": x}, 2.0)
        assert "host-to-device" in str(caught.value)
        assert "scale (float float32[])" in str(caught.value)
        assert "device_put(scale, sharding)" in str(caught.value)
        with pytest.raises(TransferGuardError, match=r"state\['w'\] \(ndarray float32\[8,2\]\)"):
            f({"w": V}, 2.0)
        with pytest.raises(TransferGuardError, match=r"device-to-device .* scale \(float32\[\]\)"):
            with jax.transfer_guard_host_to_device("allow"):
                one = device_put(2.0)
            f({"w": x}, one)
    assert same(f({"w": x}, 2.0)["w"], V * 2)
    with jax.transfer_guard("disallow"), pytest.raises(TransferGuardError, match="scale"):
        f({"w": x}, 2.0)


def test_guards_apply_to_compiled_programs_and_bound_steps() -> None:
    by_rows, everywhere = named("x"), named()

    def update(state: Any, scale: Any) -> Any:
        return state * scale

    f = pjit(update, in_shardings=(by_rows, everywhere), out_shardings=by_rows)
    compiled = f.lower(V, 2.0).compile()
    state, scale = device_put(V, by_rows), device_put(np.float32(2), everywhere)
    step = compiled.bind(state)
    with jax.transfer_guard("disallow"):
        step(scale)
        compiled(state, scale)
        for call in (lambda: compiled(state, np.float32(2)), lambda: step(np.float32(2))):
            with pytest.raises(RuntimeError, match="isallowed host-to-device"):
                call()
        with pytest.raises(TransferGuardError, match="host-to-device.* state "):
            compiled.bind(V)
    assert same(step.state, V * 2)


def test_guards_apply_to_transforms() -> None:
    f = pjit(lambda x, y: (x * y).sum())
    x = rows(OURS)
    with jax.transfer_guard("disallow"), pytest.raises(RuntimeError):
        jax.grad(f)(x, V)
    assert same(jax.grad(f)(x, V), V)


@pytest.mark.devices(8)
@pytest.mark.parametrize(("level", "explicit"), [("log", False), ("log_explicit", True)])
def test_logging(level: str, explicit: bool, caplog: pytest.LogCaptureFixture) -> None:
    x = rows(OURS)
    with caplog.at_level(logging.WARNING, "xlashard.transfer"), jax.transfer_guard(level):
        device_put({"w": V}, named("x"))
        np.asarray(x)
    texts = [record.getMessage() for record in caplog.records]
    assert any("device-to-host transfer of the value of an Array float32[8,2]" in t for t in texts)
    assert any("host-to-device transfer of the ndarray, explicit" in t for t in texts) is (explicit)


@pytest.mark.devices(8)
def test_callback_runs_under_the_guards_of_the_caller() -> None:
    """The callback runs under the caller's guards; transfers of its result are checked once."""
    seen = []

    def piece(index: Any) -> Any:
        seen.append(jax.config.jax_transfer_guard_host_to_device)
        return V[index]

    with jax.transfer_guard_device_to_device("disallow"), jax.transfer_guard_host_to_device("log"):
        x = make_array_from_callback(V.shape, named("x"), piece)
    assert seen == ["log"] * 2 and same(x, V)


@pytest.mark.devices(8)
def test_guards_permit_pieces_already_on_their_devices() -> None:
    sharding = NamedSharding(MESH, P(("x", "y")))
    x = device_put(V, sharding)
    pieces = {str(s.index): s.data for s in x.addressable_shards}
    backwards = dict(zip(pieces, reversed(pieces.values()), strict=True))
    with jax.transfer_guard("disallow_explicit"):
        y = make_array_from_callback(V.shape, sharding, lambda index: pieces[str(index)])
        with pytest.raises(TransferGuardError, match="device-to-device"):
            make_array_from_callback(V.shape, sharding, lambda index: backwards[str(index)])
    assert same(y, V)


def test_computing_is_no_transfer() -> None:
    x, y = rows(OURS), copies(OURS)
    with jax.transfer_guard("disallow_explicit"):
        moved = with_sharding_constraint(x, NamedSharding(MESH, P(None, "x")))
        assert (x + x).sharding == (x - x).sharding
        assert type(pjit(lambda a, b: a @ b.T)(x, y)) is Array
    assert same(moved, V)


@pytest.mark.devices(8)
def test_the_setting_of_a_process_and_of_a_thread() -> None:
    x = rows(OURS)
    found: list[Any] = []

    def elsewhere() -> None:
        try:
            found.append(device_get(x))
        except TransferGuardError as error:
            found.append(error)

    with jax.transfer_guard("disallow_explicit"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert same(found.pop(), V)
    y = rows(OURS)
    jax.config.update("jax_transfer_guard_device_to_host", "disallow")
    try:
        with pytest.raises(TransferGuardError):
            np.asarray(y)
        assert same(one(OURS), V)
    finally:
        jax.config.update("jax_transfer_guard_device_to_host", None)
    assert same(y, V)


@pytest.mark.devices(8)
def test_repr_under_a_guard_omits_the_value() -> None:
    x = rows(OURS)
    with jax.transfer_guard("disallow"):
        assert repr(x) == str(x) == "Array(shape=(8, 2), dtype=float32)"
    assert "15." in repr(x)
    with jax.transfer_guard("disallow"):
        assert "15." in repr(x)


@pytest.mark.devices(8)
def test_refused_transfer_leaves_the_donated_source_alive() -> None:
    x = rows(OURS)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(TransferGuardError):
        device_put(x, DEVICES[0], donate=True)
    assert not x.is_deleted() and same(x, V)


@pytest.mark.devices(8)
def test_reordering_devices_is_no_transfer():
    reversed_mesh = jax.sharding.Mesh(MESH.devices[::-1], MESH.axis_names)
    axis = MESH.axis_names[0]
    for spec in (P(axis), P()):
        for put in (jax.device_put, device_put):
            x = put(V, NamedSharding(MESH, P(axis)))
            with jax.transfer_guard("disallow_explicit"):
                moved = put(x, NamedSharding(reversed_mesh, spec))
            same(moved, V)
            with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError):
                put(x, NamedSharding(MESH, P()))
