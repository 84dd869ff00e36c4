"""Bad calls of compiled programs, of constraints and of shardings."""

import random

import jax
import numpy as np

from tests.core.pjit.bad.bench import GARBAGE, NAMES, Bad, Bench, array, entered, run
from tests.core.pjit.helpers import make_mesh
from xlashard import (
    GSPMDSharding,
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_put,
    pjit,
    with_sharding_constraint,
)


def compiled_call(bench: Bench, rng: random.Random) -> Bad:
    w, batch = np.zeros((8, 4), np.float32), np.zeros(8, np.float32)
    gone = device_put(batch, NamedSharding(bench.mesh, P("x")))
    gone.delete()
    args, fact = rng.choice(
        [
            (({"w": w},), "args[1]"),
            (({"w": w}, batch, batch), "args[2]"),
            (({"v": w}, batch), "args[0]"),
            (({"w": w, "b": w}, batch), "args[0]"),
            ((w, batch), "args[0]"),
            (({"w": w[:4]}, batch), "state['w']"),
            (({"w": w.T}, batch), "state['w']"),
            (({"w": w.astype(rng.choice([int, np.float16, bool]))}, batch), "state['w']"),
            (({"w": w}, batch[:3]), "batch"),
            (({"w": w}, rng.choice(GARBAGE)), "batch"),
            (({"w": w}, jax.ShapeDtypeStruct((8,), np.float32)), "batch"),
            (({"w": w}, device_put(batch, NamedSharding(bench.mesh, P("y")))), "batch"),
            (({"w": device_put(w, jax.devices()[2])}, batch), "state['w']"),
            (({"w": device_put(w, NamedSharding(bench.other, P("x")))}, batch), "state['w']"),
            (({"w": w}, gone), "batch"),
        ]
    )
    return lambda: bench.compiled(*args), (fact,)


def bound_call(bench: Bench, rng: random.Random) -> Bad:
    batch = np.zeros(8, np.float32)
    gone = device_put(batch, NamedSharding(bench.mesh, P("x")))
    gone.delete()
    args, fact = rng.choice(
        [
            ((), "run"),
            ((batch, batch), "run"),
            (({"batch": batch},), "run"),
            ((batch[:5],), "batch"),
            ((batch.astype(np.int32),), "batch"),
            ((rng.choice(GARBAGE),), "batch"),
            ((jax.ShapeDtypeStruct((8,), np.float32),), "batch"),
            ((gone,), "batch"),
        ]
    )
    return lambda: bench.step(*args), (fact,)


def wrong_binding(bench: Bench, rng: random.Random) -> Bad:
    w = np.zeros((8, 4), np.float32)
    state, fact = rng.choice(
        [
            ({"v": w}, "run"),
            ([w], "run"),
            (w, "run"),
            ({"w": w[:2]}, "state['w']"),
            ({"w": w.astype(np.int8)}, "state['w']"),
            ({"w": rng.choice(GARBAGE)}, "state['w']"),
            ({"w": device_put(w, jax.devices()[1])}, "state['w']"),
            ({"w": device_put(w, NamedSharding(bench.mesh, P("y")))}, "state['w']"),
        ]
    )
    argnum = rng.choice([0, 0, 0, 5, -1])
    texts = (fact,) if argnum == 0 else (f"argument {argnum}",)
    return lambda: bench.compiled.bind(state, argnum=argnum), texts


def constraint(bench: Bench, rng: random.Random) -> Bad:
    name = rng.choice(NAMES)
    few = NamedSharding(make_mesh((2,), ("x",)), P(None, None, "x"))
    sharding = rng.choice([P("z"), P("x", "x"), P(None, None, "y"), few, "x", 3, P(1)])
    wrong = rng.choice([{name: sharding}, sharding])
    tree = {name: array(rng, 8, 8)}

    def call():
        return with_sharding_constraint(tree, wrong)

    call = rng.choice([call, lambda: pjit(lambda t: with_sharding_constraint(t, wrong))(tree)])
    return entered(bench.mesh, call), (f"[{name!r}]", "shardings")


def named_sharding(bench: Bench, rng: random.Random) -> Bad:
    mesh, spec = rng.choice(
        [
            (bench.mesh, P("z")),
            (bench.mesh, P("x", ("y", "x"))),
            (bench.mesh, P(2)),
            (bench.mesh, "x"),
            (bench.mesh, ("x", "y")),
            (bench.mesh, 5),
            (None, P("x")),
            ("mesh", P()),
            (jax.devices(), P("x")),
            (P("x"), bench.mesh),
        ]
    )
    return lambda: NamedSharding(mesh, spec), ("'z'", "'x'", "2", "spec", "mesh")


def tiles(bench: Bench, rng: random.Random) -> Bad:
    count = rng.choice([1, 2, 3, 7])
    text = rng.choice(
        [
            "{devices=[8]<=[8]}",
            "{devices=[2,4]<=[8]}",
            "{devices=[4,2]0,1,2,3,4,5,6,7}",
            "{devices=[8,1]<=[8] last_tile_dim_replicate}",
            "{devices=[",
            "replicated",
            "",
            "{maximal device=}",
            "{devices=[3,2]<=[8]}",
            7,
            None,
            P("x"),
        ]
    )
    needles = ("tiles", "devices", "sharding", repr(text))
    return lambda: GSPMDSharding(jax.devices()[:count], text), needles


def shard_shapes(bench: Bench, rng: random.Random) -> Bad:
    shape, spec = rng.choice(
        [((7,), P("x")), ((4, 3), P(None, "y")), ((), P("x")), ((8,), P(None, "y")), ((2,), P("x"))]
    )
    sharding = NamedSharding(bench.mesh, spec)
    method = rng.choice(
        [sharding.shard_shape, sharding.devices_indices_map, sharding.is_compatible_aval]
    )
    return lambda: method(shape), ("dimension",)


def mixed_memory(bench: Bench, rng: random.Random) -> Bad:
    kind = rng.choice(["hbm2", "disk", ""])
    place = rng.choice(
        [
            lambda: NamedSharding(bench.mesh, P("x"), memory_kind=kind),
            lambda: SingleDeviceSharding(jax.devices()[0], memory_kind=kind),
        ]
    )
    return lambda: pjit(run, in_shardings=place())({"w": array(rng, 8)}, array(rng, 8)), (kind,)


MAKERS = (
    compiled_call,
    bound_call,
    wrong_binding,
    constraint,
    named_sharding,
    tiles,
    shard_shapes,
    mixed_memory,
)
