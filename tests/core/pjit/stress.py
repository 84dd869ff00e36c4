"""Stress of donation: refused calls, interrupts and forks at random moments, on eight devices.

    python -m tests.core.pjit.stress [--refused 3000] [--lost 1500] [--interrupts 1500]
        [--forks 300] [--seed 0]

Refused are calls that pass a donated buffer twice, and calls with an array that lost a shard.
After each refused call every array must hold its value, and programs over all devices must still
finish. After each interrupt the state of a bound step must be that of before or after the step
which was interrupted. After each fork, however the child ends, the parent goes on as if there had
been none. `tests/core/pjit/test_stress.py` runs a few of each.
"""

import argparse
import atexit
import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable

if __name__ == "__main__":
    import tests.conftest  # noqa: F401  gives this process its devices, before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
from xlashard import Array, BoundStep, Mesh, NamedSharding, P, device_put, pjit
from xlashard.errors import DeletedError, DonationError

SIZE = 16
# XLA's CPU client lets 32 runs wait for a device. A thread that would add one more blocks, and the
# all-reduce of an earlier run then misses that thread: a deadlock, under jax.jit too.
IN_FLIGHT = 16


class Refusals:
    """Ways to pass a donated buffer twice, drawn at random.

    Args:
        dice: Draws them.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.rows = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), P("x"))

        def step(scale, x, y):
            spread = jax.lax.with_sharding_constraint(jnp.ones(SIZE) * scale, self.rows)
            return x + 1, y * 2, spread.sum() + x.sum() * y.sum()

        self.fun = pjit(step, donate_argnums=1)
        x = self.array()
        self.compiled = self.fun.lower(1.0, x, x).compile()
        self.loaded = xlashard.Compiled.deserialize(self.compiled.serialize())
        self.check = pjit(lambda x: (x, x.sum()))

    def array(self) -> Array:
        """Make a sharded array from the host, or by a program."""
        x = device_put(np.arange(SIZE, dtype=np.float32), self.rows)
        return x if self.dice.random() < 0.5 else pjit(lambda x: x + 0, donate_argnums=0)(x)

    def other(self, x: Array) -> Array:
        """Make another array over some or all buffers of an array."""
        match self.dice.randrange(5):
            case 0:
                return x
            case 1:
                return Array.from_jax(x.to_jax())
            case 2:
                turned = Mesh(self.rows.mesh.devices.reshape(4, 2), ("a", "b"))
                return device_put(x, NamedSharding(turned, P(("a", "b"))))
            case 3:
                # One or more shards of it, among those of another array.
                fresh, taken = self.array(), self.dice.randrange(1, 256)
                shards = zip(x.addressable_shards, fresh.addressable_shards, strict=True)
                pieces = [(a if taken >> i & 1 else b).data for i, (a, b) in enumerate(shards)]
                return xlashard.make_array_from_single_device_arrays(x.shape, self.rows, pieces)
            case _:
                return x.to_jax()

    def call(self) -> tuple[str, Callable[[], object], dict[int, Array]]:
        """Draw a call: its name, the call, and its arrays."""
        if self.dice.random() < 0.25:
            # Shared on the first device alone: the others would start.
            scalar = jnp.float32(3)
            fun = pjit(lambda a, b: self._spread(a) + b, donate_argnums=1)
            return "uncommitted scalar", lambda: fun(scalar, scalar), {0: scalar}
        x = self.array()
        y = self.other(x)
        name = self.dice.choice(["pjit", "compiled", "loaded", "bound step", "vmap", "closed over"])
        scale = jnp.float32(1)
        calls: dict[str, Callable[[], object]] = {
            "pjit": lambda: self.fun(scale, x, y),
            "compiled": lambda: self.compiled(scale, x, y),
            "loaded": lambda: self.loaded(scale, x, y),
            "bound step": lambda: self._bound(x, y),
            "vmap": lambda: jax.vmap(self.fun, in_axes=(None, 0, 0))(scale, x, y),
            "closed over": lambda: pjit(lambda a: a + y, donate_argnums=0)(x),
        }
        return name, calls[name], {0: x, 1: y}

    def _spread(self, scale):
        return jax.lax.with_sharding_constraint(jnp.ones(SIZE) * scale, self.rows).sum()

    def _bound(self, x, y):
        fun = pjit(lambda s, y: (s + y, y.sum()), donate_argnums=0, out_shardings=(self.rows, None))
        step = fun.lower(x, y).compile().bind(x)
        try:
            return step(y)
        finally:
            np.testing.assert_array_equal(step.state, x)


def refused(count: int, dice: random.Random) -> Counter[str]:
    """Make calls that must be refused, and check after each that its arrays are whole.

    Args:
        count: Number of calls.
        dice: Draws them.

    Returns:
        Number of calls of each kind.

    Raises:
        AssertionError: With the kind of a call that was not refused, or took a buffer.
    """
    refusals, kinds = Refusals(dice), Counter[str]()
    for i in range(count):
        name, call, arrays = refusals.call()
        values = {k: np.array(x) for k, x in arrays.items()}
        try:
            call()
        except DonationError:
            kinds[name] += 1
        else:
            raise AssertionError(f"call {i}, {name}, was not refused")
        for k, x in arrays.items():
            assert not x.is_deleted(), f"call {i}, {name}: argument {k} is deleted"
            np.testing.assert_array_equal(x, values[k], f"call {i}, {name}, argument {k}")
        same, total = refusals.check(refusals.array())
        assert float(total) == SIZE * (SIZE - 1) / 2 and not same.is_deleted()
    return kinds


class LostShards:
    """Arrays that lost a shard after a program ran on them, drawn at random.

    Args:
        dice: Draws them.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.rows = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), P("x"))
        self.total = pjit(lambda state, x: (state, x.sum()))
        self.compiled = self.total.lower(0.0, self.array()).compile()
        self.loaded = xlashard.Compiled.deserialize(self.compiled.serialize())
        self.step = self.compiled.bind(0.0)
        self.donate = pjit(lambda x: x + 1, donate_argnums=0)

    def array(self) -> Array:
        """Make an array."""
        return device_put(np.arange(SIZE, dtype=np.float32), self.rows)

    def exposed(self) -> tuple[str, Array, jax.Array]:
        """Draw an array: the way to one of its shards, the array, and the shard."""
        i = self.dice.randrange(8)
        match self.dice.choice(["shards", "to_jax", "from_jax", "device_put", "pieces", "piece"]):
            case "shards":
                x = self.array()
                return "shards", x, x.addressable_shards[i].data
            case "to_jax":
                x = self.array()
                return "to_jax", x, x.to_jax().addressable_shards[i].data
            case "piece":
                x = self.array()
                return "piece", x, x.addressable_data(i).to_jax()
            case "pieces":
                handle = jax.device_put(np.arange(SIZE, dtype=np.float32), self.rows)
                pieces = [shard.data for shard in handle.addressable_shards]
                make = xlashard.make_array_from_single_device_arrays
                return "pieces", make((SIZE,), self.rows, pieces), pieces[i]
            case way:
                handle = jax.device_put(np.arange(SIZE, dtype=np.float32), self.rows)
                x = Array.from_jax(handle) if way == "from_jax" else device_put(handle, self.rows)
                return way, x, handle.addressable_shards[i].data


