"""`eval_shape`: shapes and shardings of a state, without running the function that makes it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax
from jax.tree_util import GetAttrKey

from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import Literal
from xlashard._jax.tree_definitions import outline
from xlashard.core.pjit.api import pjit
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.shardings.device_assignment import find_spec_mesh
from xlashard.core.pjit.shardings.path_rules import (
    is_path_rules,
    read_path_rules,
    read_sharding,
)
from xlashard.core.pjit.shardings.resolve import fit_sharding
from xlashard.core.pjit.shardings.resources import (
    UNSPECIFIED,
    Auto,
    expand,
    read_resources,
    refuse_from_gda,
    refuse_unconstrained,
)
from xlashard.core.pjit.stages.traced import Traced
from xlashard.core.pjit.trace import Call, TracedCall
from xlashard.core.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    XLACompatibleSharding,
    on_mesh,
)
from xlashard.errors import MeshError, ResourceError
from xlashard.support.lazily import dataclass
from xlashard.support.tracebacks import short_tracebacks


@runtime_checkable
class StatePlan(Protocol):
    """Plan of a program that takes the state, such as an `AutoPlan`."""

    def find_state_shardings(
        self, values: Mapping[str, Any], mesh: Mesh | AbstractMesh | None
    ) -> Mapping[str, XLACompatibleSharding]:
        """Return the shardings of a state by its paths as a result, from a mesh in force."""
        ...


def eval_shape(
    fun: Callable[..., Any], /, *args: Any, shardings: Any = UNSPECIFIED, **kwargs: Any
) -> Any:
    """Return shapes, dtypes and shardings of a result, without running the function.

    Shardings that are not given are derived. Zeros with the paths and shapes of parameters, as
    optimizers have, get those of the parameters; scalars and other constants are replicated. Only
    if a result is left, the function is compiled, with the known shardings as constraints, and the
    partitioner's choice is read. No array of a result is allocated.

    Args:
        fun: A function of pytrees of arrays that makes a state: `model.init`, `optimizer.init`.
        *args: Its arguments, or their `jax.ShapeDtypeStruct`s; those with shardings on a mesh are
            parameters, too.
        shardings: What is known of the result; left out, this is `jax.eval_shape`. Either a
            prefix of the result with the leaves None (replicated), a PartitionSpec, a Sharding or
            `UNSPECIFIED` (derived); or rules, a list of pairs of a regular expression and such a
            leaf, of which the first that `re.search` finds in a path such as
            `result['params']['w']` or, of an argument, `params['w']` holds; or the `AutoPlan` of a
            function that takes the result as an argument, or its parts as its first ones.
        **kwargs: Keyword arguments of the function.

    Returns:
        The tree of `jax.ShapeDtypeStruct`, for `device_put`, `make_array_from_callback`, orbax
        and `preflight`.

    Raises:
        ArgumentError: If a rule matches nothing, or the plan has no argument like the result.
        ResourceError: If a sharding is invalid or does not fit its value.
        MeshError: For a spec, None or a derived sharding without a mesh.

    Example:
        >>> import jax, numpy as np
        >>> import xlashard as xs
        >>> mesh = xs.Mesh(np.array(jax.devices()[:1]), ("model",))
        >>> def init(key):
        ...     params = {"w": jax.random.normal(key, (8, 4))}
        ...     return {"params": params, "momentum": jax.tree.map(jax.numpy.zeros_like, params)}
        >>> rules = [("params", xs.P("model"))]
        >>> with jax.set_mesh(mesh):
        ...     state = xs.eval_shape(init, jax.random.key(0), shardings=rules)
        >>> state["momentum"]["w"].sharding.spec
        P('model',)
    """
    with short_tracebacks:
        if shardings is UNSPECIFIED:
            return jax.eval_shape(fun, *args, **kwargs)
        is_compiled = isinstance(getattr(fun, "_function", None), Function)
        compiled: Any = fun if is_compiled else pjit(fun)
        function = compiled._function
        call = function.trace_values(args, kwargs)
        state = _State.read(function, call, shardings)
        state.replicate_scalars()
        state.mirror_parameters()
        state.mirror_copies()
        state.replicate_constants()
        state.compile_rest()
        known = zip(call.traced.jaxpr.out_avals, state.shardings, strict=True)
        return outline(call.traced.out_tree, [tracing.struct_of(*each) for each in known])


@dataclass(frozen=True, eq=False)
class _State:
    """Result of a function, with the shardings that are known.

    Attributes:
        function: The function.
        call: Its call, traced.
        mesh: The mesh of derived shardings; None without one.
        arguments: Sharding of each argument; None if it has none.
        shardings: Sharding of each result, which `derive` methods complete.
    """

    function: Function
    call: Call
    mesh: Mesh | AbstractMesh | None
    arguments: list[XLACompatibleSharding | None]
    shardings: list[XLACompatibleSharding | None]

    @classmethod
    def read(cls, function: Function, traced_call: TracedCall, requested: Any) -> "_State":
        call = function.read_call(traced_call)
        traced = call.traced
        own = [a.sharding if a.committed else None for a in function.describe_arguments(call)]
        results = dict(zip(traced.result_paths, traced.jaxpr.out_avals, strict=True))
        mesh = find_spec_mesh(call.mesh) or _find_mesh(own)
        if isinstance(requested, StatePlan):
            named = requested.find_state_shardings(results, mesh)
        elif is_path_rules(requested):
            # Rules for the parameters that an optimizer takes say what its state gets.
            values = dict(zip(traced.arg_names, traced.in_avals, strict=True)) | results
            named = read_path_rules(requested, "shardings").find_shardings(values, mesh, "path")
            own = [a or named.get(p) for a, p in zip(own, traced.arg_names, strict=True)]
        else:
            named = _read_prefix(requested, traced, mesh)
        shardings = [named.get(path) for path in results]
        mesh = _find_mesh([*shardings, *own]) or mesh
        return cls(function, call, mesh, own, shardings)

    @property
    def _unknown(self) -> list[int]:
        return [number for number, known in enumerate(self.shardings) if known is None]

    def _replicated(self, number: int) -> NamedSharding:
        if self.mesh is None:
            path = self.call.traced.result_paths[number]
            raise MeshError(
                f"shardings leave that of {path} to be derived, but no mesh is known: call inside "
                "`with jax.set_mesh(mesh):`, or give NamedSharding(mesh, P(...)) for it"
            )
        return NamedSharding(self.mesh, PartitionSpec())

    def replicate_scalars(self) -> None:
        avals = self.call.traced.jaxpr.out_avals
        for number in self._unknown:
            if not avals[number].ndim:
                self.shardings[number] = self._replicated(number)

    def replicate_constants(self) -> None:
        constants = find_constant_results(self.call.traced.jaxpr)
        for number in self._unknown:
            if constants[number]:
                self.shardings[number] = self._replicated(number)

    def mirror_parameters(self) -> None:
        """Give constants the shardings of parameters that have their paths and shapes.

        The containers are compared, not only the leaves: layers of one model resemble each other,
        too. Those of a mirror hold constants alone, and no key that the parameters lack; the
        parameters are arguments, or computed.
        """
        traced = self.call.traced
        constants = find_constant_results(traced.jaxpr)
        results = _key_paths(traced.out_tree)
        arguments = _key_paths(traced.in_tree)
        places = [("argument", *keys) for keys in arguments] + [("result", *k) for k in results]
        avals = [*traced.in_avals, *traced.jaxpr.out_avals]
        computed = [True] * len(arguments) + [not constant for constant in constants]
        known = dict(zip(places, [*self.arguments, *self.shardings], strict=True))
        parameters = _Containers(places, computed)
        shapes = dict(zip(places, [aval.shape for aval in avals], strict=True))
        for number in self._unknown:
            place = "result", *results[number]
            candidates = parameters.find_originals(place) if constants[number] else []
            choices = {known[p] for p in candidates if shapes[p] == shapes[place]} - {None}
            if len(choices) == 1:
                self.shardings[number] = choices.pop()

    def mirror_copies(self) -> None:
        """Give copies of parameters and of arguments, in any dtype, the sharding of these."""
        jaxpr = self.call.traced.jaxpr
        sources = find_copy_sources(jaxpr)
        # A literal can't be hashed, and is no copy of a parameter.
        results = [None if isinstance(v, Literal) else sources.get(v, v) for v in jaxpr.outvars]
        values = [*zip(results, self.shardings, strict=True)]
        # Closed-over tracers come first.
        own = jaxpr.invars[len(self.call.traced.consts) :]
        values += zip(own, self.arguments, strict=True)
        known = {v: sharding for v, sharding in values if not (v is None or sharding is None)}
        for number in self._unknown:
            self.shardings[number] = known.get(results[number])

    def compile_rest(self) -> None:
        """Compile the function with the known shardings, and take the partitioner's for others."""
        unknown = self._unknown
        if not unknown:
            return
        self._replicated(unknown[0])  # raises without a mesh
        pairs = zip(self.arguments, self.call.in_shardings, strict=True)
        ins = tuple([requested if own is None else own for own, requested in pairs])
        mesh = self.mesh if isinstance(self.mesh, Mesh) else self.call.mesh
        request = replace(
            self.call, mesh=mesh, in_shardings=ins, out_shardings=tuple(self.shardings)
        )
        compiled = Traced(self.function, request).lower().compile()
        chosen = request.traced.out_tree.flatten_up_to(compiled.output_shardings)
        avals = request.traced.jaxpr.out_avals
        for number in unknown:
            sharding = chosen[number]
            on_axes = mesh is not None and on_mesh(sharding, mesh, avals[number].ndim)
            self.shardings[number] = on_axes or sharding


