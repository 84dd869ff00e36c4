"""Define primitives, with JAX's rules for their transformations."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import compress
from typing import Any

import jax

# Public as jax.extend.core.register_call_primitive_rules, whose package imports Pallas.
from xlashard._jax import originals
from xlashard._jax.private import (
    ad,
    batching,
    checkify,
    core,
    discharge,
    eval_jaxpr,
    find_name,
    mlir,
    pe,
    remat,
    sharding_impls,
    try_steps,
)
from xlashard._jax.runtime.shardings import (
    AbstractMesh,
    Device,
    JaxNamedSharding,
    Mesh,
    device_list,
)
from xlashard._jax.trace.residuals import register_linearization
from xlashard.errors import CompileError
from xlashard.support.lazily import dataclass

type Primitive = core.Primitive
AxisData = Any


@lru_cache(maxsize=1)
def _call_primitive_class() -> Any:
    """Return the class of primitives that call a jaxpr, their parameter `jaxpr`.

    JAX's rules for calls name that parameter `call_jaxpr`; `bind` takes both names.
    """

    class CallPrimitive(core.Primitive):
        multiple_results = True
        boundary: Callable[[Any], dict[str, Any]]
        # Of parameters that are complete.
        bind_complete = core.Primitive.bind

        def bind(self, *args: Any, **params: Any) -> Any:
            return super().bind(*args, **self.with_own_names(params, len(args)))

        def is_high(self, *_: Any, jaxpr: Any, **__: Any) -> bool:
            """Return what JAX would find by a look at every parameter."""
            return jaxpr.is_high

        def with_own_names(self, params: dict[str, Any], count: int) -> dict[str, Any]:
            """Return all parameters of a call, by the names of this package, for `bind_complete`.

            Donation is dropped where the arguments are no longer those of the call.
            """
            if "call_jaxpr" in params:
                params["jaxpr"] = params.pop("call_jaxpr")
            if len(params.get("donated_invars", ())) != count:
                params["donated_invars"] = (False,) * count
            return {**params, **self.boundary(params["jaxpr"])}

    return CallPrimitive


def call_primitive(
    name: str,
    impl: Callable[..., Sequence[Any]],
    is_placing: Callable[[Any], bool],
    boundary: Callable[[Any], dict[str, Any]],
) -> Primitive:
    """Return a primitive that calls a jaxpr and that JAX can differentiate, batch and so on.

    JAX's rules for such primitives transform the jaxpr inside and bind the same primitive again,
    so every piece of a transformed call comes back to `impl`.

    Args:
        name: Its name in jaxprs.
        impl: Function that runs it on concrete values: `impl(*args, jaxpr=..., **params)`.
        is_placing: Function that returns True for a sharding constraint of the body.
        boundary: Function that reads the parameters that follow from a body: its shardings.

    The parameters of its equations have the names of those of `jax.jit`. `donated_invars` has a
    flag for each argument, which batching, evaluation, derivatives in forward mode and the
    forward part of a linearization preserve. `donation`, the mode of reporting unusable donations,
    is of this package alone.
    """
    primitive: Any = _call_primitive_class()(name)
    primitive.boundary = boundary
    _register_transformations(primitive, is_placing)
    # After JAX's rules for calls, which define these two as well.
    primitive.def_effectful_abstract_eval(_type_call)
    primitive.def_impl(impl)
    mlir.register_lowering(primitive, _lower_call, cacheable=False)
    # Each rule serves one transformation, and the others work without it.
    try_steps(
        partial(
            _set_rule, primitive, lambda: checkify.error_checks, partial(_check_call, primitive)
        ),
        partial(_set_rule, primitive, lambda: core.pp_eqn_rules, _print_call),
        partial(
            _set_rule, primitive, lambda: pe.custom_staging_rules, partial(_stage_call, primitive)
        ),
    )
    return primitive


def _stage_call(primitive: Primitive, trace: Any, source: Any, *args: Any, **params: Any) -> Any:
    """Add a call to the jaxpr under way: as one equation, or under `inline` those of its body.

    The results have the types of the body, as those of a call have. The weak type of a tangent may
    differ from that of its primal, by which the derivative of the body was traced.
    """
    if not params["inline"]:
        return trace.default_process_primitive(primitive, args, params, source)
    jaxpr = params["jaxpr"]
    typed = [
        _set_weak_type(trace, arg, aval, source) if _is_weak(arg.aval) != _is_weak(aval) else arg
        for arg, aval in zip(args, jaxpr.in_avals, strict=True)
    ]
    results = pe.inline_jaxpr_into_trace(trace, source, jaxpr, jaxpr.consts, *typed)
    return [trace.to_jaxpr_tracer(result, source) for result in results]


def _is_weak(aval: Any) -> bool:
    return getattr(aval, "weak_type", False)  # a token has none


def _set_weak_type(trace: Any, value: Any, aval: Any, source: Any) -> Any:
    params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
    return trace.default_process_primitive(jax.lax.convert_element_type_p, (value,), params, source)


def _type_call(*_: Any, jaxpr: Any, **__: Any) -> tuple[Sequence[Any], Any]:
    return jaxpr.out_avals, core.positional_effects(jaxpr)


def _register_transformations(primitive: Primitive, is_placing: Callable[[Any], bool]) -> None:
    """Register JAX's rules for calls, with the parameter names of this package."""
    if find_name(eval_jaxpr, "register_call_primitive_rules") is None:
        # JAX 0.11.0 and older: programs run and compile, but can't be transformed.
        try_steps(partial(_refuse_transformations, primitive))
        return
    eval_jaxpr.register_call_primitive_rules(primitive)
    primitive.to_lojax = _renamed(primitive.to_lojax)
    try_steps(
        partial(_register_jvp, primitive),
        partial(_rename_rule, primitive, lambda: ad.fancy_transposes, donates=False),
        partial(_rename_rule, primitive, lambda: remat.rules, donates=False),
        partial(_rename_rule, primitive, lambda: batching.fancy_primitive_batchers),
        partial(_rename_rule, primitive, lambda: core.custom_typechecks),
        partial(_register_discharge, primitive),
        partial(_rename_dce, primitive),
        partial(_register_partial_eval, primitive),
        partial(_register_remat, primitive),
        partial(register_linearization, primitive, is_placing),
    )