def lost(count: int, dice: random.Random) -> Counter[str]:
    """Make calls with arrays that lost a shard, and check after each that programs still finish.

    Args:
        count: Number of calls.
        dice: Draws them.

    Returns:
        Number of calls of each kind.

    Raises:
        AssertionError: With the kind of a call that was not refused.
    """
    shards, kinds = LostShards(dice), Counter[str]()
    for i in range(count):
        way, x, shard = shards.exposed()
        calls = {
            "pjit": lambda x: shards.total(0.0, x),
            "compiled": lambda x: shards.compiled(0.0, x),
            "loaded": lambda x: shards.loaded(0.0, x),
            "bound step": shards.step,
        }
        name = dice.choice(list(calls))
        for _ in range(dice.randrange(3)):
            calls[name](x)
        if dice.random() < 0.5:
            shards.donate(shard)
        else:
            shard.delete()
        try:
            calls[name](x)
        except DeletedError:
            kinds[f"{name}, {way}"] += 1
        else:
            raise AssertionError(f"call {i}, {name}, {way}, was not refused")
        assert float(shards.step(shards.array())) == SIZE * (SIZE - 1) / 2
    return kinds


def interrupted(count: int, dice: random.Random, *, keys: bool = False) -> Counter[str]:
    """Interrupt the loop of a bound step that donates, and check its state after each interrupt.

    Args:
        count: Number of interrupts.
        dice: Draws their times.
        keys: Whether a key array is a part of the state.

    Returns:
        Numbers of interrupts that left the old state, and that left the new one.

    Raises:
        AssertionError: If the state is neither.
    """
    rows = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), P("x"))

    def advance(state, by):
        return state | {"n": state["n"] + 1, "w": state["w"] + by}, state["w"].sum()

    whole = NamedSharding(rows.mesh, P())
    places: dict[str, NamedSharding] = {"n": whole, "w": rows}
    state: dict[str, object] = {"n": np.int32(0), "w": np.zeros(SIZE, np.float32)}
    if keys:
        places["key"], state["key"] = whole, jax.random.key(0)
    fun = pjit(advance, donate_argnums=0, out_shardings=(places, None))
    start = device_put(state, places)
    step = fun.lower(start, 1.0).compile().bind(start)
    step(1.0)
    began = time.perf_counter()
    for _ in range(10):
        step(1.0)
    jax.block_until_ready(step.state)
    duration = (time.perf_counter() - began) / 10
    found, calls = Counter[str](), 11
    for i in range(count):
        done: list[None] = []
        try:
            with _Interrupt(dice.uniform(0, 4 * duration)) as interrupt:
                # Not here: the jump back of a loop at the end of a block is outside of its `try`.
                _repeat(step, interrupt, done)
        except KeyboardInterrupt:
            pass
        state = step.state
        n = int(state["n"])
        new = n - calls - len(done)
        assert new in (0, 1), f"interrupt {i}: {n} steps, {calls + len(done)} calls have returned"
        np.testing.assert_array_equal(state["w"], np.full(SIZE, n, np.float32))
        found["new state" if new else "old state"] += 1
        calls = n
        if dice.random() < 0.5:
            step(1.0)
            calls += 1
    return found


