"""Paths of arguments and results of the functions of flax and equinox, as users write them."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import xlashard
from tests.core.pjit.helpers import f32
from xlashard import explain
from xlashard._jax.trace.jitted import inner_stage
from xlashard.analysis.programs.from_jax import unwrap
from xlashard.analysis.programs.program_reader import read_call, read_stage


def trace(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    return read_call(*unwrap(fun, args, kwargs or {}))


def paths_of(program: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    arguments = tuple(value.path for value in program.arguments)
    return arguments, tuple(value.path for value in program.results)


class Block(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros(()))


class Blocks(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.tied = self.blocks[0].dense


@partial(nnx.jit, static_argnums=1)
def count_up(model: Any, times: int, x: Any, *, extra: Any) -> Any:
    for block in model.blocks:
        x = block.dense(x)
        block.count[...] += times
    model.last = nnx.Variable(x.sum())
    return {"y": x}, extra["more"], model.blocks[1]


@nnx.jit
def made(x: Any) -> Any:
    return Blocks(), x


STATE = [
    f"blocks[{i}].{name}.value" for i in (0, 1) for name in ("count", "dense.bias", "dense.kernel")
]


@pytest.mark.slow
def test_paths_of_modules_in_arguments_and_results() -> None:
    model, other, x = Blocks(), Blocks(), np.ones((2, 4), np.float32)
    arguments, results = paths_of(trace(count_up, (model, 3, x), {"extra": {"more": other}}))
    states = [f"model.{path}" for path in STATE]
    others = [f"extra['more'].{path}" for path in STATE]
    assert arguments == (*states, "x", *others)
    assert results == (*states, "model.last.value", *others, "result[0]['y']")
    # A module passed twice is one value; a function without modules has JAX's own result.
    twice = nnx.jit(lambda a, b: (a.tied(b[0].tied(x)), b))
    arguments, results = paths_of(trace(twice, (model, [model])))
    assert arguments == tuple(f"a.{path}" for path in STATE)
    assert results == (*(f"a.{path}" for path in STATE), "result[0]")
    assert paths_of(trace(nnx.jit(lambda x: (x, x)), (x,)))[1] == (
        "result[0]",
        "result[1]",
    )
    # A look-alike result of another wrapper keeps its names.
    lookalike = eqx.filter_jit(lambda x: ((x,), {}, x))
    assert "args" not in str(paths_of(trace(lookalike, (x,)))[1])


@pytest.mark.slow
def test_paths_of_modules_in_recorded_programs() -> None:
    x = np.ones((2, 4), np.float32)
    with xlashard.record_programs() as programs:
        model = made(x)[0]
        count_up(model, 3, x, extra={"more": Blocks()})
        count_up.lower(model, 3, x, extra={"more": Blocks()})
    found = [p.program for p in programs if not p.is_operation and p.name in ("made", "count_up")]
    create, first, lowered = map(paths_of, found)
    assert create[1] == (*(f"result[0].{path}" for path in STATE), "result[1]")
    states = [f"model.{path}" for path in STATE]
    assert first[0][:7] == (*states, "x")
    # The first call has given the model one more variable.
    assert lowered[0][:8] == (*states, "model.last.value", "x")
    assert first[1][:7] == lowered[1][:7] == (*states, "model.last.value")


@pytest.mark.slow
def test_paths_under_nnx_jit_without_graphs_and_cached_partial() -> None:
    def train(model: Any, optimizer: Any, x: Any, *, scale: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return {"loss": loss * scale}

    model, x, scale = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), f32(2, 4), f32()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    momentum = "optimizer.opt_state[0].trace"
    variables = ["model.bias", "model.kernel", f"{momentum}['bias']", f"{momentum}['kernel']"]
    state = tuple(f"{name}.value" for name in (*variables, "optimizer.step"))
    without_graphs = partial(nnx.jit, graph_updates=False)
    paths = []
    for fun, args in (
        (nnx.jit(train, graph=False), (model, optimizer, x)),
        (without_graphs(train, graph=False), (model, optimizer, x)),
        (without_graphs(train, graph=True), (model, optimizer, x)),
        (nnx.jit_partial(train, model, optimizer, graph=False), (x,)),
        (nnx.cached_partial(nnx.jit(train), model, optimizer), (x,)),
    ):
        paths.append(paths_of(trace(fun, args, {"scale": scale})))
    results = "result['loss']"
    assert paths[:3] == [((*state, "x", "scale"), (results, *state))] * 3
    flat = tuple(f"args[0][{i}].value" for i in range(5))
    assert paths[3] == ((*flat, "args[1]", "kwargs['scale']"), (results, *flat))
    assert paths[4] == ((*state, "x", "scale"), (*state, results))
    with xlashard.record_programs() as programs:
        nnx.jit(train, graph=False)(model, optimizer, x, scale=scale)
        jax.jit(lambda x: (x + 1, []))(x)
    recorded = [paths_of(p.program) for p in programs if not p.is_operation]
    assert recorded[0] == paths[0]
    assert recorded[1][1] == ("result[0]",)


def test_paths_of_modules_in_stages() -> None:
    model, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), f32(2, 4)
    apply = nnx.jit(lambda model, x: model(x))
    state = ["model.bias.value", "model.kernel.value"]
    lowered = apply.lower(model, x)
    for stage in (apply.trace(model, x), lowered, lowered.compile()):
        report = explain(stage)
        assert [v.path for v in report.inputs] == [*state, "x"]
        assert [v.path for v in report.outputs] == [*state, "result"]
    for stage in (lowered, jax.jit(lambda x: (x, (x,), {})).lower(x)):
        names = paths_of(read_stage(inner_stage(stage)).program)[0]
        assert names == ((*state, "x") if stage is lowered else ("x",))


class Layer(eqx.Module):
    w: jax.Array
    act: Any

    @eqx.filter_jit
    def __call__(self, x: Any, *, times: Any = 2) -> Any:
        return self.act(x @ self.w) * times


@pytest.mark.slow
def test_paths_under_equinox() -> None:
    layer, x = Layer(f32(4, 4), jax.nn.relu), jnp.asarray(f32(4, 4))
    donated = eqx.filter_jit(
        lambda model, x, k: model.act(x @ model.w) * k, donate="all-except-first"
    )
    swapped = eqx.filter_jit(lambda a, b: {"y": a - b})
    cases = [
        (donated, (layer, x + 0, 3), {}, ("x", "model.w"), "result"),
        (layer.__call__, (x,), {"times": jnp.ones(())}, ("self.w", "x", "times"), "result"),
        # The same array twice, by name in another order.
        (swapped, (), {"b": x, "a": x}, ("a", "b"), "result['y']"),
        (eqx.filter_jit(eqx.nn.Identity()), (x,), {}, ("x",), "result"),
        (eqx.filter_jit(Layer.__call__.__wrapped__), (layer, x), {}, ("self.w", "x"), "result"),
    ]
    with xlashard.record_programs() as programs:
        for fun, args, kwargs, _, _ in cases:
            fun(*args, **kwargs)
    recorded = [program for program in programs if not program.is_operation]
    for (fun, args, kwargs, names, result), program in zip(cases, recorded, strict=True):
        for traced in (trace(fun, args, kwargs), program.program):
            assert paths_of(traced) == (names, ("marker of equinox", result))
    # Arrays of the function itself.
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    report = explain(eqx.filter_jit(linear), x[0])
    assert [v.path for v in report.inputs] == ["x", "Linear.weight", "Linear.bias"]
