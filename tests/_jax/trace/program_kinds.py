"""Kinds of programs that `jax.jit` takes, written for any devices; plain JAX, without xlashard.

Each maker gets eight devices, and whether arrays can be made on them: those of a topology take
none.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.extend.sharding import GSPMDSharding
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

ORDER = (3, 1, 0, 2, 7, 5, 6, 4)


@dataclass(frozen=True)
class Program:
    """A function with the arguments of a call.

    Attributes:
        function: What `jax.jit` returned.
        args: Arrays, or structs with shardings.
        make_context: Returns the block in which the function is traced.
    """

    function: Any
    args: tuple[Any, ...]
    make_context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Outcome:
    """Outcome for a kind that plain JAX doesn't lower for devices of a topology.

    Attributes:
        what: `refused`: JAX raises an error with the text, whatever the devices; for some kinds
            only without a library, or under GSPMD; `portable`: JAX's
            module for the topology is another one, for the reason in `text`, and the right one is
            what JAX lowers for the CPU's mesh under the platform's rules, without layouts; `own`:
            JAX raises an error with the text, and the right module has the words of `found`.
        text: Words of the error, or the reason.
        found: Words of the module.
    """

    what: Literal["refused", "portable", "own"]
    text: str
    found: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of program.

    Attributes:
        make: Returns its program for devices.
        outcomes: What comes out by platform, if not the module of plain JAX.
        is_slow: True if it takes more than 0.1 s.
        is_compiled: True if its compiled program is compared, too.
        queries_chip: True if its kernels query the chip while they are traced.
        platforms: Those that it is for.
    """

    make: Callable[[Sequence[Any], bool], Program]
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    is_slow: bool = False
    is_compiled: bool = False
    queries_chip: bool = False
    platforms: tuple[str, ...] = ("tpu", "cuda")


KINDS: dict[str, Kind] = {}


def kind(**facts: Any) -> Callable[[Callable[[Sequence[Any], bool], Program]], None]:
    """Add a kind to the table, under the name of its maker."""

    def add(make: Callable[[Sequence[Any], bool], Program]) -> None:
        KINDS[make.__name__] = Kind(make, **facts)

    return add


def mesh_of(
    devices: Sequence[Any],
    shape: tuple[int, ...] = (2, 4),
    names: tuple[str, ...] = ("x", "y"),
    kind: AxisType = AxisType.Auto,
) -> Mesh:
    """Return a mesh of the first devices."""
    grid = np.array(devices[: int(np.prod(shape))]).reshape(shape)
    return Mesh(grid, names, axis_types=(kind,) * len(names))


def row_of(devices: Sequence[Any]) -> Mesh:
    """Return a mesh with one axis."""
    return mesh_of(devices, (len(devices),), ("x",))