class _ChildError(Exception):
    """The error that ends a child, wherever its parent was when it forked."""


def _end_at_once() -> None:
    os._exit(0)


def _exit_normally() -> None:
    raise SystemExit


def _fail() -> None:
    raise _ChildError


_ENDS = {"at once": _end_at_once, "normally": _exit_normally, "by an error": _fail}
# A child in which a lock of the runtime stays taken hangs in an exit handler of JAX.
_CHILD_SECONDS = 10


def forked(count: int, dice: random.Random) -> Counter[str]:
    """Fork children while a bound step or a repeat call runs, or between calls.

    A child leaves the frames of the call by an exception, and runs the exit handlers.

    Args:
        count: Number of forks.
        dice: Draws their times, and how the children end.

    Returns:
        Number of forks by place, and by the end of the child.

    Raises:
        AssertionError: If a value of the parent is wrong afterwards.
    """
    rows = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), P("x"))
    fun = pjit(lambda w, by: (w + by, w.sum()), donate_argnums=0, out_shardings=(rows, None))
    start = device_put(np.zeros(SIZE, np.float32), rows)
    step = fun.lower(start, 1.0).compile().bind(start)
    repeat = xlashard.jit(lambda x: x.sum())
    x = device_put(np.arange(SIZE, dtype=np.float32), rows)
    found, calls, parent = Counter[str](), 0, os.getpid()
    for i in range(count):
        place, end = dice.choice(["bound step", "jit", "between"]), dice.choice(list(_ENDS))
        done: list[None] = []
        try:
            with _Fork(dice.uniform(0, 0.003), _ENDS[end]) as fork:
                if place == "bound step":
                    _repeat(step, fork, done)
                elif place == "jit":
                    _wait_for(fork, lambda: jax.block_until_ready(repeat(x)))
                else:
                    _wait_for(fork, lambda: None)
        except BaseException:
            if os.getpid() == parent:
                raise
            atexit._run_exitfuncs()
            os._exit(0)
        status, calls = os.waitpid(fork.child, 0)[1], calls + len(done)
        found[f"{place}, {end}{', killed' if os.WIFSIGNALED(status) else ''}"] += 1
        for _ in range(2):
            total = step(1.0)
            assert float(total) == calls * SIZE, f"fork {i}, {place}, {end}"
            calls += 1
        np.testing.assert_array_equal(step.state, np.full(SIZE, calls, np.float32))
        assert float(repeat(x)) == SIZE * (SIZE - 1) / 2
    return found


