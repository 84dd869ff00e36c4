"""Trains a small network, saves checkpoints, and resumes from one on another mesh."""

import argparse
import asyncio
import functools
import json
import os
import re
from typing import Any, Dict, List, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.config import config
from jax.experimental import PartitionSpec as P
from jax.experimental import multihost_utils
from jax.experimental.gda_serialization import serialization as gda_serialization
from jax.experimental.gda_serialization.serialization import (
    GlobalAsyncCheckpointManager,
    get_tensorstore_spec,
)
from jax.experimental.global_device_array import GlobalDeviceArray
from jax.experimental.maps import Mesh
from jax.experimental.pjit import FROM_GDA, pjit

config.update("jax_parallel_functions_output_gda", True)

IN, HIDDEN, OUT, BATCH = 8, 16, 4, 16


def layout(axes: Dict[str, Any]) -> Dict[str, Any]:
    """The axes of parameters and optimizer, which has the same again and a counter."""
    return {"params": axes, "momentum": axes, "step": P()}


FIRST = layout({"wi": P(None, "model"), "wo": P("model", None), "bias": P()})
SECOND = layout({"wi": P("rows", "columns"), "wo": P(("columns", "rows"), None), "bias": None})


def init_state() -> Dict[str, Any]:
    rng = np.random.RandomState(0)
    params = {
        "wi": jnp.asarray(rng.normal(0, 0.3, (IN, HIDDEN)), jnp.float32),
        "wo": jnp.asarray(rng.normal(0, 0.3, (HIDDEN, OUT)), jnp.float32),
        "bias": jnp.zeros((OUT,)),
    }
    momentum = jax.tree_map(jnp.zeros_like, params)
    return {"params": params, "momentum": momentum, "step": jnp.zeros((), jnp.int32)}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["wi"])
    return jnp.mean((hidden @ params["wo"] + params["bias"] - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    momentum = jax.tree_multimap(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree_multimap(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "step": state["step"] + 1}, loss


def batch_for(number: int, mesh: Mesh, axes: P) -> Dict[str, GlobalDeviceArray]:
    rng = np.random.RandomState(100 + number)
    x = rng.normal(size=(BATCH, IN)).astype(np.float32)
    values = {"x": x, "y": np.sin(x[:, :OUT])}
    return {
        name: GlobalDeviceArray.from_callback(v.shape, mesh, axes, functools.partial(_part, v))
        for name, v in values.items()
    }


def _part(value: np.ndarray, index: Any) -> np.ndarray:
    return value[index]


def flat_names(tree: Any) -> List[str]:
    """A name for each leaf: those on the way to it, with dots between."""
    names: List[str] = []

    def walk(node: Any, prefix: Tuple[str, ...]) -> None:
        if isinstance(node, dict):
            for key in sorted(node):
                walk(node[key], prefix + (key,))
        else:
            names.append(".".join(prefix))

    walk(tree, ())
    return names


class LeafByLeaf:
    """Writes and reads each leaf by itself, and keeps a table of what it wrote."""

    def __init__(self, directory: str, save_dtype: Optional[Any] = None):
        self.directory = directory
        self.save_dtype = save_dtype

    def _spec(self, directory: str, name: str, leaf: Any) -> Dict[str, Any]:
        spec = get_tensorstore_spec(os.path.join(directory, re.sub(r"\W", "_", name)))
        metadata = gda_serialization._get_metadata(leaf)
        stored = jnp.dtype(metadata.pop("dtype"))
        if self.save_dtype is not None and jnp.issubdtype(stored, jnp.floating):
            stored = jnp.dtype(self.save_dtype)
        spec["metadata"] = metadata
        spec["dtype"] = stored.name
        if stored != leaf.dtype:
            spec = {"driver": "cast", "dtype": jnp.dtype(leaf.dtype).name, "base": spec}
        assert gda_serialization._spec_has_metadata(spec)
        return spec

    def save(self, state: Any) -> None:
        leaves, names = jax.tree_leaves(state), flat_names(state)
        temporary = self.directory + ".tmp"
        specs = [self._spec(temporary, name, leaf) for name, leaf in zip(names, leaves)]
        commits: List[Any] = []

        async def write_all():
            await asyncio.gather(
                *jax.tree_map(
                    functools.partial(gda_serialization.async_serialize, commit_future=commits),
                    leaves,
                    specs,
                    is_leaf=lambda x: isinstance(x, dict),
                )
            )

        asyncio.run(write_all())
        for future in commits:
            future.result()
        multihost_utils.sync_global_devices("written:" + self.directory)
        if jax.process_index() == 0:
            with open(os.path.join(temporary, "table.json"), "w") as f:
                json.dump({name: list(leaf.shape) for name, leaf in zip(names, leaves)}, f)
            os.rename(temporary, self.directory)
        multihost_utils.sync_global_devices("renamed:" + self.directory)

    def restore(self, mesh: Mesh, axes: Any, like: Any) -> Any:
        names = flat_names(like)
        treedef = jax.tree_structure(like)
        with open(os.path.join(self.directory, "table.json")) as f:
            shapes = json.load(f)
        flat_axes = [x if x is not None else P() for x in self._flat_axes(axes)]
        limiter = gda_serialization._LimitInFlightBytes(10**9)

        async def read_one(name: str, leaf: Any, leaf_axes: P) -> Any:
            spec = get_tensorstore_spec(os.path.join(self.directory, re.sub(r"\W", "_", name)))
            return await gda_serialization.async_deserialize(
                mesh, leaf_axes, spec, tuple(shapes[name]), leaf.dtype, limiter
            )

        async def read_all():
            return await asyncio.gather(
                *[read_one(*each) for each in zip(names, jax.tree_leaves(like), flat_axes)]
            )

        return treedef.unflatten(asyncio.run(read_all()))

    def _flat_axes(self, axes: Any) -> List[Any]:
        if not isinstance(axes, dict):
            return [axes]
        return [x for key in sorted(axes) for x in self._flat_axes(axes[key])]


def save_by_manager(manager, directory: str, state: Any) -> None:
    """Goes on while the files are written; the directory appears when all hosts are done."""
    temporary = directory + ".writing"
    specs = [get_tensorstore_spec(os.path.join(temporary, name)) for name in flat_names(state)]
    manager.serialize(
        jax.tree_leaves(state),
        specs,
        on_commit_callback=lambda: os.rename(temporary, directory),
    )


def restore_by_manager(manager, directory: str, shardings: Any, like: Any) -> Any:
    leaves, treedef = jax.tree_flatten(like)
    specs = [get_tensorstore_spec(os.path.join(directory, name)) for name in flat_names(like)]
    restored = manager.deserialize(
        shardings,
        specs,
        global_shapes=[x.shape for x in leaves],
        dtypes=[x.dtype for x in leaves],
    )
    return treedef.unflatten(restored)


class Run:
    """A training run on one mesh."""

    def __init__(self, mesh: Mesh, axes: Any, batch_axes: P):
        self.mesh, self.axes, self.batch_axes = mesh, axes, batch_axes
        self.step = pjit(
            train_step,
            in_axis_resources=(axes, FROM_GDA),
            out_axis_resources=(axes, None),
            donate_argnums=(0,),
        )

    def init(self) -> Any:
        with Mesh(self.mesh.devices, self.mesh.axis_names):
            return pjit(init_state, in_axis_resources=None, out_axis_resources=self.axes)()

    def train(self, state: Any, first: int, last: int) -> Tuple[Any, List[float]]:
        losses = []
        for number in range(first, last):
            batch = batch_for(number, self.mesh, self.batch_axes)
            with Mesh(self.mesh.devices, self.mesh.axis_names):
                state, loss = self.step(state, batch)
            losses.append(float(loss.addressable_data(0)))
        return state, losses


def whole(tree: Any) -> Any:
    return multihost_utils.process_allgather(tree, tiled=True)


def sums(tree: Any) -> List[float]:
    return [float(np.abs(x).astype(np.float64).sum()) for x in jax.tree_leaves(whole(tree))]


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree_leaves(one), jax.tree_leaves(other))
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def missing_is_reported(directory: str, sharding: Any) -> bool:
    spec = get_tensorstore_spec(os.path.join(directory, "nothing"))
    try:
        gda_serialization.run_deserialization([sharding], [spec])
    except ValueError as error:
        return os.path.join(directory, "nothing") in str(error)
    return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--restore_from")
    parser.add_argument("--multiprocess", action="store_true")
    args = parser.parse_args()
    if args.multiprocess:
        jax.distributed.initialize()

    devices = np.array(jax.devices())
    first = Run(Mesh(devices.reshape(4, 2), ("data", "model")), FIRST, P("data"))
    grid = devices.reshape(2, 4)
    second = Run(Mesh(grid, ("rows", "columns")), SECOND, P(("rows", "columns")))
    manager = GlobalAsyncCheckpointManager(timeout_secs=120)
    path = functools.partial(os.path.join, args.workdir)

    if args.restore_from:
        like = jax.eval_shape(init_state)
        checkpoint = LeafByLeaf(os.path.join(args.restore_from, "leaves_3"))
        state = checkpoint.restore(first.mesh, first.axes, like)
    else:
        state, _ = first.train(first.init(), 0, 3)
        LeafByLeaf(path("leaves_3")).save(state)

    LeafByLeaf(path("half_3"), save_dtype=jnp.bfloat16).save(state)
    save_by_manager(manager, path("managed_3"), state)
    saved = whole(state)
    # The buffers are donated to the next step while they are still being written.
    state, losses = first.train(state, 3, 6)
    manager.check_for_errors()
    manager.wait_until_finished()

    like = jax.eval_shape(init_state)
    restored = LeafByLeaf(path("half_3")).restore(second.mesh, second.axes, like)
    differences = jax.tree_multimap(
        lambda a, b: float(np.abs(a - b).max()), whole(restored["params"]), saved["params"]
    )
    # The shardings of what was restored serve to restore once more.
    shardings = [x.sharding for x in jax.tree_leaves(restored)]
    restored = restore_by_manager(manager, path("managed_3"), shardings, like)
    equal = same(whole(restored), saved)
    leaves = jax.tree_leaves(restored)
    kinds = sorted({type(x).__name__ for x in leaves})
    by_replicas = [sum(s.replica_id == 0 for s in x.addressable_shards) for x in leaves]
    on_second = all(x.sharding.mesh == second.mesh for x in leaves)
    moved, again = second.train(restored, 3, 6)

    report = {
        "losses": losses,
        "losses_on_another_mesh": again,
        "restored_is_saved": equal,
        "largest_difference_of_half": max(jax.tree_leaves(differences)),
        "sums": sums(state["params"]),
        "sums_on_another_mesh": sums(moved["params"]),
        "step": int(np.asarray(moved["step"].addressable_data(0))),
        "kinds": kinds,
        "on_second_mesh": on_second,
        "first_replicas": by_replicas,
        "missing_is_reported": missing_is_reported(args.workdir, leaves[0].sharding),
        "files": sorted(os.listdir(args.workdir)),
    }
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
