"""orbax: saving Arrays, and the shardings that it can restore them to."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests.core.array.cases import DEVICES, DTYPES, HALF, SHARDINGS, named, same, value
from tests.core.processes import run_many
from tests.device_counts import emulate_devices
from tests.fork_server import python_command
from tests.message_patterns import naming
from xlashard import Array, Mesh, NamedSharding, P, SingleDeviceSharding, device_put, pjit
from xlashard.errors import TilingError

ROOT = Path(__file__).resolve().parents[2]
V = value(np.float32)
TALL = Mesh(np.array(DEVICES), ("all",))


def everything() -> dict[str, Any]:
    """Return an Array of every sharding kind and of every dtype, and special values."""
    return {
        "shardings": {name: device_put(V, s) for name, s in SHARDINGS.items()},
        "dtypes": {
            name: device_put(value(dtype), named("x", "y")) for name, dtype in DTYPES.items()
        },
        "scalar": device_put(np.float32(3), named()),
        "uncommitted": device_put(V),
        "key": device_put(jax.random.key(7), named()),
        "keys": device_put(jax.random.split(jax.random.key(7), 8), named("x")),
    }


def check_same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert same(ours, np.asarray(theirs))


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    return everything()


@pytest.fixture(scope="module")
def saved(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orbax") / "everything"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def shapes(tree: Any, sharding_of: Callable[[Any], Any]) -> Any:
    """Return the target of a restore: shapes with shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), tree
    )


def over(mesh: Mesh, kind: type = NamedSharding) -> Callable[[Any], Any]:
    """Return a function to shardings of the first dimension over the first axis of a mesh."""
    return lambda x: kind(mesh, P(mesh.axis_names[0]) if x.ndim else P())