def struct(shape: tuple[int, ...], mesh: Any, *spec: Any, dtype: Any = jnp.float32, **more: Any):
    """Return a shape with a sharding."""
    sharding = NamedSharding(mesh, P(*spec), **more)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def plain(*shape: int) -> jax.ShapeDtypeStruct:
    """Return a shape without a sharding."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def two(mesh: Any) -> tuple[Any, Any]:
    """Return the arguments of a matrix product."""
    return struct((512, 256), mesh, "x", "y"), struct((256, 128), mesh, "y", None)


# Shardings and meshes.


@kind(is_compiled=True)
def automatic_axes(devices, real):
    return Program(jax.jit(lambda a, b: jnp.tanh(a @ b)), two(mesh_of(devices)))


@kind()
def constraint_inside(devices, real):
    mesh = mesh_of(devices)
    to = NamedSharding(mesh, P("y", "x"))
    fun = jax.jit(lambda a: lax.with_sharding_constraint(a * 2, to).sum(0))
    return Program(fun, two(mesh)[:1])


@kind()
def device_put_inside(devices, real):
    mesh = mesh_of(devices)
    to = NamedSharding(mesh, P("y", "x"))
    return Program(jax.jit(lambda a: jax.device_put(a * 2, to) + 1), two(mesh)[:1])


@kind()
def shardings_of_jit(devices, real):
    mesh = mesh_of(devices)
    rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "y"))
    both = NamedSharding(mesh, P("x", "y"))
    fun = jax.jit(lambda a, b: (a @ b, b), in_shardings=(rows, columns), out_shardings=(both, None))
    return Program(fun, (plain(512, 256), plain(256, 128)))


@kind()
def shardings_of_inner_jit(devices, real):
    mesh = mesh_of(devices)
    inner = jax.jit(lambda a: a * 2, in_shardings=NamedSharding(mesh, P("y", "x")))
    return Program(jax.jit(lambda a: inner(a).sum(0)), two(mesh)[:1])


@kind()
def unused_argument(devices, real):
    mesh = mesh_of(devices)
    vector = struct((256,), mesh, "y")
    return Program(jax.jit(lambda a, b, c: a + c), (two(mesh)[0], vector, vector))


@kind()
def explicit_axes(devices, real):
    mesh = mesh_of(devices, kind=AxisType.Explicit)
    fun = jax.jit(lambda a, b: jnp.dot(a, b, out_sharding=P("x", None)))
    return Program(fun, two(mesh), lambda: jax.set_mesh(mesh))


@kind()
def explicit_axes_without_context(devices, real):
    mesh = mesh_of(devices, kind=AxisType.Explicit)
    to = NamedSharding(mesh, P("y", "x"))
    return Program(jax.jit(lambda a: jax.sharding.reshard(a * 2, to)), two(mesh)[:1])


@kind()
def mesh_in_context(devices, real):
    mesh = mesh_of(devices)
    fun = jax.jit(lambda a: lax.with_sharding_constraint(a @ a.T, P("x", "y")))
    return Program(fun, two(mesh)[:1], lambda: jax.set_mesh(mesh))


@kind()
def mesh_in_context_only(devices, real):
    mesh = mesh_of(devices)
    fun = jax.jit(lambda a: lax.with_sharding_constraint(a @ a.T, P("x", "y")))
    return Program(fun, (plain(512, 256),), lambda: jax.set_mesh(mesh))


@kind()
def with_mesh(devices, real):
    mesh = mesh_of(devices)
    fun = jax.jit(lambda a: lax.with_sharding_constraint(a @ a.T, P("x", "y")))
    return Program(fun, two(mesh)[:1], lambda: mesh)


@kind(is_compiled=True)
def abstract_meshes(devices, real):
    # Plain JAX compiles it for a topology's devices only under a default device.
    abstract = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    mesh = abstract if real else mesh_of(devices)
    return Program(jax.jit(lambda a, b: jnp.tanh(a @ b)), two(mesh))


@kind()
def abstract_mesh_beside_devices(devices, real):
    mesh = mesh_of(devices)
    to = NamedSharding(mesh.abstract_mesh, P("y", "x"))
    fun = jax.jit(lambda a: lax.with_sharding_constraint(a * 2, to))
    return Program(fun, two(mesh)[:1])


@kind(outcomes={"cuda": Outcome("own", "Unknown backend", found="stablehlo.multiply")})
def abstract_mesh_in_context(devices, real):
    mesh = mesh_of(devices, kind=AxisType.Explicit)
    fun = jax.jit(lambda a: jax.sharding.reshard(a * 2, P("y", "x")))
    return Program(fun, two(mesh)[:1], lambda: jax.sharding.use_abstract_mesh(mesh.abstract_mesh))


@kind()
def abstract_mesh_in_shard_map(devices, real):
    # Plain JAX refuses operations that require devices, where it has none.
    explicit = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    mesh = explicit if real else mesh_of(devices, kind=AxisType.Explicit)
    body = jax.shard_map(
        lambda a: lax.psum(a, "x"), mesh=mesh, in_specs=P("x", "y"), out_specs=P(None, "y")
    )
    return Program(jax.jit(body), two(mesh)[:1])


@kind()
def shard_map_under_the_mesh_in_context(devices, real):
    mesh = mesh_of(devices, kind=AxisType.Explicit)
    body = jax.shard_map(lambda a: a - lax.pmean(a, "x"), out_specs=P("x", "y"))
    return Program(jax.jit(body), two(mesh)[:1], lambda: jax.set_mesh(mesh))


@kind()
def meshes_of_two_shapes(devices, real):
    to = NamedSharding(row_of(devices), P("x"))
    fun = jax.jit(lambda a: lax.with_sharding_constraint(a * 2, to))
    return Program(fun, two(mesh_of(devices))[:1])


@kind(is_compiled=True)
def sharding_of_a_compiled_program(devices, real):
    # Results of programs have this type where no mesh fits.
    compiled = NamedSharding(mesh_of(devices), P("x", "y"))._to_xla_hlo_sharding(2)
    sharding = GSPMDSharding([devices[i] for i in ORDER], compiled)
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=sharding)
    return Program(jax.jit(lambda a: a * 2), (x,))


@kind()
def values_of_many_types(devices, real):
    mesh = mesh_of(devices)
    x: Any = np.ones((512, 256), np.float32)
    to = NamedSharding(mesh, P("x"))
    leaf = jax.device_put(x, to) if real else struct(x.shape, mesh, "x")
    args = {"a": leaf, "b": (x[:, :1], 2.0, True), "none": None}, 3
    fun = jax.jit(lambda d, n: (d["a"] * n + d["b"][0] * d["b"][1], d["b"]), static_argnums=1)
    return Program(fun, args)


@kind(is_compiled=True)
def devices_in_another_order(devices, real):
    mesh = mesh_of([devices[i] for i in ORDER])
    return Program(jax.jit(lambda a, b: jnp.tanh(a @ b)), two(mesh))


@kind(outcomes=dict.fromkeys(("tpu", "cuda"), Outcome("refused", "incompatible devices")))
def two_orders(devices, real):
    mesh, other = mesh_of(devices), mesh_of([devices[i] for i in ORDER])
    to = NamedSharding(other, P("y", "x"))
    fun = jax.jit(lambda a, b: lax.with_sharding_constraint(a @ b, to))
    return Program(fun, two(mesh))


@kind()
def part_of_the_devices(devices, real):
    mesh = row_of(devices[4:])
    return Program(jax.jit(lambda a: a.sum(0)), (struct((512, 512), mesh, "x"),))


@kind(is_compiled=True)
def one_device(devices, real):
    sharding = SingleDeviceSharding(devices[3])
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=sharding)
    return Program(jax.jit(lambda a: a @ a), (x,))


@kind()
def no_devices_named(devices, real):
    # Plain JAX lowers it for the CPU, to a module that fits any platform.
    return Program(jax.jit(lambda a: a @ a.T), (plain(512, 256),))


@kind()
def shard_map_over_part_of_the_axes(devices, real):
    mesh = mesh_of(devices)
    body = jax.shard_map(
        lambda a: lax.psum(a, "x"),
        mesh=mesh,
        in_specs=P("x", None),
        out_specs=P(None, None),
        axis_names={"x"},
    )
    return Program(jax.jit(lambda a: body(a) * 2), two(mesh)[:1])


@kind()
def shard_map_over_all_axes(devices, real):
    mesh = mesh_of(devices)
    ring = [(i, (i + 1) % 4) for i in range(4)]
    body = jax.shard_map(
        lambda a: lax.ppermute(a + lax.axis_index("y"), "y", ring),
        mesh=mesh,
        in_specs=P("x", "y"),
        out_specs=P("x", "y"),
    )
    return Program(jax.jit(body), two(mesh)[:1])


@kind()
def pmap(devices, real):
    fun = jax.pmap(lambda a: lax.psum(a, "i"), axis_name="i", devices=list(devices))
    return Program(fun, (plain(8, 128),))


# Values: closed over, keys, references, donated, with layouts, in the host's memory.


@kind(is_compiled=True)
def closed_over_array(devices, real):
    mesh = mesh_of(devices)
    weights: Any = np.arange(256 * 128, dtype=np.float32).reshape(256, 128)
    if real:
        weights = jax.device_put(weights, NamedSharding(mesh, P("y", None)))
    return Program(jax.jit(lambda a: a @ weights), two(mesh)[:1])


@kind()
def closed_over_by_inner_functions(devices, real):
    mesh = mesh_of(devices)
    bias: Any = np.arange(128, dtype=np.float32)
    if real:
        bias = jax.device_put(bias, NamedSharding(mesh, P()))
    inner = jax.jit(lambda a: a + bias)
    fun = jax.jit(lambda a: lax.fori_loop(0, 3, lambda i, a: inner(a) * bias, a))
    return Program(fun, (struct((512, 128), mesh, "x"),))


@kind(is_slow=True, is_compiled=True)
def keys(devices, real):
    mesh = row_of(devices)
    noise = jax.vmap(lambda k, a: a + jax.random.normal(k, a.shape))
    args = struct((8,), mesh, "x", dtype=jax.random.key(0).dtype), struct((8, 128), mesh, "x")
    return Program(jax.jit(noise), args)


@kind(is_slow=True)
def one_key(devices, real):
    mesh = row_of(devices)
    fun = jax.jit(lambda k, a: (jax.random.split(k), a * jax.random.bernoulli(k, 0.5, a.shape)))
    return Program(fun, (struct((), mesh, dtype=jax.random.key(0).dtype), struct((8, 128), mesh)))


@kind()
def reference_made_inside(devices, real):
    def double(a):
        ref = jax.new_ref(a)
        ref[...] = ref[...] * 2
        return jax.freeze(ref)

    return Program(jax.jit(double), (struct((8, 128), row_of(devices), "x"),))


NO_NATIVE_REFERENCE = dict.fromkeys(
    ("tpu", "cuda"), Outcome("portable", "a reference needs an array, which no topology holds")
)


@kind(outcomes=NO_NATIVE_REFERENCE, is_compiled=True)
def reference_closed_over(devices, real):
    mesh = row_of(devices)
    ref = reference(mesh)

    def add(a):
        ref[...] = ref[...] + a
        return (a * ref[...]).sum()

    return Program(jax.jit(add), (struct((8, 128), mesh, "x"),))


@kind(
    outcomes=dict.fromkeys(
        ("tpu", "cuda"),
        Outcome("own", "not available with compile-only client", found="tf.aliasing_output = 3"),
    ),
    is_compiled=True,
)
def references_beside_an_ordered_effect(devices, real):
    device = SingleDeviceSharding(devices[0])
    zeros = jax.device_put(np.zeros((8, 128), np.float32), device)
    first, second = jax.new_ref(zeros), jax.new_ref(zeros)

    def add(unused, a):
        first[...] = first[...] + a
        second[...] = second[...] + first[...]
        jax.debug.print("{}", a[0, 0], ordered=True)
        return a * 2

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=device)
    return Program(jax.jit(add), (x, x))


@kind(outcomes=NO_NATIVE_REFERENCE)
def reference_as_argument(devices, real):
    mesh = row_of(devices)

    def add(ref, a):
        ref[...] = ref[...] + a
        return (a * ref[...]).sum()

    return Program(jax.jit(add), (reference(mesh), struct((8, 128), mesh, "x")))


def reference(mesh: Mesh) -> Any:
    """Return a reference of a sharded array."""
    zeros = np.zeros((8, 128), np.float32)
    return jax.new_ref(jax.device_put(zeros, NamedSharding(mesh, P("x"))))


@kind(is_compiled=True)
def donated_argument(devices, real):
    mesh = mesh_of(devices)
    state = {"w": two(mesh)[0]}
    step = jax.jit(lambda s, g: jax.tree.map(lambda a, b: a - 0.1 * b, s, g), donate_argnums=0)
    return Program(step, (state, state))


@kind()
def donated_argument_for_another_sharding(devices, real):
    fun = jax.jit(lambda a: a.T * 1.0, donate_argnums=0)
    return Program(fun, (struct((512, 512), mesh_of(devices), "x", "y"),))


def with_layout(devices: Sequence[Any], layout: Any) -> Program:
    """Return a program whose argument and result have a layout."""
    laid = Format(layout, NamedSharding(mesh_of(devices), P("x", "y")))
    return Program(
        jax.jit(lambda a: a * 2, in_shardings=laid, out_shardings=laid), (plain(512, 256),)
    )


@kind()
def layout_of_the_user(devices, real):
    return with_layout(devices, Layout((1, 0)))


@kind(is_compiled=True)
def layout_that_is_the_default_of_a_cpu(devices, real):
    return with_layout(devices, Layout((0, 1)))


@kind()
def layout_left_to_the_compiler(devices, real):
    laid = Format(Layout.AUTO, NamedSharding(mesh_of(devices), P("x", "y")))
    fun = jax.jit(lambda a, b: (a.T @ b).T, in_shardings=(laid, laid), out_shardings=laid)
    return Program(fun, (plain(512, 256), plain(512, 256)))


@kind()
def layout_of_an_array(devices, real):
    # No platform's default for shards of this shape.
    laid = Format(Layout((1, 0)), NamedSharding(mesh_of(devices), P("x", "y")))
    if real:
        zeros = np.zeros((1024, 1024), np.float32)
        return Program(jax.jit(lambda a: a * 2), (jax.device_put(zeros, laid),))
    return Program(jax.jit(lambda a: a * 2, in_shardings=laid), (plain(1024, 1024),))


@kind()
def layout_inside(devices, real):
    def product(a):
        return with_layout_constraint(a * 2, Layout((1, 0))).sum(0)

    return Program(jax.jit(product), two(mesh_of(devices))[:1])


PINNED_ON_GPU = {
    "cuda": Outcome(
        "portable", "the client of a topology of GPUs reports no such memory, and JAX drops it"
    )
}


@kind(outcomes=PINNED_ON_GPU)
def argument_in_host_memory(devices, real):
    x = struct((512, 256), mesh_of(devices), "x", "y", memory_kind="pinned_host")
    return Program(jax.jit(lambda a: jax.device_put(a, jax.memory.Space.Device) * 2), (x,))


@kind(outcomes=PINNED_ON_GPU)
def result_in_host_memory(devices, real):
    mesh = mesh_of(devices)
    to = NamedSharding(mesh, P("x", "y"), memory_kind="pinned_host")
    return Program(jax.jit(lambda a: a * 2, out_shardings=to), two(mesh)[:1])


@kind(outcomes=PINNED_ON_GPU)
def result_in_unpinned_host_memory(devices, real):
    mesh = mesh_of(devices)
    to = NamedSharding(mesh, P("x", "y"), memory_kind="unpinned_host")
    return Program(jax.jit(lambda a: a * 2, out_shardings=to), two(mesh)[:1])


@kind(is_slow=True)
def offloaded_residuals(devices, real):
    mesh = mesh_of(devices)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(h, w):
        return checkpoint_name(jnp.tanh(h @ w), "h"), None

    def loss(w, a):
        return lax.scan(jax.checkpoint(layer, policy=policy), a, w)[0].sum()

    args = struct((4, 256, 256), mesh, None, "x", None), struct((512, 256), mesh, "x", None)
    return Program(jax.jit(jax.grad(loss)), args)


@kind(is_slow=True)
def many_arguments(devices, real):
    x = struct((8,), row_of(devices), "x")
    return Program(jax.jit(lambda *a: [x + 1 for x in a]), (x,) * 2100)


@kind(is_slow=True)
def language_model_of_8b(devices, real):
    mesh = row_of(devices)
    layers, width, hidden = 32, 4096, 14336
    weights = {
        "qkvo": ((layers, 4, width, width), P(None, None, "x")),
        "up": ((layers, width, hidden), P(None, "x")),
        "down": ((layers, hidden, width), P(None, "x")),
        "embedding": ((128256, width), P("x")),
    }
    params = {
        name: struct(shape, mesh, *spec, dtype=jnp.bfloat16)
        for name, (shape, spec) in weights.items()
    }

    def layer(h, w):
        for i in range(4):
            h = h + jnp.tanh(h @ w["qkvo"][i])
        return h + jax.nn.silu(h @ w["up"]) @ w["down"], None

    def loss(params, tokens):
        blocks = {name: params[name] for name in ("qkvo", "up", "down")}
        h, _ = lax.scan(jax.checkpoint(layer), params["embedding"][tokens], blocks)
        return (h @ params["embedding"].T).astype(jnp.float32).mean()

    def step(params, tokens):
        gradients = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda a, b: a - (0.1 * b).astype(a.dtype), params, gradients)

    tokens = struct((8, 128), mesh, "x", dtype=jnp.int32)
    return Program(jax.jit(step, donate_argnums=0), (params, tokens))


# Operations that platforms lower in different ways.


@kind(is_compiled=True)
def platform_dependent(devices, real):
    def choose(a):
        return lax.platform_dependent(
            a, cpu=lambda a: a + 1, tpu=lambda a: a * 2, cuda=lambda a: a - 5
        )

    return Program(jax.jit(choose), two(mesh_of(devices))[:1])


@kind()
def branch_on_the_backend(devices, real):
    # Python takes the branch of the devices at hand, whatever the topology.
    def choose(a):
        return a * 2 if jax.default_backend() == "cpu" else a + 1

    return Program(jax.jit(choose), two(mesh_of(devices))[:1])


@kind(is_slow=True)
def linear_algebra(devices, real):
    def solve(a):
        s = a @ a.mT + jnp.eye(16)
        decomposed = jnp.linalg.cholesky(s), jnp.linalg.qr(a), jnp.linalg.eigh(s)
        return decomposed, jnp.linalg.svd(a), jnp.linalg.solve(s, a), jnp.linalg.det(s)

    return Program(jax.jit(solve), (struct((8, 16, 16), row_of(devices), "x"),))


@kind(
    outcomes={
        "tpu": Outcome("refused", "primitive 'eig' not found for platform tpu"),
        "cuda": Outcome("refused", "cuSolver internal error"),
    }
)
def eigenvalues(devices, real):
    return Program(jax.jit(jnp.linalg.eigvals), (struct((8, 16, 16), row_of(devices), "x"),))


@kind()
def fourier_transform(devices, real):
    fun = jax.jit(lambda a: jnp.abs(jnp.fft.fft2(a)))
    return Program(fun, (struct((8, 64, 64), row_of(devices), "x"),))


@kind(is_slow=True)
def random_bits(devices, real):
    def draw(a):
        noise = jax.random.normal(jax.random.key(1), a.shape)
        bits = jax.random.bits(jax.random.key(1, impl="rbg"), (512,))
        return a + noise, bits, jax.random.permutation(jax.random.key(2), 64)

    return Program(jax.jit(draw), (struct((512, 64), row_of(devices), "x"),))


@kind()
def sorts(devices, real):
    fun = jax.jit(lambda a: (lax.top_k(a, 4), jnp.sort(a), lax.approx_max_k(a, 4)))
    return Program(fun, (struct((512, 64), row_of(devices), "x"),))


@kind()
def ragged_product(devices, real):
    mesh = row_of(devices)
    rows = struct((512, 64), mesh, "x", dtype=jnp.bfloat16)
    weights = struct((4, 64, 128), mesh, dtype=jnp.bfloat16)
    sizes = struct((4,), mesh, dtype=jnp.int32)
    return Program(jax.jit(lax.ragged_dot), (rows, weights, sizes))


@kind()
def scaled_product(devices, real):
    mesh = row_of(devices)
    values = struct((8, 128, 256), mesh, "x", dtype=jnp.float8_e4m3fn)
    scales = struct((8, 128, 8), mesh, "x", dtype=jnp.float8_e8m0fnu)

    def multiply(*args):
        return jax.nn.scaled_matmul(*args, preferred_element_type=jnp.float32)

    return Program(jax.jit(multiply), (values, values, scales, scales))


@kind(is_slow=True)
def attention(devices, real):
    q = struct((8, 512, 4, 64), row_of(devices), "x", dtype=jnp.bfloat16)
    fun = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    return Program(fun, (q, q, q))


@kind(
    platforms=("cuda",),
    is_compiled=True,
    outcomes={"cuda": Outcome("own", "cuDNN", found="CustomSPMDPartitioning")},
)
def attention_of_cudnn(devices, real):
    q = struct((8, 512, 4, 64), row_of(devices), "x", dtype=jnp.bfloat16)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    return Program(jax.jit(attend), (q, q, q))


@kind()
def convolution(devices, real):
    mesh = row_of(devices)
    fun = jax.jit(lambda a, w: lax.conv(a, w, (1, 1), "SAME"))
    return Program(fun, (struct((8, 3, 32, 32), mesh, "x"), struct((16, 3, 3, 3), mesh)))


@kind()
def compiler_options(devices, real):
    option = {
        "cpu": {},
        "tpu": {"xla_tpu_scoped_vmem_limit_kib": "32768"},
        "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    }[devices[0].platform]
    fun = jax.jit(lambda a, b: jnp.tanh(a @ b), compiler_options=option)
    return Program(fun, two(mesh_of(devices)))


@kind()
def checkified(devices, real):
    from jax.experimental import checkify

    def check(a):
        checkify.check(a.sum() > 0, "negative")
        return a * 2

    return Program(jax.jit(checkify.checkify(check)), two(mesh_of(devices))[:1])


@kind()
def partitioned_by_the_user(devices, real):
    from jax.experimental.custom_partitioning import custom_partitioning

    double = custom_partitioning(lambda a: a * 2)
    double.def_partition(
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        partition=lambda mesh, args, result: (
            *(mesh, lambda a: a * 2),
            *(result.sharding, (args[0].sharding,)),
        ),
        sharding_rule="i j -> i j",
    )
    return Program(jax.jit(lambda a: double(a) + 1), two(mesh_of(devices))[:1])


# Under GSPMD, JAX builds an invalid module.
@kind(
    outcomes=dict.fromkeys(("tpu", "cuda"), Outcome("refused", "Cannot lower jaxpr")),
    is_slow=True,
)
def exported_function(devices, real):
    own = two(mesh_of(devices if real else jax.devices()))
    exported = jax.export.export(
        jax.jit(lambda a, b: jnp.tanh(a @ b)), platforms=["cpu", "tpu", "cuda"]
    )(*own)
    return Program(jax.jit(exported.call), two(mesh_of(devices)))


@kind()
def high_level_values(devices, real):
    from jax.experimental import hijax

    # Its name in JAX 0.11 and older is the second one.
    base = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive

    class Negate(base):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x):
            return -x

    def negate(a):
        return Negate(jax.typeof(a))(a) * 2

    return Program(jax.jit(negate), two(mesh_of(devices))[:1])


@kind(is_compiled=True)
def lowering_rule_that_runs_a_program(devices, real):
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    add_three = Primitive("add_three")
    add_three.def_abstract_eval(lambda a: a)

    def rule(context, a):
        three = float(jax.jit(lambda x: x + 1)(np.float32(2)))
        return mlir.lower_fun(lambda a: a + three, multiple_results=False)(context, a)

    mlir.register_lowering(add_three, rule)
    return Program(jax.jit(add_three.bind), two(mesh_of(devices))[:1])


# Callbacks.

UNKNOWN_BACKEND = {"cuda": Outcome("own", "Unknown backend", found="xla_ffi_python_gpu_callback")}


@kind(outcomes=UNKNOWN_BACKEND, is_compiled=True)
def pure_callback(devices, real):
    fun = jax.jit(lambda a: jax.pure_callback(np.sin, plain(*a.shape), a))
    return Program(fun, two(mesh_of(devices))[:1])


@kind(outcomes=UNKNOWN_BACKEND)
def callback_under_another_order(devices, real):
    fun = jax.jit(lambda a: jax.pure_callback(np.sin, plain(*a.shape), a))
    return Program(fun, two(mesh_of([devices[i] for i in ORDER]))[:1])


@kind(outcomes=UNKNOWN_BACKEND)
def io_callback(devices, real):
    from jax.experimental import io_callback

    def report(a):
        io_callback(lambda x: None, None, a.sum())
        return a * 2

    return Program(jax.jit(report), two(mesh_of(devices))[:1])


@kind(outcomes=UNKNOWN_BACKEND)
def ordered_callback(devices, real):
    from jax.experimental import io_callback

    def report(a):
        io_callback(lambda x: None, None, a.sum(), ordered=True)
        return a * 2

    sharding = SingleDeviceSharding(devices[0])
    return Program(
        jax.jit(report), (jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=sharding),)
    )


@kind(outcomes=UNKNOWN_BACKEND)
def debug_print(devices, real):
    def report(a):
        jax.debug.print("{}", a.sum())
        return a * 2

    return Program(jax.jit(report), two(mesh_of(devices))[:1])


# Kernels.


def over_rows(mesh: Mesh, kernel: Callable[..., Any], **options: Any) -> Program:
    """Return a program that calls a Pallas kernel for the rows of each device."""
    from jax.experimental import pallas as pl

    def call(a):
        return pl.pallas_call(kernel, out_shape=jax.typeof(a), **options)(a)

    body = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return Program(jax.jit(body), (struct((1024, 128), mesh, "x"),))


def double_kernel(source: Any, result: Any) -> None:
    """Write twice the source."""
    result[...] = source[...] * 2.0


@kind(platforms=("tpu",), is_slow=True, is_compiled=True)
def pallas_kernel(devices, real):
    return over_rows(row_of(devices), double_kernel)


@kind(platforms=("cuda",), is_slow=True, is_compiled=True)
def triton_kernel(devices, real):
    from jax.experimental.pallas import triton

    return over_rows(row_of(devices), double_kernel, compiler_params=triton.CompilerParams())


def call_with_queried_chip(a: Any) -> Any:
    """Call a Pallas kernel that depends on the chip."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    scale = float(pltpu.get_tpu_info().vmem_capacity_bytes)

    def kernel(source, result):
        result[...] = source[...] * scale

    return pl.pallas_call(kernel, out_shape=jax.typeof(a))(a)


