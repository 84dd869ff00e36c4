"""Programs with flax.nnx."""

from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.core.pjit.libraries import Imports, Trained, batches


class Block(nnx.Module):
    """Two layers, the first sharded by columns, the second by rows, with dropout between."""

    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.lecun_normal()
        cut = nnx.with_partitioning(normal, (None, "model"))
        back = nnx.with_partitioning(normal, ("model", None))
        self.up = nnx.Linear(8, 16, rngs=rngs, kernel_init=cut)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs, kernel_init=back)

    def __call__(self, x):
        return self.down(self.dropout(self.norm(nnx.gelu(self.up(x)))))


def split_and_merge(imports: Imports, mesh: Any) -> Trained:
    """The model split into graph and state; the state is donated to jit."""
    optimizer = optax.adam(1e-2)

    def named(spec):
        return imports.NamedSharding(mesh, spec)

    def init():
        return nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)

    with jax.set_mesh(mesh):
        graph, shapes, _ = nnx.eval_shape(init)
        specs = nnx.get_partition_spec(shapes)
        shardings = jax.tree.map(named, specs, is_leaf=lambda s: isinstance(s, P))
        params, rest = imports.jit(lambda: init()[1:], out_shardings=(shardings, named(P())))()
        opt_state = imports.jit(optimizer.init)(params)

        def train_step(params, rest, opt_state, x, y):
            def loss_of(params):
                model = nnx.merge(graph, params, rest, copy=True)
                loss = ((model(x) - y) ** 2).mean()
                return loss, nnx.split(model, nnx.Param, ...)[2]

            (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), rest, opt_state, loss

        step = imports.jit(train_step, donate_argnums=(0, 1, 2))
        losses = []
        for x, y in batches(3):
            cut = imports.device_put((x, y), named(P("data")))
            params, rest, opt_state, loss = step(params, rest, opt_state, *cut)
            losses.append(float(loss))
    kernel = params["up"]["kernel"][...]
    return Trained(losses, params, [(kernel, P(None, "model"))])


def state_through_scan(imports: Imports, mesh: Any) -> Trained:
    """Training steps inside one program, by `jax.lax.scan` over the state of a model."""
    data = imports.NamedSharding(mesh, P(None, "data"))
    graph, state = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))

    def loss_of(state, x, y):
        return ((nnx.merge(graph, state)(x) - y) ** 2).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    @imports.jit
    def train(state, batches):
        return jax.lax.scan(step, state, batches)

    stacked = jax.tree.map(lambda *xs: jax.numpy.stack(xs), *batches(3))
    state, losses = train(state, imports.device_put(stacked, data))
    return Trained([float(loss) for loss in losses], state, [])


PROGRAMS = {f.__name__: f for f in (split_and_merge, state_through_scan)}