TARGETS: dict[str, Callable[[Any], Any]] = {
    "where it was": lambda x: x.sharding,
    "another mesh": over(TALL),
    "half the devices": over(HALF),
    "one device": lambda x: SingleDeviceSharding(DEVICES[5]),
    "a sharding of JAX": over(TALL, jax.sharding.NamedSharding),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_restoring_into_shapes(tree: Any, saved: Path, target: str) -> None:
    wanted = shapes(tree, TARGETS[target])
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(saved, wanted)
    check_same(restored, tree)
    wrapped = device_put(restored)
    for name, x in wrapped["shardings"].items():
        place = wanted["shardings"][name].sharding
        assert type(x) is Array and x.committed
        assert x.sharding.is_equivalent_to(place, x.ndim), name
        before, after = (y.addressable_data(0) for y in (restored["shardings"][name], x))
        assert before.unsafe_buffer_pointer() == after.unsafe_buffer_pointer()


@pytest.mark.slow
def test_restoring_into_arrays(tree: Any, saved: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(saved, tree)
    check_same(restored, tree)
    for ours, theirs in zip(*map(jax.tree.leaves, (tree, restored)), strict=True):
        assert theirs.sharding.is_equivalent_to(ours.sharding, ours.ndim)
    total = jax.tree.map(pjit(lambda x: x.sum()), restored["shardings"])
    assert {type(x) for x in total.values()} == {Array}
    assert {float(x) for x in total.values()} == {V.sum()}


# Shardings that orbax can serialize. It omits all others, JAX's or ours, and fails without a
# target if only some arrays of a tree have one.
NOTED = ("rows", "columns", "both", "replicated", "single", "permuted mesh")


@pytest.mark.slow
def test_restoring_without_a_target(tree: Any, tmp_path: Path) -> None:
    noted = {name: tree["shardings"][name] for name in NOTED} | tree["dtypes"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "noted", noted)
        checkpointer.save(tmp_path / "tiles", {"x": tree["shardings"]["bare tiles"]})
        restored = device_put(checkpointer.restore(tmp_path / "noted"))
        (tiles,) = checkpointer.restore(tmp_path / "tiles").values()
    check_same(restored, noted)
    for name, x in restored.items():
        assert type(x) is Array and x.sharding == noted[name].sharding, name
    assert same(tiles, V) and type(tiles) is np.ndarray


@pytest.mark.slow
def test_checkpoints_of_jax_and_xlashard_are_interchangeable(tmp_path: Path) -> None:
    ours = {"w": device_put(V, named("x", "y")), "b": device_put(V[0], named("y"))}
    theirs = jax.tree.map(Array.to_jax, ours)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ours", ours)
        checkpointer.save(tmp_path / "theirs", theirs)
    with ocp.StandardCheckpointer() as checkpointer:
        check_same(checkpointer.restore(tmp_path / "ours", theirs), ours)
        check_same(checkpointer.restore(tmp_path / "theirs", ours), ours)
    names = [
        sorted(path.relative_to(tmp_path / kind) for path in (tmp_path / kind).glob("*"))
        for kind in ("ours", "theirs")
    ]
    assert names[0] == names[1]


def by_jit(x: Any) -> Any:
    return jax.jit(lambda t: t * 0 - 1, donate_argnums=0)(x)


def by_pjit(x: Any) -> Any:
    return pjit(lambda t: t * 0 - 1, donate_argnums=0)(x)


def by_moving(x: Any) -> Any:
    return by_pjit(device_put(x, named("y", "x"), donate=True))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [("x", "y"), ()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("use_up", [by_jit, by_pjit, by_moving])
def test_donation_during_an_asynchronous_save(spec: Any, use_up: Any, tmp_path: Path) -> None:
    v = np.random.default_rng(0).standard_normal((512, 1024), np.float32)
    x = pjit(lambda t: t + 0)(device_put(v, named(*spec)))
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "state", args=ocp.args.StandardSave({"x": x}))
        y = use_up(use_up(x))
        assert same(y, np.full_like(v, -1))
        checkpointer.wait_until_finished()
        assert same(checkpointer.restore(tmp_path / "state")["x"], v)


def test_host_copy_in_flight_survives_donation() -> None:
    """A host copy stays valid after donation; asynchronous saves rely on it."""
    for spec in (("x", "y"), ()):
        x = pjit(lambda t: t + 0)(device_put(V, named(*spec)))
        pieces = [shard.data for shard in x.addressable_shards]
        for piece in pieces:
            piece.copy_to_host_async()
        read = [
            (np.asarray(piece), shard.index)
            for piece, shard in zip(pieces, x.global_shards, strict=True)
        ]
        del pieces
        y = by_pjit(x)
        assert same(y, np.full_like(V, -1))
        assert all(same(got, V[index]) for got, index in read)


@pytest.mark.slow
def test_training_run_resumes_on_fewer_devices(tmp_path: Path) -> None:
    """CheckpointManager, optax state, asynchronous saves, and a smaller machine afterwards."""
    optimizer = optax.adam(0.1)

    def loss_of(params: Any, batch: Any) -> Any:
        return ((batch @ params["w"] + params["b"]) ** 2).mean()

    @pjit(donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, loss

    def start(where: Callable[..., Any]) -> Any:
        params = {
            "w": device_put(np.ones((16, 8), np.float32), where("x", "y")),
            "b": device_put(np.ones(8, np.float32), where("y")),
        }
        state = {"params": params, "opt": optimizer.init(params), "step": np.int32(0)}
        # Uncommitted leaves are replicated explicitly, because orbax restores committed arrays.
        state = jax.tree.map(
            lambda x: x if getattr(x, "committed", False) else device_put(x, where()), state
        )
        return state, device_put(np.eye(16, dtype=np.float32), where("x"))

    state, batch = start(named)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    losses = []
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for number in range(6):
            manager.save(number, args=ocp.args.StandardSave(state))
            state, loss = step(state, batch)
            losses.append(float(loss))
    smaller = Mesh(np.array(DEVICES[:2]).reshape(2, 1), ("x", "y"))
    target, batch = start(lambda *spec: NamedSharding(smaller, P(*spec)))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert sorted(manager.all_steps()) == [4, 5]
        restored = manager.restore(4, args=ocp.args.StandardRestore(target))
    assert int(restored["step"]) == 4
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    for wanted in losses[4:]:
        restored, loss = step(restored, batch)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for ours, wanted in zip(*map(jax.tree.leaves, (restored, target)), strict=True):
        assert type(ours) is Array and ours.sharding.is_equivalent_to(wanted.sharding, ours.ndim)


@pytest.mark.slow
def test_pytree_handlers_cast_and_restore_parts(tmp_path: Path) -> None:
    tree = {"w": device_put(V, named("x", "y")), "n": 3, "v": V[0]}
    with ocp.PyTreeCheckpointer() as checkpointer:
        half = jax.tree.map(lambda _: ocp.SaveArgs(dtype=jnp.dtype(jnp.bfloat16)), tree)
        checkpointer.save(tmp_path / "half", tree, save_args=half)
        checkpointer.save(tmp_path / "whole", tree)
        (metadata,) = [checkpointer.metadata(tmp_path / "whole").item_metadata.tree["w"]]
        args = ocp.checkpoint_utils.construct_restore_args(tree)
        whole = checkpointer.restore(tmp_path / "whole", restore_args=args)
        args = {"w": ocp.ArrayRestoreArgs(sharding=named("y"), global_shape=(4, 16), strict=False)}
        cut = checkpointer.restore(
            tmp_path / "half", args=ocp.args.PyTreeRestore({"w": 0}, args, partial_restore=True)
        )
    assert metadata.shape == V.shape and metadata.dtype == V.dtype
    assert same(whole["w"], V) and whole["w"].sharding == named("x", "y")
    assert whole["n"] == 3 and type(whole["v"]) is np.ndarray
    assert same(cut["w"], V[:4].astype(jnp.bfloat16)) and cut["w"].sharding == named("y")


# The other process has as many devices: it restores what was saved here, and saves arrays of JAX
# itself.
ELSEWHERE = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
from xlashard import Array, Mesh, NamedSharding, P, device_put, pjit
mesh = Mesh(np.array(jax.devices()), ("all",))
everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("all"))
with ocp.StandardCheckpointer() as checkpointer:
    wanted = {"w": jax.ShapeDtypeStruct((8, 16), np.float32, sharding=rows)}
    restored = device_put(checkpointer.restore(sys.argv[1], wanted))["w"]
    assert type(restored) is Array and len(restored.devices()) == len(jax.devices())
    doubled = pjit(lambda x: x * 2, out_shardings=rows)(restored)
    checkpointer.save(sys.argv[2], {"w": doubled.to_jax(), "n": device_put(1.5, everywhere)})
print("devices:", len(jax.devices()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_restore_with_a_different_device_count(count: int, tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "here", {"w": device_put(V, named("x", "y"))})
    environment = {**os.environ, **emulate_devices(count), "PYTHONPATH": str(ROOT)}
    words = ["-c", ELSEWHERE, str(tmp_path / "here"), str(tmp_path / "there")]
    done = subprocess.run(
        [*python_command(environment), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"devices: {count}" in done.stdout
    target = {"w": device_put(V, named("y")), "n": device_put(np.float32(0), named())}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = device_put(checkpointer.restore(tmp_path / "there", target))
    assert same(restored["w"], V * 2) and float(restored["n"]) == 1.5
    assert restored["w"].sharding == named("y")


@pytest.mark.slow
def test_two_processes_save_together(tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_processes_save.py")
    for output in run_many(script, 2, 2, str(tmp_path / "together")):
        assert "both agree" in output, output
    wanted = {"rows": device_put(V, named("x")), "whole": device_put(V, named())}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "together", wanted)
    assert same(restored["rows"], V) and same(restored["whole"], V)


def test_partial_results_are_not_saved(tmp_path: Path) -> None:
    mesh = Mesh(np.array(DEVICES), ("all",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = device_put(V, NamedSharding(mesh, P(unreduced={"all"})))
    with (
        ocp.StandardCheckpointer() as checkpointer,
        pytest.raises(TilingError, match=naming("partial results", "device_put(x, sharding)")),
    ):
        checkpointer.save(tmp_path / "partial", {"x": x})
    assert not (tmp_path / "partial").exists()
