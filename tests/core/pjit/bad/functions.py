"""Bad calls of pjit, and of the functions that it makes."""

import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tests.core.pjit.bad.bench import GARBAGE, NAMES, Bad, Bench, array, entered, run
from tests.core.pjit.helpers import make_mesh
from xlashard import NamedSharding, P, device_put, pjit

NO_RESOURCES = (
    "x",
    "",
    3,
    0.5,
    True,
    object(),
    np.arange(2),
    np.float32(1),
    jax.numpy,
    lambda: 0,
    {1},
    b"x",
    slice(2),
    int,
)


def state_of(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Return a nested state whose leaves are `[8, 8]`, and the paths of its leaves."""
    names = rng.sample(NAMES, rng.randint(1, 3))
    if rng.random() < 0.5:
        return {n: array(rng, 8, 8) for n in names}, [f"state[{n!r}]" for n in names]
    inner = {n: array(rng, 8, 8) for n in names}
    paths = [f"state['params'][0][{n!r}]" for n in names]
    return {"params": [inner, ()]}, paths


def replaced(state: Any, path: str, leaf: Any) -> Any:
    """Return the state with another leaf at a path."""

    def pick(at, old):
        return leaf if "state" + jax.tree_util.keystr(at) == path else old

    return jax.tree_util.tree_map_with_path(pick, state)


def ways(rng: random.Random, f: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Return a call, or another method that checks arguments in the same way."""
    method = rng.choice([f, f, f, f.lower])
    return lambda: method(*args, **kwargs)


def wrong_spec(bench: Bench, rng: random.Random) -> Bad:
    state, paths = state_of(rng)
    path = rng.choice(paths)
    axis, other = rng.sample(["x", "y"], 2)
    spec = rng.choice(
        [
            P("z"),
            P(None, axis + axis),
            P((axis, "model")),
            P(axis, axis),
            P((axis, other, axis)),
            P(axis, (other, axis)),
            P(None, None, axis),
            P(None, None, None, (axis, other)),
            P(3.5),
            P((axis, 1)),
        ]
    )
    specs = jax.tree.map(lambda _: rng.choice([None, P(axis)]), state)
    leaves = replaced(specs_as_leaves(specs), path, Leaf(spec))
    tree = jax.tree.map(lambda leaf: leaf.spec, leaves)
    keyword = rng.choice(["in_shardings", "out_shardings"])
    shown = path if keyword == "in_shardings" else path.replace("state", "result[0]")
    f = pjit(run, static_argnums=2, **{keyword: (tree, None)})
    return entered(bench.mesh, ways(rng, f, state, array(rng, 8))), (shown,)


class Leaf:
    """Wrapper of a spec or None, so that maps over trees see a leaf."""

    def __init__(self, spec):
        self.spec = spec


def specs_as_leaves(tree: Any) -> Any:
    return jax.tree.map(Leaf, tree, is_leaf=lambda x: x is None or isinstance(x, P))


def not_divisible(bench: Bench, rng: random.Random) -> Bad:
    size = rng.choice([1, 2, 3, 5, 6, 7, 9, 10, 11])
    shape = (size, 8) if rng.random() < 0.5 else (8, size)
    spec = P("x", None) if shape[0] == size else P(None, ("y", "x"))
    state, paths = state_of(rng)
    path = rng.choice(paths)
    state = replaced(state, path, array(rng, *shape))
    resource = rng.choice([spec, NamedSharding(bench.mesh, spec)])
    f = pjit(run, static_argnums=2, in_shardings=(resource, None))
    return entered(bench.mesh, ways(rng, f, state, array(rng, 8))), (path,)


def no_array(bench: Bench, rng: random.Random) -> Bad:
    state, paths = state_of(rng)
    path = rng.choice(paths)
    f = pjit(run, static_argnums=2)
    return ways(rng, f, replaced(state, path, rng.choice(GARBAGE)), array(rng, 8)), (path,)


def a_shape_alone(bench: Bench, rng: random.Random) -> Bad:
    state, paths = state_of(rng)
    path = rng.choice(paths)
    shape = jax.ShapeDtypeStruct((8, 8), np.float32)
    return lambda: pjit(run)(replaced(state, path, shape), array(rng, 8)), (path,)


def no_resource(bench: Bench, rng: random.Random) -> Bad:
    wrong = rng.choice([*NO_RESOURCES, bench.mesh, jax.devices()[0]])
    keyword = rng.choice(
        ["in_shardings", "out_shardings", "in_axis_resources", "out_axis_resources"]
    )
    name = rng.choice(NAMES)
    tree = rng.choice([(wrong, None), ({name: wrong}, None), [None, [P("x"), wrong]]])
    return lambda: pjit(run, **{keyword: tree}), (keyword + "[",)


def wrong_prefix(bench: Bench, rng: random.Random) -> Bad:
    state = {"a": array(rng, 8), "b": {"c": array(rng, 8), "d": (array(rng, 8), array(rng, 8))}}
    tree, path = rng.choice(
        [
            ({"a": None}, "state"),
            ({"a": None, "b": None, "z": None}, "'z'"),
            ({"a": {"w": None}, "b": None}, "state['a']"),
            ({"a": [None], "b": None}, "state['a']"),
            ([None, None], "state"),
            ((None,), "state"),
            ({"a": None, "b": {"c": None}}, "state['b']"),
            ({"a": None, "b": [None, None]}, "state['b']"),
            ({"a": None, "b": {"c": None, "d": (None,)}}, "state['b']['d']"),
            ({"a": None, "b": {"c": None, "d": {"e": None}}}, "state['b']['d']"),
            ({"a": None, "b": {"c": (), "d": None}}, "state['b']['c']"),
        ]
    )
    f = pjit(run, in_shardings=(tree, None))
    return entered(bench.mesh, ways(rng, f, state, array(rng, 8))), (path,)


def wrong_result_prefix(bench: Bench, rng: random.Random) -> Bad:
    tree, path = rng.choice(
        [
            ((None,), "result"),
            ((None, None, None), "result"),
            ({"a": None}, "result"),
            (({"a": None, "c": None}, None), "result[0]"),
            (({"b": None}, None), "result[0]"),
            ((None, (None,)), "result[1]"),
            (([None], None), "result[0]"),
        ]
    )
    f = pjit(run, out_shardings=tree)
    return entered(bench.mesh, ways(rng, f, {"a": array(rng, 8)}, array(rng, 8))), (path,)


def wrong_count(bench: Bench, rng: random.Random) -> Bad:
    entries = rng.choice([(None,), (None,) * 4, (P("x"),) * 5, ()])
    f = pjit(run, in_shardings=rng.choice([entries, list(entries)]))
    return entered(bench.mesh, ways(rng, f, {"w": array(rng, 8)}, array(rng, 8))), ("state",)


def no_tuple(bench: Bench, rng: random.Random) -> Bad:
    f = pjit(run, in_shardings={rng.choice(NAMES): P("x")})
    return entered(bench.mesh, ways(rng, f, {"w": array(rng, 8)}, array(rng, 8))), ("in_shardings",)


def no_mesh(bench: Bench, rng: random.Random) -> Bad:
    keyword = rng.choice(["in_shardings", "out_shardings"])
    f = pjit(run, **{keyword: (P("x"), P("y"))})
    return ways(rng, f, {"w": array(rng, 8)}, array(rng, 8)), ("with jax.set_mesh(mesh):",)


def other_devices(bench: Bench, rng: random.Random) -> Bad:
    state, paths = state_of(rng)
    path = rng.choice(paths)
    kind = rng.choice(["mesh", "in", "out", "argument"])
    places = [NamedSharding(bench.other, P("x")), NamedSharding(make_mesh((2,), ("x",)), P("x"))]
    if kind != "in":  # a replicated argument is resharded to in_shardings that replicate it
        places.append(jax.devices()[rng.randrange(8)])
    state = replaced(state, path, device_put(array(rng, 8, 8), rng.choice(places)))
    here = NamedSharding(bench.mesh, P())
    batch, keywords = array(rng, 8), {}
    if kind == "argument":
        # Replicated values on the same devices are used as they are.
        batch = device_put(batch, NamedSharding(bench.mesh, P("x")))
    elif kind != "mesh":
        keywords = {f"{kind}_shardings": (here, here)}
    call = ways(rng, pjit(run, **keywords), state, batch)
    return (entered(bench.mesh, call) if kind == "mesh" else call), (path,)


def other_place(bench: Bench, rng: random.Random) -> Bad:
    state, paths = state_of(rng)
    path = rng.choice(paths)
    there = device_put(array(rng, 8, 8), NamedSharding(bench.mesh, P("x")))
    resource = rng.choice([P("y"), P(None, "x"), P("x", "y"), P(("y", "x")), None])
    f = pjit(run, in_shardings=(resource, None))
    state = replaced(state, path, there)
    return entered(bench.mesh, ways(rng, f, state, array(rng, 8))), (path,)


def deleted(bench: Bench, rng: random.Random) -> Bad:
    state, paths = state_of(rng)
    path = rng.choice(paths)
    gone = device_put(array(rng, 8, 8), rng.choice([None, NamedSharding(bench.mesh, P("x"))]))
    gone.delete()
    gone = rng.choice([gone, gone.to_jax()])
    # To lower, the type of an array is enough.
    f, args = pjit(run), (replaced(state, path, gone), array(rng, 8))
    return rng.choice([lambda: f(*args), lambda: f.lower(*args).compile()(*args)]), (path,)


def unhashable(bench: Bench, rng: random.Random) -> Bad:
    wrong = rng.choice([[1], {}, {1}, np.arange(2), bytearray(b"x"), jax.numpy.ones(2)])
    f = rng.choice([pjit(run, static_argnums=2), pjit(run, static_argnames="n")])
    args = {"w": array(rng, 8)}, array(rng, 8)
    call = rng.choice([ways(rng, f, *args, wrong), ways(rng, f, *args, n=wrong)])
    return call, ("argument n ",)


def wrong_option(bench: Bench, rng: random.Random) -> Bad:
    keyword, wrong = rng.choice(
        [
            ("static_argnums", rng.choice([7, -9, "n", (0, 5), 1.5, True, {0: 1}])),
            ("donate_argnums", rng.choice([7, -9, "n", (0, 5), 1.5, False, [None]])),
            ("static_argnames", rng.choice(["m", ("n", "zz"), 3, (1,), {"n": 1}.keys()])),
            ("donate_argnames", rng.choice(["m", ("state", "zz"), 3, (1,)])),
            ("donation", rng.choice(["loud", None, 3, True])),
            ("compiler_options", rng.choice([["a"], "a", {3: 1}, {"a": [1]}, {"a": None}, 5])),
            ("device", rng.choice(["cpu", 0, object(), bench.mesh])),
        ]
    )
    return lambda: pjit(run, **{keyword: wrong}), (keyword,)


def contradiction(bench: Bench, rng: random.Random) -> Bad:
    keywords, fact = rng.choice(
        [
            ({"static_argnums": 0, "donate_argnums": 0}, "state"),
            ({"static_argnames": "n", "donate_argnums": 2}, "n is both"),
            ({"static_argnums": -1, "donate_argnames": ("n",)}, "n is both"),
            ({"device": jax.devices()[0], "backend": "cpu"}, "backend="),
            ({"device": jax.devices()[0], "in_shardings": None}, "device"),
            ({"backend": "cpu", "out_shardings": P("x")}, "backend"),
            ({"in_shardings": None, "in_axis_resources": None}, "in_axis_resources"),
            ({"out_shardings": P(), "out_axis_resources": None}, "out_axis_resources"),
        ]
    )
    return lambda: pjit(run, **keywords), (fact,)


def no_function(bench: Bench, rng: random.Random) -> Bad:
    def generator():
        yield

    wrong = rng.choice([None, 3, "f", np.arange(3), P("x"), generator, [run]])
    return lambda: pjit(wrong), ("pjit",)


def unknown_backend(bench: Bench, rng: random.Random) -> Bad:
    name = rng.choice(["quantum", "tpu9", "CPU0"])
    f = pjit(run, backend=name)
    return ways(rng, f, {"w": array(rng, 8)}, array(rng, 8)), (repr(name),)


def shared_donation(bench: Bench, rng: random.Random) -> Bad:
    x = device_put(np.zeros(8, np.float32), rng.choice([None, jax.devices()[1]]))
    f = pjit(run, donate_argnums=rng.choice([0, 1, (0, 1)]))
    return lambda: f({"w": x}, x), ("state['w']", "batch")


MAKERS = (
    wrong_spec,
    not_divisible,
    no_array,
    a_shape_alone,
    no_resource,
    wrong_prefix,
    wrong_result_prefix,
    wrong_count,
    no_tuple,
    no_mesh,
    other_devices,
    other_place,
    deleted,
    unhashable,
    wrong_option,
    contradiction,
    no_function,
    unknown_backend,
    shared_donation,
)
