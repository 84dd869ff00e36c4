"""Names that a random program uses, for each library that it runs under."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xlashard

P = jax.sharding.PartitionSpec


@dataclass(frozen=True)
class Library:
    """Source of the functions of a program.

    Attributes:
        name: Its name, for messages.
        pjit: Compiles a function.
        constrain: Pins a sharding inside.
        place: Makes a resource of a spec.
        put: Shards an array by a spec before the call, or leaves it.
        spread: `vmap` whose batch is sharded over an axis of the mesh.
        by_hand: `shard_map` of a function of each element.
        whole: Wraps a transformed program: without one more `jax.jit` JAX refuses arguments
            that are placed otherwise than its shardings.
        gathered: Reshards a value to the whole one on explicit axes.
        doubled: Doubles a value through partial sums over an axis, if it is explicit.
    """

    name: str
    pjit: Callable[..., Any]
    constrain: Callable[..., Any]
    place: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    spread: Callable[[Callable[..., Any], str], Callable[..., Any]]
    by_hand: Callable[[Callable[..., Any], Any], Callable[..., Any]]
    whole: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fun: fun
    doubled: Callable[[Any, str], Any] = lambda x, _: x + x
    gathered: Callable[[Any], Any] = lambda x: x


def plain() -> Library:
    """Return JAX on one device, which ignores shardings."""
    return Library(
        "jax.jit on one device",
        lambda fun, **_: jax.jit(fun),
        lambda x, _: x,
        lambda spec: spec,
        lambda x, _: x,
        lambda fun, _: jax.vmap(fun),
        lambda fun, _: fun,
    )


def jax_sharded(mesh: jax.sharding.Mesh, named: bool = True, *, as_pjit: bool = False) -> Library:
    """Return JAX over the mesh.

    Args:
        mesh: The mesh.
        named: True to write shardings instead of specs.
        as_pjit: True if None in shardings means replicated, as in `pjit`.
    """

    def named_sharding(spec: Any) -> Any:
        return jax.sharding.NamedSharding(mesh, P() if spec is None else spec)

    def place(spec: Any) -> Any:
        return named_sharding(spec) if named else spec

    return Library(
        "jax.jit with the same shardings",
        _with_none_as(named_sharding(None), jax.jit) if as_pjit else jax.jit,
        _constraint(mesh, jax.lax.with_sharding_constraint),
        place,
        lambda x, spec: x if spec is None else _put(x, named_sharding(spec)),
        _spread,
        _by_hand(mesh),
        jax.jit,
        _doubled(mesh, jax.jit),
        _gathered(mesh),
    )


def _with_none_as(none: Any, jit: Callable[..., Any]) -> Callable[..., Any]:
    """Replace None in shardings of the functions that `jit` compiles."""

    def compiled(fun: Callable[..., Any], **options: Any) -> Any:
        for name in {"in_shardings", "out_shardings"} & options.keys():
            options[name] = jax.tree.map(
                lambda x: none if x is None else x,
                options[name],
                is_leaf=lambda x: x is None or isinstance(x, P),
            )
        return jit(fun, **options)

    return compiled


def xlashard_sharded(mesh: jax.sharding.Mesh, named: bool, *, as_jax: bool = False) -> Library:
    """Return xlashard over the mesh.

    Args:
        mesh: The mesh.
        named: True to write shardings instead of specs.
        as_jax: True to compile with `xlashard.jit` where `jax_sharded` compiles with `jax.jit`.
    """

    def place(spec: Any) -> Any:
        if not named:
            return spec
        return xlashard.NamedSharding(mesh, P() if spec is None else spec)

    def put(x: Any, spec: Any) -> Any:
        if spec is None:
            return x
        if x.ndim % 2:  # a jax.Array, which is equivalent to one of ours
            return _put(x, jax.sharding.NamedSharding(mesh, spec))
        return xlashard.device_put(x, xlashard.NamedSharding(mesh, spec))

    return Library(
        "xlashard",
        xlashard.jit if as_jax else xlashard.pjit,
        _constraint(mesh, xlashard.with_sharding_constraint),
        place,
        put,
        _spread,
        _by_hand(mesh),
        jax.jit if as_jax else lambda fun: fun,
        _doubled(mesh, xlashard.pjit),
        _gathered(mesh),
    )


def _put(x: Any, sharding: Any) -> jax.Array:
    if sharding.spec.unreduced:  # not of a value on the host
        x = jax.device_put(x, sharding.update(spec=P(*sharding.spec.partitions)))
    return jax.device_put(x, sharding)


def _constraint(mesh: jax.sharding.Mesh, constrain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constraint by the automatic axes of a sharding, and a reshard by its others."""

    def both(x: Any, sharding: Any) -> Any:
        def part(axes: tuple[str, ...]) -> Any:
            spec = getattr(sharding, "spec", sharding)
            entries = [_entry(entry, axes) for entry in spec]
            return type(sharding)(mesh, P(*entries)) if spec is not sharding else P(*entries)

        return constrain(jax.reshard(x, part(mesh.explicit_axes)), part(mesh.auto_axes))

    if not mesh.explicit_axes:
        return constrain
    return jax.reshard if mesh.are_all_axes_explicit else both


