"""Trace Python functions to jaxprs, and read types and shardings of values."""

import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.private import (
    api_util,
    core,
    find_name,
    jax_dispatch,
    jax_pjit,
    mesh_lib,
    original_value,
    pe,
    sharding_impls,
    util,
)
from xlashard._jax.runtime.global_state import cached_by_jaxpr
from xlashard._jax.runtime.shardings import AbstractMesh, JaxSharding, Mesh, UnspecifiedValue
from xlashard._jax.tree_definitions import in_default_registry

type Jaxpr = Any
type TreeDef = Any

if TYPE_CHECKING:
    Tracer = core.Tracer
else:
    Tracer = jax.core.Tracer


def escaped_tracer_error(tracer: Tracer, detail: str | None = None) -> Exception:
    """Return JAX's error for a tracer that is used after its trace."""
    return core.escaped_tracer_error(tracer, detail)


class TracedFunction(NamedTuple):
    """A function after tracing.

    Attributes:
        jaxpr: Its closed jaxpr.
        consts: The closed-over tracers; they precede the arguments.
        is_new: True the first time, False for a cached trace.
        name: The function's name.
        in_avals: The abstract values of its dynamic arguments.
        in_tree: The tree of `(args, kwargs)` without static arguments.
        out_tree: The tree of its result.
        arg_names: A path for each dynamic argument (`state['params']['w']`).
        result_paths: A path for each result.
        shared: What calls with the same trace have in common, by what it depends on. It lives as
            long as the jaxpr, and so must not refer to it.
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    is_new: bool
    name: str
    in_avals: tuple[Any, ...]
    in_tree: TreeDef
    out_tree: TreeDef
    arg_names: tuple[str, ...]
    result_paths: tuple[str, ...]
    shared: dict[Any, Any]


@lru_cache(maxsize=1)
def _default_options() -> Any:
    """Return the default options of `jax.jit`; JAX's caches compare them by identity."""
    return originals.jit(lambda: None)._jit_info  # pyright: ignore[reportFunctionMemberAccess]


@lru_cache(maxsize=1)
def _find_inference() -> Callable[..., Any]:
    """Return JAX's function that traces, or finds a trace, and returns the parameters of a call.

    It is not the one that `watch_misses` observes: pjit-ed functions have their own log.
    """
    return original_value(jax_pjit, "_infer_params")


# Tracers of one function share its jaxprs, which JAX caches by function.
_traced: weakref.WeakSet[Jaxpr] = weakref.WeakSet()
_traced_lock = threading.Lock()


class AlikeCalls:
    """Calls under a trace with the same tree and types, under the same settings and meshes.

    Attributes:
        shared: What the first of them found out for the next; None before.
    """

    __slots__ = ("shared",)

    def __init__(self, *_: Any) -> None:
        self.shared: Any = None


@lru_cache(maxsize=1)
def _find_alike_calls() -> Any:
    """Return the cache of `AlikeCalls` by tracer, trace context and what else they depend on."""
    return util.weakref_lru_cache(AlikeCalls)


