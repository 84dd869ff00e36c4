"""One process compiles and the others load; run in each process of a pod.

It stops with an error where a result is wrong.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.core.processes import expect
from xlashard import (
    Array,
    Compiled,
    Mesh,
    NamedSharding,
    P,
    explain_recompile,
    make_array_from_callback,
    pjit,
)
from xlashard._jax.runtime import compiler, executables
from xlashard.errors import CompileError, ProgramsDifferError, SharedBinaryWarning

jax.distributed.initialize()

ME = jax.process_index()
ROWS = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
WHOLE = np.arange(64, dtype=np.float32).reshape(8, 8)
X = make_array_from_callback((8, 8), ROWS, lambda index: WHOLE[index])

compiled: list[str] = []


def noted(module: Any, request: Any) -> Any:
    compiled.append("a program")
    return compile_module(module, request)


compile_module = compiler.compile_module
compiler.compile_module = noted


def mixed(x):
    return {"sum": jnp.sin(x @ x.T).sum(), "rows": x * 2}


def here(value: Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in value.addressable_shards]


def same_bits(one: dict[str, Array], other: dict[str, Array]) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    shards = (pair for a, b in pairs for pair in zip(here(a), here(b), strict=True))
    return all(a.tobytes() == b.tobytes() for a, b in shards)


@contextmanager
def compilations(count: int) -> Iterator[None]:
    compiled.clear()
    yield
    assert len(compiled) == count, (len(compiled), count)


@contextmanager
def warned(count: int, text: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught if w.category is SharedBinaryWarning]
    assert len(messages) == count, messages
    assert all(text in message for message in messages), messages


# The first process compiles, the other doesn't, and the results have the same bits.
step = pjit(mixed, share_binary=True)
with warned(0, ""), compilations(1 if ME == 0 else 0):
    shared = step(X)
expected = "the compiler" if ME == 0 else "another process"
assert explain_recompile(step).explanations[0].executable == expected
assert same_bits(shared, step(X))
assert same_bits(shared, pjit(mixed)(X))

# Likewise by `compile`, whose program can be saved, too.
lowered = pjit(lambda x: (x @ x) + 1).lower(X)
with compilations(1 if ME == 0 else 0):
    program = lowered.compile(share_binary=True)
assert same_bits({"x": program(X)}, {"x": lowered.compile(share_binary=False)(X)})
again = Compiled.deserialize(program.serialize())
assert same_bits({"x": program(X)}, {"x": again(X)})

# Programs from files are compared by the modules that they were compiled from.
files = [pjit(lambda x, n=n: x * n).lower(X).compile().serialize() for n in (2.0, 3.0)]
saved = Compiled.deserialize(files[0])
assert same_bits({"x": saved(X)}, {"x": Compiled.deserialize(saved.serialize())(X)})
files = [pjit(lambda x, n=n: x + n).lower(X).compile().serialize() for n in (2.0, 3.0)]
error = expect(ProgramsDifferError, "of other modules", lambda: Compiled.deserialize(files[ME])(X))
assert error.difference == "module" and "the same file" in str(error), error

# A process that drops its program compiles it alone: the others don't run it again.
if ME == 1:
    jax.clear_caches()
    with compilations(1):
        assert same_bits(shared, pjit(mixed, share_binary=True)(X))
else:
    assert same_bits(shared, step(X))

# Programs that differ are detected before any process compiles.
with compilations(0):
    error = expect(
        ProgramsDifferError,
        "constant",
        lambda: pjit(lambda x: x * (ME + 1.0), share_binary=True)(X),
    )
assert error.difference == "operation"

# Compile errors are raised in all processes, with the same text.
wrong = {"xla_cpu_enable_fast_math": "neither"}
expect(
    CompileError,
    "xla_cpu_enable_fast_math",
    lambda: pjit(lambda x: x - 3).lower(X).compile(wrong, share_binary=True),
)


def called(x):
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.negative, kind, x)


# A program that can't be shared is compiled by each, and one process reports why.
with warned(1 if ME == 0 else 0, "it calls Python functions"), compilations(1):
    pjit(called, in_shardings=ROWS, share_binary=True).lower(X).compile()

loads = executables.from_bytes


def fails(*_: object) -> None:
    raise RuntimeError("no such machine code here")


if ME == 1:
    executables.from_bytes = fails
with warned(1 if ME == 0 else 0, "process 1: its bytes can't be loaded: no such"), compilations(1):
    alone = pjit(lambda x: mixed(x + 0), share_binary=True)(X)
executables.from_bytes = loads
assert same_bits(alone, shared)
print("shared")
