"""Programs that users shard over devices, by name, for any library's `jit`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from xlashard import UNSPECIFIED, P

FEATURES = 32


@dataclass(frozen=True)
class Library:
    """Library that provides a program's functions."""

    jit: Callable[..., Any]
    constrain: Callable[[Any, Any], Any]
    named: Callable[[Any, P], Any]


@dataclass(frozen=True)
class NamedProgram:
    """Program on a mesh of `data` 4 by `model` 2.

    Attributes:
        make: Returns the function, given a library and the mesh.
        shapes: Its arguments' shapes, of float32 unless specified.
        in_specs: Specs of the arguments, or UNSPECIFIED.
        out_specs: Specs of the results, or UNSPECIFIED.
        silent: Whether it has no collectives.
    """

    make: Callable[[Library, Any], Callable[..., Any]]
    shapes: tuple[Any, ...]
    in_specs: tuple[Any, ...]
    out_specs: Any = UNSPECIFIED
    silent: bool = False


PROGRAMS: dict[str, NamedProgram] = {}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def program(name: str, *shapes: Any, ins: Any, out: Any = UNSPECIFIED, silent: bool = False) -> Any:
    """Register the program that the decorated function makes."""

    def add(make: Callable[[Library, Any], Callable[..., Any]]) -> Any:
        PROGRAMS[name] = NamedProgram(make, shapes, tuple(ins), out, silent)
        return make

    return add


def plain(name: str, *shapes: Any, **options: Any) -> Any:
    """Register a program of the decorated function itself, which constrains nothing inside."""

    def add(fun: Callable[..., Any]) -> Any:
        program(name, *shapes, **options)(lambda library, mesh: fun)
        return fun

    return add


X, W = f32(16, FEATURES), f32(FEATURES, 64)


def _squares(w, x):
    return ((x @ w) ** 2).mean()


plain("matmul, data-parallel gradient", W, X, ins=(P(), P("data")), out=P())(jax.grad(_squares))
plain("matmul, fsdp gradient", W, X, ins=(P("data"), P("data")), out=P("data"))(jax.grad(_squares))


@plain("matmul, column-parallel", W, X, ins=(P(None, "model"), P("data")), out=P("data"))
def column(w, x):
    return x @ w


@plain("matmul, row-parallel", W, X, ins=(P("model"), P("data", "model")), out=P("data"))
def row(w, x):
    return x @ w


@plain("matmul, result scattered", W, X, ins=(P("model"), P(None, "model")), out=P("model"))
def scattered(w, x):
    return x @ w