def refer_weakly(fun: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that returns `fun`, without a reference where its class has weak ones."""
    try:
        return weakref.ref(fun)
    except TypeError:
        return lambda: fun


class FunctionTracer:
    """Tracer of one function, with a cache that lives as long as the function.

    It does not keep the function alive.

    Args:
        fun: The function.
        signature: Its signature; None for a function without one.
        static_argnums: Positions of static arguments, none of them negative.
        static_argnames: Names of static arguments.

    Attributes:
        static_argnums: Positions of static arguments.
        static_argnames: Names of static arguments.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        signature: inspect.Signature | None,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
    ) -> None:
        self._find_function = refer_weakly(fun)
        self.static_argnums = static_argnums
        self.static_argnames = static_argnames
        self._info = _default_options()._replace(
            fun_sourceinfo=api_util.fun_sourceinfo(fun),
            fun_signature=signature,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
        # What the last call of each jaxpr has in common with the next one.
        self._jaxprs: weakref.WeakKeyDictionary[Jaxpr, tuple[TreeDef, Any]]
        self._jaxprs = weakref.WeakKeyDictionary()

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh | None, tree: TreeDef
    ) -> TracedFunction:
        """Trace the function for a call's arguments, under a mesh.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            mesh: The mesh, or None.
            tree: The tree of `(args, kwargs)`; of another form with static arguments.
        """
        with use_mesh(mesh):
            params, _ = _find_inference()(self._find_function(), self._info, args, kwargs)
        jaxpr, is_new = params.params["jaxpr"], False
        known = self._jaxprs.get(jaxpr)
        if known is None or known[0] != params.in_tree:
            if self.static_argnums or self.static_argnames:
                tree = in_default_registry(params.in_tree)
            known = params.in_tree, _read_params(params, tree)
            with _traced_lock:
                is_new = jaxpr not in _traced
                _traced.add(jaxpr)
                self._jaxprs[jaxpr] = known
        return TracedFunction(jaxpr, tuple(params.consts), is_new, *known[1])

    def find_alike(self, values: Sequence[Any], tree: TreeDef, *rest: Any) -> AlikeCalls | None:
        """Return the calls under a trace that are like one; None if they are not kept together.

        Args:
            values: The leaves of the call's arguments: arrays and tracers.
            tree: Their tree.
            rest: What else they depend on.
        """
        if self.static_argnums or self.static_argnames:
            return None
        legacy, concrete = mesh_lib.thread_resources.env.physical_mesh, mesh_lib.get_concrete_mesh()
        try:
            avals = tuple([core.shaped_abstractify(value) for value in values])
            if not all([type(aval) is jax.core.ShapedArray for aval in avals]):
                return None  # JAX compares references
            return _find_alike_calls()(self, tree, avals, legacy, concrete, rest)
        except TypeError:  # an unknown class, or data of a node without a hash
            return None

    def forget(self) -> list[Jaxpr]:
        """Empty the cache, and return its jaxprs."""
        _find_alike_calls().evict_weakref(self)
        with _traced_lock:
            jaxprs = list(self._jaxprs)
            self._jaxprs.clear()
        if isinstance(self._find_function, weakref.ref):  # others can't be in JAX's cache
            pe.trace_to_jaxpr.evict_weakref(self._find_function())
        jax_pjit._infer_params_cached.cache_clear()
        return jaxprs


def _read_params(params: Any, in_tree: TreeDef) -> tuple[Any, ...]:
    """Return the last fields of a `TracedFunction`, which its jaxpr and its tree determine."""
    jaxpr = params.params["jaxpr"]
    return (
        params.params["name"],
        tuple(params.in_avals),
        in_tree,
        in_default_registry(params.out_tree),
        tuple(params.arg_names),
        tuple(jaxpr.debug_info.safe_result_paths(len(jaxpr.outvars))),
        {},
    )


def use_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Set the mesh of the traced function, as `jax.set_mesh` does.

    An abstract mesh in force, with axes that `shard_map` has made manual, stays.
    """
    if mesh is None:
        return nullcontext()
    stack = ExitStack()
    if jax.sharding.get_abstract_mesh().empty:
        stack.enter_context(sharding_impls._internal_use_concrete_mesh(mesh))
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
    return stack


NO_MESH = Mesh(np.empty((), dtype=object), ())
"""The mesh of JAX's equations and of its state where none is in force."""


@contextmanager
def no_mesh_in_force() -> Iterator[None]:
    """Leave the mesh in force, to run programs on single devices."""
    with (
        sharding_impls._internal_use_concrete_mesh(NO_MESH),
        jax.sharding.use_abstract_mesh(NO_MESH.abstract_mesh),
    ):
        yield


def mesh_in_force() -> Mesh | None:
    """Return the mesh in force, of `with mesh:` or of `jax.set_mesh`."""
    legacy = mesh_lib.thread_resources.env.physical_mesh
    if not legacy.empty:
        return legacy
    concrete = mesh_lib.get_concrete_mesh()
    return None if concrete is None or concrete.empty else concrete


