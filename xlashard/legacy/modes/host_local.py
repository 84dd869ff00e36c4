"""Calls and stages with host-local arguments and results, where the mesh spans processes.

Arguments become global arrays, the program runs on them, and its results become host-local again.
Shards that are placed as their resource specifies are neither copied nor moved.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any

import jax

from xlashard._jax.runtime.transfer import assemble, split
from xlashard._jax.stablehlo_modules import to_text
from xlashard._jax.stablehlo_parse import to_mhlo
from xlashard._jax.trace.tracing import abstractify, struct_of
from xlashard._jax.tree_definitions import leaf_paths
from xlashard.core.array import Array, device_put
from xlashard.core.array.array_class.handles import is_key_array, key_handle, keys_over, wrap_result
from xlashard.core.array.device_buffers import make_array_from_single_device_arrays
from xlashard.core.array.placement.target import resolve_sharding
from xlashard.core.pjit.callables import make_dispatcher
from xlashard.core.pjit.shardings.resolve import to_sharding
from xlashard.core.pjit.shardings.resources import Auto, FromGda, Resource, expand
from xlashard.core.pjit.stages import compiled
from xlashard.core.pjit.stages import traced as stages
from xlashard.core.pjit.trace import Call
from xlashard.core.sharding import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    PartitionSpec,
    partition_spec,
)
from xlashard.errors import BoxError, ResourceError, XlashardError
from xlashard.legacy.historic_errors import KeywordArgumentError
from xlashard.legacy.modes.mode_function import ModeFunction, host_local_class, is_global
from xlashard.pods.multihost.host_local_arrays import error_at
from xlashard.pods.multihost.host_mesh import HostMesh, as_global, as_host_local, host_mesh
from xlashard.support.tracebacks import shortened

_REPLICATED = PartitionSpec()


class HostLocal:
    """Conversion between host-local and global arrays, for one function and mesh.

    Args:
        function: The function, with `jax_array` off.
        mesh: The mesh in force, which spans processes.

    Attributes:
        returns_host_local: True if results are host-local.
    """

    def __init__(self, function: ModeFunction, mesh: Mesh) -> None:
        self._function = function
        self._mesh = mesh
        self.returns_host_local = function.mode.returns_host_local
        arguments, results = function.options.in_resources, function.options.out_resources
        of_arguments = partial(function.parameters.expand_in, arguments)
        of_results = partial(expand, results, name="result")
        self._in_specs = lru_cache(256)(partial(self._specs, of_arguments, arguments.what))
        self._out_specs = lru_cache(256)(partial(self._specs, of_results, results.what))
        # A call with global arrays may look like one with host-local arrays, whose result differs.
        self._run = make_dispatcher(function, function.calls.beside())

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """Call the function with host-local arguments and results."""
        return self.lower(self._run(*self.lift(args)))

    def changes(self, args: tuple[Any, ...]) -> bool:
        """Return True if a result or one of these arguments is host-local.

        Replicated, uncommitted values are passed to the program unchanged.
        """
        if self.returns_host_local:
            return True
        values, specs = self._with_specs(self._dynamic(args))
        return not all(map(_goes_as_it_is, values, specs))

    def lift(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call as global arrays."""
        return self._with_static(args, self.lift_dynamic(self._dynamic(args)))

    def lift_types(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call as types of global arrays."""
        return self._with_static(args, self._mapped(self._dynamic(args), self._lifted_type))

    def lift_dynamic(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the non-static arguments as global arrays."""
        return self._mapped(args, self._lifted)

    def lower(self, result: Any) -> Any:
        """Return a result as host-local arrays, unless results are global."""
        try:
            return self._mapped_result(result, self._lowered)
        except BoxError as error:
            # no-catalogue: needs several processes
            raise BoxError(_block_text("a result", error)) from None

    def lower_types(self, result: Any) -> Any:
        """Return the types of a host-local result, from the types of the global one."""
        return self._mapped_result(result, self._lowered_type)

    def _mapped_result(self, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
        """Return a host-local result with every leaf converted by its spec; others unchanged."""
        if not self.returns_host_local:
            return result
        values, tree = jax.tree_util.tree_flatten(result)
        return tree.unflatten(list(map(convert, values, self._out_specs(tree))))

    def _dynamic(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        static = self._function.parameters.static_argnums
        return tuple(arg for i, arg in enumerate(args) if i not in static)

    def _with_static(self, args: tuple[Any, ...], dynamic: tuple[Any, ...]) -> tuple[Any, ...]:
        static, rest = self._function.parameters.static_argnums, iter(dynamic)
        return tuple(arg if i in static else next(rest) for i, arg in enumerate(args))

    def _with_specs(self, dynamic: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        values, tree = jax.tree_util.tree_flatten((dynamic, {}))
        return values, self._in_specs(tree)

    def _mapped(
        self, dynamic: tuple[Any, ...], convert: Callable[[Any, Any], Any]
    ) -> tuple[Any, ...]:
        """Return the arguments with every leaf converted by its spec."""
        values, specs = self._with_specs(dynamic)
        converted = []
        for value, spec in zip(values, specs, strict=True):
            try:
                converted.append(convert(value, spec))
            except XlashardError as error:
                # no-catalogue: needs several processes
                raise self._with_path(error, dynamic, len(converted), spec) from None
        return jax.tree_util.tree_structure(dynamic).unflatten(converted)

    def _with_path(
        self, error: XlashardError, dynamic: tuple[Any, ...], index: int, spec: Any
    ) -> XlashardError:
        """Return the error with the argument's path, its spec and the mesh."""
        path = self._path(dynamic, index)
        if isinstance(error, BoxError):
            return BoxError(_block_text(path, error))
        return error_at(error, f"{path} (host-local)", self._host, spec)

    def _path(self, dynamic: tuple[Any, ...], index: int) -> str:
        parameters = self._function.parameters
        names = map(parameters.signature.name, parameters.dynamic_positions(len(dynamic)))
        paths = chain.from_iterable(map(leaf_paths, dynamic, names))
        return next(islice(paths, index, None))

    def _specs(
        self, resources_of: Callable[[Any], Sequence[Resource]], what: str, tree: Any
    ) -> tuple[Any, ...]:
        """Return the spec of each leaf; `FROM_GDA` and `AUTO` stay unchanged."""
        return tuple(_spec(resource, self._mesh, what) for resource in resources_of(tree))

    @property
    def _host(self) -> HostMesh:
        return host_mesh(self._mesh)

    def _lifted(self, value: Any, spec: Any) -> Any:
        if not isinstance(spec, PartitionSpec) or _goes_as_it_is(value, spec):
            return value
        if spec == _REPLICATED:
            return self._everywhere(value)
        return as_global(value, self._host, spec)

    def _everywhere(self, value: Any) -> Any:
        """Return a replicated value on all devices of the mesh, in any order of its devices."""
        if is_key_array(value):
            return keys_over(self._everywhere(key_handle(value))._handle, value)
        sharding, devices = NamedSharding(self._mesh, _REPLICATED), self._mesh.local_devices
        if value.is_fully_replicated and value.devices() == set(devices):
            shards = [shard.data for shard in value.addressable_shards]
        else:
            shards = [device_put(value, device) for device in devices]
        return make_array_from_single_device_arrays(shards[0].shape, sharding, shards)

    def _lifted_type(self, value: Any, spec: Any) -> Any:
        if not isinstance(spec, PartitionSpec) or spec == _REPLICATED or is_global(value):
            return value
        aval = abstractify(value)
        shape = self._host.global_shape(spec, aval.shape)
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)

    def _lowered(self, value: Any, spec: PartitionSpec) -> Any:
        if not isinstance(value, Array) or value.is_fully_addressable:
            return value
        part = (
            _copies_here(value) if spec == _REPLICATED else as_host_local(value, self._host, spec)
        )
        return wrap_result(part._handle, host_local_class(part._handle))

    def _lowered_type(self, value: Any, spec: PartitionSpec) -> Any:
        if spec == _REPLICATED:
            return value
        shape = self._host.local_shape(spec, value.shape)
        return jax.ShapeDtypeStruct(shape, value.dtype, weak_type=value.weak_type)


def _block_text(what: str, error: BoxError) -> str:
    return (
        f"{what} is host-local while jax_array is off, so this process's devices must form one "
        "contiguous block of the mesh in force (global_mesh below); GlobalDeviceArrays and "
        f"replicated values (None) need no block. {error}"
    )


def _goes_as_it_is(value: Any, spec: Any) -> bool:
    if is_global(value):
        return True
    return spec == _REPLICATED and not (isinstance(value, jax.Array) and value.committed)


def _spec(resource: Resource, mesh: Mesh, what: str) -> Any:
    if isinstance(resource.value, FromGda | Auto):
        return resource.value
    sharding = to_sharding(resource, mesh, what)
    if not isinstance(sharding, NamedSharding):
        raise ResourceError(  # no-catalogue: needs several processes
            f"{what} contains {sharding}, but while jax_array is off values are host-local, which "
            "requires named mesh axes: write a PartitionSpec such as P('data')"
        )
    return partition_spec(sharding.normal_spec)


def _copies_here(value: Array) -> Array:
    """Return this process's replicas of a fully replicated array."""
    pieces = split(value._handle)
    devices = tuple(piece.device for piece in pieces)
    placement = resolve_sharding(value.shape, GSPMDSharding.get_replicated(devices))
    aval = placement.aval(value.dtype, value.weak_type)
    return Array.from_jax(assemble(aval, placement.jax_sharding, pieces))


def _called(
    call: Callable[..., Any],
    host_local: HostLocal | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a stage, also with host-local arguments."""
    if host_local is None or kwargs:
        return call(*args, **kwargs)
    return host_local.lower(call(*host_local.lift_dynamic(args)))


class ModeTraced(stages.Traced):
    """Traced function.

    Args:
        function: The function.
        call: The call that it was traced for.
        host_local: Converts host-local arguments and results; None if they are global.
    """

    def __init__(self, function: ModeFunction, call: Call, host_local: HostLocal | None) -> None:
        super().__init__(function, call)
        self._host_local = host_local

    @shortened
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the traced function."""
        return _called(super().__call__, self._host_local, args, kwargs)

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the result, as a tree of `jax.ShapeDtypeStruct`."""
        whole = super().out_info
        return whole if self._host_local is None else self._host_local.lower_types(whole)

    @shortened
    def lower(self, **options: Any) -> Any:
        """Resolve the shardings and lower the function, as `xlashard.pjit` does."""
        lowered = super().lower(**options)
        if not isinstance(lowered, stages.Lowered):
            return lowered  # JAX's own, for jax.export
        return ModeLowered(lowered, self._host_local)


def _with_mhlo(lowered: Any) -> tuple[Callable[..., Any], Callable[..., str]]:
    """Return `compiler_ir` and `as_text` of a class of lowered stages, also for `"mhlo"`."""
    module_of, text_of = lowered.compiler_ir, lowered.as_text

    def compiler_ir(self: Any, dialect: str | None = None) -> Any:
        """Return the module as an object, of `"stablehlo"` (by default), `"mhlo"` or `"hlo"`."""
        if dialect == "mhlo":
            return to_mhlo(module_of(self, "stablehlo"))
        return module_of(self, dialect)

    def as_text(self: Any, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the module as text, with `debug_info` including the source locations."""
        if dialect == "mhlo":
            return to_text(compiler_ir(self, dialect), debug_info=debug_info)
        return text_of(self, dialect, debug_info=debug_info)

    return compiler_ir, as_text


class ModeLowered(stages.Lowered):
    """Lowered function whose compiled program takes host-local or global arguments.

    Args:
        lowered: The module.
        host_local: Converts host-local arguments and results; None if they are global.
    """

    def __init__(self, lowered: stages.Lowered, host_local: HostLocal | None) -> None:
        parts = lowered._request, lowered._program, lowered._platform
        super().__init__(lowered._traced, *parts)
        self._host_local = host_local

    compiler_ir, as_text = _with_mhlo(stages.Lowered)

    @shortened
    def compile(
        self, compiler_options: Mapping[str, Any] | None = None, **options: Any
    ) -> "ModeCompiled":
        """Compile the module, as `xlashard.pjit` does."""
        executable = super().compile(compiler_options, **options)
        function: Any = self._traced._function
        kind = ModeCompiled if function.mode.jax_array else HostLocalCompiled
        out = kind(executable._info, executable._compiled, executable._body)
        out._host_local = self._host_local
        return out


class ModeCompiled(compiled.Compiled):
    """Compiled program."""

    # Converts host-local arguments and results; None if they are global.
    _host_local: HostLocal | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return _called(super().__call__, self._host_local, args, kwargs)

    def compiler_ir(self) -> list[Any]:
        """Return the optimised module of each partition, as an `HloModule` of jaxlib."""
        return compiled_ir(self)

    def cost_analysis(self) -> dict[str, float] | None:
        """Return XLA's estimates for the optimised program, which are also at `[0]`."""
        return _as_listed(super().cost_analysis())


class HostLocalCompiled(ModeCompiled):
    """Compiled program that moves host-local arguments to its devices, but no global ones."""

    def _check_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], bool]:
        if kwargs:
            raise KeywordArgumentError(
                f"{self._info.name} was called with {', '.join(kwargs)} by name, but it was "
                "compiled while jax_array is off, for positional arguments only: pass them by "
                "position"
            )
        return super()._check_arguments(args, kwargs)

    def _check_places(self, values: Sequence[Any]) -> None:
        types = [v if is_global(v) else struct_of(abstractify(v), None) for v in values]
        super()._check_places(types)


def compiled_ir(self: Any) -> list[Any]:
    """Return the optimised modules of a compiled stage: `Compiled.compiler_ir` until JAX 0.3.25."""
    return self.runtime_executable().hlo_modules()


class _Costs(dict[str, float]):
    """Estimates by name, and themselves at `[0]`: they were in a list until JAX 0.5.0."""

    def __missing__(self, key: object) -> Any:
        if key == 0:
            return self
        raise KeyError(key)  # no-catalogue: Python's own message for a missing key


def _as_listed(costs: dict[str, float] | None) -> dict[str, float] | None:
    return None if costs is None else _Costs(costs)


_costs_of = jax.stages.Compiled.cost_analysis


def compiled_costs(self: Any) -> Any:
    """Return XLA's estimates for a compiled stage of JAX, which are also at `[0]`."""
    return _as_listed(_costs_of(self))


lowered_ir, lowered_text = _with_mhlo(jax.stages.Lowered)
for _name, _function in (("lowered_ir", lowered_ir), ("lowered_text", lowered_text)):
    # Functions are pickled by name.
    _function.__name__ = _function.__qualname__ = _name
