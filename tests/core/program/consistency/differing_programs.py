"""Programs that differ between processes, one after the other; run in each process of a pod.

The outcome of each is printed as a line of JSON. After each, all processes run a program together.
"""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


if __name__ == "__main__":
    jax.distributed.initialize()

import xlashard  # noqa: E402
from xlashard import Mesh, NamedSharding, P, multihost, pjit  # noqa: E402
from xlashard._jax.lowering import uses_shardy  # noqa: E402
from xlashard.core.processes import store  # noqa: E402
from xlashard.core.program.consistency import CONSISTENCY  # noqa: E402
from xlashard.core.program.consistency.fingerprint import ProgramFingerprint  # noqa: E402
from xlashard.core.program.parsed_module import lower_parsed_module, parse_module  # noqa: E402
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan  # noqa: E402


class Pod:
    """Process index, and arrays over all processes."""

    def __init__(self) -> None:
        self.me = jax.process_index()
        self.odd = jax.process_count() - 1
        # Time when the last process arrived at a slow case.
        self.came = 0.0
        self.devices = np.array(jax.devices())
        self.rows = NamedSharding(Mesh(self.devices, ("data",)), P("data"))
        self.columns = NamedSharding(Mesh(self.devices, ("data",)), P(None, "data"))

    def is_odd(self) -> bool:
        return self.me == self.odd

    def ones(self, *shape: int, dtype: Any = np.float32) -> Any:
        whole = np.ones(shape, dtype)
        return xlashard.make_array_from_callback(shape, self.rows, lambda index: whole[index])


def both_are_here(what: str) -> None:
    """Wait until all processes have arrived, without any means that their programs use."""
    store.write(f"tests/{what}/{pod.me}", b"")
    for process in range(jax.process_count()):
        assert store.read(f"tests/{what}/{process}", 60) is not None


def double(x):
    return x * 2


@case
def flags():
    if pod.is_odd():
        os.environ["LIBTPU_INIT_ARGS"] = "--xla_dump_to=elsewhere --xla_some_flag=2"
    else:
        os.environ["LIBTPU_INIT_ARGS"] = "--xla_some_flag=1"
    try:
        return pjit(double)(pod.ones(8, 4))
    finally:
        del os.environ["LIBTPU_INIT_ARGS"]


@case
def same():
    return float(pjit(lambda x: (x + 1).sum())(pod.ones(8, 4)))


@case
def shapes():
    def train_step(state, batch):
        return state["w"] * batch.sum()

    batch = pod.ones(16, 4) if pod.is_odd() else pod.ones(8, 4)
    return pjit(train_step)({"w": pod.ones(8)}, batch)


@case
def dtypes():
    return pjit(double)(pod.ones(8, dtype=np.int32 if pod.is_odd() else np.float32))


@case
def counts():
    def total(*xs):
        return sum(x.sum() for x in xs)

    return pjit(total)(*[pod.ones(8)] * (3 if pod.is_odd() else 2))


@case
def order():
    def train_step(x):
        return x.sum()

    def evaluate(x):
        return x.max()

    return pjit(evaluate if pod.is_odd() else train_step)(pod.ones(8))


@case
def constants():
    factor = 2.5 if pod.is_odd() else 3.5

    def scaled(x):
        y = jnp.sin(x)
        return y * factor

    return pjit(scaled)(pod.ones(8))


@case
def branch():
    def step(x):
        y = jnp.cos(x)
        if jax.process_index() == pod.odd:
            y = jnp.exp(y)
        return y.sum()

    return pjit(step)(pod.ones(8))


@case
def inner_function():
    @jax.jit
    def inner(x):
        return x - 1 if pod.is_odd() else x + 1

    def outer(x):
        return inner(x) * 2

    return pjit(outer)(pod.ones(8))


@case
def in_shardings():
    where = pod.columns if pod.is_odd() else pod.rows
    return pjit(double, in_shardings=where)(jnp.ones((8, 8), np.float32))


@case
def out_shardings():
    def pair(x):
        return {"a": x, "b": x + 1}

    where = {"a": pod.rows, "b": pod.columns if pod.is_odd() else pod.rows}
    return pjit(pair, out_shardings=where)(pod.ones(8, 8))