@plain(
    "convolution over cut pictures",
    f32(4, 16, 16, 4),
    f32(3, 3, 4, 8),
    ins=(P("model", "data"), P()),
    out=P("model", "data"),
)
def convolution(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _attention(q, k, v):
    """Causal attention, `[batch, length, heads, features]`."""
    scores = jnp.einsum("blhf,bmhf->bhlm", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhlm,bmhf->blhf", weights, v)


_QKV = (f32(8, 8, 4, 8),) * 3


@program(
    "attention, heads over model",
    f32(8, 8, FEATURES),
    f32(FEATURES, 3, 4, 8),
    f32(4, 8, FEATURES),
    ins=(P("data"), P(None, None, "model"), P("model")),
    out=P("data"),
)
def attention(library, mesh):
    def block(x, project, out):
        q, k, v = jnp.moveaxis(jnp.einsum("bld,dnhf->blnhf", x, project), 2, 0)
        heads = library.constrain(
            _attention(q, k, v), library.named(mesh, P("data", None, "model"))
        )
        return jnp.einsum("blhf,hfd->bld", heads, out)

    return block


plain(
    "attention, sequence over data", *_QKV, ins=(P("model", "data"),) * 3, out=P("model", "data")
)(_attention)

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
_PARAMS = {"up": f32(FEATURES, 64), "down": f32(64, FEATURES), "bias": f32(FEATURES)}
_PARAM_SPECS = {"up": P("data", "model"), "down": P("model", "data"), "bias": P()}
_STATE = jax.eval_shape(OPTIMIZER.init, _PARAMS)
_STATE_SPECS = optax.tree_utils.tree_map_params(
    OPTIMIZER, lambda _, spec: spec, _STATE, _PARAM_SPECS, transform_non_params=lambda _: P()
)


def _mlp(params, x):
    return jax.nn.gelu(x @ params["up"]) @ params["down"] + params["bias"]


@plain(
    "a step of a two-layer network with adamw",
    _PARAMS,
    _STATE,
    X,
    X,
    ins=(_PARAM_SPECS, _STATE_SPECS, P("data"), P("data")),
    out=(_PARAM_SPECS, _STATE_SPECS, P()),
)
def training_step(params, state, x, y):
    loss, grads = jax.value_and_grad(lambda p: ((_mlp(p, x) - y) ** 2).mean())(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


@program(
    "scan over layers, weights gathered one by one",
    f32(4, FEATURES, FEATURES),
    X,
    ins=(P(None, "data", "model"), P("data")),
    out=P(None, "data", "model"),
)
def layers(library, mesh):
    def loss(ws, x):
        def layer(x, w):
            return library.constrain(jnp.tanh(x @ w), library.named(mesh, P("data"))), None

        return (lax.scan(layer, x, ws)[0] ** 2).mean()

    return jax.grad(loss)


@plain("embedding over a cut vocabulary", f32(64, 16), i32(8, 12), ins=(P("model"), P("data")))
def embedding(table, tokens):
    return table[tokens]


@plain("gradient of an embedding", f32(64, 16), i32(8, 12), ins=(P("model"), P("data")))
def embedding_gradient(table, tokens):
    return jax.grad(lambda t: (t[tokens] ** 2).sum())(table)


@plain("top-k of a cut row", f32(8, 64), ins=(P("data", "model"),), out=P("data"))
def top_k(x):
    return lax.top_k(x, 5)


@plain("sort of a cut column", f32(64, 8), ins=(P("data"),), out=P("data"))
def sort(x):
    return jnp.sort(x, 0)


@plain("fft of a cut row", f32(8, 32), ins=(P("model", "data"),), out=P("model", "data"))
def fft(x):
    return jnp.fft.fft(x)


@plain("cumulative sum down a cut column", f32(64, 8), ins=(P("data"),), out=P("data"))
def cumulative(x):
    return jnp.cumsum(x, 0)


@plain("random numbers", i32(), ins=(P(),), out=P("data", "model"), silent=True)
def random_numbers(seed):
    return jax.random.normal(jax.random.key(seed), (16, 8))


@plain("shuffle of rows", f32(32, 8), i32(), ins=(P("data"), P()), out=P("data"))
def shuffle(x, seed):
    return jax.random.permutation(jax.random.key(seed), x)


@program(
    "experts, tokens sent to them and back",
    f32(8, 16, FEATURES),
    f32(FEATURES, 8),
    f32(8, FEATURES, 64),
    f32(8, 64, FEATURES),
    ins=(P(("data", "model")), P(), P(("data", "model")), P(("data", "model"))),
    out=P(("data", "model")),
)
def experts(library, mesh):
    """Tokens in groups over the devices, experts over the same devices."""
    capacity, everywhere = 4, ("data", "model")

    def layer(x, router, up, down):
        gates = jax.nn.softmax(x @ router)
        chosen = jax.nn.one_hot(gates.argmax(-1), 8)
        slot = (jnp.cumsum(chosen, 1) - 1) * chosen
        dispatch = jax.nn.one_hot(slot.astype(int), capacity) * chosen[..., None]
        inside = jnp.einsum("gtec,gtd->egcd", dispatch, x)
        inside = library.constrain(inside, library.named(mesh, P(None, everywhere)))
        inside = library.constrain(inside, library.named(mesh, P(everywhere)))
        outside = jax.nn.relu(jnp.einsum("egcd,edf->egcf", inside, up))
        outside = jnp.einsum("egcf,efd->egcd", outside, down)
        outside = library.constrain(outside, library.named(mesh, P(everywhere)))
        outside = library.constrain(outside, library.named(mesh, P(None, everywhere)))
        return jnp.einsum("gtec,egcd->gtd", dispatch * gates.max(-1)[..., None, None], outside)

    return layer


@plain(
    "cross-entropy over a cut vocabulary",
    f32(FEATURES, 64),
    X,
    i32(16),
    ins=(P(None, "model"), P("data"), P("data")),
    out=(P(), P(None, "model")),
)
def cross_entropy(table, x, labels):
    def loss(table):
        logits = x @ table
        hit = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - hit).mean()

    return jax.value_and_grad(loss)(table)


@plain("layer norm over cut features", X, ins=(P("data", "model"),), out=P("data", "model"))
def layer_norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


@plain("transposition in place", f32(16, 16), ins=(P("data", "model"),), out=P("data", "model"))
def transposition(x):
    return x.T


@plain("reshape across the cut", f32(16, 8), ins=(P("data", "model"),), out=P("data", "model"))
def reshape(x):
    return x.reshape(8, 16)


@plain("rows to columns", f32(16, 16), ins=(P("data"),), out=P(None, "data"))
def rows_to_columns(x):
    return x * 2


@plain(
    "gather and scatter of rows",
    f32(32, 8),
    i32(16),
    f32(16, 8),
    ins=(P("data"), P("data"), P("data")),
    out=P("data"),
)
def gather_scatter(x, rows, updates):
    return x.at[rows].add(updates * x[rows])


@program(
    "gradient of a rematerialised block",
    _PARAMS,
    X,
    ins=({"up": P(None, "model"), "down": P("model"), "bias": P()}, P("data")),
    out={"up": P(None, "model"), "down": P("model"), "bias": P()},
)
def remat(library, mesh):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(params, x):
        return library.constrain(_mlp(params, x), library.named(mesh, P("data"))) + x

    def loss(params, x):
        return (block(params, block(params, x)) ** 2).mean()

    return jax.grad(loss)


@plain("power iteration in a while loop", f32(32, 32), f32(32), ins=(P("data"), P()), out=P())
def while_loop(a, x):
    def again(state):
        x, last, rounds = state
        return (jnp.abs(x - last).max() > 1e-3) & (rounds < 20)

    def step(state):
        x, _, rounds = state
        y = a @ x
        return y / jnp.linalg.norm(y), x, rounds + 1

    return lax.while_loop(again, step, (x, x * 0, 0))[0]


@plain("branches that say different things", X, i32(), ins=(P("data", "model"), P()), out=P("data"))
def branches(x, which):
    return lax.switch(which, [lambda x: x - x.mean(0), lambda x: x - x.mean(1, keepdims=True)], x)


@plain("neighbours in a ring", f32(16, 8), ins=(P("data"),), out=P("data"))
def neighbours(x):
    return jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0)


@program("pjit inside, sharded otherwise", W, X, ins=(P("data"), P("data")), out=P("data"))
def inside(library, mesh):
    named = functools.partial(library.named, mesh)
    inner = library.jit(
        lambda w, x: jnp.tanh(x @ w),
        in_shardings=(named(P(None, "model")), named(P("data"))),
        out_shardings=named(P("data", "model")),
    )
    return lambda w, x: inner(w * 2, x) + inner(w, x)


@program("shard_map inside", X, ins=(P("data"),), out=P("data"))
def by_hand(library, mesh):
    ring = jax.shard_map(
        lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    return lambda x: x - ring(x).mean(0)
