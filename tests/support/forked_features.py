"""Fork a child after each feature that keeps state, and use the feature again in the parent.

    python forked_features.py

The child ends in every way that runs exit handlers of Python, and without them. It leaves the
blocks that the parent is in, as a child of `multiprocessing` or of a daemon's double fork does.
"""

import atexit
import contextlib
import logging
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

OWNER = os.getpid()


def end_child() -> None:
    """End a child after its exit handlers: the runtime of JAX aborts or hangs when it is freed."""
    if os.getpid() != OWNER:
        os._exit(0)


# Registered before the handlers of JAX and of the package, it runs after them.
atexit.register(end_child)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import xlashard as xs  # noqa: E402
from xlashard import P  # noqa: E402
from xlashard.core.program.executables import EXECUTABLES  # noqa: E402
from xlashard.legacy.serialization import (  # noqa: E402
    GlobalAsyncCheckpointManager,
    get_tensorstore_spec,
)
from xlashard.support.background import repeating  # noqa: E402
from xlashard.train.checkpoint.checkpoints import Checkpoints  # noqa: E402
from xlashard.train.checkpoint.manifest import RunMetadata  # noqa: E402
from xlashard.workers.job_pool import JobPool, WorkerJob, WorkerLimits  # noqa: E402

# Longest time for the parent to use a feature again, or for a child to end.
_SECONDS = 200
_CHILD_SECONDS = 10


class ChildError(Exception):
    """The error that ends a child."""


def fail() -> None:
    raise ChildError


WAYS: tuple[Callable[[], Any], ...] = (lambda: sys.exit(0), lambda: os._exit(0), fail)


def fork_children() -> None:
    """Fork a child for each way to end, and wait for it; the child does not return."""
    for end in WAYS:
        child = os.fork()
        if not child:
            # One in which a lock of the runtime stays taken hangs in an exit handler of JAX.
            signal.alarm(_CHILD_SECONDS)
            end()
        os.waitpid(child, 0)


MESH = xs.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
ROWS = xs.NamedSharding(MESH, P("x"))
W = jax.ShapeDtypeStruct((64, 64), np.float32)
VALUE = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)


@contextlib.contextmanager
def preflights() -> Iterator[Callable[[int], Any]]:
    def use(number: int) -> None:
        found = xs.preflight(lambda w: jnp.tanh(w @ w) * number, W, topology="v5e-4", mesh={"a": 4})
        assert found.memory is not None

    yield use


@contextlib.contextmanager
def pools() -> Iterator[Callable[[int], Any]]:
    pids = set()
    with JobPool(WorkerLimits(workers=1)) as pool:

        def use(number: int) -> None:
            job = WorkerJob("0", "tests.predict.sweep.runners:square", {"number": number})
            ((_, answer),) = pool.run([job])
            assert answer["number"] == number * number
            pids.add(answer["pid"])
            assert len(pids) == 1, "the child has ended the worker of its parent"

        yield use


@contextlib.contextmanager
def jobs_in_progress() -> Iterator[Callable[[int], Any]]:
    """Fork between the answers of a series of jobs."""
    with JobPool(WorkerLimits(workers=2)) as pool:
        jobs = (
            WorkerJob(str(n), "tests.predict.sweep.runners:square", {"number": n})
            for n in range(40)
        )
        answers = pool.run(jobs)
        yield lambda _: next(answers)
        assert len(list(answers)) == 38


