"""From a Python function to its jaxpr, and what may be read off one."""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import jax
from jax._src import api_util, core, dispatch, dtypes, sharding_impls, source_info_util
from jax._src import mesh as mesh_lib
from jax._src import pjit as jax_pjit
from jax._src.interpreters import partial_eval as pe

from xlashard._jax.runtime.shardings import AbstractMesh, JaxSharding, Mesh
from xlashard.lazily import dataclass

type Jaxpr = Any
type TreeDef = Any

Tracer = core.Tracer
escaped_tracer_error = core.escaped_tracer_error


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A function after tracing.

    Attributes:
        name: The function's name.
        jaxpr: Its closed jaxpr.
        in_avals: The abstract values of its dynamic arguments.
        in_tree: The tree of `(args, kwargs)`, static ones taken out.
        out_tree: The tree of its result.
        arg_names: A path for each dynamic argument (`state['params']['w']`).
        result_paths: A path for each result.
        consts: Tracers that it closes over; they go in front of the arguments.
        is_new: True the first time, False where it was remembered.
    """

    name: str
    jaxpr: Jaxpr
    in_avals: tuple[Any, ...]
    in_tree: TreeDef
    out_tree: TreeDef
    arg_names: tuple[str, ...]
    result_paths: tuple[str, ...]
    consts: tuple[Any, ...]
    is_new: bool


# Options of jax.jit at their defaults; an instance serves as key of JAX's caches by its identity.
_NO_OPTIONS = jax.jit(lambda: None)._jit_info  # pyright: ignore[reportFunctionMemberAccess]

# Functions of several tracers share what was traced: JAX remembers it by the function alone.
_traced: weakref.WeakSet[Jaxpr] = weakref.WeakSet()
_traced_lock = threading.Lock()


class FunctionTracer:
    """Traces one function, and remembers what it has traced while the function lives.

    Args:
        fun: The function.
        signature: Its signature; None for a function without one.
        static_argnums: Positions of static arguments, none of them negative.
        static_argnames: Names of static arguments.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        signature: inspect.Signature | None,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
    ) -> None:
        self._fun = fun
        self._info = _NO_OPTIONS._replace(
            fun_sourceinfo=api_util.fun_sourceinfo(fun),
            fun_signature=signature,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
        self._jaxprs: weakref.WeakSet[Jaxpr] = weakref.WeakSet()

    @property
    def static_argnums(self) -> tuple[int, ...]:
        """Positions of static arguments."""
        return self._info.static_argnums

    @property
    def static_argnames(self) -> tuple[str, ...]:
        """Names of static arguments."""
        return self._info.static_argnames

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh | None
    ) -> TracedFunction:
        """Traces for the shapes of a call's arguments, under a mesh."""
        with use_mesh(mesh):
            params, _ = jax_pjit._infer_params(self._fun, self._info, args, kwargs)
        jaxpr = params.params["jaxpr"]
        debug = jaxpr.debug_info
        with _traced_lock:
            is_new = jaxpr not in _traced
            _traced.add(jaxpr)
            self._jaxprs.add(jaxpr)
        return TracedFunction(
            name=params.params["name"],
            jaxpr=jaxpr,
            in_avals=tuple(params.in_avals),
            in_tree=_in_default_registry(params.in_tree),
            out_tree=_in_default_registry(params.out_tree),
            arg_names=tuple(params.arg_names),
            result_paths=tuple(debug.safe_result_paths(len(jaxpr.out_avals))),
            consts=tuple(params.consts),
            is_new=is_new,
        )

    def forget(self) -> list[Jaxpr]:
        """Drops what was traced, and says what that was."""
        with _traced_lock:
            jaxprs = list(self._jaxprs)
            self._jaxprs.clear()
        pe.trace_to_jaxpr.evict_weakref(self._fun)
        jax_pjit._infer_params_cached.cache_clear()
        return jaxprs


