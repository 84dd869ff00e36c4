"""Pretrains a small language model whose parameters have logical axes, with a partitioner."""

import collections
import functools
import json
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import jax
import jax.experimental.maps
import jax.experimental.pjit
import numpy as np
import optax
from absl import app, flags, logging
from jax import lax
from jax import numpy as jnp
from jax.experimental import PartitionSpec, multihost_utils
from jax.experimental.global_device_array import GlobalDeviceArray
from jax.experimental.maps import Mesh
from jax.experimental.pjit import pjit as jax_pjit

FLAGS = flags.FLAGS
flags.DEFINE_bool("multiprocess", False, "Whether other processes take part.")
flags.DEFINE_integer("num_steps", 4, "How many steps to train.")
flags.DEFINE_integer("num_model_partitions", 2, "Devices that one replica of the model has.")
flags.DEFINE_integer("microbatches", 2, "Into how many pieces each batch is cut.")

VOCAB, EMBED, MLP, LENGTH, BATCH = 16, 8, 32, 6, 16

Array = Any
Batch = Dict[str, np.ndarray]
LogicalAxisRules = Sequence[Tuple[str, Optional[str]]]

RULES: LogicalAxisRules = (
    ("batch", "data"),
    ("vocab", "model"),
    ("mlp", "model"),
    ("heads", "model"),
    ("embed", None),
    ("length", None),
)


class AxisNames(tuple):
    """Names of the axes of one parameter; a leaf of a pytree, which a plain tuple is not."""

    def __new__(cls, *names):
        return tuple.__new__(cls, names)


class TrainState(NamedTuple):
    step: Array
    params: Any
    opt_state: Any


class DataLayout(NamedTuple):
    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


def global_mesh_defined() -> bool:
    env = jax.experimental.maps.thread_resources.env
    return env.physical_mesh.devices.shape != ()


def with_sharding_constraint(x: Array, names: Sequence[Optional[str]]) -> Array:
    """Constrains x to where the rules put its logical axes, where there is a mesh at all."""
    if not global_mesh_defined():
        return x
    return jax.experimental.pjit.with_sharding_constraint(x, logical_to_mesh_axes(names))


def logical_to_mesh_axes(
    names: Sequence[Optional[str]], rules: LogicalAxisRules = RULES
) -> PartitionSpec:
    found: list = []
    for name in names:
        options = [axis for logical, axis in rules if logical == name and axis not in found]
        found.append(options[0] if options else None)
    return PartitionSpec(*found)


class PartitionedFunction:
    """A pjit-ed function that is always called with its mesh."""

    def __init__(self, function, mesh: Mesh):
        self._function = function
        self._mesh = mesh

    def __call__(self, *args):
        with Mesh(self._mesh.devices, self._mesh.axis_names):
            return self._function(*args)

    def lower(self, *args, **kwargs):
        with Mesh(self._mesh.devices, self._mesh.axis_names):
            return self._function.lower(*args, **kwargs)


class LocalChunker:
    """Computes which piece of a global array belongs to the devices of this host."""

    def __init__(self, global_mesh: Mesh):
        self.global_mesh = global_mesh
        local_mesh = global_mesh.local_mesh
        first_local_device = local_mesh.devices.reshape(-1)[0]
        (place,) = np.argwhere(global_mesh.devices == first_local_device)
        self.num_chunks: Dict[str, int] = collections.OrderedDict()
        self.chunk_ids: Dict[str, int] = collections.OrderedDict()
        for axis, at in zip(global_mesh.shape.keys(), place):
            devices_per_chunk = local_mesh.shape[axis]
            self.num_chunks[axis] = global_mesh.shape[axis] // devices_per_chunk
            self.chunk_ids[axis] = int(at) // devices_per_chunk

    def local_slice(self, global_shape, mesh_axes) -> Tuple[slice, ...]:
        pieces = [slice(None)] * len(global_shape)
        for dim, axis in enumerate(mesh_axes):
            if axis is None:
                continue
            size = global_shape[dim] // self.num_chunks[axis]
            at = self.chunk_ids[axis] * size
            pieces[dim] = slice(at, at + size)
        return tuple(pieces)

    def replica_id(self, mesh_axes) -> int:
        found = 0
        for axis, count in self.num_chunks.items():
            if axis not in mesh_axes:
                found = found * count + self.chunk_ids[axis]
        return found