def _refuse_transformations(primitive: Primitive) -> None:
    """Make every transformation of a call raise the error for the rules that JAX lacks."""

    def refuse(*_: Any, **__: Any) -> Any:
        return eval_jaxpr.register_call_primitive_rules

    for rules in (
        *(ad.primitive_jvps, ad.primitive_linearizations, ad.fancy_transposes),
        *(batching.fancy_primitive_batchers, pe.custom_partial_eval_rules),
        pe.partial_eval_jaxpr_custom_rules,
    ):
        rules[primitive] = refuse


def _set_rule(primitive: Primitive, table: Callable[[], Any], rule: Callable[..., Any]) -> None:
    table()[primitive] = rule


def _rename_rule(primitive: Primitive, table: Callable[[], Any], *, donates: bool = True) -> None:
    """Wrap a rule that JAX registered for a call, for the parameter names of this package."""
    rules = table()
    if primitive in rules:  # JAX 0.11 has no rule of remat for calls.
        rules[primitive] = _renamed(rules[primitive], donates=donates)


def _register_jvp(primitive: Primitive) -> None:
    ad.primitive_jvps[primitive] = partial(_jvp_call, ad.primitive_jvps[primitive])


def _jvp_call(
    rule: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    donated_invars: tuple[bool, ...],
    **params: Any,
) -> Any:
    """Bind a call of primals and tangents, which donates a tangent with its primal."""
    nonzero = [type(tangent) is not ad.Zero for tangent in tangents]
    donated = (*donated_invars, *compress(donated_invars, nonzero))
    return _renamed(rule)(primals, tangents, donated_invars=donated, **params)


def _register_discharge(primitive: Primitive) -> None:
    discharged = partial(discharge._eval_jaxpr_discharge_rule, primitive)
    discharge.register_discharge_rule(primitive)(_renamed(discharged))


def _register_partial_eval(primitive: Primitive) -> None:
    rules = pe.custom_partial_eval_rules
    rules[primitive] = partial(_partial_eval_call, rules[primitive], primitive)


def _register_remat(primitive: Primitive) -> None:
    update: Any = partial(_without_donation, primitive)
    rule: Any = partial(pe.closed_call_partial_eval_custom_rule, "jaxpr", update)
    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def _renamed(rule: Callable[..., Any], *, donates: bool = True) -> Callable[..., Any]:
    """Return a rule of JAX for a call, which takes the body as `jaxpr`.

    Args:
        rule: The rule.
        donates: True if the rule binds a call of the same arguments, which may donate them.
    """

    def call(*args: Any, jaxpr: Any, donated_invars: tuple[bool, ...] = (), **params: Any) -> Any:
        kept = donated_invars if donates else ()
        return rule(*args, call_jaxpr=jaxpr, donated_invars=kept, **params)

    return call


def _rename_dce(primitive: Primitive) -> None:
    pe.dce_rules[primitive] = partial(_dce_call, pe.dce_rules[primitive])


