"""Plans and modules for the tests of programs."""

import re

import jax
import numpy as np

from xlashard import GSPMDSharding, Mesh, NamedSharding, P, SingleDeviceSharding
from xlashard._jax import stablehlo_parse
from xlashard._jax.lowering import LoweringTarget, lower_body
from xlashard._jax.runtime.compiler import client_of, platform_of
from xlashard._jax.trace.tracing import abstractify
from xlashard.core.program.compile import compile_program
from xlashard.core.program.lowered import lower_program
from xlashard.core.program.plan import ProgramPlan, ValuePlan

U = P.UNCONSTRAINED

# Written by the pass that outlines meshes as symbols; repeats the mesh.
_MESH_COPY = re.compile(r" \{stablehlo\.mesh = .*\}$", re.MULTILINE)


def devices(count=8):
    return tuple(jax.devices()[:count])


def mesh(shape=(2, 4), names=("x", "y"), order=None):
    """Return a mesh; on one device, every axis has size 1."""
    if jax.device_count() == 1:
        shape, order = (1,) * len(shape), None
    chosen = [jax.devices()[i] for i in order or range(int(np.prod(shape)))]
    return Mesh(np.array(chosen).reshape(shape), names)


def named(*spec, on=None, memory_kind=None):
    return NamedSharding(on or mesh(), P(*spec), memory_kind=memory_kind)


def tiles(text, count=8):
    return GSPMDSharding(devices(count), text)


def single(memory_kind=None):
    return SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)


def value(shape, sharding=None, dtype="float32", **rest):
    return ValuePlan(tuple(shape), dtype, sharding, **rest)


def plan(args, results, partitioner, *, donated=None, count=8, name="f", on=None, **rest):
    return ProgramPlan(
        name=name,
        devices=tuple(on) if on else devices(count),
        args=tuple(args),
        results=tuple(results),
        donated=tuple(donated or [False] * len(args)),
        partitioner=partitioner,
        **rest,
    )


def identity(*types):
    """Return a module that returns its arguments."""
    args = ", ".join(f"%arg{i}: {t}" for i, t in enumerate(types))
    names = ", ".join(f"%arg{i}" for i in range(len(types)))
    results = ", ".join(types)
    ret = f"return {names} : {results}" if types else "return"
    return f"module {{ func.func public @main({args}) -> ({results}) {{ {ret} }} }}"


def lower(source, wanted, tokens=0):
    """Return the annotated program of a module's text."""
    body = stablehlo_parse.body_of_module(stablehlo_parse.read_module(source))
    if tokens:
        body = type(body)(**{**vars(body), "ordered_effects": (None,) * tokens})
    avals = [
        [
            None
            if v.dtype.startswith("key")
            else abstractify(jax.ShapeDtypeStruct(v.shape, v.dtype))
            for v in values
        ]
        for values in (wanted.args, wanted.results)
    ]
    return lower_program(wanted, body, (avals[0], avals[1]))


def text_of(lowered):
    """Return the module's text as in golden files."""
    return _MESH_COPY.sub("", lowered.as_text())


def compiled(source, wanted, **rest):
    """Return the compiled program of a module's text."""
    return compile_program(lower(source, wanted), **rest)


def traced(fun, *args, count=8):
    """Return the body of a JAX function for some arguments, and its abstract values."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    device = jax.devices()[0]
    target = LoweringTarget(platform_of(device), client_of(device), devices(count))
    body = lower_body(jaxpr, "f", [f"arg{i}" for i in range(len(args))], target)
    return body, (jaxpr.in_avals, jaxpr.out_avals)


def chosen(program):
    """Return the tiles per dimension of each argument and of each result."""
    return tuple(
        tuple(s.rank_tiling(len(v.shape)).counts for s, v in zip(shardings, values, strict=True))
        for shardings, values in (
            (program.in_shardings, program.plan.args),
            (program.out_shardings, program.plan.results),
        )
    )