def _entry(entry: Any, axes: tuple[str, ...]) -> Any:
    """Return an entry of a spec with some of its axes alone; open dimensions are whole."""
    if entry is None or entry is P.UNCONSTRAINED:
        return None
    names = (entry,) if isinstance(entry, str) else entry
    return tuple(name for name in names if name in axes) or None


def _gathered(mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    whole = jax.sharding.NamedSharding(mesh, P())
    return lambda x: jax.reshard(x, whole) if mesh.are_all_axes_explicit else x


def _doubled(mesh: jax.sharding.Mesh, jit: Callable[..., Any]) -> Callable[[Any, str], Any]:
    def doubled(x: Any, axis: str) -> Any:
        if not mesh.are_all_axes_explicit:
            return x + x
        whole = jax.sharding.NamedSharding(mesh, P())
        # Of a constant that is not placed XLA takes every partial sum for the whole.
        partial = jax.reshard(jax.reshard(x, whole), whole.update(spec=P(unreduced={axis})))
        return jax.reshard(jit(lambda y: y + y)(partial), whole)

    return doubled


def _spread(fun: Callable[..., Any], axis: str) -> Callable[..., Any]:
    return jax.vmap(fun, spmd_axis_name=axis)


def _by_hand(mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    return lambda fun, spec: jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)


def environment(library: Library) -> dict[str, Any]:
    """Return the names of a program, bound to the functions of a library."""
    tables: list[Any] = []
    return {
        "jax": jax,
        "jnp": jnp,
        "lax": lax,
        "np": np,
        "P": P,
        "UNSPECIFIED": xlashard.UNSPECIFIED,
        "pjit": library.pjit,
        "constrain": library.constrain,
        "place": library.place,
        "numbers": numbers,
        "keys": keys,
        "scalar": scalar,
        "spread": library.spread,
        "by_hand": library.by_hand,
        "table": functools.partial(table, library, tables),
        "twice": twice,
        "doubled": library.doubled,
        "Checked": Checked,
        "unwrap": unwrap,
        "tables": tables,
        "gathered": library.gathered,
    }


@functools.lru_cache
def plain_names() -> Mapping[str, Any]:
    """Return the names of a program under plain JAX."""
    return MappingProxyType(environment(plain()))


def numbers(shape: tuple[int, ...], dtype: str, start: int = 0) -> np.ndarray:
    """Return different numbers; floats have a magnitude of at most 1.

    Every float16 and bfloat16 is exact.
    """
    count = np.arange(int(np.prod(shape, dtype=int)), dtype=np.int64).reshape(shape)
    mixed = (count * 7919 + start * 31 + 17) % 257 - 128
    if dtype == "bool":
        return mixed % 2 == 0
    if dtype == "complex64":
        return (mixed / 128 + 1j * np.roll(mixed, 1) / 128).astype(np.complex64)
    if dtype in ("int32", "int8"):
        return (mixed % 23 - 9).astype(dtype)
    if dtype == "uint8":
        return (mixed % 23).astype(dtype)
    return (mixed / 128).astype(jnp.dtype(dtype))


def keys(shape: tuple[int, ...], start: int = 0) -> jax.Array:
    """Return keys for random numbers."""
    return jax.random.split(jax.random.key(start), shape) if shape else jax.random.key(start)


def table(
    library: Library, tables: list[Any], shape: tuple[int, ...], dtype: str, spec: Any
) -> Any:
    """Return numbers sharded over the mesh, for a function to close over, and keep them."""
    with jax.ensure_compile_time_eval():
        tables.append(library.put(numbers(shape, dtype), spec))
    return tables[-1]


@jax.tree_util.register_dataclass
@dataclass
class Checked:
    """Container whose constructor accepts an array, a tracer or a number only."""

    value: Any

    def __post_init__(self) -> None:
        assert isinstance(self.value, jax.Array | np.ndarray | np.generic | float)


def unwrap(container: Any) -> Any:
    """Return the value in a container of an argument."""
    return container.value if isinstance(container, Checked) else container["a"]


def twice(fun: Callable[..., Any], first: Any, second: Any) -> tuple[Any, Any]:
    """Call one function two times."""
    return fun(first), fun(second)


def scalar(*values: Any) -> jax.Array:
    """Return a float32 that depends on all elements of all values."""
    total = jnp.float32(0)
    for value in values:
        if jnp.iscomplexobj(value):
            value = jnp.real(value) + jnp.imag(value)
        total += jnp.sum(value.astype(jnp.float32)) / max(value.size, 1)
    return total