def _repeat(step: BoundStep, interrupt: "_Interrupt", done: list[None]) -> None:
    """Run a step until an interrupt comes, and append an item for each call that has returned."""
    while not interrupt.over:
        step(1.0)
        done.append(None)
        if len(done) % IN_FLIGHT == 0:
            jax.block_until_ready(step.state)


def _wait_for(interrupt: "_Interrupt", act: Callable[[], object]) -> None:
    while not interrupt.over:
        act()


class _Interrupt:
    """Block that a signal interrupts in the main thread, once, with a KeyboardInterrupt.

    Args:
        delay: Seconds from the beginning of the block.
    """

    def __init__(self, delay: float) -> None:
        self.over = False
        self._delay = delay
        self._cancelled, self._sent = threading.Event(), threading.Event()
        self._sender = threading.Thread(target=self._send)

    def _send(self) -> None:
        if not self._cancelled.wait(self._delay):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            self._sent.wait(10)

    def _handle(self, *_: object) -> None:
        self._sent.set()
        if not self.over:
            self.over = True
            self._act()

    def _act(self) -> None:
        raise KeyboardInterrupt

    def __enter__(self) -> "_Interrupt":
        self._before = signal.signal(signal.SIGUSR2, self._handle)
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self._cancelled.set()
        self._sender.join()
        signal.signal(signal.SIGUSR2, self._before)


class _Fork(_Interrupt):
    """Block in which the main thread forks a child, once.

    Args:
        delay: Seconds from the beginning of the block.
        end: Ends the child.

    Attributes:
        child: Its process id.
    """

    def __init__(self, delay: float, end: Callable[[], None]) -> None:
        super().__init__(delay)
        self.child = 0
        self._end = end

    def _act(self) -> None:
        with warnings.catch_warnings():
            # Of Python and JAX, about threads.
            warnings.simplefilter("ignore")
            self.child = os.fork()
        if not self.child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_CHILD_SECONDS)
            self._end()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.core.pjit.stress", description=__doc__)
    parser.add_argument("--refused", type=int, default=3000, help="how many refused calls")
    parser.add_argument("--lost", type=int, default=1500, help="how many calls with lost shards")
    parser.add_argument("--interrupts", type=int, default=1500, help="how many interrupts")
    parser.add_argument("--forks", type=int, default=300, help="how many forks")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    options = parser.parse_args()
    for name, run, count in (
        ("refused calls", refused, options.refused),
        ("calls with lost shards", lost, options.lost),
        ("interrupts", interrupted, options.interrupts),
        ("forks", forked, options.forks),
    ):
        began = time.perf_counter()
        kinds = run(count, random.Random(options.seed))
        seconds = time.perf_counter() - began
        print(f"{kinds.total()} {name} in {seconds:.0f} s: {dict(kinds)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