class Partitioner:
    def __init__(self, num_partitions: int):
        devices = np.asarray(jax.devices()).reshape(-1, num_partitions)
        self.mesh = Mesh(devices, ("data", "model"))
        self.chunker = LocalChunker(self.mesh)

    def get_data_layout(self, batch_size: int) -> DataLayout:
        num_shards = self.chunker.num_chunks["data"]
        return DataLayout(
            batch_size,
            self.chunker.chunk_ids["data"],
            num_shards,
            self.chunker.replica_id(PartitionSpec("data")) == 0,
        )

    def partition(
        self,
        fn: Callable,
        in_axis_resources,
        out_axis_resources,
        static_argnums=(),
        donate_argnums=(),
    ) -> PartitionedFunction:
        pjitted = jax_pjit(
            fn,
            in_axis_resources=in_axis_resources,
            out_axis_resources=out_axis_resources,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
        )
        return PartitionedFunction(pjitted, self.mesh)


def param_names() -> Dict[str, Any]:
    return {
        "embedding": AxisNames("vocab", "embed"),
        "block": {
            "scale": AxisNames("embed"),
            "wi": AxisNames("embed", "mlp"),
            "wo": AxisNames("mlp", "embed"),
        },
    }


def init_params(rng: jax.random.KeyArray) -> Dict[str, Any]:
    embedding, wi, wo = jax.random.split(rng, 3)
    return {
        "embedding": jax.random.normal(embedding, (VOCAB, EMBED)),
        "block": {
            "scale": jnp.ones((EMBED,)),
            "wi": jax.random.normal(wi, (EMBED, MLP)) / np.sqrt(EMBED),
            "wo": jax.random.normal(wo, (MLP, EMBED)) / np.sqrt(MLP),
        },
    }


def forward(params, tokens: Array) -> Array:
    x = jnp.take(params["embedding"], tokens, axis=0)
    x = with_sharding_constraint(x, ("batch", "length", "embed"))
    block = params["block"]
    y = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * block["scale"]
    y = with_sharding_constraint(jax.nn.relu(y @ block["wi"]), ("batch", "length", "mlp"))
    x = x + y @ block["wo"]
    logits = x @ params["embedding"].T
    return with_sharding_constraint(logits, ("batch", "length", "vocab"))


def per_example_loss(params, batch) -> Array:
    log_probs = jax.nn.log_softmax(forward(params, batch["inputs"]))
    picked = jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    return -jnp.mean(picked, axis=-1)


def make_optimizer() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def init_state(rng: jax.random.KeyArray) -> TrainState:
    params = init_params(rng)
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer().init(params))


