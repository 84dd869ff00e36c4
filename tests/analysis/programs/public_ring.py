"""Report on functions of `jax.jit` in a process that refuses the private ring, and print facts.

python -m tests.analysis.programs.public_ring

Worker processes of a sweep import this module for its target, and refuse the ring as well.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.layers import is_private
from tests.test_layers import XLASHARD


class _RefusesPrivateRing(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if is_private(name, XLASHARD):
            raise AssertionError(f"a report imports {name} of the private ring")
        return None


def refuse_private_ring() -> None:
    """Refuse each module of the private ring from now on."""
    loaded = [name for name in sys.modules if is_private(name, XLASHARD)]
    assert not loaded, f"loaded already: {loaded}"
    sys.meta_path.insert(0, _RefusesPrivateRing())


refuse_private_ring()

# ruff: noqa: E402  # Below are the imports that are refused and recorded.
from xlashard._jax import private


def record_readers() -> dict[str, set[str]]:
    """Return a dict that gets the private names that each function of `_jax` reads from now on."""
    readers: dict[str, set[str]] = defaultdict(set)
    read = private._Reader.__call__

    def read_and_record(reader: Any, name: str) -> Any:
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] == private.__name__ and frame.f_back is not None:
            frame = frame.f_back
        module = frame.f_globals["__name__"].removeprefix("xlashard._jax.")
        function = frame.f_code.co_qualname.partition(".<locals>")[0]
        value = read(reader, name)
        readers[f"{module}.{function}"].add(f"{reader._name}.{name}")
        # A stand-in keeps a function: other readers are recorded, too.
        reader._members.pop(name, None)
        return value

    reader_class: Any = private._Reader
    reader_class.__call__ = read_and_record
    return readers


READERS = record_readers() if __name__ == "__main__" else {}

import xlashard
from xlashard import testing


def make_call(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a function of `jax.jit` with collectives, and its arguments as shapes."""
    rows, blocks = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ("d", "dm"))
    bias = np.ones(64, np.float32)

    def loss(w: Any, x: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w) + bias, rows)
        return w - 0.1 * hidden.sum(), hidden.mean()

    weights = NamedSharding(mesh, PartitionSpec("m"))
    step = jax.jit(loss, in_shardings=(weights, blocks), donate_argnums=0)
    shapes = (128, 64), (8, 128)
    return step, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def count_collectives(compiled: Any) -> dict[str, int]:
    """Count the collectives of a compiled program of JAX in its text."""
    names = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return dict(Counter(re.findall(names, compiled.as_text())))


def _add_up(report: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for collective in report.collectives:
        counts[collective.kind] += collective.count
    return dict(counts)


def _assert_program(step: Any, args: Any, counts: dict[str, int]) -> str:
    """Check a program by the assertions, and return the name of a wrong one's error."""
    kinds: dict[str, Any] = {kind.replace("-", "_"): count for kind, count in counts.items()}
    testing.assert_collectives(step, args, **kinds, others=0)
    testing.assert_no_resharding(step, args, inside=False)
    testing.assert_memory(step, args, at_most="1 MiB")
    testing.assert_no_host_transfer(step, args)
    testing.assert_sharded(step, args, at_least=0.5)
    try:
        testing.assert_memory(step, args, at_most=1)
    except AssertionError as error:
        return type(error).__name__
    return ""


def _explain_nnx() -> list[str] | None:
    """Return the paths of the arguments of a program of `nnx.jit`; None without flax."""
    with suppress(ModuleNotFoundError):
        from flax import nnx

        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        call = nnx.jit(lambda model, x: model(x).sum())
        report = xlashard.explain(call, model, jnp.ones((4, 8)))
        return [value.path for value in report.inputs]
    return None


def main() -> None:
    """Make the reports, and print facts of them as JSON."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step, shapes = make_call(mesh)
    arrays = tuple(np.ones(shape.shape, np.float32) for shape in shapes)
    traced = step.trace(*shapes)
    lowered = traced.lower()
    compiled = lowered.compile()
    counts = count_collectives(compiled)
    forms = {
        "shapes": (step, *shapes),
        "arrays": (step, *arrays),
        "Traced": (traced,),
        "Lowered": (lowered,),
        "Compiled": (compiled,),
    }
    reports = {form: xlashard.explain(*call) for form, call in forms.items()}
    for report in reports.values():
        assert str(report) and report.to_json()
    preflights = {
        form: xlashard.preflight(*forms[form], topology="v5e-8", estimate=True)
        for form in ("shapes", "Traced", "Lowered")
    }
    for preflight in preflights.values():
        assert str(preflight) and preflight.to_json()
    sweep = xlashard.preflight_sweep(
        "tests.analysis.programs.public_ring:make_call",
        topologies="v5e-8",
        mesh={"d": 2, "m": 4},
        estimate=True,
        workers=1,
        progress=False,
    )
    facts = {
        "expected": counts,
        "collectives": {form: _add_up(report) for form, report in reports.items()},
        "preflights": {form: report.fits for form, report in preflights.items()},
        "sweep": [result.outcome for result in sweep.results],
        "errors": {
            "function": _assert_program(step, shapes, counts),
            "stage": _assert_program(compiled, (), counts),
        },
        "nnx": _explain_nnx(),
        "readers": {reader: sorted(names) for reader, names in sorted(READERS.items())},
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