@kind(platforms=("tpu",), queries_chip=True)
def kernel_that_queries_the_chip(devices, real):
    mesh = row_of(devices)
    body = jax.shard_map(
        call_with_queried_chip, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    return Program(jax.jit(body), (struct((1024, 128), mesh, "x"),))


@kind(
    platforms=("tpu",),
    queries_chip=True,
    outcomes={"tpu": Outcome("own", "Unsupported TPU device kind", found="tpu_custom_call")},
)
def kernel_that_queries_the_chip_without_mesh(devices, real):
    sharding = SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=sharding)
    return Program(jax.jit(lambda a: call_with_queried_chip(a) + 1), (x,))


@kind(platforms=("tpu",), is_slow=True)
def pallas_copy_to_another_device(devices, real):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(source, result, sent, received):
        to = (lax.axis_index("x") + 1) % 8
        copy = pltpu.make_async_remote_copy(
            source, result, sent, received, device_id=(to,), device_id_type=pl.DeviceIdType.MESH
        )
        copy.start()
        copy.wait()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    semaphores = [pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA]
    options = {"in_specs": [anywhere], "out_specs": anywhere, "scratch_shapes": semaphores}
    return over_rows(row_of(devices), kernel, **options)


@kind(platforms=("tpu",), is_slow=True)
def splash_attention(devices, real):
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    mesh = row_of(devices)
    causal = [splash_attention_mask.CausalMask((512, 512)) for _ in range(4)]
    mask = splash_attention_mask.MultiHeadMask(causal)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask)
    attend = jax.shard_map(
        jax.vmap(kernel), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    q = struct((8, 4, 512, 128), mesh, "x", dtype=jnp.bfloat16)
    loss = jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum())
    return Program(jax.jit(loss), (q, q, q))