def train_step(microbatches: int, state: TrainState, batch) -> Tuple[TrainState, Dict[str, Array]]:
    def loss_of(params, piece):
        return jnp.mean(per_example_loss(params, piece))

    def cut(x):
        x = x.reshape((x.shape[0] // microbatches, microbatches) + x.shape[1:])
        return with_sharding_constraint(jnp.swapaxes(x, 0, 1), (None, "batch", "length"))

    def add_up(carry, piece):
        loss, grads = jax.value_and_grad(loss_of)(state.params, piece)
        return jax.tree_map(jnp.add, carry, (loss, grads)), None

    zeros = (jnp.zeros(()), jax.tree_map(jnp.zeros_like, state.params))
    (loss, grads), _ = lax.scan(add_up, zeros, jax.tree_map(cut, batch))
    loss, grads = jax.tree_map(lambda x: x / microbatches, (loss, grads))
    updates, opt_state = make_optimizer().update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}
    return TrainState(state.step + 1, params, opt_state), metrics


def eval_step(params, batch) -> Array:
    return per_example_loss(params, batch)


def state_mesh_axes(abstract: TrainState) -> TrainState:
    """The specs of a state: those of the parameters, wherever a tree like them stands."""
    param_axes = jax.tree_map(logical_to_mesh_axes, param_names())
    like_params = jax.tree_structure(param_axes)

    def is_like_params(x):
        return jax.tree_structure(x) == like_params

    opt_axes = jax.tree_map(
        lambda x: param_axes if is_like_params(x) else None,
        abstract.opt_state,
        is_leaf=is_like_params,
    )
    return TrainState(None, param_axes, opt_axes)


def read_batch(step: int, layout: DataLayout) -> Batch:
    """The part of a batch that this host reads."""
    tokens = np.random.RandomState(step).randint(0, VOCAB, (layout.batch_size, LENGTH + 1))
    tokens[:, 1::2] = (tokens[:, :-1:2] * 3 + 1) % VOCAB
    size = layout.batch_size // layout.num_shards
    mine = tokens[layout.shard_id * size : (layout.shard_id + 1) * size].astype(np.int32)
    return {"inputs": mine[:, :-1], "targets": mine[:, 1:]}


def to_pjit_input(batch: Batch, mesh: Mesh, spec: PartitionSpec):
    """A host-local batch as what pjit takes under the flags of this run."""
    if jax.config.jax_array:
        if jax.process_count() > 1:
            return multihost_utils.host_local_array_to_global_array(batch, mesh, spec)
        return batch
    if not jax.config.jax_parallel_functions_output_gda:
        return batch
    chunker = LocalChunker(mesh)

    def to_gda(x: np.ndarray) -> GlobalDeviceArray:
        shape = (x.shape[0] * chunker.num_chunks["data"],) + x.shape[1:]
        start = chunker.local_slice(shape, spec)[0].start
        return GlobalDeviceArray.from_callback(
            shape, mesh, spec, lambda index: x[index[0].start - start : index[0].stop - start]
        )

    return jax.tree_map(to_gda, batch)


def local_sum(x: Array) -> float:
    """The sum of what only this host holds of a result."""
    if isinstance(x, GlobalDeviceArray):
        return sum(float(np.sum(s.data)) for s in x.local_shards if s.replica_id == 0)
    if jax.config.jax_array and jax.process_count() > 1:
        return sum(float(np.sum(s.data)) for s in x.addressable_shards if s.replica_id == 0)
    return float(np.sum(x))


def main(argv):
    del argv
    if FLAGS.multiprocess:
        jax.distributed.initialize()
    partitioner = Partitioner(FLAGS.num_model_partitions)
    layout = partitioner.get_data_layout(BATCH)
    logging.info("data layout: %s", layout)

    rng = jax.random.PRNGKey(0)
    state_axes = state_mesh_axes(jax.eval_shape(init_state, rng))
    batch_axes = PartitionSpec("data")
    partitioned_init = partitioner.partition(init_state, None, state_axes)
    shapes = jax.eval_shape(partitioned_init, rng)
    state = partitioned_init(rng)
    num_gda = sum(isinstance(x, GlobalDeviceArray) for x in jax.tree_leaves(state))

    step_fn = partitioner.partition(
        train_step,
        in_axis_resources=(state_axes, batch_axes),
        out_axis_resources=(state_axes, None),
        static_argnums=(0,),
        donate_argnums=(1,),
    )
    eval_fn = partitioner.partition(eval_step, (state_axes.params, batch_axes), batch_axes)
    norm_fn = partitioner.partition(optax.global_norm, (state_axes.params,), None)

    make_batch = functools.partial(to_pjit_input, mesh=partitioner.mesh, spec=PartitionSpec("data"))
    losses, evals = [], []
    first = make_batch(read_batch(0, layout))
    outputs_global = jax.config.jax_array or jax.config.jax_parallel_functions_output_gda
    lowering = {"_global_avals": True} if outputs_global else {}
    compiled = step_fn.lower(FLAGS.microbatches, state, first, **lowering).compile()
    for step in range(FLAGS.num_steps):
        batch = make_batch(read_batch(step, layout))
        if step % 2:
            state, metrics = step_fn(FLAGS.microbatches, state, batch)
        else:
            state, metrics = compiled(state, batch)
        losses.append(float(np.asarray(metrics["loss"])))
        evals.append(local_sum(eval_fn(state.params, batch)))

    report = {
        "losses": losses,
        "local_evals": evals,
        "norm": float(np.asarray(norm_fn(state.params))),
        "num_gda": num_gda,
        "num_leaves": len(jax.tree_leaves(state)),
        "same_shapes": jax.tree_map(lambda x: x.shape, shapes)
        == jax.tree_map(lambda x: tuple(x.shape), state),
        "layout": list(layout),
    }
    print("RESULT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    jax.config.config_with_absl()
    app.run(main)
