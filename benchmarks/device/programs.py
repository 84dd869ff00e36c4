"""Programs that devices are measured with: their kind, function and arrays."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._operation_programs import (
    PROGRAMS,
    attention_gradient,
    cudnn_attention,
    cudnn_attention_gradient,
    gated_linear,
    layer_norm,
)

_DTYPES = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "f8": jnp.float8_e4m3fn,
    "s8": jnp.int8,
    "s32": jnp.int32,
    "c64": jnp.complex64,
}

TINY = 16
"""Largest dimension of the arrays in a rehearsal."""

type Call = Callable[..., Any]


@dataclass(frozen=True)
class DeviceProgram:
    """A program to measure.

    Attributes:
        kind: Kind, of which a median is printed.
        name: Its name among all programs.
        function: The function.
        arrays: Types of its arguments: `bf16[8,128] s32[8]`. Integers are indices into the rows of
            the first array.
        needs_gpu: Whether it calls a library of GPUs.
        sharded: Number of arrays, from the first on, whose rows are sharded over several devices;
            each device has the others whole.
    """

    kind: str
    name: str
    function: Call
    arrays: str
    needs_gpu: bool = False
    sharded: int = 0

    def types(self, *, tiny: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the types of the arguments, in a rehearsal with small dimensions."""
        found = []
        for word in self.arrays.split():
            dtype, _, text = word.removesuffix("]").partition("[")
            dims = (int(size) for size in text.split(","))
            shape = tuple(min(size, TINY) if tiny else size for size in dims)
            found.append(jax.ShapeDtypeStruct(shape, _DTYPES[dtype]))
        return tuple(found)

    def make_arguments(self, *, tiny: bool) -> list[jax.Array]:
        """Return arguments on the first device."""
        types = self.types(tiny=tiny)
        return [_values(each, types[0].shape[0]) for each in types]


def _values(kind: jax.ShapeDtypeStruct, rows: int) -> jax.Array:
    if jnp.issubdtype(kind.dtype, jnp.integer):
        # A prime stride visits the rows in no order of memory.
        count = np.prod(kind.shape, dtype=np.int64)
        values = np.arange(count) * 7919 % min(rows, 127 if kind.dtype == jnp.int8 else rows)
        return jnp.asarray(values.reshape(kind.shape), kind.dtype)
    return jax.random.normal(jax.random.key(0), kind.shape, jnp.float32).astype(kind.dtype)


def _small_operations(x: jax.Array) -> jax.Array:
    """Return x after products that no fusion joins."""
    for _ in range(100):
        x = x @ x
    return x


def _loop(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ y), x)


def _passes(x: jax.Array) -> jax.Array:
    """Return x after 20 passes over it that XLA can't fuse."""
    for _ in range(20):
        x = jax.lax.optimization_barrier(x + 1)
    return x