# The parameters of the rule differ between releases of JAX.
def _dce_call(rule: Callable[..., Any], *args: Any) -> tuple[list[bool], Any]:
    """Drop from a call what no result needs; its equation is the last argument."""
    *needed, eqn = args
    params = dict(eqn.params)
    params["call_jaxpr"] = params.pop("jaxpr")
    renamed = eqn.replace(params=params)
    used, smaller = rule(*needed, renamed)
    if smaller is None:
        return used, None
    if smaller is renamed:
        # JAX keeps a jaxpr of which every equation stays, and all that is known of that jaxpr.
        return used, eqn
    params = dict(smaller.params)
    params["donated_invars"] = tuple(compress(params["donated_invars"], used))
    return used, smaller.replace(params=eqn.primitive.with_own_names(params, sum(used)))


def _partial_eval_call(
    rule: Callable[..., Any], primitive: Any, trace: Any, *tracers: Any, **params: Any
) -> Any:
    """Run the known part of a call; the equation of the unknown part gets our parameter names."""
    results = _renamed(rule, donates=False)(trace, *tracers, **params)
    recipes: list[Any] = [getattr(result, "recipe", None) for result in results]
    for recipe in (*recipes, *(handle.recipe for handle in trace.effect_handles)):
        if "call_jaxpr" in getattr(recipe, "params", ()):
            recipe.params.update(primitive.with_own_names(recipe.params, len(recipe.in_tracers)))
    return results