@contextlib.contextmanager
def programs() -> Iterator[Callable[[int], Any]]:
    """Compile and run; a cache of compiled programs on disk holds them too."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        f = xs.jit(lambda x, n: (x * n).sum())

        def use(number: int) -> None:
            x = xs.device_put(VALUE, ROWS)
            assert float(f(x, 1)) == VALUE.sum()
            g = xs.jit(lambda x: x.sum() + number)
            assert float(g(x)) == VALUE.sum() + number
            EXECUTABLES.cache_clear()

        # A child leaves a folder that belongs to its parent to it.
        owner = os.getpid()
        yield use
        if os.getpid() != owner:
            os._exit(0)
    jax.config.update("jax_compilation_cache_dir", None)


@contextlib.contextmanager
def bound_steps() -> Iterator[Callable[[int], Any]]:
    step = xs.pjit(lambda s, x: (s + x, s.sum()), donate_argnums=0, out_shardings=(ROWS, None))
    state = xs.device_put(np.zeros_like(VALUE), ROWS)
    bound = step.lower(state, state).compile().bind(state)
    calls = []

    def use(number: int) -> None:
        bound(xs.device_put(VALUE, ROWS))
        calls.append(number)
        assert np.array_equal(bound.state, VALUE * len(calls))

    yield use


@contextlib.contextmanager
def reports() -> Iterator[Callable[[int], Any]]:
    f = xs.pjit(lambda x: (x @ x.T).sum(), in_shardings=ROWS)
    xs.watch()

    def use(number: int) -> None:
        assert xs.explain(f, VALUE).collectives
        f(VALUE[: 8 * (number + 1)])
        assert str(xs.explain_recompile(f))

    yield use


@contextlib.contextmanager
def background() -> Iterator[Callable[[int], Any]]:
    import threading

    ticked = threading.Event()
    with repeating(ticked.set, 0.001, "ticking"):

        def use(_: int) -> None:
            ticked.clear()
            assert ticked.wait(_SECONDS)

        yield use


@contextlib.contextmanager
def checkpoints() -> Iterator[Callable[[int], Any]]:
    state = {"w": xs.device_put(VALUE, ROWS)}
    folder = Path(tempfile.mkdtemp())
    with Checkpoints(folder, keep=9) as saved:

        def use(number: int) -> None:
            # The children are forked while it is being written.
            saved.save(state, RunMetadata(step=number, data={}, settings="", mesh={"x": 4}))

        yield use
        saved.wait()
        like = {"w": jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype, sharding=ROWS)}
        assert np.array_equal(saved.restore(like).state["w"], VALUE)
        assert saved.steps() == [0, 1, 2]


@contextlib.contextmanager
def checkpoints_of_2022() -> Iterator[Callable[[int], Any]]:
    folder = Path(tempfile.mkdtemp())
    manager = GlobalAsyncCheckpointManager(timeout_secs=_SECONDS)

    def use(number: int) -> None:
        spec = get_tensorstore_spec(f"{folder}/unfinished/w")
        commit = partial(os.rename, f"{folder}/unfinished", f"{folder}/step_{number}")
        # It waits for the one before.
        manager.serialize([xs.device_put(VALUE, ROWS)], [spec], on_commit_callback=commit)

    yield use
    manager.wait_until_finished()
    assert sorted(os.listdir(folder)) == ["step_0", "step_1", "step_2"]


@contextlib.contextmanager
def layouts() -> Iterator[Callable[[int], Any]]:
    """Search for a layout, which compiles its candidates in worker processes."""

    def use(number: int) -> None:
        step = xs.pjit(lambda w, x: jnp.tanh(x @ w).sum() * (number + 1))
        assert xs.auto_shard(step, W, W, mesh={"a": 4}, topology="v5e-4").in_shardings

    yield use


FEATURES = (
    *(preflights, pools, jobs_in_progress, programs, bound_steps, layouts),
    *(reports, background, checkpoints, checkpoints_of_2022),
)


def main() -> None:
    # JAX aborts in a child that ends normally.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.filterwarnings("ignore", "os.fork|This process", category=Warning)
    logging.getLogger("absl").setLevel(logging.ERROR)
    for feature in FEATURES:
        with feature() as use:
            use(0)
            signal.alarm(_SECONDS)
            fork_children()
            use(1)
            fork_children()
            if feature is not jobs_in_progress:
                use(2)
        signal.alarm(0)
        print("as before:", feature.__name__, flush=True)


if __name__ == "__main__":
    main()
    print("the end")