def _ragged(x: jax.Array, w: jax.Array) -> jax.Array:
    sizes = jnp.full(w.shape[0], x.shape[0] // w.shape[0], jnp.int32)
    return jax.lax.ragged_dot(x, w, sizes)


def _slots(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("egk,ekn->egn", x, w)


def _decode(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, keys, values)


def _convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _convolve_gradient(x: jax.Array, w: jax.Array) -> Any:
    return jax.grad(lambda x, w: _convolve(x, w).astype(jnp.float32).sum(), argnums=(0, 1))(x, w)


def _mlp_step(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
    """Return the weights after a step of gradient descent."""

    def loss(weights: Any) -> jax.Array:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.square(y.astype(jnp.float32)).mean()

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


def _block_step(
    x: jax.Array, qkv: jax.Array, out: jax.Array, up: jax.Array, down: jax.Array
) -> Any:
    """Return the gradients of a transformer's block."""

    def loss(qkv: jax.Array, out: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        q, k, v = jnp.einsum("btw,wchd->cbthd", x, qkv)
        y = x + jnp.einsum("bthd,hdw->btw", jax.nn.dot_product_attention(q, k, v), out)
        y = y + jax.nn.gelu(y @ up) @ down
        return y.astype(jnp.float32).mean()

    return jax.grad(loss, argnums=(0, 1, 2, 3))(qkv, out, up, down)


def _segments(x: jax.Array, ids: jax.Array) -> jax.Array:
    count = max(x.shape[0] // 100, 1)
    return jax.ops.segment_sum(x, ids % count, num_segments=count)


_PRODUCT = PROGRAMS["product"]
_HIGHEST = partial(jnp.dot, precision="highest")
_HEADS = "bf16[4,2048,16,128] bf16[4,2048,16,128] bf16[4,2048,16,128]"
_TABLE: Mapping[str, Mapping[str, tuple[Call, str]]] = {
    "product": {
        **{
            f"product bf16 {n}": (_PRODUCT, f"bf16[{n},{n}] bf16[{n},{n}]")
            for n in (512, 2048, 8192)
        },
        "product f16": (_PRODUCT, "f16[4096,4096] f16[4096,4096]"),
        "product f32": (_PRODUCT, "f32[4096,4096] f32[4096,4096]"),
        "product f32 highest": (_HIGHEST, "f32[4096,4096] f32[4096,4096]"),
        "product f8": (_PRODUCT, "f8[4096,4096] f8[4096,4096]"),
        "product s8": (
            partial(jnp.dot, preferred_element_type=jnp.int32),
            "s8[4096,4096] s8[4096,4096]",
        ),
        "product c64": (jnp.dot, "c64[2048,2048] c64[2048,2048]"),
        "gated product": (gated_linear, "bf16[4096,4096] bf16[4096,2,8192]"),
    },
    "bytes": {
        "copy": (jnp.copy, "f32[16384,16384]"),
        "addition": (jnp.add, "bf16[16384,16384] bf16[16384,16384]"),
        "transpose": (lambda x: x.T + 1, "f32[8192,8192]"),
        "sum of columns": (lambda x: x.sum(0), "f32[16384,8192]"),
        "softmax": (jax.nn.softmax, "bf16[8192,32768]"),
        "layer norm": (layer_norm, "bf16[16384,8192] bf16[8192]"),
        "20 passes over 8 MB": (_passes, "f32[1024,2048]"),
    },
    "elementwise": {
        "sine": (jnp.sin, "f32[8192,8192]"),
        "exponential": (lambda x: jnp.log1p(jnp.exp(x)), "f32[8192,8192]"),
        "gelu": (jax.nn.gelu, "bf16[8192,8192]"),
    },
    "indices": {
        "gather rows": (lambda x, i: x[i], "f32[1048576,128] s32[262144]"),
        "scatter rows": (lambda x, i: x.at[i].add(1.0), "f32[1048576,128] s32[262144]"),
        "segment sum": (_segments, "f16[100000000] s32[100000000]"),
    },
    "sort": {
        "sort": (jnp.sort, "f32[16777216]"),
        "argsort": (jnp.argsort, "f32[4194304]"),
        "top k": (partial(jax.lax.top_k, k=8), "f32[4096,32768]"),
        "cumulative sum": (partial(jnp.cumsum, axis=0), "f32[16777216]"),
    },
    "launch": {
        "one operation": (lambda x: x + 1, "f32[128,128]"),
        "100 products": (_small_operations, "bf16[128,128]"),
        "loop of 100": (_loop, "bf16[128,128]"),
    },
    "attention": {
        "attention": (PROGRAMS["attention"], _HEADS),
        "attention, gradient": (attention_gradient, _HEADS),
        "cuDNN attention": (partial(cudnn_attention, causal=True), _HEADS),
        "cuDNN attention, gradient": (partial(cudnn_attention_gradient, causal=True), _HEADS),
    },
    "decode": {
        "decode step": (_decode, "bf16[32,1,16,128] bf16[32,8192,16,128] bf16[32,8192,16,128]"),
        "decode product": (_PRODUCT, "bf16[32,8192] bf16[8192,28672]"),
    },
    "experts": {
        "ragged product": (_ragged, "bf16[16384,2048] bf16[32,2048,4096]"),
        "experts in slots": (_slots, "bf16[32,512,2048] bf16[32,2048,4096]"),
    },
    "convolution": {
        "convolution": (_convolve, "bf16[64,56,56,128] bf16[3,3,128,128]"),
        "convolution, gradient": (_convolve_gradient, "bf16[64,56,56,128] bf16[3,3,128,128]"),
        "convolution f32": (_convolve, "f32[64,28,28,256] f32[3,3,256,256]"),
    },
    "training": {
        "MLP step": (_mlp_step, "bf16[8192,4096] bf16[4096,4096] bf16[4096,4096]"),
        "small MLP step": (_mlp_step, "f32[256,512] f32[512,512] f32[512,512] f32[512,512]"),
        "block gradients": (
            _block_step,
            "bf16[4,2048,2048] bf16[2048,3,16,128] bf16[16,128,2048] "
            "bf16[2048,8192] bf16[8192,2048]",
        ),
    },
    "all devices": {
        "sum of products": (lambda x, y: x.T @ y, "bf16[16384,4096] bf16[16384,4096]"),
        "gathered product": (jnp.dot, "bf16[8192,8192] bf16[8192,8192]"),
        "sharded MLP step": (_mlp_step, "bf16[65536,4096] bf16[4096,4096] bf16[4096,4096]"),
    },
    "other": {
        "Fourier transform": (jnp.fft.fft, "c64[4096,4096]"),
        "random numbers": (
            lambda x: jax.random.normal(jax.random.key(1), x.shape),
            "f32[8192,8192]",
        ),
    },
}


_SHARDED = {"sum of products": 2, "gathered product": 2, "sharded MLP step": 1}
"""Number of sharded arrays, by program."""


def list_programs() -> Iterator[DeviceProgram]:
    """Yield all programs, by kind."""
    for kind, programs in _TABLE.items():
        for name, (function, arrays) in programs.items():
            sharded = _SHARDED.get(name, 0)
            yield DeviceProgram(kind, name, function, arrays, "cuDNN" in name, sharded)


PROFILED = ("MLP step", "block gradients", "100 products", "softmax", "sort")
"""Programs whose profiles are compared with the predicted schedules."""

PROGRAMS_FOR_TPUS = (
    *("product bf16 8192", "gated product", "copy", "softmax", "layer norm", "gather rows"),
    *("attention", "ragged product", "block gradients", *_SHARDED),
)
"""Programs that TPUs are measured with."""