@case
def devices():
    devices = pod.devices[::-1] if pod.is_odd() else pod.devices
    where = NamedSharding(Mesh(devices, ("data",)), P("data"))
    return pjit(lambda: jnp.ones(8), out_shardings=where)()


@case
def options():
    given = {"xla_cpu_enable_fast_math": pod.is_odd()}
    return pjit(double, compiler_options=given)(pod.ones(8, 2))


@case
def donations():
    return pjit(double, donate_argnums=0 if pod.is_odd() else ())(pod.ones(8, 3))


class Model:
    """Holder of a closed-over value."""

    def __init__(self) -> None:
        seed = 7 if pod.is_odd() else 0
        self.weights = np.random.default_rng(seed).normal(size=(200, 200)).astype(np.float32)


@case
def closed_over():
    model = Model()

    def apply(x):
        return x @ model.weights

    return pjit(apply)(pod.ones(8, 200))


@case
def closed_over_on_a_device():
    weights = jnp.asarray(Model().weights)

    def apply(x):
        return x @ weights

    return pjit(apply)(pod.ones(8, 200))


@case
def small_closed_over():
    table = np.arange(40, dtype=np.float32) + pod.is_odd()

    def look_up(x):
        return x * jax.lax.rev(jnp.asarray(table), (0,))

    return pjit(look_up)(pod.ones(8, 40))


def _twice(x):
    return np.asarray(x) * 2


def _thrice(x):
    return np.asarray(x) * 3


