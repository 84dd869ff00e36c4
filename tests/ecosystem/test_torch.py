"""PyTorch: memory shared both ways by dlpack. `make test-torch` installs it, for it is large."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, named, same, value
from xlashard import Array, NamedSharding, P, device_put, from_dlpack, pjit
from xlashard.errors import DLPackError

torch: Any = pytest.importorskip("torch", reason="PyTorch is tested by `make test-torch`")

SHARED = ("float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "bool", "complex64")
V = np.arange(1024, dtype=np.float32).reshape(32, 32)


def tensor(dtype: str = "float32") -> Any:
    """Return a tensor with the alignment that a CPU device requires, as PyTorch's tensors have."""
    made = (torch.arange(1024).reshape(32, 32) % 100).to(getattr(torch, dtype))
    assert made.data_ptr() % 64 == 0
    return made


def numbers(x: Any) -> np.ndarray:
    """Return its values, also of dtypes that NumPy lacks."""
    return np.asarray(x.float() if isinstance(x, torch.Tensor) else jnp.asarray(x, jnp.float32))


@pytest.mark.parametrize("dtype", SHARED)
def test_from_a_tensor_without_a_copy(dtype: str) -> None:
    t = tensor(dtype)
    for copy in (None, False):
        x = from_dlpack(t, copy=copy)
        assert type(x) is Array and x.dtype == jnp.dtype(dtype)
        assert x.unsafe_buffer_pointer() == t.data_ptr()
        if dtype != "complex64":
            np.testing.assert_array_equal(numbers(x), numbers(t))
    assert from_dlpack(t, copy=True).unsafe_buffer_pointer() != t.data_ptr()


@pytest.mark.parametrize("dtype", SHARED)
def test_to_a_tensor_without_a_copy(dtype: str) -> None:
    x = pjit(lambda v: v % 100)(device_put(V, DEVICES[0])).astype(dtype)
    t = torch.from_dlpack(x)
    assert t.dtype == getattr(torch, dtype) and tuple(t.shape) == x.shape
    assert t.data_ptr() == x.unsafe_buffer_pointer()
    if dtype != "complex64":
        np.testing.assert_array_equal(numbers(t), numbers(x))
    assert from_dlpack(t).unsafe_buffer_pointer() == x.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_64_bits(dtype: str) -> None:
    t = tensor(dtype)
    assert from_dlpack(t).dtype == np.dtype(dtype.replace("64", "32"))
    with pytest.raises(DLPackError, match=f"share memory of {dtype}.*jax_enable_x64"):
        from_dlpack(t, copy=False)
    with jax.enable_x64(True):
        x = from_dlpack(t, copy=False)
        assert x.dtype == np.dtype(dtype) and x.unsafe_buffer_pointer() == t.data_ptr()


def test_noncontiguous_tensors_are_copied() -> None:
    t = tensor()
    for view in (t.T, t[:, ::2], t[::2], t[0].expand(4, 32)):
        np.testing.assert_array_equal(from_dlpack(view), view.numpy())
    with pytest.raises(DLPackError, match="copy=False"):
        from_dlpack(t[:, ::2], copy=False)
    unaligned = t.ravel()[1:]
    np.testing.assert_array_equal(from_dlpack(unaligned), unaligned.numpy())
    with pytest.raises(DLPackError, match="64 bytes"):
        from_dlpack(unaligned, copy=False)
    rows = t[2:]
    assert from_dlpack(rows, copy=False).unsafe_buffer_pointer() == rows.data_ptr()


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 5)])
def test_shapes(shape: tuple[int, ...]) -> None:
    t = torch.ones(shape)
    assert same(from_dlpack(t), t.numpy())
    assert same(torch.from_dlpack(device_put(t.numpy())).numpy(), t.numpy())


def test_shared_memory_outlives_its_producer() -> None:
    x = from_dlpack(tensor())
    t = torch.from_dlpack(pjit(lambda v: v + 1)(device_put(V)))
    gc.collect()
    filler = [torch.zeros(32, 32) for _ in range(64)] + [pjit(lambda v: v * 0)(V) for _ in range(8)]
    np.testing.assert_array_equal(x, V % 100)
    np.testing.assert_array_equal(t.numpy(), V + 1)
    assert len(filler) == 72


def test_donation_keeps_the_memory_of_a_tensor() -> None:
    x = pjit(lambda v: v + 1)(device_put(V))
    t = torch.from_dlpack(x)
    y = pjit(lambda v: v * 0, donate_argnums=0)(x)
    assert same(y, V * 0)
    np.testing.assert_array_equal(t.numpy(), V + 1)


def test_tensors_with_gradients_require_detach() -> None:
    t = torch.ones(4, requires_grad=True)
    with pytest.raises(BufferError, match=r"detach\(\)"):
        from_dlpack(t)
    assert same(from_dlpack(t.detach()), np.ones(4, np.float32))


def test_from_dlpack_places_tensors_on_any_sharding() -> None:
    t = tensor()
    x = from_dlpack(t, device=named("x", "y"))
    assert x.sharding == named("x", "y") and same(x, t.numpy())
    elsewhere = from_dlpack(t, device=DEVICES[3])
    assert elsewhere.devices() == {DEVICES[3]}
    assert elsewhere.unsafe_buffer_pointer() == t.data_ptr()
    with pytest.raises(DLPackError, match="is on 8.*addressable_shards"):
        torch.from_dlpack(x)
    pieces = [torch.from_dlpack(shard.data) for shard in x.addressable_shards]
    for piece, shard in zip(pieces, x.addressable_shards, strict=True):
        assert piece.data_ptr() == shard.data.unsafe_buffer_pointer()
        np.testing.assert_array_equal(piece.numpy(), t.numpy()[shard.index])


def test_conversion_through_numpy() -> None:
    x = device_put(value(np.float32), named("x", "y"))
    assert same(torch.as_tensor(np.array(x)).numpy(), value(np.float32))
    assert same(device_put(tensor().numpy(), named("x")), tensor().numpy())
    np.testing.assert_allclose(
        (torch.ones(32, 32) + torch.from_dlpack(device_put(V))).numpy(), V + 1
    )


def test_a_module_of_torch_feeds_a_program() -> None:
    """Weights trained in PyTorch, used and changed here, and returned."""
    layer = torch.nn.Linear(16, 8)
    rows = NamedSharding(named().mesh, P("y"))
    weights = from_dlpack(layer.weight.detach(), device=rows)
    bias = from_dlpack(layer.bias.detach(), device=rows)
    batch = torch.randn(4, 16)
    ours = pjit(lambda w, b, x: x @ w.T + b)(weights, bias, from_dlpack(batch, device=named()))
    np.testing.assert_allclose(ours, layer(batch).detach().numpy(), rtol=1e-4, atol=1e-5)
    doubled = pjit(lambda w: w * 2, out_shardings=named())(weights)
    with torch.no_grad():
        layer.weight.copy_(torch.from_dlpack(doubled.addressable_data(0)))
    np.testing.assert_array_equal(layer.weight.detach().numpy(), doubled)