def _without_donation(primitive: Any, *args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of the known and of the staged part of a call, donating nothing."""
    parts = ({**part, "donated_invars": ()} for part in args[-2:])
    known, staged = (primitive.with_own_names(part, len(part["jaxpr"].invars)) for part in parts)
    return known, staged


def _lower_call(
    ctx: Any,
    *args: Any,
    jaxpr: Any,
    name: str,
    compiler_options_kvs: tuple[tuple[str, Any], ...],
    **_: Any,
) -> Sequence[Any]:
    """Lower a call to a function of the module, so that equal bodies are emitted once.

    Module, profiles and HLO have the name of the called function.

    Raises:
        CompileError: If the call has options of the compiler, which compiles whole programs.
    """
    options = dict(compiler_options_kvs)
    if options:
        raise CompileError(
            f"{name} has compiler_options={options}, but is called inside another program: pass "
            "compiler_options to the outermost pjit"
        )
    names = ctx.name_stack.extend(f"{ctx.primitive.name}({name})")
    with mlir.source_info_to_location(ctx.module_context, None, names, ctx.traceback):
        return mlir.core_call_lowering(ctx, *args, name=name, call_jaxpr=jaxpr)


def _check_call(
    primitive: Primitive,
    context: Any,
    error: Any,
    enabled_errors: Any,
    *args: Any,
    jaxpr: Any,
    **params: Any,
) -> tuple[Any, list[Any]]:
    """Bind a call under checkify, with the errors so far as additional arguments."""
    errors, error_tree = jax.tree.flatten(error)
    values = [*errors, *args]
    checked, out_tree, _ = checkify.jaxpr_to_checkify_jaxpr(
        context, jaxpr, enabled_errors, error_tree, *map(jax.typeof, values)
    )
    out = primitive.bind(*values, **{**params, "jaxpr": checked, "donated_invars": ()})
    return jax.tree.unflatten(out_tree, out)


def _print_call(eqn: Any, context: Any, settings: Any) -> Any:
    """Print a call as JAX prints its own: name, options that are set, and body."""
    body = eqn.params["jaxpr"]
    if body not in context.shared_jaxprs:
        context.suggest_same_var_names(body.invars, eqn.invars)
        context.suggest_same_var_names(body.outvars, eqn.outvars)
    shown = ["name", *(k for k in _PRINTED if eqn.params[k] not in _PRINTED[k]), "jaxpr"]
    if any(eqn.params["donated_invars"]):
        shown.insert(1, "donated_invars")
    return core._pp_eqn(eqn, context, settings, params=shown)


# Parameters of a call that are printed only when they differ from these defaults.
_PRINTED: dict[str, tuple[Any, ...]] = {
    "compiler_options_kvs": ((),),
    "donation": ("warn",),
}


def identity_primitive(
    name: str,
    impl: Callable[..., Any],
    batch: Callable[..., tuple[Any, int | None]],
    lower: Callable[..., Any],
    abstract: Callable[..., Any] = lambda aval, **_: aval,
) -> Primitive:
    """Return a primitive of one value that is mathematically the identity, and its own transpose.

    Args:
        name: Its name in jaxprs.
        impl: Function that runs it on a concrete value.
        batch: `batch(axis_data, (x,), (dim,), **params)` returns the value and its batch dimension.
        lower: `lower(ctx, value, **params)` returns the MLIR value.
        abstract: `abstract(aval, **params)` returns the type of the result.
    """
    primitive = core.Primitive(name)
    primitive.def_impl(impl)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, lambda ctx, x, **params: [lower(ctx, x, **params)])
    try_steps(
        partial(_set_rule, primitive, lambda: core.pp_eqn_rules, _print_sharding),
        partial(_register_transpose, primitive, primitive),
        partial(_set_rule, primitive, lambda: batching.fancy_primitive_batchers, batch),
    )
    return primitive


@dataclass(frozen=True)
class LinearRules:
    """Rules of one of two linear primitives that are each other's transpose.

    Attributes:
        name: Its name in jaxprs.
        impl: Function that runs it on a concrete value.
        shape: `shape(shape, **params)` returns the shape of the result.
        batch: `batch(axis_data, dim, **params)` returns the parameters for a batch dimension `dim`.
        lower: `lower(shapes, x, **params)` returns the MLIR value, from the shapes of operand and
            result.
    """

    name: str
    impl: Callable[..., Any]
    shape: Callable[..., tuple[int, ...]]
    batch: Callable[..., dict[str, Any]]
    lower: Callable[..., Any]


def transposed_pair(forward: LinearRules, backward: LinearRules) -> tuple[Primitive, Primitive]:
    """Return two linear primitives of one value, each the transpose of the other."""
    first, second = core.Primitive(forward.name), core.Primitive(backward.name)
    _give_rules(first, forward, second)
    _give_rules(second, backward, first)
    return first, second


def _give_rules(primitive: Primitive, rules: LinearRules, transpose: Primitive) -> None:
    def abstract(aval: Any, **params: Any) -> Any:
        shape = rules.shape(aval.shape, **params)
        if shape == aval.shape:
            return aval  # with the explicit axes of its type
        return jax.core.ShapedArray(shape, aval.dtype, weak_type=aval.weak_type)

    def batch(
        axis_data: AxisData, values: Sequence[Any], dims: Sequence[int | None], **params: Any
    ) -> tuple[Any, int | None]:
        (x,), (dim,) = values, dims
        if dim is not None:
            params = rules.batch(axis_data, dim, **params)
        return primitive.bind(x, **params), dim

    def lower(ctx: Any, x: Any, **params: Any) -> list[Any]:
        return [rules.lower((ctx.avals_in[0].shape, ctx.avals_out[0].shape), x, **params)]

    primitive.def_impl(rules.impl)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, lower)
    try_steps(
        partial(_register_transpose, primitive, transpose),
        partial(_set_rule, primitive, lambda: batching.fancy_primitive_batchers, batch),
    )


def _register_transpose(primitive: Primitive, transpose: Primitive) -> None:
    ad.deflinear2(primitive, lambda ct, _, **params: (transpose.bind(ct, **params),))


def recompute_in_remat(primitive: Primitive) -> None:
    """Make remat recompute a primitive of one value whatever its policy, and save the operand."""
    try_steps(
        partial(_set_rule, primitive, lambda: pe.partial_eval_jaxpr_custom_rules, _apply_again)
    )


def _apply_again(
    saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, ...]:
    missing = [] if all(instantiated) else list(eqn.invars)
    known = None if any(unknown) else eqn
    return known, eqn, list(unknown), [True], missing


class _Witness(tuple[Any, ...]):
    """Tuple of a jaxpr, which is a new object at each access and so never printed as shared."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return map(_copy_slots, super().__iter__())


def _copy_slots(jaxpr: Any) -> Any:
    """Return a copy of a jaxpr. JAX reads those of each constraint several times."""
    kind = type(jaxpr)
    copied = object.__new__(kind)
    for slot in kind.__slots__:
        if slot != "__weakref__":
            setattr(copied, slot, getattr(jaxpr, slot))
    return copied


@lru_cache(maxsize=1024)
def device_witness(devices: tuple[Device, ...], mesh: Mesh | AbstractMesh | None) -> Any:
    """Return a jaxpr whose only purpose is to contain a sharding of devices or of a mesh.

    `jax.jit` finds the devices of a program, and the mesh on which to name its results, by
    searching all jaxprs for primitives of its own. This jaxpr is a parameter of our equations
    (`witness`) for this search, and never runs.
    """
    if not devices:
        return _Witness()
    if not isinstance(mesh, Mesh):
        everywhere = sharding_impls.GSPMDSharding.get_replicated(device_list(devices))
    else:
        everywhere = JaxNamedSharding(mesh, jax.sharding.PartitionSpec())
    # Unlike a constraint, a call accepts any sharding on explicit axes.
    return _Witness([jax.make_jaxpr(originals.jit(lambda x: x, out_shardings=everywhere))(0.0)])


def _print_sharding(eqn: Any, context: Any, settings: Any) -> Any:
    return core._pp_eqn(eqn, context, settings, params=["sharding"])


def spmd_axis_names(axis_data: AxisData) -> tuple[str, ...]:
    """Return the mesh axes over which `vmap(..., spmd_axis_name=...)` shards its batch."""
    name = axis_data.spmd_name
    if name is None:
        return ()
    return tuple(name) if isinstance(name, tuple | list) else (name,)
