"""Fits a linear model from GlobalDeviceArrays that are filled in all possible ways."""

import argparse
import json
from typing import Any, Dict, List, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import PartitionSpec as P
from jax.experimental import maps, multihost_utils
from jax.experimental.global_device_array import (
    Device,
    GlobalDeviceArray,
    Shard,
    get_shard_indices,
    get_shard_shape,
)
from jax.experimental.pjit import FROM_GDA, pjit
from jax.tree_util import tree_leaves, tree_map

jax.config.update("jax_parallel_functions_output_gda", True)

FEATURES, OUTPUTS, BATCH = 8, 4, 16
Index = Tuple[slice, ...]


class Reader:
    """A source of examples that counts its calls and their indices."""

    def __init__(self, seed: int):
        rng = np.random.RandomState(seed)
        self.features = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
        truth = np.linspace(-1.0, 1.0, FEATURES * OUTPUTS).reshape(FEATURES, OUTPUTS)
        self.targets = (self.features @ truth).astype(np.float32)
        self.calls: List[Any] = []

    def read(self, index: Index) -> np.ndarray:
        self.calls.append((index[0].start, index[0].stop))
        return self.features[index]

    def read_many(self, indices: Sequence[Index]) -> List[np.ndarray]:
        self.calls.append(len(indices))
        return [self.targets[index] for index in indices]

    def read_onto(self, wanted: Sequence[Tuple[Index, Tuple[Device, ...]]]):
        self.calls.append([len(devices) for _, devices in wanted])
        return [
            jax.device_put(self.features[index], device)
            for index, devices in wanted
            for device in devices
        ]


def gda_from_host_local(batch: Dict[str, np.ndarray], mesh: maps.Mesh, spec: P):
    """Puts what this host has read onto its devices, piece by piece."""
    # This host's rows begin where those of its first device do.
    devices = list(mesh.local_devices)
    rows = BATCH // jax.process_count()

    def put(x: np.ndarray) -> List[Any]:
        shape = (x.shape[0] * jax.process_count(),) + x.shape[1:]
        indices = get_shard_indices(shape, mesh, spec)
        base = jax.process_index() * rows
        buffers = []
        for device in devices:
            start, stop, _ = indices[device][0].indices(shape[0])
            piece = x[(slice(start - base, stop - base),) + tuple(indices[device][1:])]
            assert piece.shape == get_shard_shape(shape, mesh, spec)
            buffers.append(jax.device_put(piece, device))
        return buffers

    buffers = tree_map(put, batch)
    shapes = tree_map(lambda x: (x.shape[0] * jax.process_count(),) + x.shape[1:], batch)
    return tree_map(
        lambda dbs, name: GlobalDeviceArray(shapes[name], mesh, spec, dbs),
        buffers,
        {name: name for name in batch},
        is_leaf=lambda x: isinstance(x, list),
    )


def predict(params, features):
    return features @ params["w"] + params["b"]


def mean_loss(params, features, targets):
    return jnp.mean((predict(params, features) - targets) ** 2)


def train_step(params, batch):
    loss, grads = jax.value_and_grad(mean_loss)(params, batch["features"], batch["targets"])
    return tree_map(lambda p, g: p - 0.3 * g, params, grads), loss


def bytes_once(tree) -> int:
    """Bytes of a checkpoint of a tree, of which this host writes its part."""
    shards: List[Shard] = [s for x in tree_leaves(tree) for s in x.local_shards]
    return sum(s.data.size * s.data.dtype.itemsize for s in shards if s.replica_id == 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--multiprocess", action="store_true")
    args = parser.parse_args()
    if args.multiprocess:
        jax.distributed.initialize()

    mesh = maps.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    spec = P("data")
    params_axes = {"w": P(None, "model"), "b": P("model")}
    init = pjit(
        lambda: {"w": jnp.zeros((FEATURES, OUTPUTS)), "b": jnp.zeros((OUTPUTS,))},
        in_axis_resources=None,
        out_axis_resources=params_axes,
    )
    step = pjit(
        train_step,
        in_axis_resources=(FROM_GDA, FROM_GDA),
        out_axis_resources=(params_axes, None),
        donate_argnums=(0,),
    )
    evaluate = pjit(
        lambda params, features, targets, weight: weight * mean_loss(params, features, targets),
        in_axis_resources=(params_axes, FROM_GDA, FROM_GDA, None),
        out_axis_resources=None,
    )
    infer = pjit(predict, in_axis_resources=(FROM_GDA, P("data")), out_axis_resources=P("data"))

    calls, losses = [], []
    with mesh:
        params = init()
    for number in range(args.steps):
        reader = Reader(number)
        if number % 3 == 0:
            features = GlobalDeviceArray.from_callback(
                global_shape=(BATCH, FEATURES),
                global_mesh=mesh,
                mesh_axes=spec,
                data_callback=reader.read,
            )
            targets = GlobalDeviceArray.from_batched_callback(
                (BATCH, OUTPUTS), mesh, spec, reader.read_many
            )
            batch = {"features": features, "targets": targets}
        elif number % 3 == 1:
            features = GlobalDeviceArray.from_batched_callback_with_devices(
                (BATCH, FEATURES), mesh, spec, reader.read_onto
            )
            targets = GlobalDeviceArray.from_callback(
                (BATCH, OUTPUTS), mesh, spec, lambda index, reader=reader: reader.targets[index]
            )
            batch = {"features": features, "targets": targets}
        else:
            rows = BATCH // jax.process_count()
            mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
            local = {"features": reader.features[mine], "targets": reader.targets[mine]}
            batch = gda_from_host_local(local, mesh, spec)
        calls.append(reader.calls)
        with mesh:
            params, loss = step(params, batch)
        losses.append(float(loss.addressable_data(0)))

    with mesh:
        weighted = evaluate(params, batch["features"], batch["targets"], np.float32(2.0))
        predicted = infer(params, batch["features"])
    gathered = multihost_utils.process_allgather(predicted, tiled=True)
    features = batch["features"]
    remote = [s for s in features.global_shards if s.data is None]
    first = features.local_data(0)
    report = {
        "losses": losses,
        "eval": float(weighted.addressable_data(0)),
        "predicted": np.asarray(gathered).sum(axis=1).tolist(),
        "calls": calls,
        "num_remote_shards": len(remote),
        "first_shape": list(first.shape),
        "local_bytes": bytes_once(batch),
        "mesh_axes_are_spec": features.mesh_axes == P("data"),
        "kinds": sorted({type(x).__name__ for x in tree_leaves((params, predicted))}),
    }
    shards = features.local_shards
    for shard in shards:
        shard.data.delete()
    report["deleted"] = all(shard.data.is_deleted() for shard in shards)
    try:
        np.asarray(features)
    except RuntimeError as e:
        report["names_deletion"] = "deleted" in str(e)
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