def _find_mesh(shardings: Sequence[Any]) -> Mesh | AbstractMesh | None:
    """Return the first mesh that a sharding stands on, one of devices if there is any."""
    named = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    return next((mesh for mesh in named if isinstance(mesh, Mesh)), next(iter(named), None))


def _read_prefix(
    requested: Any, traced: tracing.TracedFunction, mesh: Mesh | AbstractMesh | None
) -> dict[str, XLACompatibleSharding | None]:
    tree = read_resources(requested, "shardings")
    refuse_from_gda(tree)
    refuse_unconstrained(tree)
    mesh = mesh or _find_mesh([leaf.value for leaf in tree.leaves])
    named: dict[str, XLACompatibleSharding | None] = {}
    leaves = expand(tree, traced.out_tree, "result")
    values = zip(traced.result_paths, traced.jaxpr.out_avals, leaves, strict=True)
    for path, aval, resource in values:
        if isinstance(resource.value, Auto):
            raise ResourceError(
                f"shardings of {path} is AUTO, which a search over a whole program chooses: write "
                "UNSPECIFIED to derive it, or pass the plan of xlashard.auto_shard(step, ...)",
                path=path,
            )
        value = "shardings", path, aval
        sharding = read_sharding(resource, mesh, value)
        named[path] = None if sharding is None else fit_sharding(sharding, value, (), None)
    return named


