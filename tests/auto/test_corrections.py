"""Layouts are corrected where unforeseen collectives keep them from being the fastest."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlashard import P
from xlashard.auto.corrections import corrected, lightened
from xlashard.auto.problem import ConstraintSite, ProgramLayout
from xlashard.auto.proof import ProvenLayout
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import ReplicaGroups
from xlashard.hlo.collectives import Collective
from xlashard.hlo.module import Frame
from xlashard.hlo.shapes import Shape
from xlashard.predict.costs.network_model import NetworkCost


def two_products(a, b):
    first = a @ b
    return jnp.tanh(first) @ b


X = np.zeros((8, 8), np.float32)
JAXPR = jax.make_jaxpr(two_products)(X, X)
FIRST = two_products.__code__.co_firstlineno + 1
PRODUCTS = [n for n, eqn in enumerate(JAXPR.eqns) if eqn.primitive.name == "dot_general"]
INSIDE = tuple(
    (ConstraintSite(path, kind, 0), P("x"))
    for path, kind in [
        ((), "parameter"),
        *[((n,), kind) for n in PRODUCTS for kind in ("operand", "result")],
    ]
)
LAYOUT = ProgramLayout("auto", (P(), P()), (P(),), INSIDE, 1.0, 1.0)


def moved(seconds, line=FIRST, resource="ici"):
    shape = (Shape("f32", (8, 8)),)
    frames = (Frame(two_products.__code__.co_filename, line, "two_products"),)
    exchange = Collective(
        "all-to-all", "c", "main", shape, shape, ReplicaGroups.everyone(8), frames=frames
    )
    return exchange, NetworkCost(expected_seconds=seconds, dcn_bytes=float(resource == "dcn"))


def proven(name, seconds, *unforeseen, waits=1.0, layout=LAYOUT, network="ici"):
    layout = replace(layout, name=name)
    shares = ((network, waits),)
    return ProvenLayout(
        layout, seconds, fits=True, shares=shares, unforeseen=unforeseen, compilation=object()
    )


class Compiler:
    """Replacement of the compiler that lists the layouts that it gets."""

    memory_bytes = 1000.0

    def __init__(self, *unforeseen, saves=True):
        self.names, self.unforeseen, self.saves = [], unforeseen, saves

    def prove(self, layouts, count):
        assert count == len(layouts)
        self.names += [layout.name for layout in layouts]
        if self.saves is False:
            return [over(p.name, 1.0, 1001) for p in layouts]
        return [proven(p.name, 1.0, *self.unforeseen, layout=p) for p in layouts]


class Nearby:
    """Replacement of the search that records the arguments of its calls by layout."""

    def __init__(self):
        machine = SimpleNamespace(grid=MeshGrid(("x",), (8,)))
        self.problem = SimpleNamespace(jaxpr=JAXPR, machine=machine)
        paths = [(), *((n,) for n in PRODUCTS)]
        operations = [SimpleNamespace(path=path, results=(0,)) for path in paths]
        self.graph = SimpleNamespace(operations=operations)
        self.saved, self.raised = {}, {}

    def lighter(self, layout, nbytes):
        self.saved[layout.name] = nbytes
        return [replace(layout, name=f"{layout.name}, lighter")]

    def dearer(self, layout, seconds):
        self.raised[layout.name] = dict(seconds)
        return [replace(layout, name=f"{layout.name}, corrected")]


def corrected_names(*layouts, seconds=np.inf):
    compiler = Compiler()
    found = corrected(layouts, compiler, Nearby(), seconds)
    assert [p.layout.name for p in found] == compiler.names
    return {name.partition(";")[0].partition(",")[0] for name in compiler.names}


def test_layouts_that_may_become_the_fastest_are_corrected():
    fastest = proven("fastest", 1.0)
    assert corrected_names(fastest, proven("slow", 1.5, moved(0.7))) == {"slow"}
    assert corrected_names(fastest, proven("too slow", 1.5, moved(0.4))) == set()
    assert corrected_names(fastest, proven("hidden", 1.5, moved(0.7), waits=0.4)) == set()
    assert corrected_names(proven("small", 1.0, moved(0.02))) == set()
    between = moved(0.7, resource="dcn")
    assert corrected_names(fastest, proven("between", 1.5, between, network="dcn")) == {"between"}
    assert corrected_names(fastest, proven("other", 1.5, between, network="ici")) == set()
    assert corrected_names(replace(proven("large", 1.5, moved(0.7)), fits=False)) == set()
    several = [proven(name, 1.0, moved(cost)) for name, cost in [("a", 0.1), ("b", 0.3)]]
    assert corrected_names(*several) == {"a", "b"}
    # Layouts that would stay slower than one of another search are not corrected.
    assert corrected_names(*several, seconds=0.8) == {"b"}


def test_operations_are_charged_for_unforeseen_collectives_of_the_line():
    search = Nearby()
    second = moved(0.5, line=FIRST + 1)
    corrected([proven("auto", 1.0, moved(0.25), moved(0.5), second)], Compiler(), search)
    assert search.raised == {"auto": {("x", 1): 0.75, ("x", 2): 0.5}}


def test_number_of_corrections_is_limited():
    compiler = Compiler(moved(0.5))
    corrected([proven("auto", 2.0, moved(1.5))], compiler, Nearby())
    rounds = [name.count("corrected") for name in compiler.names]
    assert rounds == sorted(rounds) and max(rounds) <= 2 and len(rounds) <= 4 + 2 * 4


def over(name, seconds, nbytes):
    return replace(proven(name, seconds), memory_bytes=nbytes, fits=False)


def lightened_bytes(*layouts, seconds=np.inf, **options):
    compiler, search = Compiler(**options), Nearby()
    found = lightened(layouts, compiler, search, seconds)
    assert [p.layout.name for p in found] == compiler.names
    return search.saved


def test_fast_layouts_slightly_over_the_memory_are_lightened():
    fits = replace(proven("fits", 2.0), memory_bytes=900)
    near = over("near", 1.5, 1020)
    assert lightened_bytes(fits, near) == {"near": pytest.approx(22.0)}
    assert lightened_bytes(near) == {"near": pytest.approx(22.0)}
    assert lightened_bytes(near, seconds=1.4) == {}
    assert lightened_bytes(fits, over("slow", 2.5, 1020)) == {}
    assert lightened_bytes(fits, over("large", 1.5, 1080)) == {}
    refused = replace(near, compilation=None)
    assert lightened_bytes(refused) == {}
    several = [over(name, cost, 1020) for name, cost in [("a", 1.9), ("b", 1.7), ("c", 1.8)]]
    assert lightened_bytes(fits, *several).keys() == {"b", "c"}


def test_too_large_lightened_layout_is_lightened_again():
    assert lightened_bytes(over("near", 1.5, 1020), saves=False) == {
        "near": pytest.approx(22.0),
        "near, lighter": pytest.approx(3.0),
    }