def _in_default_registry(tree: TreeDef) -> TreeDef:
    """The same tree as `jax.tree_util` makes it: JAX traces by a registry of its own."""
    return jax.tree_util.tree_structure(tree.unflatten([0] * tree.num_leaves))


def use_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Lets the traced function see a mesh, as `jax.set_mesh` would.

    Where JAX says already which axes there are, and which of them `shard_map` deals out by hand,
    that stays.
    """
    if mesh is None:
        return nullcontext()
    stack = ExitStack()
    if mesh_lib.get_abstract_mesh().empty:
        stack.enter_context(sharding_impls._internal_use_concrete_mesh(mesh))
        stack.enter_context(mesh_lib.use_abstract_mesh(mesh.abstract_mesh))
    return stack


def mesh_in_force() -> Mesh | None:
    """The mesh of `with mesh:` or of `jax.set_mesh`, whichever is in force here."""
    legacy = mesh_lib.thread_resources.env.physical_mesh
    if not legacy.empty:
        return legacy
    concrete = mesh_lib.get_concrete_mesh()
    return None if concrete is None or concrete.empty else concrete


def manual_axes() -> frozenset[str]:
    """The mesh axes over which a `shard_map` around here runs by hand."""
    mesh = mesh_lib.get_abstract_mesh()
    return frozenset() if mesh.empty else frozenset(mesh.manual_axes)


def is_top_level() -> bool:
    """True where no transformation and no trace is under way."""
    return core.trace_state_clean()


def is_staging() -> bool:
    """True where what is bound becomes a part of a jaxpr, behind whatever transformations."""
    return _staging_trace() is not None


def staged(value: Any) -> Tracer:
    """Return the tracer of a value in the jaxpr under way; a tracer is returned unchanged.

    Requires `is_staging()`.
    """
    if isinstance(value, Tracer):
        return value
    trace = _staging_trace()
    return trace.to_jaxpr_tracer(dtypes.canonicalize_value(value), source_info_util.current())


def _staging_trace() -> Any:
    """The trace that makes a jaxpr, behind those of transformations; None outside of any."""
    trace = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace


def value_behind(value: Any) -> Any:
    """The concrete value that a tracer of `vmap` and of derivatives stands for.

    A tracer comes back for one of which nothing is known but its type.
    """
    while isinstance(value, Tracer):
        behind = getattr(value, "val", None)
        behind = getattr(value, "primal", None) if behind is None else behind
        if behind is None:
            break
        value = behind
    return value


def abstractify(value: object) -> Any:
    """The abstract value of an argument.

    Raises:
        TypeError: If it is nothing that JAX computes with.
    """
    return core.shaped_abstractify(value)


def typed_axes(aval: Any) -> tuple[tuple[str, ...], ...]:
    """For each dimension of a value the explicit mesh axes that its type cuts it along.

    Empty where its type says nothing of a mesh, or only of automatic axes.
    """
    sharding = aval.sharding
    explicit, spec = set(sharding.mesh.explicit_axes), sharding.spec
    if not explicit:
        return ()
    return tuple(
        tuple(a for a in _as_tuple(entry) if a in explicit)
        for entry in (*spec.partitions, *(None,) * (aval.ndim - len(spec.partitions)))
    )


def mesh_of_type(aval: Any) -> AbstractMesh | None:
    """Return the mesh in the type of a value; None where there is none, or `shard_map` has axes."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or sharding.mesh._any_axis_manual:
        return None
    return sharding.mesh


def sharding_of_type(aval: Any) -> tuple[AbstractMesh, Any] | None:
    """Return the mesh and the spec that the type of a value prescribes; None where it does not.

    A type prescribes a sharding on explicit axes. Next to them, automatic axes may cut the
    dimensions that it leaves uncut.
    """
    mesh = mesh_of_type(aval)
    if mesh is None or not mesh._any_axis_explicit:
        return None
    spec = aval.sharding.spec
    if mesh._any_axis_auto:
        dims = (spec.UNCONSTRAINED if d is None else d for d in spec.partitions)
        spec = spec.update(partitions=tuple(dims))
    return mesh, spec