def _key_paths(tree: Any) -> list[tuple[Any, ...]]:
    filled = outline(tree, range(tree.num_leaves))
    return [tuple(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(filled)[0]]


class _Containers:
    """Paths of arrays by their containers: those of a state, and of arguments.

    Args:
        places: Path of each array, as keys.
        computed: For each, False for a constant.
    """

    def __init__(self, places: Sequence[tuple[Any, ...]], computed: Sequence[bool]) -> None:
        self._inside: dict[Any, set[Any]] = defaultdict(set)
        self._computed: set[Any] = set()
        # By the path below a container.
        self._below: dict[Any, list[Any]] = defaultdict(list)
        for place, is_computed in zip(places, computed, strict=True):
            for depth in range(1, len(place) + 1):
                self._inside[place[:depth]].add(place[depth:])
                self._below[place[depth:]].append(place[:depth])
                if is_computed:
                    self._computed.add(place[:depth])

    def find_originals(self, place: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the parameters of which a constant may be the mirror.

        Args:
            place: Path of the constant.
        """
        for depth in range(1, len(place) + 1):
            container, below = place[:depth], place[depth:]
            if container in self._computed:
                continue
            others = [other for other in self._below[below] if other in self._computed]
            originals = [(*o, *below) for o in others if self._is_mirror(container, o)]
            # A single array has no keys to compare: it mirrors a single parameter.
            if originals and (below or len(originals) == 1):
                return originals
        return []

    def _is_mirror(self, container: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        keys, expected = self._inside[container], self._inside[other]
        # A field of an optimizer's state may lack parameters that are masked. Elsewhere it may be
        # a layer that has some arrays of another one.
        return keys == expected or (isinstance(container[-1], GetAttrKey) and keys < expected)


def find_constant_results(jaxpr: Any) -> list[bool]:
    """Return for each result of a jaxpr whether it is made of nothing: `jnp.zeros(shape)`.

    A constant that another operation takes does not count, for the partitioner may shard it as
    that one.

    Args:
        jaxpr: The jaxpr.
    """
    producers = {v: (eqn, number) for eqn in jaxpr.eqns for number, v in enumerate(eqn.outvars)}
    sources = find_copy_sources(jaxpr)
    takers = [eqn for eqn in jaxpr.eqns if sources.keys().isdisjoint(eqn.outvars)]
    used = {v for eqn in takers for v in eqn.invars if not isinstance(v, Literal)}
    inner: dict[int, list[bool]] = {}

    def is_constant(variable: Any) -> bool:
        if isinstance(variable, Literal):
            return True
        variable = sources.get(variable, variable)
        if variable in used or variable not in producers:
            return False
        eqn, number = producers[variable]
        if all(isinstance(v, Literal) for v in eqn.invars):
            return True
        body = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
        if body is None:
            return False
        if id(eqn) not in inner:
            inner[id(eqn)] = find_constant_results(body)
        return inner[id(eqn)][number]

    return [is_constant(variable) for variable in jaxpr.outvars]


_CALLS = ("jit", "pjit")
_COPIES = ("copy", "copy_p", "convert_element_type", "reduce_precision")


def find_copy_sources(jaxpr: Any) -> dict[Any, Any]:
    """Return the variables of a jaxpr that are copies of others, by variable.

    Args:
        jaxpr: The jaxpr.
    """
    sources: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _COPIES and not isinstance(eqn.invars[0], Literal):
            (source,), (copied,) = eqn.invars, eqn.outvars
            sources[copied] = sources.get(source, source)
    return sources