@case
def callbacks():
    called = _thrice if pod.is_odd() else _twice

    def with_callback(x):
        return jax.pure_callback(called, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return pjit(with_callback, in_shardings=pod.rows)(pod.ones(8))


@case
def movements():
    whole = NamedSharding(Mesh(pod.devices, ("data",)), P())
    return xlashard.device_put(pod.ones(8, 8), whole if pod.is_odd() else pod.columns)


@case
def gradients():
    power = 3 if pod.is_odd() else 2
    loss = pjit(lambda x: (x**power).sum())
    return jax.grad(lambda x: loss(x))(pod.ones(8))


@case
def compiled():
    factor = 4.0 if pod.is_odd() else 5.0
    x = pod.ones(8)
    return pjit(lambda x: x * factor).lower(x).compile()(x)


@case
def bound():
    factor = 6.0 if pod.is_odd() else 7.0

    def step(state, x):
        return state + x * factor, state.sum()

    x, state = pod.ones(8), pod.ones(8)
    run = pjit(step, donate_argnums=0).lower(state, x).compile().bind(state)
    try:
        return run(x)
    finally:
        assert not run.state.is_deleted()


@case
def stablehlo():
    op = "add" if pod.is_odd() else "multiply"
    text = f"""func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
      %y = stablehlo.{op} %x, %x : tensor<8xf32>
      return %y : tensor<8xf32>
    }}"""
    x = pod.ones(8)
    return xlashard.compile_stablehlo(text, in_shardings=pod.rows)(x)


@case
def huge():
    """A module of 3 MB that differs in its last operation; compiling it would take longest."""
    operations = ["%0 = stablehlo.sine %x : tensor<8xf32>"]
    for number in range(1, 60_000):
        operations.append(f"%{number} = stablehlo.cosine %{number - 1} : tensor<8xf32>")
    last = "exponential" if pod.is_odd() else "log"
    operations.append(f"%y = stablehlo.{last} %{number} : tensor<8xf32>")
    operations.append("return %y : tensor<8xf32>")
    text = "func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {\n" + "\n".join(operations) + "}"
    parsed = parse_module(text)
    value = ValuePlan((8,), "float32", pod.rows, name="x")
    plan = ProgramPlan("huge", tuple(jax.devices()), (value,), (value,), (False,), partitioner())
    lowered = lower_parsed_module(parsed, plan)
    assert len(lowered.as_text()) > 3_000_000
    both_are_here("lowered")
    pod.came = time.monotonic()
    CONSISTENCY.admit(ProgramFingerprint(plan, lowered.body.module))


@case
def jit_shapes():
    @jax.jit
    def train_step(state, batch):
        return state["w"] * batch.sum()

    batch = pod.ones(16, 4) if pod.is_odd() else pod.ones(8, 4)
    with multihost.checked_programs(True):
        return train_step({"w": pod.ones(8)}, batch)


@case
def jit_branch():
    @jax.jit
    def step(x):
        y = x * 2
        if pod.is_odd():
            y = jnp.sin(y)
        return y.sum()

    with multihost.checked_programs(True):
        compiled = step.lower(pod.ones(8)).compile()
        return compiled(pod.ones(8).to_jax())


@case
def jit_closed_over():
    table = np.full((256, 256), 2.0 if pod.is_odd() else 1.0, np.float32)
    with multihost.checked_programs(True):
        return jax.jit(lambda x: x + table[0, 0], out_shardings=pod.rows.jax_sharding((8,)))(
            pod.ones(8)
        )


@case
def jit_same():
    with multihost.checked_programs(True):
        add = jax.jit(lambda x: x + 71)
        sums = [float(add(pod.ones(8)).sum()) for _ in range(3)]
    # Compiled without the comparison, and differently.
    other = jax.jit(lambda x: x + (2 if pod.is_odd() else 1))(pod.ones(8))
    return [*sums, add._cache_size(), float(other.addressable_shards[0].data[0]) - pod.is_odd()]


@case
def threads():
    """Two threads run two programs, in another order in each process."""
    programs = [pjit(lambda x: x + 11), pjit(lambda x: x + 12)]
    x, results = pod.ones(8), {}
    began = threading.Event()

    def run(number: int) -> None:
        began.set()
        results[number] = programs[number](x)

    first = 1 if pod.is_odd() else 0
    both = [threading.Thread(target=run, args=(n,)) for n in (first, 1 - first)]
    both[0].start()
    began.wait()
    time.sleep(0.5)
    both[1].start()
    for thread in both:
        thread.join()
    return sorted(float(shard.data[0]) for r in results.values() for shard in r.addressable_shards)


@case
def forgotten():
    """A process that has dropped a program runs it again, and the others need not."""
    x = pod.ones(8)

    def make():
        return pjit(lambda x: x + 21)

    make()(x)
    if pod.is_odd():
        jax.clear_caches()
        gc.collect()
        return float(make()(x).addressable_shards[0].data[0])
    return 22.0


@case
def analysed():
    """A program that one process only analyses."""
    if not pod.is_odd():
        program = pjit(lambda x: x + 31).lower(pod.ones(8)).compile()
        assert program.cost_analysis()
    return True


@case
def missing():
    try:
        if pod.is_odd():
            return None
        with multihost.checked_programs(True, timeout=2):
            return pjit(lambda x: x + 41)(pod.ones(8))
    finally:
        both_are_here("missing")


@case
def all_unchecked():
    with multihost.checked_programs(False):
        shape = (8, 5 if pod.is_odd() else 6)
        result = pjit(lambda x: x + 61)(pod.ones(*shape))
        return float(result.addressable_shards[0].data[0, 0])


@case
def unchecked():
    """One process does not compare, and reports it when it runs a program of several processes."""
    with multihost.checked_programs(not pod.is_odd()):
        try:
            result = pjit(lambda x: x + 51)(pod.ones(8))
            return float(result.addressable_shards[0].data[0])
        finally:
            both_are_here("unchecked")


def outcome(use: Callable[[], Any]) -> dict[str, Any]:
    """Return the outcome of a case."""
    began = time.monotonic()
    record: dict[str, Any] = {}
    try:
        result = use()
        record["result"] = None if isinstance(result, xlashard.Array) else result
    except Exception as error:
        record |= {
            "error": type(error).__name__,
            "text": str(error),
            "difference": getattr(error, "difference", None),
            "processes": list(getattr(error, "processes", ())),
        }
    return record | {"seconds": time.monotonic() - max(began, pod.came)}


def partitioner() -> Partitioner:
    return Partitioner.SHARDY if uses_shardy() else Partitioner.GSPMD


def together(number: int) -> float:
    """Run a program in all processes after each case."""
    total = pjit(lambda x: (x * number).sum())(pod.ones(8))
    return float(total)


if __name__ == "__main__":
    pod = Pod()
    wanted = sys.argv[1:] or list(CASES)
    for number, name in enumerate(wanted):
        record = outcome(CASES[name])
        if name != "unchecked":  # its processes are out of step afterwards
            record["after"] = together(number)
        print("CASE", json.dumps({"case": name, **record}), flush=True)
    assert CONSISTENCY.policy.enabled
