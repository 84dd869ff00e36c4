"""Making primitives of our own, with the rules by which JAX transforms them."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import ad, batching, mlir

# Public as jax.extend.core.register_call_primitive_rules, whose package imports Pallas.
from jax._src.lax.eval_jaxpr import register_call_primitive_rules

from xlashard._jax.shardings import Device, JaxGSPMDSharding, device_list

Primitive = core.Primitive
AxisData = Any


def call_primitive(name: str, impl: Callable[..., Sequence[Any]]) -> Primitive:
    """A primitive that calls a jaxpr (its parameter `call_jaxpr`), differentiable, batchable, ...

    JAX's rules for such primitives transform the jaxpr inside and bind the same primitive again,
    so every piece of a transformed call comes back to `impl`.

    Args:
        name: Its name in jaxprs.
        impl: Runs it on concrete values: `impl(*args, call_jaxpr=..., **params)`.
    """
    primitive = Primitive(name)
    # The call keeps a function of its own in the module, so that equal bodies are emitted once.
    register_call_primitive_rules(primitive, name=name, inline_jax_late=False)
    primitive.def_impl(impl)
    return primitive


def identity_primitive(
    name: str,
    impl: Callable[..., Any],
    batch: Callable[..., tuple[Any, int | None]],
    lower: Callable[..., Any],
) -> Primitive:
    """A primitive of one value that is the identity to the maths, and its own transpose.

    Args:
        name: Its name in jaxprs.
        impl: Runs it on a concrete value.
        batch: `batch(axis_data, (x,), (dim,), **params)` gives the value and its batch dimension.
        lower: `lower(ctx, value, **params)` gives the MLIR value.
    """
    primitive = Primitive(name)
    primitive.def_impl(impl)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    core.pp_eqn_rules[primitive] = _print_without_witness
    # Before JAX 0.12 a witness in several equations is printed once, on top of the jaxpr.
    getattr(core, "pp_subjaxprs_rules", {})[primitive] = lambda _: ()
    ad.deflinear2(primitive, lambda ct, _, **params: (primitive.bind(ct, **params),))
    batching.fancy_primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda ctx, x, **params: [lower(ctx, x, **params)])
    return primitive


@lru_cache(maxsize=1024)
def device_witness(devices: tuple[Device, ...]) -> Any:
    """A jaxpr that names devices in JAX's own words.

    JAX's own compiled functions learn which devices their program is for from the primitives that
    they know, in whatever jaxpr those stand. As a parameter of an equation of ours (`witness`)
    this jaxpr tells them, and nothing of it is ever run.
    """
    everywhere = JaxGSPMDSharding.get_replicated(device_list(devices))
    return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, everywhere))(0.0)


def _print_without_witness(eqn: Any, context: Any, settings: Any) -> Any:
    return core._pp_eqn(eqn, context, settings, params=[k for k in eqn.params if k != "witness"])


def spmd_axis_names(axis_data: AxisData) -> tuple[str, ...]:
    """The mesh axes along which `vmap(..., spmd_axis_name=...)` deals its batch out."""
    name = axis_data.spmd_name
    if name is None:
        return ()
    return tuple(name) if isinstance(name, tuple | list) else (name,)
