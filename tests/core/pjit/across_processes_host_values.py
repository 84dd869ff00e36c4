"""One of two processes with two devices each: arguments that every process passes on its own.

NumPy arrays under a sharding that splits them between processes are refused, as by JAX; other
values must be equal in both.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.core.processes import expect, join_the_others

join_the_others()

import xlashard as xs  # noqa: E402
from xlashard import NamedSharding, P, device_put, multihost, pjit  # noqa: E402
from xlashard.core.program.consistency.exchange import ConsistencyGroup  # noqa: E402
from xlashard.errors import ResourceError, UnequalError  # noqa: E402

ME = jax.process_index()
MESH = xs.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
ROWS, WHOLE = NamedSharding(MESH, P("x")), NamedSharding(MESH, P())
LOCAL = NamedSharding(xs.Mesh(np.array(jax.local_devices()), ("l",)), P("l"))
BATCH = np.full((8, 4), ME + 1, np.float32)
SAME = np.arange(32, dtype=np.float32).reshape(8, 4)
SPLIT = r"batch.* is a NumPy array.*'[xy]'.*host_local_array_to_global_array.*device_put"


def total(batch: Any) -> Any:
    return batch.sum()


def under_mesh(f: Any, x: Any) -> Any:
    with jax.set_mesh(MESH):
        return f(x)


def split_arrays_are_refused() -> None:
    struct = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=ROWS)
    state, out = jnp.zeros(()), device_put(np.zeros((8, 4), np.float32), ROWS)
    step = pjit(lambda s, batch: (s + 1, batch.sum()), in_shardings=(None, ROWS))
    keeps = pjit(lambda batch, n: batch + n, in_shardings=(ROWS, None), out_shardings=ROWS)
    tree = pjit(lambda d: d["batch"].sum(), in_shardings=({"batch": P(("x", "y"))},))
    uses: list[Callable[[Any], Any]] = [
        pjit(total, in_shardings=ROWS),
        xs.jit(total, in_shardings=(NamedSharding(MESH, P(None, "y")),)),
        pjit(total, in_shardings=ROWS, strict=True),
        pjit(total, in_shardings=ROWS).lower,
        pjit(total).lower(struct).compile(),
        step.lower(state, struct).compile().bind(state),
        lambda x: keeps.lower(struct, jnp.zeros(())).compile().bind(x),
        lambda x: under_mesh(pjit(total, in_shardings=P("x")), x),
        lambda x: under_mesh(tree, {"batch": x}),
    ]
    for use in uses:
        for value in (BATCH, SAME):
            expect(ResourceError, SPLIT, lambda use=use, value=value: use(value))
    # What an error recommends.
    given = multihost.host_local_array_to_global_array(BATCH, MESH, P("x"))
    assert float(uses[0](given)) == 96
    assert float(uses[0](device_put(SAME, ROWS))) == SAME.sum() == float(uses[4](out + 1)) * 15.5
    # Nothing is split, or the devices belong to one process.
    assert float(pjit(total, in_shardings=WHOLE)(SAME)) == SAME.sum()
    assert float(pjit(total, in_shardings=LOCAL)(BATCH)) == BATCH.sum()
    assert float(pjit(lambda n, x: x.sum() + n)(np.float32(1), out)) == 1


def unequal_values_are_refused() -> None:
    counts = iter(range(1, 100))

    def fresh() -> Any:
        """Return a program that no process has run."""
        shift = next(counts)
        return lambda x, seed, rate: (x.sum() + seed.sum() * shift, rate * 2)

    shared = device_put(SAME, ROWS)
    key = jax.random.key
    forms: list[tuple[str, Callable[[int], Any]]] = [
        ("Python", float),
        ("NumPy", lambda n: np.full(3, n, np.float32)),
        ("uncommitted", lambda n: jnp.full(3, n, jnp.float32)),
        ("Array", lambda n: device_put(np.full(3, n, np.float32))),
        ("bfloat16", lambda n: np.full(3, n, jnp.bfloat16)),
    ]
    for _, make in forms:
        for wrapped in (pjit, xs.jit, lambda f: pjit(f, in_shardings=(ROWS, WHOLE, WHOLE))):
            f = wrapped(fresh())
            error = expect(UnequalError, r"seed differs", lambda f=f, m=make: f(shared, m(ME), 1.0))
            assert error.processes == (1,) and error.paths == ("seed",), error
            # The program has not run: it is compared again.
            expect(UnequalError, r"rate differs", lambda f=f, m=make: f(shared, m(1), m(ME)))
            out, _ = f(shared, make(1), 1.0)
            assert out.is_fully_replicated
    f = pjit(fresh()).lower(shared, 1.0, 1.0).compile()
    expect(
        UnequalError, r"seed differs.*0\.0 in process 0.*1\.0", lambda: f(shared, float(ME), 1.0)
    )
    f(shared, 1.0, 1.0)
    by_key = pjit(lambda x, k: x + jax.random.uniform(k, x.shape))
    error = expect(UnequalError, r"k differs", lambda: by_key(shared, key(ME)))
    by_key(shared, key(3))
    # A bound step compares its state and the inputs of its first call.
    g = pjit(lambda s, x, rate: (s + x.sum() * rate, rate), in_shardings=(WHOLE, ROWS, WHOLE))
    compiled = g.lower(jnp.zeros(3), shared, 1.0).compile()
    for path, state, rate in (("s", ME, 1.0), ("rate", 1, float(ME))):
        step = compiled.bind(np.full(3, state, np.float32))
        expect(UnequalError, rf"{path} differs", lambda step=step, rate=rate: step(shared, rate))
    step = compiled.bind(np.ones(3, np.float32))
    for _ in range(2):
        jax.block_until_ready(step(shared, 1.0))
    # A transformed call.
    h = pjit(lambda rate, x: (x * rate).sum())
    expect(
        UnequalError,
        r"argument 0 of <lambda> differs in process 1",
        lambda: jax.grad(h)(float(ME), shared),
    )
    assert float(jax.grad(h)(1.0, shared)) == SAME.sum()


def programs_of_jax_too() -> None:
    shared = device_put(SAME, ROWS)
    with multihost.checked_programs(True):
        f = jax.jit(lambda x, rate: x.sum() * rate + 17)
        expect(UnequalError, r"rate differs.*process 1", lambda: f(shared, float(ME)))
        assert float(f(shared, 1.0)) == SAME.sum() + 17


def repeat_calls_compare_nothing() -> None:
    shared = device_put(SAME, ROWS)
    f = pjit(lambda x, rate: x.sum() * rate + 19)
    f(shared, 1.0)
    whole, ConsistencyGroup.admit = ConsistencyGroup.admit, None  # pyright: ignore
    try:
        assert float(f(shared, 2.0)) == 2 * SAME.sum() + 19
    finally:
        ConsistencyGroup.admit = whole
    with multihost.checked_programs(False):
        g = pjit(lambda x, rate: x.sum() * rate + 23)
        jax.block_until_ready(g(shared, float(ME)))


for check in (
    split_arrays_are_refused,
    unequal_values_are_refused,
    programs_of_jax_too,
    repeat_calls_compare_nothing,
):
    check()
print("both agree")