def platforms_in_force() -> tuple[str] | None:
    """Return the platform that the abstract mesh in force names; None without one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else (device.platform,)


def manual_axes() -> frozenset[str]:
    """Return the manual mesh axes of an enclosing `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset() if mesh.empty else frozenset(mesh.manual_axes)


def is_top_level() -> bool:
    """Return True outside of all transformations and traces."""
    return core.trace_state_clean()


def is_staging() -> bool:
    """Return True where bound primitives become part of a jaxpr, behind any transformations."""
    trace = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_batch_sharded() -> bool:
    """Return True inside of a `vmap` that shards its batch over mesh axes (`spmd_axis_name`)."""
    trace = core.trace_ctx.trace
    while trace is not None:
        if getattr(getattr(trace, "axis_data", None), "spmd_name", None) is not None:
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def value_behind(value: Any, until: type | tuple[()] = ()) -> Any:
    """Return the concrete value behind a tracer of `vmap` and of derivatives.

    The result is a tracer if the value is abstract.

    Args:
        value: The value.
        until: A class of tracers to stop at.
    """
    while isinstance(value, Tracer) and not isinstance(value, until):
        behind = getattr(value, "val", None)
        behind = getattr(value, "primal", None) if behind is None else behind
        if behind is None:
            break
        value = behind
    return value


def abstractify(value: object) -> Any:
    """Return the abstract value of an argument; raises `TypeError` for an unsupported type."""
    return core.shaped_abstractify(value)


def struct_of(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return the type of a value with a sharding; None leaves it unspecified."""
    rest: dict[str, Any] = {"weak_type": bool(getattr(aval, "weak_type", False))}
    space = getattr(aval, "memory_space", None)
    if space not in (None, jax.memory.Space.Device):
        # JAX reads it from named shardings alone.
        rest["_memory_space"] = space
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, **rest)


def typed_axes(aval: Any) -> tuple[tuple[str, ...], ...]:
    """Return for each dimension of a value the explicit mesh axes that its type shards it over.

    The tuple is empty without a mesh in the type, or with automatic axes only.
    """
    sharding = aval.sharding
    explicit, spec = set(sharding.mesh.explicit_axes), sharding.spec
    if not explicit:
        return ()
    return tuple(
        tuple(a for a in entry_axes(entry) if a in explicit)
        for entry in (*spec.partitions, *(None,) * (aval.ndim - len(spec.partitions)))
    )


def mesh_of_type(aval: Any) -> AbstractMesh | None:
    """Return the mesh in the type of a value; None without a mesh, or inside `shard_map`."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or sharding.mesh._any_axis_manual:
        return None
    return sharding.mesh


@lru_cache(maxsize=4096)
def sharding_of_type(aval: Any) -> tuple[AbstractMesh, Any] | None:
    """Return the mesh and the spec that the type of a value prescribes; None where it does not.

    A type prescribes a sharding on explicit axes. Automatic axes may shard the dimensions that the
    type leaves replicated.
    """
    mesh = mesh_of_type(aval)
    if mesh is None or not mesh._any_axis_explicit:
        return None
    spec = aval.sharding.spec
    if mesh._any_axis_auto:
        dims = (spec.UNCONSTRAINED if d is None else d for d in spec.partitions)
        spec = spec.update(partitions=tuple(dims))
    return mesh, spec


def leaves_explicit_mesh(aval: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Return True for a constraint on automatic axes that are not those of a value's type."""
    before = aval.sharding.mesh
    if before.empty or not before._any_axis_explicit or before.manual_axes:
        return False
    axes = before.axis_names, before.axis_sizes
    return mesh.are_all_axes_auto and axes != (mesh.axis_names, mesh.axis_sizes)


def with_auto_mesh(aval: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the type of a value that a constraint puts on a mesh, if all its axes are automatic.

    A type with explicit axes of the same mesh is returned unchanged.
    """
    before = aval.sharding.mesh
    if leaves_explicit_mesh(aval, mesh):
        whole = jax.sharding.PartitionSpec(*[None] * aval.ndim)
        return aval.update(sharding=jax.sharding.NamedSharding(mesh.abstract_mesh, whole))
    if not mesh.are_all_axes_auto or not (before.empty or before.are_all_axes_auto):
        return aval
    return aval.update(sharding=aval.sharding.update(mesh=mesh.abstract_mesh))


def with_sharding_in_type(aval: Any, sharding: Any) -> Any:
    """Return the type of a value under a sharding, whose mesh and explicit axes it contains."""
    if aval is core.abstract_token or not isinstance(sharding, jax.sharding.NamedSharding):
        return aval
    return core.update_aval_with_sharding(aval, sharding)


def explicit_sharding(aval: Any) -> JaxSharding | None:
    """Return the sharding in the type of a value, if all axes of its mesh are explicit."""
    mesh = mesh_of_type(aval)
    return None if mesh is None or not mesh.are_all_axes_explicit else aval.sharding


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a partition spec, major to minor."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple) else ()


def moved_to_memory(value: Any, kind: str | None) -> Any:
    """Return a traced value in another memory; its gradient is transferred back."""
    space = core.mem_kind_to_space(kind)
    return originals.device_put(value, space, src=jax.typeof(value).memory_space)


def physical_aval(aval: Any) -> Any:
    """Return the aval of the buffers of a value: integers for keys."""
    return core.physical_aval(aval)


def is_token(aval: Any) -> bool:
    """Return True for the abstract value of a token (`jax.lax.create_token`)."""
    return aval is core.abstract_token


def shaped(aval: Any) -> Any:
    """Return the shape and dtype of the arrays behind a token; another aval unchanged."""
    return core.get_token_aval() if is_token(aval) else aval


def has_tokens(avals: Iterable[Any]) -> bool:
    """Return True if one of the abstract values is that of a token."""
    return any([aval is core.abstract_token for aval in avals])


def all_shaped(avals: Iterable[Any]) -> list[Any]:
    """Return `shaped` of each abstract value."""
    return [core.get_token_aval() if aval is core.abstract_token else aval for aval in avals]


def is_extended(aval: Any) -> bool:
    """Return True for values whose buffers have another shape (PRNG keys)."""
    return not is_token(aval) and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def element_bits(aval: Any) -> int:
    """Return the bits of an element in a buffer, which are less than 8 where it packs elements.

    An element of an array of PRNG keys has those of its integers.
    """
    if is_extended(aval):
        physical = physical_aval(aval)
        return math.prod(physical.shape[len(aval.shape) :]) * element_bits(physical)
    # The buffer of a gradient of integers holds booleans.
    return 8 if aval.dtype == jax.dtypes.float0 else jax.dtypes.itemsize_bits(aval.dtype)


def count_bytes(aval: Any, shape: Sequence[int] | None = None) -> int:
    """Return the bytes of the buffer of a value, or of a part of it.

    Args:
        aval: The abstract value.
        shape: The shape of the part; None for the whole value.
    """
    return -(-math.prod(aval.shape if shape is None else shape) * element_bits(aval) // 8)


@cached_by_jaxpr
def inner_shardings(jaxpr: Jaxpr) -> tuple[JaxSharding, ...]:
    """Return the distinct concrete shardings of JAX's primitives inside a jaxpr."""
    shardings = dict.fromkeys(named_shardings(jaxpr))
    for eqn, called, _ in sharding_equations(jaxpr):
        # A slice is a plain tuple: iterating over a witness copies its jaxprs, which no cache has.
        for inner in eqn.params.get("witness", called)[:]:
            shardings |= dict.fromkeys(inner_shardings(inner))
    return tuple(shardings)


def named_shardings(jaxpr: Jaxpr) -> list[JaxSharding]:
    """Return the concrete shardings that equations of JAX with shardings name."""
    bodies = _jaxpr_types()
    named = [
        # The callers walk bodies by themselves.
        eqn.replace(params={k: v for k, v in eqn.params.items() if not isinstance(v, bodies)})
        for eqn, _, names_sharding in sharding_equations(jaxpr)
        if names_sharding
    ]
    if not named:
        return []
    named = replace_fields(jaxpr, eqns=named)
    # By identity first: the list has one entry for each equation, however deep.
    shardings = {id(s): s for s, _ in jax_dispatch.get_intermediate_shardings(named)}
    return [s for s in shardings.values() if isinstance(s, JaxSharding)]


def abstract_meshes_in(jaxpr: Jaxpr) -> list[Any]:
    """Return the meshes that constraints, `shard_map` and types inside a jaxpr name."""
    meshes: dict[Any, None] = {}
    for eqn in equations(jaxpr):
        named = [eqn.params.get("mesh"), getattr(eqn.params.get("sharding"), "mesh", None)]
        for mesh in named:
            if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh) and not mesh.empty:
                meshes[mesh] = None
    return list(meshes)


def needs_devices(jaxpr: Jaxpr) -> bool:
    """Return True if the lowering of a primitive inside depends on the devices."""
    needing = jax_dispatch.prim_requires_devices_during_lowering
    return not inner_primitives(jaxpr).isdisjoint(needing)


def source_of(jaxpr: Jaxpr) -> str:
    """Return name and location of the traced function, such as `train_step at train.py:41`.

    The location is left out for functions that Python code did not define.
    """
    return jaxpr.debug_info.func_src_info


@cached_by_jaxpr
def sharding_equations(jaxpr: Jaxpr) -> tuple[tuple[Any, Sequence[Jaxpr], bool], ...]:
    """Return the equations of a jaxpr whose parameters contain a sharding or a jaxpr.

    Most equations contain neither, so that a search for constraints or inner jaxprs looks at these.

    Returns:
        For each the equation, the jaxprs that it runs, and True if it is one of JAX whose
        parameters may name a sharding. The jaxpr of a constraint of this package, its `witness`,
        only names devices.
    """
    holders, plain, carriers = [], _plain_types(), (*_jaxpr_types(), JaxSharding)
    for eqn in jaxpr.eqns:
        params = eqn.params
        if plain.issuperset(map(type, params.values())):
            continue
        if "witness" in params:
            holders.append((eqn, (), False))
        elif params.keys() >= {"donation", "jaxpr"}:  # our call, whose body has its shardings
            holders.append((eqn, (params["jaxpr"],), False))
        elif members := _list_members(params, carriers):
            called = [member for member in members if not isinstance(member, JaxSharding)]
            names_sharding = len(called) < len(members) or "mesh" in params
            holders.append((eqn, called, names_sharding))
    return tuple(holders)


@cached_by_jaxpr
def inner_sharding_equations(jaxpr: Jaxpr) -> tuple[Any, ...]:
    """Return the equations of `sharding_equations`, and those of all jaxprs inside, in order."""
    eqns = []
    for eqn, called, _ in sharding_equations(jaxpr):
        eqns.append(eqn)
        for inner in called:
            eqns += inner_sharding_equations(inner)
    return tuple(eqns)


@cached_by_jaxpr
def inner_primitives(jaxpr: Jaxpr) -> "frozenset[core.Primitive]":
    """Return the primitives of the equations of a jaxpr and of all jaxprs inside it."""
    primitives = {eqn.primitive for eqn in jaxpr.eqns}
    for _, called, _ in sharding_equations(jaxpr):
        primitives.update(*map(inner_primitives, called))
    return frozenset(primitives)


@lru_cache(maxsize=1)
def _jaxpr_types() -> tuple[type, ...]:
    # JAX 0.10 keeps the closed-over values of a jaxpr in an object around it.
    return core.Jaxpr, find_name(core, "ClosedJaxpr") or core.Jaxpr


def is_jaxpr(value: object) -> bool:
    """Return True for a jaxpr, closed or not."""
    return isinstance(value, _jaxpr_types())


def replace_fields(jaxpr: Jaxpr, **fields: Any) -> Jaxpr:
    """Return a jaxpr with other fields, as `dataclasses.replace` does."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner is jaxpr:
        return jaxpr.replace(**fields)
    consts = fields.pop("consts", jaxpr.consts)
    return jaxpr.replace(jaxpr=inner.replace(**fields), consts=consts)


@lru_cache(maxsize=1)
def _plain_types() -> frozenset[type]:
    """Return the types of most parameters, which are checked before isinstance is."""
    return frozenset({type(None), bool, int, float, str, UnspecifiedValue})


def bodies(eqn: Any) -> list[Jaxpr]:
    """Return the jaxprs among the parameters of an equation."""
    return _list_members(eqn.params, _jaxpr_types())


def _list_members(params: dict[str, Any], types: tuple[type, ...]) -> list[Any]:
    """Return what parameters of an equation, or tuples among them, have of some types."""
    members = []
    for value in params.values():
        if isinstance(value, types):
            members.append(value)
        elif isinstance(value, tuple) and not _plain_types().issuperset(map(type, value)):
            members += [member for member in value if isinstance(member, types)]
    return members


def equations(jaxpr: Jaxpr) -> list[Any]:
    """Return the equations of a jaxpr and of all jaxprs inside it."""
    return [eqn for inner in with_inner_jaxprs(jaxpr) for eqn in inner.eqns]


def with_inner_jaxprs(jaxpr: Jaxpr) -> list[Jaxpr]:
    """Return a jaxpr and all jaxprs inside it, each once, except those that only name devices."""
    jaxprs: dict[int, Jaxpr] = {}
    waiting = [jaxpr]
    while waiting:
        inner = waiting.pop()
        if id(inner) not in jaxprs:
            jaxprs[id(inner)] = inner
            eqns = reversed(sharding_equations(inner))
            waiting += [body for _, called, _ in eqns for body in called]
    return list(jaxprs.values())