def with_auto_mesh(aval: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the type of a value that a constraint puts on a mesh, if all its axes are automatic.

    A type that has other axes stays as it is.
    """
    before = aval.sharding.mesh
    if not mesh.are_all_axes_auto or not (before.empty or before.are_all_axes_auto):
        return aval
    return aval.update(sharding=aval.sharding.update(mesh=mesh.abstract_mesh))


def explicit_sharding(aval: Any) -> JaxSharding | None:
    """Return the sharding in the type of a value, if all axes of its mesh are explicit."""
    mesh = mesh_of_type(aval)
    return None if mesh is None or not mesh.are_all_axes_explicit else aval.sharding


def _as_tuple(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def moved_to_memory(value: Any, kind: str | None) -> Any:
    """A traced value in another memory; its gradient comes back from there."""
    space = core.mem_kind_to_space(kind)
    return jax.device_put(value, space, src=core.typeof(value).memory_space)


def physical_aval(aval: Any) -> Any:
    """The aval of the buffers behind an aval: keys become the integers that hold them."""
    return core.physical_aval(aval)


def is_token(aval: Any) -> bool:
    """Return True for the abstract value of a token (`jax.lax.create_token`)."""
    return aval is core.abstract_token


def shaped(aval: Any) -> Any:
    """Return the shape and dtype of the arrays behind a token; another aval unchanged."""
    return core.get_token_aval() if aval is core.abstract_token else aval


def is_extended(aval: Any) -> bool:
    """True for values whose buffers have another shape than they (PRNG keys)."""
    if aval is core.abstract_token:
        return False
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def inner_shardings(jaxpr: Jaxpr) -> list[JaxSharding]:
    """Return the concrete shardings that JAX's own primitives inside a jaxpr carry, each once."""
    # By identity first: the list has one entry for each equation, however deep.
    found = {id(s): s for s, _ in dispatch.get_intermediate_shardings(jaxpr)}
    return list(dict.fromkeys(s for s in found.values() if isinstance(s, JaxSharding)))


def needs_devices(jaxpr: Jaxpr) -> bool:
    """True if a primitive inside can't be lowered without knowing the devices."""
    return dispatch.jaxpr_has_prim_requiring_devices(jaxpr)


def source_of(jaxpr: Jaxpr) -> str:
    """Where the function stands that a jaxpr, or what it was transformed from, was traced of.

    `train_step at train.py:41`; without the place for what Python code did not define.
    """
    return jaxpr.debug_info.func_src_info


def with_equations(jaxpr: Jaxpr, equations: Sequence[Any]) -> Jaxpr:
    """Return the jaxpr with some of its equations."""
    return jaxpr.replace(eqns=list(equations))


def may_name_shardings(eqn: Any) -> bool:
    """Return whether a parameter of an equation is a sharding or a jaxpr, or a tuple of such."""
    for value in eqn.params.values():
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is tuple:
            if not _PLAIN.issuperset(map(type, value)) and any(
                [isinstance(member, _CARRIERS) for member in value]
            ):
                return True
        elif isinstance(value, _CARRIERS):
            return True
    return False


_CARRIERS = (core.Jaxpr, JaxSharding)
# Types of most parameters; to look a type up takes less time than isinstance.
_PLAIN = frozenset({type(None), bool, int, float, str})


def bodies(eqn: Any) -> Iterator[Jaxpr]:
    """Return the jaxprs among the parameters of an equation."""
    return core.jaxprs_in_params(eqn.params)


def equations(jaxpr: Jaxpr) -> list[Any]:
    """The equations of a jaxpr and of all jaxprs inside it."""
    found = list(jaxpr.eqns)
    for inner in core.subjaxprs(jaxpr):
        found.extend(equations(inner))
    return found
